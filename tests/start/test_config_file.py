"""Whose file of settings is believed: one that nobody but the user and root could have written."""

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

SOMEBODY = 54321  # no user of this system, and no group
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory that other users can reach, with the working directory two below it."""
    kept = {k: v for k, v in os.environ.items() if k == "PATH"}
    monkeypatch.setattr(os, "environ", {**kept, "HOME": "/nowhere"})
    found = Path(tempfile.mkdtemp())
    inner = found / "middle" / "inner"
    inner.mkdir(parents=True)
    for directory in (found, inner.parent, inner):
        directory.chmod(0o755)
    monkeypatch.chdir(inner)
    yield found
    shutil.rmtree(found)


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
    """Return why the one file that is there is not read; fail if it is, or has an effect."""
    settled = load({})
    assert settled.origin("timeout") == "default"
    (reason,) = settled.refused.values()
    return reason


# -- owner and mode -----------------------------------------------------------------------------


def test_a_file_of_the_users_own_is_read(outer: Path) -> None:
    written(outer / "collective.toml")
    assert (load({}).timeout, load({}).refused) == (5.0, {})


@as_root
def test_a_file_of_somebody_elses_is_not_read(outer: Path) -> None:
    file = written(outer / "collective.toml")
    os.chown(file, SOMEBODY, SOMEBODY)
    assert the_reason() == f"{file} belongs to uid {SOMEBODY}, and this process has uid 0"


@as_root
def test_a_file_of_roots_is_read_by_others(outer: Path) -> None:
    written(outer / "collective.toml")
    with being_somebody():
        assert load({}).timeout == 5


@as_root
def test_a_file_that_may_not_be_opened_is_told(outer: Path) -> None:
    written(outer / "collective.toml", mode=0o600)
    with being_somebody():
        assert the_reason().endswith("cannot be opened: Permission denied")


def test_a_file_that_everybody_can_write_to_is_not_read(outer: Path) -> None:
    file = written(outer / "collective.toml", mode=0o646)
    assert the_reason() == f"others can write to {file} (mode 0646)"


@as_root
@pytest.mark.parametrize(
    ("group", "believed"), [(0, True), (SOMEBODY, False)], ids=["of the owner alone", "of others"]
)
def test_a_group_that_can_write_is_the_owners_alone(
    outer: Path, group: int, believed: bool
) -> None:
    # Where each user has such a group, its files are writable by it by default.
    file = written(outer / "collective.toml", mode=0o664)
    os.chown(file, 0, group)
    assert (load({}).timeout == 5) == believed
    assert list(load({}).refused) == ([] if believed else [file])


def test_a_directory_that_everybody_can_write_to_vouches_for_nothing(outer: Path) -> None:
    written(outer / "collective.toml")
    outer.chmod(0o777)
    assert the_reason() == f"others can write to {outer} (mode 0777)"


def test_a_sticky_directory_keeps_files_from_others(outer: Path) -> None:
    written(outer / "collective.toml")
    outer.chmod(0o1777)
    assert load({}).timeout == 5


@as_root
def test_a_directory_of_somebody_elses_vouches_for_nothing(outer: Path) -> None:
    written(outer / "collective.toml")
    os.chown(outer, SOMEBODY, SOMEBODY)
    assert the_reason() == f"{outer} belongs to uid {SOMEBODY}, and this process has uid 0"


# -- what is no plain file ----------------------------------------------------------------------


def test_a_link_of_the_users_own_is_followed(outer: Path) -> None:
    (outer / "collective.toml").symlink_to(written(outer / "mine.toml"))
    assert load({}).timeout == 5


@as_root
def test_a_link_of_somebody_elses_is_not_followed(outer: Path) -> None:
    link = outer / "collective.toml"
    link.symlink_to(written(outer / "mine.toml"))
    os.lchown(link, SOMEBODY, SOMEBODY)
    outer.chmod(0o1777)
    assert the_reason() == f"the link {link} belongs to uid {SOMEBODY}, and this process has uid 0"


def test_a_link_does_not_lead_to_where_everybody_can_write(outer: Path) -> None:
    common = outer / "common"
    common.mkdir()
    common.chmod(0o777)
    (outer / "collective.toml").symlink_to(written(common / "settings.toml"))
    assert the_reason() == f"others can write to {common} (mode 0777)"


def test_a_link_that_leads_nowhere_is_no_file(outer: Path) -> None:
    (outer / "collective.toml").symlink_to("collective.toml")
    assert load({}).refused == {}


def test_a_pipe_holds_nobody_up(outer: Path) -> None:
    os.mkfifo(outer / "collective.toml")
    assert the_reason() == f"{outer / 'collective.toml'} is not a regular file"


def test_empty_lines_take_no_time(outer: Path) -> None:
    # Millions of them took hours to search for our table.
    written(outer / "pyproject.toml", "\n" * 2_000_000)
    assert load({}).timeout == 300


# -- how far the search goes --------------------------------------------------------------------


def test_a_refused_file_does_not_hide_one_further_up(outer: Path) -> None:
    written(outer / "collective.toml")
    nearer = written(outer / "middle" / "collective.toml", "timeout = 6", mode=0o666)
    assert load({}).timeout == 5
    assert list(load({}).refused) == [nearer]


@pytest.mark.parametrize("root", ["pyproject.toml", ".git", ".hg", ".svn", ".jj", "home"])
def test_the_search_ends_with_the_project_or_at_home(outer: Path, root: str) -> None:
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
def test_of_others_projects_those_about_us_are_told(outer: Path, text: str, count: int) -> None:
    written(outer / "pyproject.toml", text, mode=0o666)
    assert load({}).timeout == 300
    assert len(load({}).refused) == count


# -- what loads code and writes files -----------------------------------------------------------

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
def test_what_loads_code_or_writes_files_is_not_taken_from_every_file(
    outer: Path, key: str, value: str
) -> None:
    written(outer / "collective.toml", f'{key} = "{value}"')
    with pytest.raises(ConfigError, match=rf"^{key}: .* has mode 0644.*chmod 600.*COLLECTIVE_"):
        load({})


@pytest.mark.parametrize(("key", "value"), HAZARDS)
def test_it_is_taken_from_the_users_own_private_file_and_from_the_environment(
    outer: Path, key: str, value: str
) -> None:
    file = written(outer / "collective.toml", f'{key} = "{value}"', mode=0o600)
    assert load({}).origin(key).startswith("file ")
    file.chmod(0o644)
    os.environ[f"COLLECTIVE_{key.upper()}"] = value
    assert load({}).origin(key).startswith("environment ")


@pytest.mark.parametrize(
    ("key", "value"),
    [("backend", "gloo"), ("backend", "cpu:shm,cuda:nccl"), ("store", "tcp://node1:29500")],
)
def test_what_only_names_is_taken_from_every_file(outer: Path, key: str, value: str) -> None:
    written(outer / "collective.toml", f'{key} = "{value}"')
    assert getattr(load({}), key) == value


@as_root
def test_what_loads_code_is_not_taken_from_roots_file_by_others(outer: Path) -> None:
    written(outer / "collective.toml", 'nccl_library = "libnccl.so"', mode=0o644)
    with being_somebody(), pytest.raises(ConfigError, match=r"nccl_library: .* belongs to uid 0"):
        load({})


# -- nothing of this is silent ------------------------------------------------------------------


def test_init_warns_of_a_file_that_it_does_not_read(outer: Path) -> None:
    file = written(outer / "collective.toml", mode=0o666)
    with pytest.warns(RuntimeWarning, match=rf"^settings: {file} is not read: .*chmod go-w"):
        collective.init().close()


def test_of_a_hosts_ranks_only_the_first_warns(outer: Path) -> None:
    written(outer / "collective.toml", mode=0o666)
    load({"rank": 1, "size": 2}).warn_of_refused()  # warnings are errors here
    with pytest.warns(RuntimeWarning):
        load({"rank": 0, "size": 2}).warn_of_refused()


def test_the_command_shows_what_is_not_read_and_why(
    outer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(outer / "collective.toml", mode=0o666)
    assert main(["config"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "is not read" in line]
    assert line.startswith(f"{file} is not read: others can write to {file} (mode 0666)")
    assert main(["config", "--json"]) == 0
    assert f'"{file}": "others can write to {file} (mode 0666)"' in capsys.readouterr().out


def test_without_a_working_directory_nothing_is_found(outer: Path) -> None:
    (outer / "middle" / "inner").rmdir()
    assert config_file.find() == config_file.Found()
