"""The null rank, and the status of a received message."""

from __future__ import annotations

from collective.contract.backend import ANY_SOURCE

__all__ = ["NULL", "Status"]

#: Null rank: a message to it is not sent, and a receive from it receives nothing. Arithmetic with
#: ranks cannot produce this number by accident, as it could produce -2 (``comm.rank - 2``).
NULL = -(2**30)


class Status:
    """Status of a received message, which ``recv`` fills in.

    Attributes:
        source: rank that sent the message; ``ANY_SOURCE`` until the message has arrived, ``NULL``
            if it was received from ``NULL``.

    See Also:
        MPI_Status.
    """

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = ANY_SOURCE

    def __repr__(self) -> str:
        return f"Status(source={self.source})"
