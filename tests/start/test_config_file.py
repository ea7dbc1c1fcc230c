"""Trust in settings files: only the user and root may have been able to write the file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import collective
from collective.errors import ConfigError
from collective.start import config_file
from collective.start.config import load
from collective.tools.cli.main import main

SOMEBODY = 54321  # an id that no user and no group of this system has
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory that other users can reach, with the working directory two below it."""
    environ = {k: v for k, v in os.environ.items() if k == "PATH"}
    monkeypatch.setattr(os, "environ", {**environ, "HOME": "/nowhere"})
    top = Path(tempfile.mkdtemp())
    inner = top / "middle" / "inner"
    inner.mkdir(parents=True)
    for directory in (top, inner.parent, inner):
        directory.chmod(0o755)
    monkeypatch.chdir(inner)
    yield top
    shutil.rmtree(top)


@contextlib.contextmanager
def being_somebody() -> Iterator[None]:
    os.seteuid(SOMEBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def written(file: Path, text: str = "timeout = 5", mode: int = 0o644) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def the_reason() -> str:
    """Return why the only settings file is refused; fail if the file has an effect."""
    settled = load({})
    assert settled.origins["timeout"] == "default"
    (reason,) = settled.refused.values()
    return reason


# -- owner and mode -----------------------------------------------------------------------------


def test_settings_file_of_user_is_read(outer: Path) -> None:
    written(outer / "collective.toml")
    assert (load({}).timeout, load({}).refused) == (5.0, {})


@as_root
def test_settings_file_of_another_user_is_not_read(outer: Path) -> None:
    file = written(outer / "collective.toml")
    os.chown(file, SOMEBODY, SOMEBODY)
    assert the_reason() == f"{file} belongs to uid {SOMEBODY}, and this process has uid 0"


@as_root
def test_settings_file_of_root_is_read_by_other_users(outer: Path) -> None:
    written(outer / "collective.toml")
    with being_somebody():
        assert load({}).timeout == 5


@as_root
def test_settings_file_without_read_permission_is_reported(outer: Path) -> None:
    written(outer / "collective.toml", mode=0o600)
    with being_somebody():
        assert the_reason().endswith("cannot be opened: Permission denied")


def test_settings_file_writable_by_all_is_not_read(outer: Path) -> None:
    file = written(outer / "collective.toml", mode=0o646)
    assert the_reason() == f"others can write to {file} (mode 0646)"


@as_root
@pytest.mark.parametrize(
    ("group", "believed"), [(0, True), (SOMEBODY, False)], ids=["private group", "shared group"]
)
def test_settings_file_writable_by_group_is_read_for_owners_private_group(
    outer: Path, group: int, believed: bool
) -> None:
    # Some systems give each user a private group, and new files are then writable by the group.
    file = written(outer / "collective.toml", mode=0o664)
    os.chown(file, 0, group)
    assert (load({}).timeout == 5) == believed
    assert list(load({}).refused) == ([] if believed else [file])


def test_settings_file_in_directory_writable_by_all_is_not_read(outer: Path) -> None:
    written(outer / "collective.toml")
    outer.chmod(0o777)
    assert the_reason() == f"others can write to {outer} (mode 0777)"


def test_settings_file_in_sticky_directory_is_read(outer: Path) -> None:
    written(outer / "collective.toml")
    outer.chmod(0o1777)
    assert load({}).timeout == 5


@as_root
def test_settings_file_in_directory_of_another_user_is_not_read(outer: Path) -> None:
    written(outer / "collective.toml")
    os.chown(outer, SOMEBODY, SOMEBODY)
    assert the_reason() == f"{outer} belongs to uid {SOMEBODY}, and this process has uid 0"


# -- links and special files --------------------------------------------------------------------


def test_settings_link_of_user_is_followed(outer: Path) -> None:
    (outer / "collective.toml").symlink_to(written(outer / "mine.toml"))
    assert load({}).timeout == 5


@as_root
def test_settings_link_of_another_user_is_not_followed(outer: Path) -> None:
    link = outer / "collective.toml"
    link.symlink_to(written(outer / "mine.toml"))
    os.lchown(link, SOMEBODY, SOMEBODY)
    outer.chmod(0o1777)
    assert the_reason() == f"the link {link} belongs to uid {SOMEBODY}, and this process has uid 0"


def test_settings_link_into_directory_writable_by_all_is_not_followed(outer: Path) -> None:
    common = outer / "common"
    common.mkdir()
    common.chmod(0o777)
    (outer / "collective.toml").symlink_to(written(common / "settings.toml"))
    assert the_reason() == f"others can write to {common} (mode 0777)"


def test_settings_link_to_itself_counts_as_absent(outer: Path) -> None:
    (outer / "collective.toml").symlink_to("collective.toml")
    assert load({}).refused == {}


def test_settings_file_that_is_a_pipe_is_refused_without_blocking(outer: Path) -> None:
    os.mkfifo(outer / "collective.toml")
    assert the_reason() == f"{outer / 'collective.toml'} is not a regular file"


def test_pyproject_with_millions_of_empty_lines_is_read_quickly(outer: Path) -> None:
    # A search for the [tool.collective] table once took hours with millions of empty lines.
    written(outer / "pyproject.toml", "\n" * 2_000_000)
    assert load({}).timeout == 300


# -- where the search ends ----------------------------------------------------------------------


def test_refused_file_does_not_hide_file_in_parent_directory(outer: Path) -> None:
    written(outer / "collective.toml")
    nearer = written(outer / "middle" / "collective.toml", "timeout = 6", mode=0o666)
    assert load({}).timeout == 5
    assert list(load({}).refused) == [nearer]


@pytest.mark.parametrize("root", ["pyproject.toml", ".git", ".hg", ".svn", ".jj", "home"])
def test_search_ends_at_project_root_or_home(outer: Path, root: str) -> None:
    written(outer / "collective.toml")
    if root == "home":
        os.environ["HOME"] = str(outer / "middle")
    else:
        (outer / "middle" / root).touch()
    assert load({}).timeout == 300
    written(outer / "middle" / "collective.toml", "timeout = 6")
    assert load({}).timeout == 6


@pytest.mark.parametrize(
    ("text", "count"), [("[project]\nname = 'theirs'", 0), ("[tool.collective]\ntimeout = 5", 1)]
)
def test_refused_pyproject_is_reported_only_with_collective_table(
    outer: Path, text: str, count: int
) -> None:
    written(outer / "pyproject.toml", text, mode=0o666)
    assert load({}).timeout == 300
    assert len(load({}).refused) == count


# -- settings that load code or write files -----------------------------------------------------

HAZARDS = [
    ("backend", "module:Class"),
    ("backend", "cpu:shm,cuda:module:Class"),
    ("across", "module:Class"),
    ("nccl_library", "./libnccl.so"),
    ("cuda_library", "libcuda.so"),
    ("store", "meet"),
    ("trace", "traces"),
]


@pytest.mark.parametrize(("key", "value"), HAZARDS)
def test_hazardous_setting_in_readable_file_raises_config_error(
    outer: Path, key: str, value: str
) -> None:
    written(outer / "collective.toml", f'{key} = "{value}"')
    with pytest.raises(ConfigError, match=rf"^{key}: .* has mode 0644.*chmod 600.*COLLECTIVE_"):
        load({})


@pytest.mark.parametrize(("key", "value"), HAZARDS)
def test_hazardous_setting_in_private_file_or_environment_is_used(
    outer: Path, key: str, value: str
) -> None:
    file = written(outer / "collective.toml", f'{key} = "{value}"', mode=0o600)
    assert load({}).origins[key].startswith("file ")
    file.chmod(0o644)
    os.environ[f"COLLECTIVE_{key.upper()}"] = value
    assert load({}).origins[key].startswith("environment ")


@pytest.mark.parametrize(
    ("key", "value"),
    [("backend", "gloo"), ("backend", "cpu:shm,cuda:nccl"), ("store", "tcp://node1:29500")],
)
def test_harmless_backend_or_store_in_readable_file_is_used(
    outer: Path, key: str, value: str
) -> None:
    written(outer / "collective.toml", f'{key} = "{value}"')
    assert getattr(load({}), key) == value


@as_root
def test_hazardous_setting_in_file_of_root_raises_for_other_users(outer: Path) -> None:
    written(outer / "collective.toml", 'nccl_library = "libnccl.so"', mode=0o644)
    with being_somebody(), pytest.raises(ConfigError, match=r"nccl_library: .* belongs to uid 0"):
        load({})


# -- reports of refused files -------------------------------------------------------------------


def test_init_warns_of_refused_file(outer: Path) -> None:
    file = written(outer / "collective.toml", mode=0o666)
    with pytest.warns(RuntimeWarning, match=rf"^settings: {file} is not read: .*chmod go-w"):
        collective.init().close()


def test_refused_file_is_warned_of_by_first_rank_of_host_only(outer: Path) -> None:
    written(outer / "collective.toml", mode=0o666)
    load({"rank": 1, "size": 2}).warn_of_refused()  # The suite turns warnings into errors.
    with pytest.warns(RuntimeWarning):
        load({"rank": 0, "size": 2}).warn_of_refused()


def test_config_command_shows_refused_file_and_reason(
    outer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(outer / "collective.toml", mode=0o666)
    assert main(["config"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is not read" in line]
    assert line.startswith(f"{file} is not read: others can write to {file} (mode 0666)")
    assert main(["config", "--json"]) == 0
    assert f'"{file}": "others can write to {file} (mode 0666)"' in capsys.readouterr().out


def test_find_in_deleted_working_directory_finds_nothing(outer: Path) -> None:
    (outer / "middle" / "inner").rmdir()
    assert config_file.find() == config_file.Found()
