"""Nobody as a peer, and what a receive tells of its message beside the array."""

from __future__ import annotations

from collective.contract.backend import ANY_SOURCE

__all__ = ["NULL", "Status"]

#: In place of a rank: nobody, to whom nothing is sent and from whom nothing is received.
#: No arithmetic with ranks ends there by accident, as it could at -2 (``comm.rank - 2``).
NULL = -(2**30)


class Status:
    """What a receive tells of its message beside the array.

    Attributes:
        source: the rank that sent it; ``ANY_SOURCE`` until it has come, ``NULL`` where none does.

    See Also:
        MPI_Status.
    """

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = ANY_SOURCE

    def __repr__(self) -> str:
        return f"Status(source={self.source})"
