"""The warm Python of tests/warm behaves like Python for a program that runs in it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.support.interpreter import printed, run_python, started

pytest.importorskip("torch")

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, __name__)",
    "path": "import os, sys; print([p for p in sys.path if p], os.getcwd(), os.environ['A'])",
    "standard input": "import sys; print(sys.stdin.read().upper())",
    "text as exit code": "import sys; sys.exit('wrong')",
    "failure": "def f():\n    raise ValueError('x')\nf()",
    "last exception at exit": "import atexit, sys\n"
    "atexit.register(lambda: print(repr(sys.last_value)))\nraise KeyError(1)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGABRT)",
    "exit handler": "import atexit; atexit.register(print, 'over')",
    "imported modules": "import sys; print(sorted({'torch', 'collective'} & {*sys.modules}))",
    "torch": "import sys, torch.nn; print(torch.__spec__.origin, 'collective' in sys.modules)",
    "module lookup": "import importlib.util as i; print(i.find_spec('torch').origin); import torch",
}


WAYS = {"-c": ["-c", PROGRAMS["arguments"]], "-m": ["-m", "program"], "a file": ["program.py"]}


def both(folder: Path, *words: str) -> list[tuple[str, str, int]]:
    """Run a program by Python and by the warm Python; return both outputs and exit codes."""
    runs = [
        run_python(
            *words,
            "more",
            python=python,
            cwd=folder,
            stdin="text",
            env={"A": "b", "PYTHONPATH": "/nowhere"},
        )
        for python in (sys.executable, warm.python())
    ]
    return [(done.stdout, done.stderr, done.returncode) for done in runs]


@pytest.mark.parametrize("program", PROGRAMS)
def test_warm_program_has_same_outcome(tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[program])
    expected, outcome = both(tmp_path, "program.py")
    assert outcome == expected


@pytest.mark.parametrize("way", WAYS)
def test_warm_program_has_same_arguments(tmp_path: Path, way: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS["arguments"])
    expected, outcome = both(tmp_path, *WAYS[way])
    assert outcome == expected


def test_warm_program_imports_torch_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("here = 1")
    program = "import torch; print(torch.here)"
    assert printed("-c", program, python=warm.python(), cwd=tmp_path) == "1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_warm_program_ends_with_signalled_command(number: int) -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    with started("-c", program, python=warm.python()) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        # The output ends, because no process has the pipe open any more.
        assert process.stdout.read() == ""
    assert process.returncode == -number


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` after the name: state, parent, and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_warm_server_survives_kill_of_program_and_command() -> None:
    asleep = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with started("-c", asleep, python=warm.python()) as command:
        assert command.stdout is not None
        program = int(command.stdout.readline())
        server = int(_stat(program)[1])
        os.kill(server, signal.SIGSTOP)  # so that the server sees both deaths at once
        try:
            os.kill(program, signal.SIGKILL)
            while _stat(program)[0] != "Z":
                time.sleep(0.001)
            command.kill()
            command.wait()
        finally:
            os.kill(server, signal.SIGCONT)
    assert printed("-c", "print('here')", python=warm.python()) == "here\n"
