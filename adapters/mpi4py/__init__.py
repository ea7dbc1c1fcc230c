"""mpi4py without MPI: unmodified programs of mpi4py run over collective's transports.

``collective run --mpi4py program.py`` lets every process of the program, also the children that it
starts, find the package in ``importable`` in place of an installed mpi4py, and its metadata. A
program that cannot be started so calls :func:`enable` before it imports mpi4py.

The modules here are what ``mpi4py.MPI`` consists of, from the bottom up: ``exceptions``,
``handles``, ``attributes``, ``memory``, ``layouts``, ``datatypes``, ``messages`` (what arguments
describe), ``operators``, ``operations`` (what is in flight), ``requests``, ``point_to_point``,
``collectives``, ``communicators``, ``topologies``, ``windows`` and ``environment``.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from collective import Communicator, ConfigError, UnsupportedError

__all__ = ["FOLDER", "communicator", "enable", "variables"]

#: Folder with the package that programs import as mpi4py, and its metadata.
FOLDER = Path(__file__).resolve().with_name("importable")


def variables() -> dict[str, str]:
    """Return the environment variables with which programs import this mpi4py."""
    path = [str(FOLDER), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def enable() -> None:
    """Let this process and its children import this mpi4py; call it before ``import mpi4py``.

    Raises:
        ConfigError: another mpi4py is imported already.
    """
    imported = sys.modules.get("mpi4py")
    file = getattr(imported, "__file__", None) or ""
    if imported is not None and Path(file).resolve().parent.parent != FOLDER:
        raise ConfigError(
            f"mpi4py: {file} is imported already, and its MPI cannot be replaced now. Call "
            "enable() before `import mpi4py`, or start the program with `collective run --mpi4py`."
        )
    os.environ.update(variables())
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))


def communicator(comm: Communicator) -> Any:
    """Return ``mpi4py.MPI.COMM_WORLD``, which has the ranks of ``comm`` from now on.

    Tests of programs call this, since each test has other ranks. All communicators that were made
    from the ``COMM_WORLD`` before are of no use any more.

    Raises:
        ConfigError: another mpi4py is imported already.
        UnsupportedError: the ranks are threads, which would share one ``COMM_WORLD``.
    """
    if comm.capabilities.in_process and comm.size > 1:
        raise UnsupportedError(
            "mpi4py: the ranks are threads of one process, which has one COMM_WORLD. Take ranks "
            "that are processes, such as those of the transport shm."
        )
    enable()
    importlib.import_module("collective.adapters.mpi4py.communicators").adopt(comm)
    return importlib.import_module("mpi4py.MPI").COMM_WORLD
