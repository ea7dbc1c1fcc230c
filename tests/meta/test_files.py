"""Requirements on files: of pytest, of merges, and of the folder of benchmarks."""

from __future__ import annotations

import re
import subprocess

from tests.support.interpreter import ROOT


def test_test_folders_are_packages() -> None:
    """Check for ``__init__.py``.

    Without it pytest takes two files of the same name for one module, and ranks import only one.
    """
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_make_runs_every_benchmark() -> None:
    lists = re.findall(r"for program in ([\w ]+);", (ROOT / "Makefile").read_text())
    started = {f"{name}.py" for names in lists for name in names.split()}
    files = (ROOT / "benchmarks").glob("*.py")
    programs = {file.name for file in files if '__name__ == "__main__"' in file.read_text()}
    assert programs == started


def test_no_file_has_both_sides_of_a_merge() -> None:
    found = subprocess.run(
        ["git", "grep", "-IlE", "^(<{7}|>{7}) "],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.stdout, found.stderr) == ("", "")
