"""Requirements of pytest, and of unpickling in ranks, for the folders of tests."""

from __future__ import annotations

from tests.support.interpreter import ROOT


def test_test_folders_are_packages() -> None:
    """Check for ``__init__.py``.

    Without it pytest takes two files of the same name for one module, and ranks import only one.
    """
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
