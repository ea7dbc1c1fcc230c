"""The package on a system that has nothing of Linux: see ``tests/support/without_linux``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, printed, run_python
from tests.support.launches import DEADLINE_S

#: A library that is compiled for Linux may call the kernel, so the native core is not in use.
WITHOUT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support/without_linux")]),
    "COLLECTIVE_NATIVE": "off",
}
#: The conformance kit, whose ranks are forked from a server.
KIT = """
import sys
from collective.testing import preload
from collective.testing.__main__ import main
if __name__ == "__main__":
    preload(sys.argv[1:2])
    sys.exit(main([*sys.argv[2:], "--sizes", "2", "--json"]))
"""


def test_nothing_of_linux_is_there() -> None:
    """Check the startup file itself, without which the other tests would show nothing."""
    program = """if True:
        import ctypes, os, socket, sys
        print(sys.platform, hasattr(os, "pidfd_open"), os.path.exists("/proc/self"))
        for use in (
            lambda: open("/proc/self/stat"),
            lambda: ctypes.CDLL(None).prctl,
            lambda: socket.socket(socket.AF_UNIX).bind("\\0name"),
        ):
            try:
                print(use())
            except (OSError, AttributeError) as error:
                print(type(error).__name__)
        """
    output = printed("-c", program, **WITHOUT).splitlines()
    assert output == ["darwin False False", "FileNotFoundError", "AttributeError", "OSError"]


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_transport_conforms_without_linux(transport: str, tmp_path: Path) -> None:
    first = "numpy"
    if transport == "gloo":
        pytest.importorskip("torch")
        first = "torch.distributed"
    program = tmp_path / "kit.py"
    program.write_text(KIT)
    done = run_python(
        program, first, transport, timeout=600.0, COLLECTIVETEST_FIRST=first, **WITHOUT
    )
    results = json.loads(done.stdout)
    failures = [result for result in results if result["outcome"] == "failed"]
    assert (failures, done.returncode) == ([], 0), done.stderr
    assert sum(result["outcome"] == "passed" for result in results) > 50


def test_collective_run_starts_ranks_without_linux(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, collective\n"
        "comm = collective.init()\n"
        "print(comm.backend, comm.all_reduce(np.ones(2))[0])\n"
    )
    output = printed("-m", "collective", "run", "-n", "2", program, timeout=DEADLINE_S, **WITHOUT)
    assert sorted(output.splitlines()) == ["[0] shm 2.0", "[1] shm 2.0"]
