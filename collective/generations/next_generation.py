"""Shrinking and growing: the ranks agree on the members of the next generation, and connect again.

The rules are in ``docs/reference/failures.md``; the protocol of a decision is in
:mod:`collective.contract.decision`. This module does not use communicators. A communicator that
shrinks or grows passes its *lineage* (:mod:`.lineage`) and its transport, and gets the lineage and
transport of the next generation. The lineage knows the store in which the ranks met and the ranks'
original numbers; the transport knows the lost ranks. Processes that wait to be let in are in
:mod:`.arrivals`.

A *generation* is the time between two such changes. Keys and decisions contain the original numbers
of ranks, those of generation 0. Present numbers would be ambiguous: some ranks may already be in
the next generation while others are not.

The keys of generation ``G`` begin with the token ``T`` that the ranks of a communicator share. They
are written in this order: ``T.G.rank``, a rank's note; ``T.G``, the members and their hosts;
``T.G.…``, by which the members connect; ``T.G.rank`` anew, "connected". A rank that finds out that
a member has died meanwhile writes ``T.G+1.open``, and the next decision begins. ``T.G`` is never
deleted: a rank that was stopped for an hour has to read that the others went on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from collective.contract.backend import Backend
from collective.contract.decision import Decision, Note
from collective.contract.process import RankProcess
from collective.contract.world import World
from collective.control.store import Store, WatchedStore
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ExcludedError,
    PeerLostError,
    RendezvousError,
)

from .arrivals import Arrivals
from .lineage import OF_PEERS, Lineage

# Time that the members have to connect, as long as no death is detected: the larger of a multiple
# of the grace and a number of seconds.
_CONNECT_GRACES, _CONNECT_S = 2.0, 10.0
# Time that a decision may take, as a multiple of the grace: three if the lowest rank is stopped
# after it has arrived, and one for ranks that arrive late.
_DECIDE_GRACES = 4.0
# Interval at which a rank that waits for members checks whether a member has died, or has begun
# another generation.
_LOOK_S = 0.02
# Value that replaces a rank's note once the rank is connected in the generation decided on.
_STANDS = b'{"connected": true}'


def usual_seconds(grace: float, timeout: float) -> float:
    """Return the seconds that ``shrink()`` may take if the caller passes no timeout.

    This is the timeout of a call, unless that is too short to wait for a silent rank and to
    connect. With too short a deadline, one silent rank would make all other ranks fail.

    Args:
        grace: seconds that a rank may be silent.
        timeout: seconds that a call may take.
    """
    return max(timeout, _DECIDE_GRACES * grace + _to_connect(grace))


def _to_connect(grace: float) -> float:
    """Return the seconds that the members have to connect, as long as no death is detected."""
    return max(_CONNECT_GRACES * grace, _CONNECT_S)


class NextGeneration:
    """One call of ``shrink()`` or ``grow()`` on one rank.

    Args:
        lineage: lineage of the communicator. A joining process passes the lineage of the members,
            with its own number as ``root.rank``.
        backend: transport of the communicator, broken or not. It stays open until the next
            transport is connected.
        deadline: deadline of the whole operation.
        exclude: present ranks to leave out, dead or alive.
        min_ranks: minimum number of ranks to continue with; by default that of the lineage.
        arrivals: queue of the processes that wait to be let in, for ``grow()``; else None. With it,
            the ranks wait for a silent rank that lives until the deadline, as long as the
            communicator is whole.
        announce: function that announces to waiting processes that the ranks go on. The lowest
            living rank calls it again and again: the rank of the last announcement may be lost.
        kind: in a joining process, the class of the transport; else None.
    """

    def __init__(
        self,
        lineage: Lineage,
        backend: Backend,
        deadline: Deadline,
        *,
        exclude: Sequence[int] = (),
        min_ranks: int | None = None,
        arrivals: Arrivals | None = None,
        announce: Callable[[], None] = lambda: None,
        kind: type[Backend] | None = None,
    ) -> None:
        self._lineage = lineage
        self._backend = backend
        self._reconnect = kind.connect if kind is not None else backend.reconnect
        self._arrivals = arrivals
        self._announce = announce
        self._what = "shrink" if arrivals is None and kind is None else "grow"
        self._exclude = [lineage.origin[rank] for rank in exclude]
        self._min_ranks = lineage.min_ranks if min_ranks is None else min_ranks
        self._deadline = deadline
        self._first = lineage.generation + 1
        # Number of the generation that is being decided on, and the ranks that may be in it.
        self._number = self._first
        self._candidates = self._members = lineage.origin
        # Members that join now. The previous transport does not know them.
        self._joining: dict[int, RankProcess | None] = {}
        self._looked_at = 0.0

    def run(self) -> tuple[Backend, Lineage]:
        """Return the transport of the next generation, and its lineage.

        Raises:
            ExcludedError: the other ranks continued, or are about to continue, without this rank.
            PeerLostError: too few ranks remain; raised on all of them.
            CollectiveTimeoutError: the ranks did not decide, or did not connect, in time.
            RendezvousError: the store is gone.
        """
        while True:
            members, hosts = self._decide()
            me = members.index(self._root.rank)
            local = hosts[:me].count(hosts[me]), hosts.count(hosts[me])
            try:
                backend = self._connect(members, *local)
            except OF_PEERS as error:
                if self._deadline.expired:
                    raise CollectiveTimeoutError(
                        f"{self._what}: timed out: after {self._deadline.seconds:g} s ranks "
                        f"{self._present(members)} have agreed on a generation, but have not "
                        f"connected {self._who}: {error}"
                    ) from error
                self._candidates = members
                self._number += 1
                continue
            if len(members) > 1:
                # Publish that this rank is connected, before it leaves the previous transport,
                # which is its next step. A rank that is still connecting sees this rank leave, and
                # would otherwise consider it lost.
                try:
                    self._store.set(self._key(self._root.rank), _STANDS)
                except BaseException:
                    backend.close()
                    raise
            lineage = replace(
                self._lineage,
                origin=members,
                generation=self._number,
                local_rank=local[0],
                local_size=local[1],
                lost=frozenset(
                    rank for rank, first in enumerate(self._lineage.origin) if first not in members
                ),
            )
            if lineage.founders:
                # The founders that are missing are out by a decision in which this rank took part.
                # A standby of the store need not wait for the data that they have.
                self._store.without(set(range(lineage.founders)) - set(members))
            return backend, lineage

    # -- the decision ---------------------------------------------------------------------

    def _decide(self) -> tuple[tuple[int, ...], list[str]]:
        """Return the members of the next generation by their original numbers, and their hosts."""
        # A rank that is alone needs no agreement, and the store may be gone with the other ranks.
        if self._candidates == (self._root.rank,) and not self._grows:
            verdict = self._verdict({self._root.rank: self._note}, frozenset())
        else:
            try:
                verdict = self._agreed()
            except RendezvousError as error:
                if not self._joined_later or not self._store.served_by_rank:
                    raise
                raise RendezvousError(
                    f"{self._what}: the store in which the ranks met is gone with the process of "
                    "their first rank 0. This process joined later, so it has no access to the "
                    f"store that the other ranks serve instead {self._who}. Have the ranks meet in "
                    "a directory that all see (COLLECTIVE_STORE=DIR), or at an address that their "
                    f"launcher serves, as torchrun does: {error}"
                ) from error
        members = tuple(verdict["members"])
        if self._root.rank not in members:
            raise ExcludedError(
                f"{self._what}: ranks {self._present(members)} went on as generation "
                f"{self._number} without this rank {self._who}: it was silent for longer than they "
                "waited (COLLECTIVE_SHRINK_GRACE), or they excluded it. It can only leave."
            )
        if len(members) < verdict["min_ranks"]:
            gone = self._present(set(self._lineage.origin) - set(members))
            raise PeerLostError(
                f"{self._what}: {len(members)} of {len(self._lineage.origin)} ranks are left, and "
                f"{verdict['min_ranks']} are needed (min_ranks, COLLECTIVE_MIN_RANKS); lost: ranks "
                f"{gone} {self._who}. Start all ranks again.",
                tuple(gone),
            )
        self._members = members
        self._joining.update(
            {int(number): RankProcess.parse(text) for number, text in verdict["joining"].items()}
        )
        return members, verdict["hosts"]

    def _agreed(self) -> dict[str, Any]:
        """Return the verdict, the same for all candidates."""
        # Announce the decision: ranks that still connect the previous generation see this key and
        # come here. This also checks early that the store supports put_if_absent().
        self._store.put_if_absent(self._key("open"), b"open")
        decision = Decision(
            self._store, self._key(), self._root.rank, self._candidates, self._lost_by_now,
            f"{self._what} to generation {self._number}", self._shown,
        )  # fmt: skip
        verdict: dict[str, Any] = decision.made(
            self._note, self._verdict, grace=self._lineage.grace, deadline=self._deadline,
            broken=self._is_broken,
        )  # fmt: skip
        return verdict

    def _lost_by_now(self) -> set[int]:
        """Return :meth:`_lost`; announce the ranks if this one is the lowest that is left."""
        lost = self._lost()
        if self._root.rank == min(set(self._candidates) - lost, default=None):
            # Waiting processes may have noticed that the rank of the last announcement is gone.
            self._announce()
        return lost

    def _is_broken(self) -> bool:
        """Return whether the communicator is broken.

        Then a rank that has left may seem to be silent: over most transports, rank 0's process
        passes on who leaves, and it may have ended before.
        """
        try:
            self._backend.refuse_broken(self._what)
        except CollectiveError:
            return True
        return False

    @property
    def _joined_later(self) -> bool:
        """Whether this process joined after generation 0."""
        return 0 < self._lineage.founders <= self._root.rank

    @property
    def _grows(self) -> bool:
        """Whether this decision may let processes in: only the first decision of a ``grow()``.

        Later decisions follow a loss.
        """
        return self._arrivals is not None and self._number == self._first

    @property
    def _note(self) -> Note:
        return {
            "exclude": self._exclude, "host": self._root.host, "min_ranks": self._min_ranks,
            "patient": self._grows,
        }  # fmt: skip

    def _verdict(self, notes: Mapping[int, Note], lost: Set[int]) -> dict[str, Any]:
        """Return the verdict: the members are all living ranks that came and are not excluded."""
        out: set[int] = set()
        members = []
        # A rank that a lower rank excludes cannot exclude others itself. So if two ranks exclude
        # each other, the lower one continues.
        for rank in sorted(notes):
            if rank not in lost and rank not in out:
                out.update(notes[rank]["exclude"])
                members.append(rank)
        members = [rank for rank in members if rank not in out]
        joining = []
        # If a rank shrinks, no process is let in: first the ranks must recover from the loss.
        if self._arrivals is not None and all(note["patient"] for note in notes.values()):
            joining = self._arrivals.claim(
                self._lineage.name, self._number, self._lineage.origin, self._lineage.founders
            )
        return {
            "members": [*members, *(proc.number for proc in joining)],
            "hosts": [*(notes[rank]["host"] for rank in members), *(proc.host for proc in joining)],
            "min_ranks": self._min_ranks,
            "joining": {proc.number: proc.process for proc in joining},
        }

    def _lost(self) -> set[int]:
        """Return the candidates that this rank considers lost, by their original numbers."""
        origin = self._lineage.origin
        lost = {origin[rank] for rank in self._backend.lost()}.intersection(self._candidates)
        # A rank that is already connected in a newer generation has left the previous transport. It
        # looks lost there, but lives.
        lost = {rank for rank in lost if not self._stands(rank)}
        announced = self._store.announced()
        return lost | {
            number
            for number, process in self._joining.items()
            if process and (process.has_ended() or process[:2] in announced)
        }

    def _stands(self, rank: int) -> bool:
        """Return whether a rank is connected in a generation that this rank is still to reach."""
        keys = (self._key(rank, number) for number in range(self._first, self._number + 1))
        return any(self._store.try_get(key) == _STANDS for key in keys)

    # -- the connection -------------------------------------------------------------------

    def _connect(self, members: tuple[int, ...], local_rank: int, local_size: int) -> Backend:
        secret = self._root.secret
        # The ranks' standbys already serve the common store.
        meeting = WatchedStore(self._store, f"{self._key()}.", self._look, lasts=True)
        world = replace(
            self._root,
            rank=members.index(self._root.rank),
            size=len(members),
            local_rank=local_rank,
            local_size=local_size,
            job=self._key(),
            store=meeting,
            secret=secret and secret.within("generation", self._key()),
        )
        try:
            return self._reconnect(world, self._deadline.within(_to_connect(self._lineage.grace)))
        finally:
            meeting.release()

    def _look(self) -> None:
        """Raise if not all members that were decided on will connect.

        Every thread that waits for a member calls it repeatedly.

        Raises:
            RendezvousError: a member has died, or has begun another generation.
        """
        now = time.monotonic()
        if now < self._looked_at + _LOOK_S:
            return
        self._looked_at = now
        if self._store.try_get(self._key("open", self._number + 1)) is not None:
            raise RendezvousError(f"{self._what}: a rank has begun generation {self._number + 1}")
        if lost := self._lost() & set(self._members):
            raise RendezvousError(f"{self._what}: ranks {self._present(lost)} died meanwhile")

    # -- names ----------------------------------------------------------------------------

    @property
    def _root(self) -> World:
        return self._lineage.root

    @property
    def _store(self) -> Store:
        return self._lineage.root.store

    def _key(self, what: int | str = "", number: int | None = None) -> str:
        key = f"{self._lineage.name}.{self._number if number is None else number}"
        return f"{key}.{what}" if what != "" else key

    def _present(self, ranks: Set[int] | Sequence[int]) -> list[int]:
        return [self._shown(rank) for rank in sorted(ranks)]

    def _shown(self, number: int) -> int:
        """Return a rank's present number; for a joining process, the number that it will get."""
        origin = self._lineage.origin
        return origin.index(number) if number in origin else number

    @property
    def _who(self) -> str:
        if self._root.rank not in self._lineage.origin:
            return f"[a process that joins as number {self._root.rank}]"
        return f"[rank {self._lineage.rank} of {len(self._lineage.origin)}]"
