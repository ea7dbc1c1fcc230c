"""Ranks as threads of this process; each job runs in new threads."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue

from collective.deadline import Deadline

from .outcome import Outcome
from .ranks import Handle, Job, Participant, Starter, perform

__all__ = ["ThreadStarter"]

# Seconds that a rank has to end after its communicator was aborted.
_GRACE_S = 2.0

_Answers = SimpleQueue[tuple[Handle, "Outcome | None"]]


class _Thread(Handle):
    def __init__(self, rank: int, answers: _Answers) -> None:
        self._participant = Participant(rank)
        self._answers = answers
        self._job: Job | None = None
        self._thread: threading.Thread | None = None

    def load(self, job: Job) -> None:
        self._job = job
        self._answers.put((self, None))

    def go(self) -> None:
        job, self._job = self._job, None
        assert job is not None
        self._thread = threading.Thread(
            target=lambda: self._answers.put((self, perform(job, self._participant))),
            name=f"rank-{self._participant.rank}",
            daemon=True,  # a thread that hangs must not keep the interpreter from exiting
        )
        self._thread.start()

    def died(self) -> Outcome:
        raise NotImplementedError("a thread always returns an outcome, so it cannot die")

    def stacks(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0) if self._thread else None
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def end(self, deadline: Deadline) -> None:
        """Wait for the thread to end, and abort what it keeps if it does not.

        A thread that does not react continues to run, but gets no other job.
        """
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(deadline.left())
            if self._thread.is_alive():
                for kept in list(self._participant.kept.values()):
                    kept.abort("the rank returned no result in time")
                self._thread.join(_GRACE_S)
            if self._thread.is_alive():
                return
        self._participant.leave()


class ThreadStarter(Starter):
    """Starter of ranks that are threads of this process."""

    def __init__(self) -> None:
        self._answers: _Answers = SimpleQueue()

    def start(self, ranks: Sequence[int]) -> dict[int, Handle]:
        return {rank: _Thread(rank, self._answers) for rank in ranks}

    def wait(self, handles: Mapping[int, Handle], deadline: Deadline) -> dict[int, Outcome | None]:
        while True:
            try:
                answering, outcome = self._answers.get(timeout=deadline.left())
            except Empty:
                return {}
            for rank, handle in handles.items():
                if handle is answering:  # ignore a late thread of an earlier job
                    return {rank: outcome}
