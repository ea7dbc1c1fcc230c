"""``python -m mpi4py.run PROGRAM``: run a program, and stop the other ranks if it fails.

The launcher and the import of ``mpi4py.MPI`` see to the other ranks already.
"""

from __future__ import annotations

import importlib.metadata
import os
import runpy
import sys
from typing import Any


def main(run_name: str = "__main__") -> dict[str, Any]:
    """Run the script, module or command that the arguments name; return its globals."""
    arguments = sys.argv[1:]
    while arguments and arguments[0] in ("-rc", "--rc", "-p", "--profile"):
        del arguments[:2]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m mpi4py (SCRIPT | -m MODULE | -c COMMAND) [ARG ...]")
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        print(f"mpi4py {importlib.metadata.version('mpi4py')} (collective)")
        raise SystemExit(0)
    from . import MPI  # noqa: F401

    kind = arguments.pop(0)
    if kind == "-m":
        sys.argv[:] = arguments
        sys.path.insert(0, "")
        return runpy.run_module(arguments[0], run_name=run_name, alter_sys=True)
    if kind == "-c":
        sys.argv[:] = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        names: dict[str, Any] = {"__name__": run_name}
        exec(compile(arguments[0], "<string>", "exec"), names)
        return names
    sys.argv[:] = [kind, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
    return runpy.run_path(kind, run_name=run_name)


if __name__ == "__main__":
    main()
