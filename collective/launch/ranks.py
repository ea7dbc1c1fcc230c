"""Ranks that are started once and steered: a job goes in, and an outcome a rank comes out.

Whoever needs several ranks in one program (tests, the benchmark, the parity suite, the doctor)
has one :class:`Ranks`, and a :class:`Starter` that knows how its kind of rank comes into being:
threads (:mod:`.thread_starter`), processes forked from a server (:mod:`.process_starter`), or
whatever a command starts, ``mpiexec`` among others, which calls back (:mod:`.command_starter`).
Another launcher is another starter.

Between the two there is a *control line* for each rank. It takes a job, which the rank loads;
when all have loaded it they are let go, so that what imports take is not the job's time; and it
brings what the job returned or raised. A rank that dies is noticed by its process's end and not
only by the line's, since a process that it forked has the line, too. One that hangs is asked for
its stacks and ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from collective.deadline import Deadline

from .outcome import Outcome, RankHungError, RanksFailedError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FunctionJob", "Handle", "Job", "Participant", "Ranks", "Resource", "Starter", "perform"]

# How long ranks may take to start and to import what a job needs, on a busy machine.
LOAD_S = 60.0
# How long a rank may take to end once its line is closed.
LEAVE_S = 5.0


# -- what a rank has ---------------------------------------------------------------------------


class Resource(Protocol):
    """Something that a rank keeps from job to job."""

    def close(self) -> None:
        """Let go of it."""

    def abort(self, reason: str) -> None:
        """Break off what is under way in it: the rank hangs, and is a thread."""


class Participant:
    """One rank, from inside.

    Attributes:
        rank: which.
        kept: what jobs leave to the next ones, by whatever they know it by; closed at the end.
    """

    def __init__(self, rank: int, kept: Mapping[Hashable, Resource] | None = None) -> None:
        self.rank = rank
        self.kept: dict[Hashable, Any] = dict(kept or {})

    def leave(self) -> None:
        """Close what is kept."""
        while self.kept:
            self.kept.popitem()[1].close()


class Job(ABC):
    """What every rank does once; pickled where ranks are processes."""

    def load(self) -> None:
        """Import what it takes. A rank that cannot fails before any other has begun."""
        return None

    @abstractmethod
    def run(self, participant: Participant) -> Any:
        """Do a rank's part, and return what goes to whoever steers the ranks."""

    def failed(self, participant: Participant, error: BaseException) -> None:
        """Let go of what is of no use after ``error``; its outcome has been noted."""
        return None


@dataclass(frozen=True)
class FunctionJob(Job):
    """A function that every rank calls with its :class:`Participant` and some arguments.

    Attributes:
        function: at the top of a module, where ranks are processes.
        args: what it gets after the participant.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.function!r} and its arguments"

    def run(self, participant: Participant) -> Any:
        __tracebackhide__ = True
        return self.function(participant, *self.args)


def perform(job: Job, participant: Participant) -> Outcome:
    """Run a rank's part of a job, whatever becomes of it."""
    __tracebackhide__ = True
    try:
        return Outcome(job.run(participant))
    except BaseException as error:  # whoever steers the ranks gets it
        outcome = Outcome.failed(error)
        job.failed(participant, error)
        return outcome


# -- what whoever steers them has --------------------------------------------------------------


class Handle(ABC):
    """One rank from outside: this end of its control line.

    Attributes:
        gone: whether it takes no more jobs.
    """

    gone = False

    @abstractmethod
    def load(self, job: Any) -> None:
        """Have it load a job, as :meth:`Starter.encode` returned it.

        Raises:
            OSError: it is not there; as the next two methods.
        """

    @abstractmethod
    def go(self) -> None:
        """Let it begin what it has loaded."""

    def skip(self) -> None:
        """Let it wait for the next job: somebody could not load this one."""
        return None

    @abstractmethod
    def died(self) -> Outcome:
        """Return the outcome of a rank that is gone."""

    @abstractmethod
    def stacks(self) -> str:
        """Return where its threads are, or an empty text if it does not say."""

    def dismiss(self) -> None:
        """Let it end by itself; return at once."""
        return None

    @abstractmethod
    def end(self, deadline: Deadline) -> None:
        """Return when it has ended, by itself until ``deadline`` or else by force."""


