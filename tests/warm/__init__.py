"""A Python for tests' programs that has PyTorch imported before they start.

To import it costs two seconds of a processor, which is most of what a small program takes. The
command that stands in for ``python`` (client.py) hands its arguments, variables, open files and
namespaces to a server (server.py), which forks, and stands for that process from then on: signals
go there, and it ends as that one does. What the program imports of this project it imports itself.
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
    """Return the path of a command that is called as ``python`` is.

    The first call starts the server, which ends with this process. Without PyTorch it is the
    Python of this process.
    """
    if importlib.util.find_spec("torch") is None or len(sys.executable) > 120:
        return sys.executable
    folder = Path(__file__).parent
    directory = tempfile.mkdtemp(prefix="warm-")
    socket, command = f"{directory}/socket", Path(directory, "python")
    command.write_text(_COMMAND.format(python=sys.executable, folder=str(folder), socket=socket))
    command.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COLLECTIVE_"))}
    server = subprocess.Popen(
        [sys.executable, str(folder / "server.py"), socket],
        # Ranks of many programs share the cores, and a thread of OpenMP that waits spins. What
        # PyTorch imports of others when it is imported may be of this project.
        env={**kept, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
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
            pass  # leaving closes its standard input, which it ends with, and waits
