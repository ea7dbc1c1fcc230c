"""The core in a free-threaded Python: ``freethreaded.sh`` builds one."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, printed

_BUILT = ROOT / ".freethreaded" / "bin" / "python3"
PYTHON = Path(sys.executable) if sysconfig.get_config_var("Py_GIL_DISABLED") else _BUILT

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="no free-threaded Python: tests/native/freethreaded.sh .freethreaded builds one",
)


def _printed(tmp_path: Path, *words: str) -> str:
    return printed("-W", "error", *words, python=PYTHON, cwd=tmp_path, env={"PYTHONPATH": ""})


def test_import_of_core_leaves_the_gil_off_without_warning(tmp_path: Path) -> None:
    program = "import collective.native._core, sys; print(sys._is_gil_enabled())"
    assert _printed(tmp_path, "-c", program) == "False\n"


def test_core_of_the_limited_api_is_not_loaded(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "collective" / "native", tmp_path / "native")
    for file in (tmp_path / "native").glob("*.so"):
        file.unlink()
    (tmp_path / "native" / "_core.abi3.so").touch()
    program = (
        "import collective, sys; collective.__path__.insert(0, sys.argv[1]);"
        "[sys.modules.pop(name) for name in ('collective.native', 'collective.native._core')];"
        "from importlib import import_module as get; print(get('collective.native').status())"
    )
    shown = _printed(tmp_path, "-c", program, str(tmp_path))
    assert shown.startswith("not in use: built for a Python with a GIL; build it again: ")


@pytest.mark.parametrize("transport", ["threads", "shm"])
def test_transport_conforms_without_the_gil(tmp_path: Path, transport: str) -> None:
    checks = ["check_all_reduce", "check_send_recv", "check_async_many"]
    words = ["-m", "collective.testing", transport, "--sizes", "2", "--checks", *checks]
    assert "\nconforms: 3 passed" in _printed(tmp_path, *words)


def test_one_communicator_refuses_or_makes_the_calls_of_two_threads(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_TWO_THREADS)
    assert _printed(tmp_path, str(program)) == "0 wrong\n"


# Ranks make no collective calls here: with one rank, every order of the calls is the same on all
# ranks. The threads share the path, the doors and the recorder of one communicator.
_TWO_THREADS = """
import threading
import numpy as np
import collective

wrong = []

def work(comm, seed):
    global wrong
    for i in range(3000):
        x = np.full(1 + (seed + i) % 40, i, np.float32)
        if not np.array_equal(comm.all_reduce(x), x):
            wrong.append(i)
        if i % 100 == 0:
            wrong += ["no record"] * (not str(collective.flight_recorder()[-1]))

with collective.init("threads", rank=0, size=1) as comm:
    threads = [threading.Thread(target=work, args=(comm, seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(wrong), "wrong")
"""
