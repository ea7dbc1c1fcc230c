"""How doctor starts processes of its own."""

from __future__ import annotations

import json
import os
import sys

__all__ = ["LEFT_BEHIND", "command"]

#: Where Open MPI keeps what a process that no mpiexec started leaves behind.
LEFT_BEHIND = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main(*arguments)`` of a module beside this one.

    It finds the modules that this process finds.
    """
    path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from collective.tools.doctor.{module} import main; main(*sys.argv[2:])"
    )
    return [sys.executable, "-c", code, path, *arguments]
