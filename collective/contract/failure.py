"""Why a communicator is broken."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Failure"]

# What a rank raises because of others.
_OF_PEERS = (CommunicatorAbortedError, CollectiveTimeoutError, RendezvousError)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a communicator is broken, as it is passed from the rank that broke it.

    Attributes:
        kind: ``"failed"`` (its code raised), ``"timeout"``, ``"lost"``, ``"mismatch"`` (found
            when it was too late to go on), ``"shrink"`` (the others are to go on with it) or
            ``"aborted"``.
        rank: who reports it.
        text: for people; the traceback for ``"failed"``.
        ranks: for ``"timeout"`` and ``"lost"``, the ranks in question.
    """

    kind: str
    rank: int
    text: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def timed_out(cls, rank: int, seconds: float, what: str, ranks: Sequence[int]) -> Self:
        """Return the failure of a call that has waited for ``what`` past its deadline.

        Args:
            rank: who reports it.
            seconds: what the call was given.
            what: what has not come, and what is known of it.
            ranks: the ranks in question.
        """
        # Programs and torch's own tests look for "timed out", or the word "timeout".
        text = f"waited {seconds:g} s for {what}; a longer timeout helps if that is only slow"
        return cls("timeout", rank, f"timed out: {text}", tuple(ranks))

    @classmethod
    def caused_by(cls, rank: int, error: BaseException) -> Self:
        """Return the failure that the peers hear of when ``error`` ends what ``rank`` does.

        An error that says what other ranks did, or did not do, is passed on as such, so that the
        peers hear of the first cause. Any other one is this rank's own, with its traceback.
        """
        if not isinstance(error, _OF_PEERS):
            return cls("failed", rank, "".join(traceback.format_exception(error)))
        kind, ranks = "aborted", getattr(error, "ranks", ())
        if isinstance(error, PeerLostError):
            kind = "lost"
        elif isinstance(error, CollectiveTimeoutError) and ranks:
            kind = "timeout"
        return cls(kind, rank, f"rank {rank} gave up: {error}", ranks)

    def error(self, where: str, me: int) -> Exception:
        """Return the exception that rank ``me`` raises in operation ``where``."""
        if self.kind == "failed":
            return PeerFailedError(
                f"{where}: rank {self.rank} failed [rank {me}]; its traceback:\n"
                f"{self.text.rstrip()}",
                self.rank,
                self.text,
            )
        if self.kind == "lost":
            return PeerLostError(f"{where}: {self.text} [rank {me}]", self.ranks)
        if self.kind == "mismatch":
            return MismatchError(f"{where}: {self.text} [rank {me}]")
        if self.kind == "timeout" and me not in self.ranks:
            return CollectiveTimeoutError(f"{where}: {self.text} [rank {me}]", self.ranks)
        return CommunicatorAbortedError(f"{where}: {self.text} [rank {me}]")
