"""``tests/pythons/run.py`` finds interpreters, says what is missing, and draws its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.pythons import interpreters
from tests.pythons.interpreters import VERSIONS, Missing, about, command, find, unpack
from tests.pythons.run import LIBRARIES, Row, table

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def _script(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_find_returns_interpreter_of_this_version() -> None:
    found = find(HERE)
    assert found is not None
    assert about(found) == (HERE, sys.version.split()[0])


def test_find_skips_program_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = next(version for version in VERSIONS if version != HERE)
    _script(tmp_path, f"python{other}", f'exec "{sys.executable}" "$@"')
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setattr(interpreters, "_DEBIAN", tmp_path)
    assert find(other) is None


def test_about_of_program_that_fails_is_none(tmp_path: Path) -> None:
    assert about(_script(tmp_path, "python3.14", "exit 3")) is None


def test_failed_command_raises_with_its_last_lines() -> None:
    with pytest.raises(Missing, match="failed: no network"):
        command([sys.executable, "-c", "import sys; sys.exit('no network')"])


def test_unpack_without_debian_tools_names_the_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Missing, match="dpkg-deb is not installed"):
        unpack("3.15", tmp_path / "patchelf")


def test_unpack_without_mirror_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _script(tmp_path, "apt-get", "exit 0")
    _script(tmp_path, "dpkg-deb", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(interpreters, "FOLDER", tmp_path / "pythons")
    with pytest.raises(Missing, match="run `apt-get update` once"):
        unpack("3.15", tmp_path / "patchelf")


def test_table_has_row_for_tested_and_for_missing_python() -> None:
    cells = {library.name: "runs 1" for library in LIBRARIES} | {"quick tests": "9 passed"}
    rows = [Row("3.11", whole="3.11.7", cells=cells), Row("3.12", problem="not tested: none")]
    lines = table(rows, ["quick tests"]).splitlines()
    assert lines[2].startswith("| 3.11.7 | runs 1 |")
    assert lines[2].endswith("| 9 passed |")
    assert lines[3].startswith("| 3.12: not tested: none | – |")
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
