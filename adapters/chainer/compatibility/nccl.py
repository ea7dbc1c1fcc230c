"""ChainerMN's ``PureNcclCommunicator``, for asking whether a communicator is one.

ChainerMN imports the module of that class to ask; the module imports mpi4py, which starts MPI.
"""

from __future__ import annotations

import sys

__all__ = ["PureNcclCommunicator"]  # noqa: F822


class _PureNcclCommunicator:
    """Nothing is one, as the module in which they are made has not been imported."""


def __getattr__(name: str) -> type:
    # Looked up at each import statement that runs: the module may have come in between.
    if name != "PureNcclCommunicator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = sys.modules.get("chainermn.communicators.pure_nccl_communicator")
    found: type = getattr(module, name, _PureNcclCommunicator)
    return found
