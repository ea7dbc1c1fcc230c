"""What pytest and the ranks' unpickling want of the folders of tests."""

from __future__ import annotations

from tests.support.interpreter import ROOT


def test_each_folder_of_tests_is_a_package() -> None:
    """Or two files of one name are one module to pytest, and ranks cannot import the other."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
