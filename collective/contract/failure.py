"""Why a communicator is broken."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
)

# Programs, and torch's own tests, search the text for "timed out" or "timeout".
_TIMED_OUT = "timed out: "
#: End of the text of a timeout, unless a longer timeout cannot help.
LONGER = "; a longer timeout helps if that is only slow"
# Errors that a rank raises because of other ranks.
_OF_PEERS = (CommunicatorAbortedError, CollectiveTimeoutError, RendezvousError)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a communicator is broken, in a form that the rank that broke it sends to its peers.

    Attributes:
        kind: ``"failed"`` (the code of ``rank`` raised), ``"timeout"``, ``"lost"``,
            ``"mismatch"`` (found too late to go on), ``"shrink"`` (the other ranks should join
            ``rank`` in ``shrink()``), ``"closed"`` (a thread of ``rank`` closed the communicator
            while another thread waited in a call) or ``"aborted"``.
        rank: the rank that reports the failure.
        text: description for people; the traceback for ``"failed"``.
        ranks: for ``"timeout"`` and ``"lost"``, the ranks that are late or lost.
    """

    kind: str
    rank: int
    text: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def timed_out(
        cls, rank: int, seconds: float, what: str, ranks: Sequence[int], remedy: str = LONGER
    ) -> Self:
        """Return the failure of a call that has waited for ``what`` past its deadline.

        Args:
            rank: the rank that reports the failure.
            seconds: the timeout of the call.
            what: text that names the missing ranks and adds facts about them.
            ranks: the ranks that did not come.
            remedy: end of the text: what the program can do.
        """
        text = f"{_TIMED_OUT}waited {seconds:g} s for {what}{remedy}"
        return cls("timeout", rank, text, tuple(ranks))

    @classmethod
    def closed(cls, rank: int) -> Self:
        """Return the failure of a rank that closes while another of its threads is in a call."""
        text = f"rank {rank} has closed its communicator while one of its calls was waiting"
        return cls("closed", rank, text, (rank,))

    @classmethod
    def moved(cls, rank: int) -> Self:
        """Return the failure of a rank in which an array of a running call has got other memory."""
        text = (
            f"other code of rank {rank} resized or moved an array of this call while the call was "
            "waiting. Change the memory of an array only when its calls are over"
        )
        return cls("aborted", rank, text)

    @classmethod
    def caused_by(cls, rank: int, error: BaseException) -> Self:
        """Return the failure that the peers get when ``error`` ends a call of ``rank``.

        If ``error`` reports a fault of other ranks, the failure repeats that fault, so that the
        peers see the first cause. Any other error is a fault of this rank, and the failure carries
        its traceback.
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
        if self.kind == "closed" and me == self.rank:
            return CommunicatorClosedError(
                f"{where}: another thread of this rank closed the communicator while this call was "
                f"waiting [rank {me}]. Call close() after all calls have returned."
            )
        if self.kind in ("lost", "closed"):
            return PeerLostError(f"{where}: {self.text} [rank {me}]", self.ranks)
        if self.kind == "mismatch":
            return MismatchError(f"{where}: {self.text} [rank {me}]")
        if self.kind == "timeout" and me not in self.ranks:
            return CollectiveTimeoutError(f"{where}: {self.text} [rank {me}]", self.ranks)
        if self.kind == "timeout" and self.text.startswith(_TIMED_OUT):
            text = self.text.removeprefix(_TIMED_OUT)
            return CommunicatorAbortedError(
                f"{where}: rank {self.rank} timed out waiting for this rank: {text} [rank {me}]"
            )
        return CommunicatorAbortedError(f"{where}: {self.text} [rank {me}]")
