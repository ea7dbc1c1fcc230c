"""The commands that texts and errors name install this package, and nobody else's."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collective import install
from tests.support.interpreter import ROOT, run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCES = sorted(
    file
    for folder in ("collective", "backends", "adapters", "examples", "benchmarks")
    for file in (ROOT / folder).glob("**/*.py")
)
TEXTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *(ROOT / "examples").glob("*.md"),
    *SOURCES,
]
# With an extra, or at the end of a command; the package's own name goes on with "-comm".
ANOTHERS = re.compile(r"(?<![\w./-])collective\[[a-z]|install[^\n`]*\scollective(?=['\"`\s]|$)")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have the module believe that it is in ``collective`` in the folder that this returns."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.setattr(install, "__file__", str(folder / "collective" / "install.py"))
    install._clone.cache_clear()
    yield folder
    install._clone.cache_clear()


def test_from_a_clone_the_clone_is_installed() -> None:
    assert install.hint("torch") == f"pip install -e {shlex.quote(f'{ROOT}[torch]')}"


def test_without_an_extra_nothing_is_in_brackets() -> None:
    assert install.hint() == f"pip install -e {shlex.quote(str(ROOT))}"


def test_installed_it_is_called_by_its_name(elsewhere: Path) -> None:
    assert install.hint("torch") == "pip install 'collective-comm[torch]'"


def test_beside_another_projects_pyproject_it_is_called_by_its_name(elsewhere: Path) -> None:
    (elsewhere / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    assert install.hint("mpi") == "pip install 'collective-comm[mpi]'"


def test_a_folder_whose_name_the_shell_would_read_is_quoted(elsewhere: Path) -> None:
    (elsewhere / "pyproject.toml").write_text(f'[project]\nname = "{install.DISTRIBUTION}"\n')
    assert shlex.split(install.hint("mpi")) == ["pip", "install", "-e", f"{elsewhere}[mpi]"]


def test_chainers_own_setup_gets_the_setuptools_that_it_needs() -> None:
    assert "setuptools<80" in install.hint("chainer")


def test_the_distribution_is_called_as_the_constant_says() -> None:
    assert PROJECT["name"] == install.DISTRIBUTION


def test_every_extra_that_a_hint_names_exists() -> None:
    named = {
        extra
        for file in SOURCES
        for extra in re.findall(r"\bhint\([\"'](\w+)[\"']\)", file.read_text())
    }
    assert {"torch", "mpi", "nccl", "bench", "parity"} <= named  # it found them
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("installed", [True, False])
def test_an_installation_beside_a_clone_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    site = tmp_path.resolve() / "site"
    (site / "collective").mkdir(parents=True)
    (site / "collective" / "__init__.py").touch()
    if installed:
        about = site / f"{install.DISTRIBUTION.replace('-', '_')}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {install.DISTRIBUTION}\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [str(site)])
    assert install.installed_beside(tmp_path / "clone") == (site if installed else None)


def test_ranks_that_import_a_clone_beside_an_installation_say_so(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "pyproject.toml").write_text(f'[project]\nname = "{install.DISTRIBUTION}"\n')
    (clone / "collective").symlink_to(ROOT / "collective")
    script = clone / "program.py"
    script.write_text("import collective; print(collective.__file__)")
    # What is installed where the tests run is no matter of theirs.
    found = "from collective import install; install.installed_beside = lambda clone: 'elsewhere'"
    start = f"from collective.tools.cli.main import main; main(['run', '-n', '1', {str(script)!r}])"
    done = run_python("-c", f"{found}; {start}")
    assert done.stdout == f"[0] {clone / 'collective' / '__init__.py'}\n", done.stderr
    assert f"sources in {clone}," in done.stderr
    assert "installed in elsewhere." in done.stderr


@pytest.mark.parametrize(
    "text",
    ["pip install 'collective[mpi]'", "pip install collective", "see `pip install -U collective`"],
)
def test_another_projects_name_is_recognised(text: str) -> None:
    assert ANOTHERS.search(text)


def test_no_text_sends_to_another_projects_package() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in TEXTS
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if ANOTHERS.search(line)
    ]
    assert found == []
