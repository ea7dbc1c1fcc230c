"""Going on after a loss, with whoever is left, and with those who join."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.world import World
from collective.elastic.arrivals import Arrivals, Knock
from collective.elastic.lineage import Lineage
from collective.elastic.next_generation import NextGeneration, agreed, usual_seconds
from collective.errors import (
    CollectiveTimeoutError,
    ExcludedError,
    InvalidArgumentError,
    RankError,
    RendezvousError,
    UnsupportedError,
)

from .foreign_names import explained
from .groups import Groups

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Generations", "Joiner"]


@dataclass(frozen=True)
class Joiner:
    """A process that joins ranks which are connected: from its knock to their next generation.

    Attributes:
        world: where the ranks met, and this process's host; its numbers are of no account.
        find: returns the transport that this process is to have, given the name of the ranks'.
        grace, min_ranks: as of :class:`Lineage`.
    """

    world: World
    find: Callable[[str], type[Backend]]
    grace: float
    min_ranks: int

    def run(self, alone: Backend, timeout: float) -> tuple[Backend, Lineage]:
        """Wait to be let in; return the transport of the grown generation, and its lineage.

        Args:
            alone: what this process has until then.
            timeout: seconds.

        Raises:
            CollectiveTimeoutError: nobody let it in, or they did not connect.
            ExcludedError: there are no ranks any more, or they went on without it.
            ConfigError: they have another transport, or speak another protocol.
        """
        end = time.monotonic() + timeout
        knock = Knock(self.world.store, self.world.host, self.grace)
        kind = self.find(knock.backend(timeout))
        while True:
            offer = knock.admitted(max(0.001, end - time.monotonic()))
            founders = offer["founders"]
            lineage = Lineage(
                root=replace(self.world, rank=offer["number"], size=founders),
                name=offer["name"],
                origin=tuple(offer["origin"]),
                generation=offer["generation"] - 1,
                grace=self.grace,
                min_ranks=self.min_ranks,
                founders=founders,
            )
            left = max(0.001, end - time.monotonic())
            try:
                return NextGeneration(lineage, alone, left, kind=kind).run()
            except ExcludedError:
                # They could not connect at first, and then did without this process.
                if time.monotonic() >= end:
                    raise


class Generations(Groups):
    """The part of a communicator that outlives ranks; the rules are in ``docs/failures.md``."""

    _agreements = 0
    # Of a process that is alone and waits to join the others.
    _joiner: Joiner | None = None
    # Called with the next generation, by whoever keeps this one.
    _succession: Callable[[Any], None] | None = None

    @property
    def generation(self) -> int:
        """How often :meth:`shrink` and :meth:`grow` were called on the way here, from 0."""
        return self._lineage.generation if self._lineage is not None else 0

    @property
    def origin(self) -> tuple[int, ...]:
        """The ranks that were once these, in the order of those of now.

        They are numbered as in the communicator of generation 0; a group's as it was made. Who has
        joined since has a number of its own, greater than all that were before.
        """
        return self._lineage.origin if self._lineage is not None else tuple(range(self.size))

    @property
    def lost(self) -> frozenset[int]:
        """Of the ranks of the last generation, those that are not in this one."""
        return self._lineage.lost if self._lineage is not None else frozenset()

    @property
    def shrink_timeout(self) -> float:
        """Seconds that :meth:`shrink` may take where the call names no other deadline.

        The communicator's timeout, or as long as it takes to go on without silent ranks if that is
        longer: four times ``COLLECTIVE_SHRINK_GRACE``, and what connecting may take.
        """
        if self._lineage is None:
            return self.timeout
        return usual_seconds(self._lineage.grace, self.timeout)

    @explained
    def shrink(
        self,
        *,
        exclude: Sequence[int] = (),
        min_ranks: int | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Return a communicator of the ranks that are left, after a loss or at any time.

        Collective among those: every rank that lives calls it, when a call of this communicator
        has raised ``PeerLostError``, or any error after which it is broken. One that is sound is
        broken by it first: calls of ranks that have not called it raise
        ``CommunicatorAbortedError``, which asks them to. Ranks keep their order. The ranks go on
        without those that have died or left, and without those that are silent for
        ``COLLECTIVE_SHRINK_GRACE`` seconds (5), or for a quarter of ``timeout`` if that is less.
        If a rank dies meanwhile the others decide again.

        This communicator is closed then, with the groups made of it. Its symmetric memory stays as
        it is, each rank's own.

        Args:
            exclude: ranks that are out, alive or not; they get ``ExcludedError``.
            min_ranks: go on only with so many, by default ``COLLECTIVE_MIN_RANKS`` (1).
            timeout: seconds for all of it, by default :attr:`shrink_timeout`.

        Returns:
            The next generation. All are in it, or nobody is left out who was not lost or silent.

        Raises:
            ExcludedError: the others went on without this rank.
            PeerLostError: fewer than ``min_ranks`` are left; on all of them.
            CollectiveTimeoutError: they did not agree in time; names who did not come.
            RendezvousError: the store in which the ranks met is gone.
            UnsupportedError: this transport, or that store, cannot.
            RankError: ``exclude`` names this rank, or one that there is not.

        See Also:
            MPIX_Comm_shrink, ncclCommShrink.
        """
        lineage = self._lineage_for("shrink")
        out = [self._rank("shrink", "exclude", rank) for rank in exclude]
        if self.rank in out:
            raise RankError(
                f"shrink: exclude {out} names this rank; one that wants to go closes the "
                f"communicator {self._who}."
            )
        floor = lineage.min_ranks if min_ranks is None else min_ranks
        if isinstance(floor, bool) or not isinstance(floor, int) or floor < 1:
            raise InvalidArgumentError(f"shrink: min_ranks {floor!r}; a positive integer.")
        seconds = self.shrink_timeout if timeout is None else self._seconds(timeout)
        # First of all: ranks that are in a call of it come out, and are asked to come here.
        text = f"rank {self.rank} shrinks the communicator; call shrink() too, to go on with it"
        self._abort(Failure("shrink", self.rank, text))
        backend, following = NextGeneration(
            lineage, self._backend, seconds, exclude=out, min_ranks=floor
        ).run()
        made = self._next(backend, following)
        self._shut(seconds)
        return made

    @property
    def joins(self) -> bool:
        """Whether this process is alone and waits to join other ranks, which :meth:`grow` does.

        So it is with ``init(join="late")``, as ``collective run --replace`` starts a process in
        place of a lost one.
        """
        return self._joiner is not None

    @property
    def grows(self) -> bool:
        """Whether processes can join: not over every transport, and no group."""
        return self.capabilities.grows and self._lineage is not None and self._lineage.founders > 0

    def waiting(self) -> int:
        """Return how many processes wait to join: the same on all ranks.

        Rank 0 looks, and broadcasts what it has seen: as long as nobody waits, one file that is
        not there, and a small broadcast. From the first call on processes find these ranks.

        Collective: every rank calls it.

        Raises:
            RendezvousError: the store in which the ranks met is gone; on all ranks.
            UnsupportedError: nobody can join over this transport, or a group.
        """
        arrivals = self._arrivals_for("waiting")
        count, problem = 0, None
        if self.rank == 0:
            try:
                arrivals.announce()
                count = len(arrivals.waiting())
            except RendezvousError as error:
                count, problem = -1, error
        count = int(self._hosted().broadcast(np.array([count]), root=0)[0])
        if count < 0:
            raise RendezvousError(
                f"waiting: rank 0 cannot look where the ranks met {self._who}"
                f"{(problem and f': {problem}') or '; its error says why.'}"
            ) from problem
        return count

    @explained
    def grow(self, *, timeout: float | None = None) -> Self:
        """Return a communicator of these ranks and of all processes that wait to join.

        The ranks keep their order and come first. ``lost`` names those of them that have died
        meanwhile, and are not in it. If nobody waits it is the same ranks in a new generation. If
        a rank calls :meth:`shrink` instead, since it has met a loss, all shrink: nobody is let
        in, and who waits goes on waiting.

        A process that waits (:attr:`joins`) calls it, too, on the communicator of itself alone.

        Collective: every rank calls it, at the same point of the program, when its calls in the
        background are over. Unlike ``shrink()`` it waits for a rank that lives and is silent, and
        breaks the communicator if that does not call it in time. This one is closed then, with
        the groups made of it.

        Args:
            timeout: seconds for all of it, by default the communicator's; of a process that waits,
                until it is let in.

        Raises:
            CollectiveTimeoutError: a rank did not call it; of one that waits: nobody let it in.
            ExcludedError: the others went on without this rank; of one that waits: they have ended.
            PeerLostError: fewer than ``COLLECTIVE_MIN_RANKS`` are left.
            RendezvousError: the store in which the ranks met is gone.
            UnsupportedError: nobody can join over this transport, or a group.

        See Also:
            ncclCommGrow.
        """
        seconds = self._seconds(timeout)
        if self._joiner is not None and not self._closed:
            backend, following = self._joiner.run(self._backend, seconds)
        else:
            arrivals = self._arrivals_for("grow")
            lineage = self._lineage_for("grow")
            if self.rank == min(set(range(self.size)) - self._backend.lost(), default=0):
                arrivals.announce()
            try:
                generation = NextGeneration(lineage, self._backend, seconds, arrivals=arrivals)
                backend, following = generation.run()
            except CollectiveTimeoutError as error:
                # What this rank has said may still be decided on, and it goes another way.
                self._abort(Failure("aborted", self.rank, f"rank {self.rank} gave up: {error}"))
                raise
        made = self._next(backend, following)
        self._shut(seconds)
        return made

    def _arrivals_for(self, what: str) -> Arrivals:
        lineage = self._lineage_for(what)
        if not self.grows:
            given = f"backend {self.backend!r}" if lineage.founders else "a group"
            raise UnsupportedError(
                f"{what}: {given}; nobody can join that {self._who}. Let processes join the "
                "communicator that init() returned, over shm, gloo or hierarchical "
                "(COLLECTIVE_BACKEND=shm), and make groups of it."
            )
        if self._arrivals is None:
            self._arrivals = Arrivals(lineage.root.store, self.backend)
        return self._arrivals

    def _next(self, backend: Backend, lineage: Lineage) -> Self:
        made = self._alike(backend, lineage.local_rank, lineage.local_size, lineage)
        # Closed with the last generation, since all of them meet in it.
        made._store, self._store = self._store, None
        if self._arrivals is not None:
            made._arrivals, self._arrivals = Arrivals(lineage.root.store, made.backend), None
            if made.rank == 0:
                # Who waits may have seen that the one who spoke for the ranks is gone.
                with contextlib.suppress(RendezvousError):
                    made._arrivals.announce()
        made._succession = self._succession
        members = [rank for rank in range(self.size) if rank not in lineage.lost]
        try:
            for listener in self._listeners:
                listener.group(made, members)
            if self._succession is not None:
                self._succession(made)
        except BaseException as error:
            # The other ranks have the next generation, and would wait in it for this one.
            made._abort(Failure.caused_by(made.rank, error))
            raise
        return made

    @explained
    def agree(self, flag: bool = True, timeout: float | None = None) -> bool:
        """Return whether every rank that lives says yes: the same on all of them.

        Collective among those, whether the communicator is broken or sound; it breaks nothing. A
        rank that dies meanwhile counts if it had its say, and is not waited for. The answer goes
        by way of the store in which the ranks met: milliseconds, where a reduction takes
        microseconds.

        Args:
            flag: what this rank says.
            timeout: seconds, by default the communicator's.

        Raises:
            CollectiveTimeoutError: a rank that is not known to be lost did not call it.
            CommunicatorAbortedError: another rank has given up waiting, and calls ``shrink()``.
            RendezvousError: the store is gone.
            UnsupportedError: this transport, or that store, cannot.

        See Also:
            MPIX_Comm_agree.
        """
        lineage, seconds = self._lineage_for("agree"), self._seconds(timeout)
        self._agreements += 1
        return agreed(lineage, self._backend, self._agreements, bool(flag), seconds)

    def _lineage_for(self, what: str) -> Lineage:
        """Return the lineage, or refuse a communicator that cannot go on after a loss."""
        if self._closed:
            self._backend.refuse_broken(what)
        if not self.capabilities.shrinks:
            why = self._backend.why_not_shrink
            raise UnsupportedError(
                f"{what}: backend {self.backend!r} cannot go on without a rank"
                f"{why and f': {why}'} {self._who}. Use COLLECTIVE_BACKEND=shm on one host, gloo "
                "or hierarchical on several; or start all ranks again."
            )
        if self._lineage is None:
            raise UnsupportedError(
                f"{what}: this communicator was made of a transport, and nobody knows where its "
                f"ranks met {self._who}. Use collective.init() or collective.connect()."
            )
        return self._lineage
