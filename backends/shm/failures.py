"""Reports of failures in the control segment: each rank may write one, and all ranks read them."""

from __future__ import annotations

import time

from collective.contract.failure import Failure

from .board import Board
from .layout import FAILURE_BYTES

# Characters to keep of a text that is too long, if most of them are ASCII, and if none is.
_KEPT = FAILURE_BYTES * 3 // 4, FAILURE_BYTES // 8


def report(board: Board, failure: Failure) -> None:
    """Write this rank's failure where the peers look for causes."""
    # All processes of the host share this clock, so cause() finds the earliest report.
    head = [time.monotonic_ns(), failure.kind, failure.rank, failure.ranks]
    text = failure.text.encode(errors="backslashreplace").decode()
    # Keep the end of a traceback, which says most.
    texts = [text, *("..." + text[-length:] for length in _KEPT if length < len(text))]
    for end in texts:
        if board.post([*head, end]):
            break


def cause(board: Board, rank: int) -> Failure:
    """Return the earliest failure; the caller has seen that the communicator is broken.

    The failure of a rank whose own code raised comes before all others, which may be consequences
    of it.

    Args:
        board: the reports.
        rank: this rank, which reports damaged memory if no rank has reported a failure.
    """
    causes: list[tuple[bool, int, Failure]] = []
    for reporting, notice in board.read().items():
        match notice:
            case [int(at), str(kind), int(reporter), [*ranks], str(text)] if all(
                isinstance(lost, int) for lost in ranks
            ):
                failure = Failure(kind, reporter, text, tuple(ranks))
            case _:
                text = f"rank {reporting} has failed, and its report is damaged"
                at, failure = 0, Failure("aborted", reporting, text)
        causes.append((failure.kind != "failed", at, failure))
    if not causes:
        text = "shared memory is damaged: its flag shows a failure, but no rank reported one"
        return Failure("aborted", rank, text)
    return min(causes, key=lambda cause: cause[:2])[2]
