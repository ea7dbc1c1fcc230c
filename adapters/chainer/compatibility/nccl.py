"""ChainerMN's ``PureNcclCommunicator``, for ``isinstance`` checks only.

For such a check ChainerMN imports the module of that class, which imports mpi4py and thereby starts
MPI.
"""

from __future__ import annotations

import sys

__all__ = ["PureNcclCommunicator"]  # noqa: F822


class _PureNcclCommunicator:
    """Class without instances, used as long as the real class's module is not imported."""


def __getattr__(name: str) -> type:
    # Looked up at each import statement, because the real module may have been imported meanwhile.
    if name != "PureNcclCommunicator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = sys.modules.get("chainermn.communicators.pure_nccl_communicator")
    kind: type = getattr(module, name, _PureNcclCommunicator)
    return kind