class Starter(ABC):
    """How ranks of one kind come into being.

    Attributes:
        together: whether they live and end together, as those of MPI: if one is gone all are
            replaced.
    """

    together = False

    def encode(self, job: Job) -> Any:
        """Return ``job`` as handles take it.

        Raises:
            TypeError: it cannot be sent to the ranks.
        """
        return job

    @abstractmethod
    def start(self, ranks: Sequence[int]) -> dict[int, Handle]:
        """Start ranks: all, or those that are not there.

        Raises:
            BackendUnavailableError: they do not start.
        """

    @abstractmethod
    def wait(self, handles: Mapping[int, Handle], deadline: Deadline) -> dict[int, Outcome | None]:
        """Wait until some rank answers.

        Returns:
            Outcomes, and None for a rank that has loaded its job; nothing if time is over.
        """

    def end(self) -> None:
        """End what has started the ranks, and remove what they left; all ranks have ended."""
        return None


class Ranks:
    """Ranks that do one job after another; a context manager.

    They are started when the first job comes. One that died or hung is replaced for the next.

    Args:
        size: how many.
        starter: what starts them; it is this object's own from now on.
    """

    def __init__(self, size: int, starter: Starter) -> None:
        self.size = size
        self._starter = starter
        self._handles: dict[int, Handle] = {}

    def start(self) -> None:
        """Start the ranks that are not there.

        Raises:
            BackendUnavailableError: they do not start.
        """
        missing = [rank for rank in range(self.size) if rank not in self._handles]
        if missing and self._starter.together and self._handles:
            self._end(Deadline(0.0))
            missing = list(range(self.size))
        if missing:
            self._handles.update(self._starter.start(missing))

    def run(self, job: Job, timeout: float, *, grace: float | None = None) -> dict[int, Outcome]:
        """Run ``job`` on every rank and return how it ended for each.

        Args:
            timeout: seconds until ranks that have not returned are ended. Starting them and
                loading the job do not count.
            grace: how many of them are left once a rank has failed; all by default.

        Raises:
            TypeError: the job cannot be sent.
            BackendUnavailableError: the ranks do not start.
        """
        encoded = self._starter.encode(job)
        try:
            self.start()
            # Whoever starts its processes or imports its modules first waits for the last.
            outcomes = self._ask(lambda handle: handle.load(encoded), Deadline(LOAD_S))
            if not outcomes:
                return self._ask(lambda handle: handle.go(), Deadline(timeout), grace)
            for rank, handle in self._handles.items():
                if rank not in outcomes:
                    handle.skip()
        except BaseException:
            # An interrupt, say: the next job must not get the answers to this one.
            self._end(Deadline(0.0))
            raise
        return outcomes

    def results(self, job: Job, timeout: float) -> list[Any]:
        """Run ``job`` on every rank, as :meth:`run`, and return what it returned, in rank order.

        Raises:
            RanksFailedError: a rank raised, died or hung; holds every rank's traceback.
        """
        outcomes = self.run(job, timeout)
        failure = RanksFailedError.of(outcomes, self.size)
        if failure is not None:
            raise failure
        return [outcomes[rank].value for rank in range(self.size)]

    def _ask(
        self, tell: Callable[[Handle], None], limit: Deadline, grace: float | None = None
    ) -> dict[int, Outcome]:
        """Tell all ranks something, and wait until each has answered; return the outcomes."""
        outcomes: dict[int, Outcome] = {}
        pending: dict[int, Handle] = {}
        for rank, handle in self._handles.items():
            try:
                tell(handle)
                pending[rank] = handle
            except OSError:
                outcomes[rank] = handle.died()
        deadline = limit
        while pending:
            answers = self._starter.wait(pending, deadline)
            if not answers:
                outcomes.update(self._hung(pending, limit))
                break
            for rank, answer in answers.items():
                del pending[rank]
                if answer is not None:
                    outcomes[rank] = answer
                    if answer.error is not None and grace is not None:
                        deadline = deadline.within(grace)
        for rank in [rank for rank, handle in self._handles.items() if handle.gone]:
            self._handles.pop(rank).end(Deadline(0.0))
        return outcomes

    def _hung(self, pending: Mapping[int, Handle], limit: Deadline) -> dict[int, Outcome]:
        """End the ranks that still run, after a look at where they are."""
        stacks = {rank: handle.stacks() for rank, handle in pending.items()}
        hung = {}
        for rank, stack in stacks.items():
            error = RankHungError(
                f"rank {rank}: no result after {limit.seconds:g} s; it was ended", stack
            )
            hung[rank] = Outcome(error=error)
            self._handles.pop(rank).end(Deadline(0.0))
        return hung

    def _end(self, deadline: Deadline) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.dismiss()  # all at once, then one by one: they leave side by side
        for handle in handles.values():
            handle.end(deadline)
        self._starter.end()

    def close(self) -> None:
        """End all ranks. A second close does nothing."""
        # Those that live together wait for each other at their end.
        whole = len(self._handles) == self.size or not self._starter.together
        self._end(Deadline(LEAVE_S if whole else 0.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
