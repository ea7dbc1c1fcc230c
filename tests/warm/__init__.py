"""A Python for programs of tests that has imported PyTorch before a program starts.

Use :func:`python` for programs that import PyTorch: the import takes 2 s of processor time, most of
the time of a small program. The command in place of ``python`` (client.py) passes its
arguments, variables, open files and namespaces to a server (server.py), which forks. From then on
the command represents the forked process: it forwards signals and ends with the same status. The
program itself imports the modules of this project.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["python"]

_COMMAND = """\
#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
import client
client.main({socket!r}, {python!r})
"""


@functools.cache
def python() -> str:
    """Return the path of a command that takes the arguments of ``python``.

    The first call starts the server, which ends with this process. Without PyTorch the path is that
    of this process's Python.
    """
    if importlib.util.find_spec("torch") is None or len(sys.executable) > 120:
        return sys.executable
    folder = Path(__file__).parent
    directory = tempfile.mkdtemp(prefix="warm-")
    socket, command = f"{directory}/socket", Path(directory, "python")
    command.write_text(_COMMAND.format(python=sys.executable, folder=str(folder), socket=socket))
    command.chmod(0o755)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COLLECTIVE_"))}
    server = subprocess.Popen(
        [sys.executable, str(folder / "server.py"), socket],
        # Ranks of many programs share the cores, and a waiting OpenMP thread spins. The import of
        # PyTorch also imports its device backends, which may be modules of this project.
        env={**environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(_end, server, os.getpid())
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the warm Python did not start"
    return str(command)


def _end(server: subprocess.Popen[bytes], starter: int) -> None:
    """End a server, unless this is a forked copy of the process that started it."""
    if os.getpid() == starter:
        with server:
            pass  # The block's end closes standard input, which ends the server, and waits for it.
