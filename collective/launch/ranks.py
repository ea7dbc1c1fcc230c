"""Ranks that are started once and then run jobs; a job has one outcome for each rank.

Programs that need several ranks (tests, the benchmark, the parity suite, the doctor) use one
:class:`Ranks` and a :class:`Starter`. The starter creates one kind of rank: threads of
this process (:class:`ThreadStarter`), processes forked from a server (:mod:`.process_starter`), or
processes that a command such as ``mpiexec`` starts and that call back (:mod:`.command_starter`).
Another launcher needs another starter.

Each rank has a *control line*. A job arrives through it, and the rank loads the job. When all ranks
have loaded it, they get the order to begin, so the time of imports does not count as the job's.
Then the line returns what the job returned or raised. The death of a rank shows as the end of its
process. The end of its line is not enough, since a process that the rank forked has the line open,
too. If a rank hangs, it gets a request for its stacks and is ended.
"""

from __future__ import annotations

import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol, Self

from collective.inner import Deadline

from .outcome import Outcome, RankDiedError, RankHungError, RanksFailedError

# How long ranks may take at least to start and to import what a job needs, on a busy machine.
LOAD_S = 60.0
# How long a rank may take to end once its line is closed.
LEAVE_S = 5.0
# Seconds that a rank has to end after its communicator was aborted.
_GRACE_S = 2.0


# -- inside a rank -----------------------------------------------------------------------------


class Resource(Protocol):
    """Object that a rank keeps from job to job."""

    def close(self) -> None:
        """Release the resource."""

    def abort(self, reason: str) -> None:
        """Abort the calls in flight, since the rank hangs; only for ranks that are threads."""


class Participant:
    """State of a rank, as its jobs see it.

    Attributes:
        rank: number of the rank.
        kept: resources that jobs leave to later jobs, under keys of their choice; closed at the
            end.
    """

    def __init__(self, rank: int, kept: Mapping[Hashable, Resource] | None = None) -> None:
        self.rank = rank
        self.kept: dict[Hashable, Any] = dict(kept or {})

    def leave(self) -> None:
        """Close all resources in :attr:`kept`."""
        while self.kept:
            self.kept.popitem()[1].close()


class Job(ABC):
    """Work that every rank does once; pickled if ranks are processes."""

    def load(self) -> None:
        """Import the modules of the job. If this fails, no rank begins the job."""
        return None

    @abstractmethod
    def run(self, participant: Participant) -> Any:
        """Do the part of a rank, and return its result for the program that controls the ranks."""

    def ended(self, rank: int, why: str) -> None:
        """Tell the other ranks that a rank has died; the controlling program calls this."""
        return None

    def failed(self, participant: Participant, error: BaseException) -> None:
        """Release resources that are of no use after ``error``; its outcome is already recorded."""
        return None


@dataclass(frozen=True)
class FunctionJob(Job):
    """Function that every rank calls with its :class:`Participant` and some arguments.

    Attributes:
        function: the function; at the top level of a module if ranks are processes.
        args: arguments after the participant.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.function!r} and its arguments"

    def run(self, participant: Participant) -> Any:
        __tracebackhide__ = True
        return self.function(participant, *self.args)


def perform(job: Job, participant: Participant) -> Outcome:
    """Run a rank's part of a job, and return its outcome, also if it raises."""
    __tracebackhide__ = True
    try:
        return Outcome(job.run(participant))
    except BaseException as error:  # the outcome carries the error to the controlling program
        outcome = Outcome.failed(error)
        job.failed(participant, error)
        return outcome


# -- in the program that controls the ranks ----------------------------------------------------


class RankHandle(ABC):
    """Rank as seen from outside: this end of its control line.

    Attributes:
        gone: whether the rank has ended and takes no more jobs.
    """

    gone = False

    @abstractmethod
    def load(self, job: Any) -> None:
        """Make the rank load a job that :meth:`Starter.encode` returned, in place of one before.

        Raises:
            OSError: the rank has ended; the next method raises it as well.
        """

    @abstractmethod
    def go(self) -> None:
        """Let the rank begin the job that it has loaded."""

    @abstractmethod
    def died(self) -> Outcome:
        """Return the outcome of a rank that has ended."""

    @abstractmethod
    def stacks(self) -> str:
        """Return the stacks of the rank's threads, or an empty text if the rank does not answer."""

    def dismiss(self) -> None:
        """Let the rank end by itself; return at once."""
        return None

    @abstractmethod
    def end(self, deadline: Deadline) -> None:
        """Wait until the rank ends by itself; end it by force at ``deadline``."""


class Starter(ABC):
    """Starter of ranks of one kind.

    Attributes:
        together: whether the ranks live and end together, as those of MPI: if one has ended, all
            are replaced.
    """

    together = False

    def encode(self, job: Job) -> Any:
        """Return ``job`` in the form that :meth:`RankHandle.load` takes.

        Raises:
            TypeError: the job cannot be sent to the ranks.
        """
        return job

    @abstractmethod
    def start(self, ranks: Sequence[int]) -> dict[int, RankHandle]:
        """Start ``ranks``: all ranks, or those that are missing.

        Raises:
            BackendUnavailableError: the ranks do not start.
        """

    @abstractmethod
    def wait(
        self, handles: Mapping[int, RankHandle], deadline: Deadline
    ) -> dict[int, Outcome | None]:
        """Wait until a rank answers.

        Returns:
            Outcomes by rank, None for a rank that has loaded its job; empty after the deadline.
        """

    def end(self) -> None:
        """End the commands that started the ranks, and clean up, once all ranks have ended."""
        return None


