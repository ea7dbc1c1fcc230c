"""Ranks of a pool as threads of this process."""

from __future__ import annotations

import sys
import threading
import time
import traceback

from .failed import Outcome, RankHungError
from .seat import Job, Seat

__all__ = ["ThreadRanks"]

# How long ranks whose communicator was aborted may take to notice.
_GRACE_S = 2.0


class ThreadRanks:
    """Runs jobs in a thread a rank; a thread lasts as long as a job."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._seats = [Seat(rank) for rank in range(size)]

    def run(self, job: Job, timeout: float) -> dict[int, Outcome]:
        """Run ``job`` on every rank and return how it ended for each."""
        outcomes: dict[int, Outcome] = {}

        def serve(seat: Seat) -> None:
            outcomes[seat.rank] = seat.run(job)

        threads = [
            # A daemon: one that hangs must not keep the interpreter from leaving.
            threading.Thread(target=serve, args=(seat,), name=f"rank-{seat.rank}", daemon=True)
            for seat in self._seats
        ]
        for thread in threads:
            thread.start()
        if not _join(threads, timeout):
            for rank, hung in self._hung(threads, timeout).items():
                outcomes[rank] = hung
        if any(outcome.error is not None for outcome in outcomes.values()):
            self.close()
        return outcomes

    def _hung(self, threads: list[threading.Thread], timeout: float) -> dict[int, Outcome]:
        """Break off the ranks that still run, after a look at where they are."""
        frames = sys._current_frames()
        hung = {}
        for seat, thread in zip(self._seats, threads):
            if thread.is_alive() and thread.ident in frames:
                stack = "".join(traceback.format_stack(frames[thread.ident]))
                error = RankHungError(f"rank {seat.rank}: no result after {timeout:g} s", stack)
                hung[seat.rank] = Outcome(error=error)
        for seat in self._seats:
            if seat.rank in hung and seat.comm is not None:
                seat.comm.abort(f"no result after {timeout:g} s")
                break
        _join(threads, _GRACE_S)
        # A thread that does not notice goes on; it must not meet the next job.
        for rank in hung:
            if threads[rank].is_alive():
                self._seats[rank] = Seat(rank)
        return hung

    def close(self) -> None:
        """Close the shared communicators."""
        for seat in self._seats:
            seat.leave()


def _join(threads: list[threading.Thread], timeout: float) -> bool:
    """Wait until all threads have ended; return whether they have within ``timeout``."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
