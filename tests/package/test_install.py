"""Installation commands in texts and errors install this package, and no other package."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from collective import install
from tests.support.interpreter import ROOT

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
# The name "collective" with an extra or at the end of a command is another project's; this
# package's name continues with "-comm".
ANOTHERS = re.compile(r"(?<![\w./-])collective\[[a-z]|install[^\n`]*\scollective(?=['\"`\s]|$)")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder in which the module ``install`` believes to be installed."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.setattr(install, "__file__", str(folder / "collective" / "install.py"))
    install._clone.cache_clear()
    yield folder
    install._clone.cache_clear()


def test_hint_in_clone_installs_clone() -> None:
    assert install.hint("torch") == f"pip install -e {shlex.quote(f'{ROOT}[torch]')}"


def test_hint_without_extra_has_no_brackets() -> None:
    assert install.hint() == f"pip install -e {shlex.quote(str(ROOT))}"


def test_hint_of_installed_package_uses_its_name(elsewhere: Path) -> None:
    assert install.hint("torch") == "pip install 'collective-comm[torch]'"


def test_hint_beside_foreign_pyproject_uses_package_name(elsewhere: Path) -> None:
    (elsewhere / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    assert install.hint("mpi") == "pip install 'collective-comm[mpi]'"


def test_hint_quotes_folder_for_shell(elsewhere: Path) -> None:
    (elsewhere / "pyproject.toml").write_text(f'[project]\nname = "{install.DISTRIBUTION}"\n')
    assert shlex.split(install.hint("mpi")) == ["pip", "install", "-e", f"{elsewhere}[mpi]"]


def test_hint_for_chainer_includes_old_setuptools() -> None:
    assert "setuptools<80" in install.hint("chainer")


def test_distribution_name_matches_pyproject() -> None:
    assert PROJECT["name"] == install.DISTRIBUTION


def test_hint_extras_exist_in_pyproject() -> None:
    named = {
        extra
        for file in SOURCES
        for extra in re.findall(r"\bhint\([\"'](\w+)[\"']\)", file.read_text())
    }
    assert {"torch", "mpi", "nccl"} <= named  # the regex works
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'collective[mpi]'",
        "pip install collective",
        "see `pip install -U collective`",
    ],
)
def test_foreign_install_command_is_recognised(text: str) -> None:
    assert ANOTHERS.search(text)


def test_texts_name_no_foreign_install_command() -> None:
    lines = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in TEXTS
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if ANOTHERS.search(line)
    ]
    assert lines == []