class Ranks:
    """Ranks that do one job after another; a context manager.

    The ranks are started at the first job. A rank that died or hung is replaced before the next
    job.

    Args:
        size: number of ranks.
        starter: starter of the ranks; this object takes ownership of it.
    """

    def __init__(self, size: int, starter: Starter) -> None:
        self.size = size
        self._starter = starter
        self._handles: dict[int, RankHandle] = {}

    def start(self) -> None:
        """Start the ranks that are missing.

        Raises:
            BackendUnavailableError: the ranks do not start.
        """
        missing = [rank for rank in range(self.size) if rank not in self._handles]
        if missing and self._starter.together:
            # Also if all ranks are missing: they may have been ended, but not their commands.
            self._end(Deadline(0.0))
            missing = list(range(self.size))
        if missing:
            self._handles.update(self._starter.start(missing))

    def run(self, job: Job, timeout: float, *, grace: float | None = None) -> dict[int, Outcome]:
        """Run ``job`` on every rank and return the outcomes by rank.

        Args:
            job: the job to run.
            timeout: seconds after which ranks that have not returned are ended. The time to start
                the ranks and to load the job does not count. It has a limit of its own: as many
                seconds, or a minute if that is longer.
            grace: seconds that the other ranks have once a rank has failed, within ``timeout``;
                None for no such limit.

        Raises:
            TypeError: the job cannot be sent.
            BackendUnavailableError: the ranks do not start.
        """
        encoded = self._starter.encode(job)
        try:
            self.start()
            # No rank begins before the last one has started and imported its modules.
            loading = Deadline(max(LOAD_S, timeout))
            outcomes = self._ask(lambda handle: handle.load(encoded), loading, "no start")
            if outcomes:
                return outcomes
            end = Deadline(timeout)
            return self._ask(lambda handle: handle.go(), end, "no result", grace, job.ended)
        except BaseException:
            # For example after an interrupt: the next job must not get the answers to this one.
            self._end(Deadline(0.0))
            raise

    def results(self, job: Job, timeout: float) -> list[Any]:
        """Run ``job`` on every rank, as :meth:`run`, and return its results in rank order.

        Raises:
            RanksFailedError: a rank raised, died or hung; contains the traceback of every rank
                that failed.
        """
        __tracebackhide__ = True
        outcomes = self.run(job, timeout)
        failure = RanksFailedError.of(outcomes, self.size)
        if failure is not None:
            raise failure
        return [outcomes[rank].value for rank in range(self.size)]

    def _ask(
        self, send: Callable[[RankHandle], None], limit: Deadline, lack: str,
        grace: float | None = None, ended: Callable[[int, str], None] = lambda rank, why: None,
    ) -> dict[int, Outcome]:  # fmt: skip
        """Send an order to all ranks, wait until each has answered, and return the outcomes.

        Args:
            lack: what an error says of a rank that has not answered at ``limit``.
            ended: function to call for a rank that has died, and how.
        """
        outcomes: dict[int, Outcome] = {}
        pending: dict[int, RankHandle] = {}
        for rank, handle in self._handles.items():
            try:
                send(handle)
                pending[rank] = handle
            except OSError:
                outcomes[rank] = handle.died()
        deadline = limit
        while pending:
            answers = self._starter.wait(pending, deadline)
            if not answers:
                outcomes.update(self._hung(pending, limit, lack))
                break
            for rank, answer in answers.items():
                del pending[rank]
                if answer is not None:
                    outcomes[rank] = answer
                    if isinstance(answer.error, RankDiedError) and pending:
                        ended(rank, str(answer.error).removeprefix(f"rank {rank}: "))
                    if answer.error is not None and grace is not None:
                        deadline = deadline.within(grace)
        for rank in [rank for rank, handle in self._handles.items() if handle.gone]:
            self._handles.pop(rank).end(Deadline(0.0))
        return outcomes

    def _hung(
        self, pending: Mapping[int, RankHandle], limit: Deadline, lack: str
    ) -> dict[int, Outcome]:
        """Get the stacks of the ranks that still run, and end these ranks."""
        stacks = {rank: handle.stacks() for rank, handle in pending.items()}
        hung = {}
        for rank, stack in stacks.items():
            error = RankHungError(
                f"rank {rank}: {lack} after {limit.seconds:g} s; the rank was ended", stack
            )
            hung[rank] = Outcome(error=error)
            self._handles.pop(rank).end(Deadline(0.0))
        return hung

    def _end(self, deadline: Deadline) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.dismiss()  # first let all end in parallel, then wait for each
        for handle in handles.values():
            handle.end(deadline)
        self._starter.end()

    def close(self) -> None:
        """End all ranks. A second call has no effect."""
        # Ranks that live together wait for each other at their end. If one is missing, the others
        # would wait in vain, so end them by force at once.
        complete = len(self._handles) == self.size or not self._starter.together
        self._end(Deadline(LEAVE_S if complete else 0.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


# -- ranks that are threads --------------------------------------------------------------------

_Answers = SimpleQueue[tuple[RankHandle, "Outcome | None"]]


class _ThreadRank(RankHandle):
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

    def start(self, ranks: Sequence[int]) -> dict[int, RankHandle]:
        return {rank: _ThreadRank(rank, self._answers) for rank in ranks}

    def wait(
        self, handles: Mapping[int, RankHandle], deadline: Deadline
    ) -> dict[int, Outcome | None]:
        while True:
            try:
                answering, outcome = self._answers.get(timeout=deadline.left())
            except Empty:
                return {}
            for rank, handle in handles.items():
                if handle is answering:  # ignore a late thread of an earlier job
                    return {rank: outcome}
