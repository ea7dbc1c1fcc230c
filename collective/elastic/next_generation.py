"""Going on after a loss, or with more: the ranks agree who they are, and connect anew.

The rules are in ``docs/failures.md``, and who decides in :mod:`collective.contract.decision`. What
is here has no communicator: one that shrinks or grows gives its *lineage* (:mod:`.lineage`), which
is what it knows of where its ranks met and of who they once were, and its transport, which knows
who is lost; it gets those of the next generation. Who waits to be let in is in :mod:`.arrivals`.

A *generation* is what lies between two such changes. Ranks are numbered in keys and decisions as
they were in generation 0: some may have gone on to the next already while others have not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from collective.contract.backend import Backend
from collective.contract.decision import Decision, Note
from collective.contract.process import RankProcess
from collective.contract.store import PrefixedStore, Store
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    CollectiveTimeoutError,
    ExcludedError,
    PeerLostError,
    RendezvousError,
)

from .arrivals import Arrivals
from .lineage import OF_PEERS, Lineage

__all__ = ["NextGeneration", "usual_seconds"]

# How long those who have been decided on may take to connect, at least, if nobody is known to have
# died: as many times the time of grace, and seconds.
_CONNECT_GRACES, _CONNECT_S = 2.0, 10.0
# How long the decision may take, in times of grace: three if the lowest rank is stopped after it
# has come, and one for the ranks that come late.
_DECIDE_GRACES = 4.0
# How often a wait for them looks whether somebody has died, or has begun anew.
_LOOK_S = 0.02
# What a rank's note becomes when it stands in the generation that was decided on.
_STANDS = b'{"connected": true}'


def usual_seconds(grace: float, timeout: float) -> float:
    """Return the deadline of ``shrink()`` where the caller names none.

    The deadline of a call, unless that is too short to wait for a silent rank and to connect: then
    one silent rank would end all others.

    Args:
        grace: seconds that a rank may be silent.
        timeout: seconds that a call may take.
    """
    return max(timeout, _DECIDE_GRACES * grace + _to_connect(grace))


def _to_connect(grace: float) -> float:
    """Return how many seconds the members have to connect, if nobody is known to have died."""
    return max(_CONNECT_GRACES * grace, _CONNECT_S)


class NextGeneration:
    """One call of ``shrink()`` or ``grow()``, of one rank.

    Args:
        lineage: the communicator's. A process that joins has that of the members, with its own
            number as ``root.rank``.
        backend: its transport, broken or not, which stays open until the next one is.
        deadline: for all of it.
        exclude: present ranks that are out, dead or not.
        min_ranks: as in :class:`Lineage`, which has it by default.
        arrivals: those who wait to be let in, if the ranks are to grow: then who lives and is
            silent is waited for to the end.
        kind: of a process that joins: what it connects by.
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
        kind: type[Backend] | None = None,
    ) -> None:
        self._lineage = lineage
        self._backend = backend
        self._reconnect = kind.connect if kind is not None else backend.reconnect
        self._arrivals = arrivals
        self._what = "shrink" if arrivals is None and kind is None else "grow"
        self._exclude = [lineage.origin[rank] for rank in exclude]
        self._min_ranks = lineage.min_ranks if min_ranks is None else min_ranks
        self._deadline = deadline
        self._first = lineage.generation + 1
        # The number of the generation that is being decided on, and who may be in it.
        self._number = self._first
        self._candidates = self._members = lineage.origin
        # Those of them that join now, which the last transport does not know.
        self._joining: dict[int, RankProcess | None] = {}
        self._looked_at = 0.0

    def run(self) -> tuple[Backend, Lineage]:
        """Return the transport of the next generation, and its lineage.

        Raises:
            ExcludedError: the others went on, or are about to, without this rank.
            PeerLostError: too few are left; on all of them.
            CollectiveTimeoutError: they did not decide, or did not connect, in time.
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
                        f"{self._present(members)} are agreed on and not connected {self._who}: "
                        f"{error}"
                    ) from error
                self._candidates = members
                self._number += 1
                continue
            if len(members) > 1:
                # Before this rank leaves the last transport, which it does next: whoever still
                # tries to reach this generation sees it go, and would take it for lost.
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
                # Out by a decision that this rank has been part of: a standby need not wait for
                # what they know.
                self._store.without(set(range(lineage.founders)) - set(members))
            return backend, lineage

    # -- the decision ---------------------------------------------------------------------

    def _decide(self) -> tuple[tuple[int, ...], list[str]]:
        """Return the members of the next generation by their first numbers, and their hosts."""
        # Alone it has nobody to agree with, and the store may have gone with the others.
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
                    "their first rank 0, and this one, which has joined, has no part in the one "
                    f"that the others serve instead {self._who}. Have the ranks meet in a "
                    "directory that all see (COLLECTIVE_STORE=DIR), or at an address that their "
                    f"launcher serves, as torchrun does: {error}"
                ) from error
        members = tuple(verdict["members"])
        if self._root.rank not in members:
            raise ExcludedError(
                f"{self._what}: ranks {self._present(members)} went on as generation "
                f"{self._number} without this one {self._who}: it was silent for longer than they "
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
        """Return what all candidates go by."""
        # Whoever still connects the last one is to come here; and the store may refuse.
        self._store.put_if_absent(self._key("open"), b"open")
        decision = Decision(
            self._store, self._key(), self._root.rank, self._candidates, self._lost,
            f"{self._what} to generation {self._number}", self._shown,
        )  # fmt: skip
        verdict: dict[str, Any] = decision.made(
            self._note, self._verdict, grace=self._lineage.grace, deadline=self._deadline
        )
        return verdict

    @property
    def _joined_later(self) -> bool:
        """Whether this process was none of the first ranks."""
        return 0 < self._lineage.founders <= self._root.rank

    @property
    def _grows(self) -> bool:
        """Whether this decision may let somebody in: the first, if it does not come of a loss."""
        return self._arrivals is not None and self._number == self._first

    @property
    def _note(self) -> Note:
        return {
            "exclude": self._exclude, "host": self._root.host, "min_ranks": self._min_ranks,
            "patient": self._grows,
        }  # fmt: skip

    def _verdict(self, notes: Mapping[int, Note], lost: Set[int]) -> dict[str, Any]:
        """Return who goes on: those who came, live, and are not excluded by one of them."""
        out: set[int] = set()
        members = []
        # Who is excluded by a lower rank has no say itself: of two that exclude each other one goes
        # on.
        for rank in sorted(notes):
            if rank not in lost and rank not in out:
                out.update(notes[rank]["exclude"])
                members.append(rank)
        members = [rank for rank in members if rank not in out]
        joining = []
        # With one that shrinks nobody is let in: first the ranks have to be whole again.
        if self._arrivals is not None and all(note["patient"] for note in notes.values()):
            joining = self._arrivals.claim(
                self._lineage.name, self._number, self._lineage.origin, self._lineage.founders
            )
        return {
            "members": [*members, *(each.number for each in joining)],
            "hosts": [*(notes[rank]["host"] for rank in members), *(each.host for each in joining)],
            "min_ranks": self._min_ranks,
            "joining": {each.number: each.process for each in joining},
        }

    def _lost(self) -> set[int]:
        """Return the candidates that are known not to come any more, by their first numbers."""
        origin = self._lineage.origin
        lost = {origin[rank] for rank in self._backend.lost()}.intersection(self._candidates)
        # Who stands in a generation that this rank tries to reach in vain has left the last one.
        lost = {rank for rank in lost if not self._stands(rank)}
        joining = self._joining.items()
        return lost | {number for number, each in joining if each and each.has_ended()}

    def _stands(self, rank: int) -> bool:
        """Tell whether a rank stands in a generation that this one is not in yet."""
        keys = (self._key(rank, number) for number in range(self._first, self._number + 1))
        return any(self._store.try_get(key) == _STANDS for key in keys)

    # -- the connection -------------------------------------------------------------------

    def _connect(self, members: tuple[int, ...], local_rank: int, local_size: int) -> Backend:
        secret = self._root.secret
        meeting = _GenerationStore(self._store, f"{self._key()}.", self._look)
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
        """Raise if those who were decided on will not all connect.

        Asked again and again by whoever waits for them, in whatever thread.

        Raises:
            RendezvousError: one of them has died, or has begun anew.
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
        found = f"{self._lineage.name}.{self._number if number is None else number}"
        return f"{found}.{what}" if what != "" else found

    def _present(self, ranks: Set[int] | Sequence[int]) -> list[int]:
        return [self._shown(each) for each in sorted(ranks)]

    def _shown(self, number: int) -> int:
        """Return a rank's present number; of one that joins, the number that it gets."""
        origin = self._lineage.origin
        return origin.index(number) if number in origin else number

    @property
    def _who(self) -> str:
        if self._root.rank not in self._lineage.origin:
            return f"[a process that joins as number {self._root.rank}]"
        return f"[rank {self._lineage.rank} of {len(self._lineage.origin)}]"


class _GenerationStore(PrefixedStore):
    """Where the ranks of one generation meet: keys of their own in the store of all.

    Args:
        store: of all generations.
        prefix: no other generation's.
        look: raises if those who are awaited will not all come.
    """

    # The ranks' standbys serve the store of all generations already.
    served_by_rank = False
    # Here and not in the other store: a rank that waits has to look.
    get = Store.get

    def __init__(self, store: Store, prefix: str, look: Callable[[], None]) -> None:
        super().__init__(store, prefix)
        self._look = look

    def release(self) -> None:
        """Look no more: a transport keeps its world, which is not to keep the last transport."""
        self._look = lambda: None

    def try_get(self, key: str) -> bytes | None:
        self._look()
        return super().try_get(key)

    def check(self) -> None:
        super().check()
        self._look()
