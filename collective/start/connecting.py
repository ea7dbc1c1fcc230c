"""From a world to a communicator: connects the transport, and starts a trace on request.

`collective run` knows which ranks have ended, and tells the others (:func:`tell_ended`). They would
wait for those ranks until the deadline. A rank that learns this while it connects proposes to meet
without the ranks that have ended; a rank that is connected proposes to stay as it is. The store
keeps the first proposal of each attempt, and all ranks follow it. So no rank is in a communicator
that other ranks have given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from collective.communicator import Communicator
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.world import World
from collective.control.store import Store, WatchedStore
from collective.deadline import Deadline
from collective.errors import ConfigError, PeerFailedError, RendezvousError
from collective.generations.lineage import OF_PEERS, Lineage
from collective.generations.succession import Joiner
from collective.request import name_ranks

# Keys of the ranks that have ended, and of the rank whose main thread has failed first.
_ENDED, _FAILING = "ended", "failing"
# Time between two looks at that key, and the time that the launcher has to tell of a rank whose
# loss the other ranks have noticed by themselves.
_LOOK_S, _WORD_S = 0.2, 1.0
# How often each rank of a job has met the others in this process. Ranks may be threads.
_meetings: Counter[tuple[str, int]] = Counter()


def connect(
    world: World,
    backend: str | type[Backend],
    *,
    timeout: float = 300.0,
    start_timeout: float = 60.0,
    check: str = "auto",
    trace: str = "",
    shrink_grace: float = 5.0,
    min_ranks: int = 1,
    join: bool = False,
) -> Communicator:
    """Connect the ranks of ``world`` and return the communicator of this rank.

    Most programs call :func:`collective.init`, which determines the world and the transport.

    Args:
        world: identity of this rank, and the store where the ranks meet.
        backend: a registered name, ``module:Class``, or the class itself.
        timeout: seconds that a call may take.
        start_timeout: seconds to wait for the other ranks to arrive.
        check: ``"always"`` compares the ranks' calls also on transports without built-in checks;
            ``"results"`` compares their results.
        trace: a directory for the ranks' traces; see :mod:`collective.trace`.
        shrink_grace: seconds that a rank may be silent when the others shrink.
        min_ranks: least number of ranks; with fewer, ``shrink()`` raises.
        join: if true, join ranks that have met in ``world.store`` and are already connected.
            They admit this process when they call ``grow()``, within ``start_timeout``. Ranks and
            sizes of ``world`` are ignored then.

    Raises:
        BackendNotFoundError, BackendUnavailableError, RendezvousError: the transport does not
            exist or cannot be used here, or the ranks did not meet.
        CollectiveTimeoutError, ExcludedError: with ``join``, the ranks did not admit this
            process, or all ranks have ended.
        UnsupportedError: ``check="results"`` with a transport that enqueues calls on GPUs.
        ConfigError: the trace of some rank cannot be written; raised on every rank.
    """
    kind = registry.find(backend) if isinstance(backend, str) else backend
    if join:
        alone = connect_alone(
            world, partial(joined_by, kind), timeout=timeout, check=check, trace=trace,
            shrink_grace=shrink_grace, min_ranks=min_ranks,
        )  # fmt: skip
        with contextlib.closing(alone):
            return alone.grow(timeout=start_timeout)
    deadline = Deadline(start_timeout)
    if world.launcher == "collective":
        transport, world = met(kind, world, deadline)
    else:
        transport = kind.connect(world, deadline)
    with contextlib.ExitStack() as undo:
        undo.callback(transport.close)
        lineage = Lineage.begin(transport, world, deadline, grace=shrink_grace, min_ranks=min_ranks)
        comm = Communicator(
            transport, lineage=lineage, local_rank=world.local_rank, local_size=world.local_size,
            host=world.host, timeout=timeout, check=check, open_to_others=world.open,
        )  # fmt: skip
        if (lasting := lineage.root.store) is not world.store:
            # The transport has made it, so whoever opened the world's store cannot close it.
            comm.inner.succession.at_end.append(lasting.close)
        undo.pop_all()
        if trace:
            # Imported here, so that programs without a trace run no code of it.
            from collective.trace.traced import start_tracing

            undo.callback(comm.close)
            start_tracing(comm, trace)
            undo.pop_all()
    return comm


def connect_alone(
    world: World,
    find: Callable[[str], type[Backend]],
    *,
    timeout: float = 300.0,
    check: str = "auto",
    trace: str = "",
    shrink_grace: float = 5.0,
    min_ranks: int = 1,
) -> Communicator:
    """Return a communicator of this process alone, whose ``grow()`` joins the ranks of ``world``.

    Args:
        world: the store where the ranks have met, and the host of this process.
        find: function that returns the transport of this process, given the name of the ranks'
            transport.
        timeout, check, trace, shrink_grace, min_ranks: as in :func:`connect`.
    """
    alone = replace(
        world, rank=0, size=1, local_rank=0, local_size=1, job=f"alone-{secrets.token_hex(8)}"
    )
    comm = connect(
        alone, "threads", timeout=timeout, check=check, trace=trace, shrink_grace=shrink_grace,
    )  # fmt: skip
    comm.inner.succession.joiner = Joiner(world, find, shrink_grace, min_ranks)
    return comm


def joined_by(kind: type[Backend], theirs: str) -> type[Backend]:
    """Return ``kind`` if a process can join ranks with it whose transport is ``theirs``.

    Raises:
        ConfigError: ``kind`` is another transport.
    """
    if kind.name == theirs:
        return kind
    raise ConfigError(
        f"join: the ranks are connected by {theirs!r}, but this process is set to use "
        f"{kind.name!r}. Give this process backend={theirs!r} (COLLECTIVE_BACKEND)."
    )


# -- ranks that end before they meet ---------------------------------------------------------


def tell_ended(store: Store, ended: Mapping[int, str], hosts: Sequence[int], least: int) -> None:
    """Tell the ranks of a launch which of them have ended; only ranks that still meet look.

    Args:
        store: store in which the ranks meet.
        ended: how each of these ranks has ended, in words.
        hosts: number of each rank's host.
        least: number of ranks with which the others go on.
    """
    value = {"ended": dict(ended), "hosts": list(hosts), "least": least}
    store.set(_ENDED, json.dumps(value).encode())


def tell_failing(store: Store, rank: int, code: int) -> None:
    """Tell the launcher that the main thread of a rank has failed, and other threads run on.

    Args:
        store: store in which the ranks met.
        rank: number of the rank.
        code: exit code that its process will have.
    """
    store.put_if_absent(_FAILING, json.dumps([rank, code]).encode())
    # The launcher looks at the store when a child may have ended. Other parents ignore this signal.
    with contextlib.suppress(OSError):
        os.kill(os.getppid(), signal.SIGCHLD)


def failing(store: Store) -> tuple[int, int] | None:
    """Return the rank whose main thread has failed first and its exit code; None if none has."""
    text = store.try_get(_FAILING)
    if text is None:
        return None
    rank, code = json.loads(text)
    return int(rank), int(code)


class _EndedRanks(NamedTuple):
    """The arguments of :func:`tell_ended`."""

    ended: Mapping[int, str]
    hosts: Sequence[int]
    least: int

    @classmethod
    def of(cls, store: Store) -> _EndedRanks:
        text = store.try_get(_ENDED)
        if text is None:
            return cls({}, (), 1)
        value = json.loads(text)
        ended = {int(rank): how for rank, how in value["ended"].items()}
        return cls(ended, value["hosts"], value["least"])


def met(kind: type[Backend], world: World, deadline: Deadline) -> tuple[Backend, World]:
    """Connect the ranks of a launcher that calls :func:`tell_ended`.

    Returns:
        The connected transport, and the world of the ranks that are connected.

    Raises:
        RendezvousError: a rank has ended, and too few are left to meet without it.
        Exception: the transport raises it for another reason.
    """
    if world.comm is not None or world.size == 1:
        return kind.connect(world, deadline), world
    meeting = _LaunchedMeeting(world, kind.capabilities.shrinks)
    while True:
        watched = WatchedStore(world.store, meeting.prefix, meeting.look)
        try:
            transport = kind.connect(replace(meeting.world, store=watched), deadline)
        except OF_PEERS as error:
            meeting.go_on(error, deadline)
            continue
        finally:
            watched.release()
        try:
            if meeting.is_complete():
                return transport, meeting.world
        except BaseException:
            transport.close()
            raise
        # Another rank has learned of the loss before it was connected.
        transport.close()
        meeting.go_on(None, deadline)


class _LaunchedMeeting:
    """Meeting of the ranks of `collective run`, some of which may end before they have met.

    Args:
        world: world of all ranks.
        shrinks: whether the transport can connect the other ranks alone.

    Attributes:
        world: world of the ranks that meet in this attempt.
        prefix: beginning of the keys of this attempt.
    """

    def __init__(self, world: World, shrinks: bool) -> None:
        self.world = self._root = world
        self.prefix = ""
        self._shrinks = shrinks
        self._members = tuple(range(world.size))
        # All ranks meet equally often, so they use the same key.
        self._name = f"met-{_meetings[world.job, world.rank]}"
        _meetings[world.job, world.rank] += 1
        self._attempt = 0
        self._over = False
        self._looked_at = 0.0

    @property
    def _key(self) -> str:
        return f"{self._name}.{self._attempt}"

    def _proposed(self, members: Sequence[int]) -> tuple[int, ...]:
        """Propose members for after this attempt; return those that a rank has proposed first."""
        text = json.dumps(list(members)).encode()
        return tuple(json.loads(self._root.store.put_if_absent(self._key, text)))

    def is_complete(self) -> bool:
        """Return whether this rank, which is connected, stays so: no rank was given up before."""
        return self._proposed(self._members) == self._members

    def look(self) -> None:
        """Raise RendezvousError if a rank has ended before all had met."""
        now = time.monotonic()
        if self._over or now < self._looked_at + _LOOK_S:
            return
        self._looked_at = now
        known = _EndedRanks.of(self._root.store)
        if not known.ended.keys().isdisjoint(self._members):
            living = [rank for rank in self._members if rank not in known.ended]
            # If a rank is connected already, all have come, and the transport tells of the loss.
            self._over = self._proposed(living) == self._members
            if not self._over:
                raise self._error(known)

    def go_on(self, error: Exception | None, deadline: Deadline) -> None:
        """Begin the next attempt, with the ranks that are left.

        Args:
            error: the reason why this rank is not connected; None if it is.
            deadline: moment by which the ranks must have met.

        Raises:
            Exception: ``error``, if no rank has ended.
            RendezvousError: too few ranks are left, or the transport cannot connect them.
        """
        # The transport may have noticed a loss before the launcher has told of it.
        word = deadline.within(_WORD_S)
        try:
            while (verdict := self._verdict()) is None and not word.expired:
                with contextlib.suppress(RendezvousError):
                    self.look()
                time.sleep(word.at_most(_LOOK_S / 4))
        except RendezvousError:  # The store cannot be used, and ``error`` says so.
            if error is None:
                raise
            raise error from error.__cause__
        if error is not None and verdict in (None, self._members):
            raise error
        assert verdict is not None
        known = _EndedRanks.of(self._root.store)
        if self._root.rank not in verdict or len(verdict) < known.least or not self._shrinks:
            if isinstance(error, PeerFailedError):
                raise error  # a peer's own exception says more than its exit code
            raise self._error(known) from None
        local = [r for r in verdict if known.hosts[r] == known.hosts[self._root.rank]]
        self._members = verdict
        self._attempt += 1
        self.prefix = f"{self._key}."
        self.world = replace(
            self._root,
            rank=verdict.index(self._root.rank),
            size=len(verdict),
            local_rank=local.index(self._root.rank),
            local_size=len(local),
            job=f"{self._root.job} {self._key}",
        )

    def _verdict(self) -> tuple[int, ...] | None:
        text = self._root.store.try_get(self._key)
        return None if text is None else tuple(json.loads(text))

    def _error(self, known: _EndedRanks) -> RendezvousError:
        return _error(known, self._members, self._root.rank, self._root.size)


def refuse_ended(store: Store, rank: int, size: int) -> None:
    """Raise RendezvousError if :func:`tell_ended` has told that a rank has ended.

    Args:
        store: store in which the ranks meet.
        rank, size: number of this rank, and of all ranks.
    """
    known = _EndedRanks.of(store)
    if known.ended:
        raise _error(known, range(size), rank, size)


def _error(known: _EndedRanks, members: Sequence[int], rank: int, size: int) -> RendezvousError:
    gone = {number: known.ended[number] for number in members if number in known.ended}
    how = ", ".join(f"rank {number}: {how}" for number, how in gone.items())
    if len(gone) == 1:
        how = how.partition(": ")[2]
    return RendezvousError(
        f"rendezvous: {name_ranks(gone)} of {size} ended before all ranks had met: {how} [rank "
        f"{rank}]. The output there says why; every rank has to call init(), and to stay until "
        "all have met."
    )
