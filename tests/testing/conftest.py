"""Runs of pytest with the plugin for tests on ranks, as after an install of this package."""

from __future__ import annotations

import faulthandler
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT

#: Function that writes a file of tests and runs pytest in it; also takes arguments for pytest.
Run = Callable[..., pytest.RunResult]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for ``sys.path`` from which pytest loads the plugin by its entry point."""
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "anything-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: anything\nVersion: 1.0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["pytest11"].items()
    lines = [f"{name} = {value}\n" for name, value in points]
    (metadata / "entry_points.txt").write_text("[pytest11]\n" + "".join(lines))
    (folder / "collective_pytest").symlink_to(ROOT / "collective" / "testing" / "plugin")
    return folder


@pytest.fixture
def ranked(pytester: pytest.Pytester, site: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs pytest on a file of tests.

    It runs in this process, but in a new one with ``subprocess=True``. PyTorch needs that, because
    a run in this process removes the modules that it has imported, and PyTorch cannot be imported
    twice.
    """
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT}")

    def run(tests: str, *arguments: str, subprocess: bool = False) -> pytest.RunResult:
        head = "import os, sys, time\nimport numpy as np\nimport collective, pytest\n"
        pytester.makepyfile(test_it=head + textwrap.dedent(tests))
        if subprocess:
            return pytester.runpytest_subprocess(*arguments, timeout=120)
        # The thread that waits for this test's time to pass is not in a copy of this process, where
        # a cancellation would wait for it.
        faulthandler.cancel_dump_traceback_later()
        return pytester.runpytest_inprocess(*arguments)

    return run
