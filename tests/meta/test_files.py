"""What pytest wants of the files of tests."""

from __future__ import annotations

from collections import Counter

from tests.interpreter import ROOT


def test_no_two_files_of_tests_have_one_name() -> None:
    """Or pytest, whose modules they are by that name alone, collects one of them only."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []
