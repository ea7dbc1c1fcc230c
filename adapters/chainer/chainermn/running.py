"""Run a program of Chainer's or ChainerMN's as it is, over our transports.

::

    collective run -n 2 -m collective.adapters.chainer SCRIPT [ARGUMENT …]
    mpiexec -n 2 python -m collective.adapters.chainer SCRIPT [ARGUMENT …]

The program imports Chainer on a current NumPy, and whatever communicator it names in
``chainermn.create_communicator`` is ours. ``-m MODULE`` instead of a script runs a module.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType
from typing import Any

from collective.launch.threads import load_program

__all__ = ["become"]

_USAGE = "usage: python -m collective.adapters.chainer (SCRIPT | -m MODULE) [ARGUMENT ...]"
# Ranks that are threads share sys.argv: the first takes the program from it for all.
_lock = threading.Lock()
_program: list[str] | None = None


def become(namespace: dict[str, Any]) -> CodeType:
    """Make a ``__main__`` module that of the program which the command line names.

    Args:
        namespace: the module's, which is emptied.

    Returns:
        The program's code, to be executed there.
    """
    global _program
    with _lock:
        program = _program = sys.argv[1:] if _program is None else _program
        if not program or program in (["-m"], ["-h"], ["--help"]):
            print(_USAGE, file=sys.stdout if program[:1] in (["-h"], ["--help"]) else sys.stderr)
            raise SystemExit(0 if program[:1] in (["-h"], ["--help"]) else 2)
        if program[0] != "-m" and not os.path.exists(program[0]):
            sys.exit(f"python -m collective.adapters.chainer: {program[0]!r}: no such file")
        code, path, package = load_program(program)

        from collective.adapters.chainer.chainermn import register

        register(replace=True)
    builtins = namespace["__builtins__"]
    namespace.clear()
    # As Python does for a script. Processes that multiprocessing spawns go by __file__.
    namespace.update(
        __name__="__main__", __file__=path, __package__=package, __spec__=None, __doc__=None,
        __loader__=None, __builtins__=builtins,
    )  # fmt: skip
    return code
