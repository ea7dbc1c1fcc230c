"""Shared memory inside each host, another transport between the hosts.

The other transport connects all ranks (the outer one), and once more those at one place of
each host; ``shm`` connects the ranks of a host (the inner one). What is done on two levels is
in :mod:`.collectives`. The levels number their ranks in their own ways and
break one by one: here one failure breaks all of them, on all hosts, and what is raised is
what the outer transport's monitor knows, in the numbers of all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms import pieces
from collective.backends.peers import levels
from collective.backends.peers.handed import HandedStore
from collective.backends.peers.monitored import Monitored
from collective.backends.shm import ShmBackend
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.capabilities import Capabilities
from collective.contract.failure import Failure
from collective.contract.store import Store
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    AllocationError,
    BackendError,
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Request

from .collectives import Steps, TwoLevel
from .topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.contract.recorder import Recorder

__all__ = ["HierarchicalBackend"]

_UINT8 = BY_NAME["uint8"]
_INT64 = BY_NAME["int64"]
_MEETING_TAG = -3

# How long waits inside a host keep polling. Measured at 1 MiB, two hosts of two ranks, on two
# cores: 2.9 to 3.1 ms a call with the 2 ms of shm, 1.9 to 2.7 with this.
_INNER_YIELDS_S = 0.2e-3


class HierarchicalBackend(TwoLevel):
    """Ranks on several hosts with several on some; see the module's docstring.

    Attributes:
        channel: the outer transport's, and so of all levels.
    """

    name = "hierarchical"
    capabilities = Capabilities(
        across_hosts=True, symmetric_memory=True, detects_lost_peers=True, shrinks=True, grows=True
    )
    _inner: ShmBackend

    def __init__(
        self, outer: Monitored, inner: ShmBackend, across: Backend | None, topology: Topology
    ) -> None:
        self.rank = outer.rank
        self.size = outer.size
        able = outer.capabilities
        self.capabilities = replace(
            type(self).capabilities, dtypes=able.dtypes, ops=able.ops, shrinks=able.shrinks
        )
        self.channel = outer.channel
        self._outer = outer
        self._inner = inner
        # When it waits, its peers are mostly busy with the network.
        inner.sleep_after(_INNER_YIELDS_S)
        self._across = across
        self._topology = topology
        self.channel.when_broken(self._break)
        if self.channel.failure is not None:
            self._break()

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Meet the other ranks as the outer transport does; see :meth:`Backend.connect`."""
        kind = registry.find(world.options.get("across", "gloo"))
        if not issubclass(kind, Monitored):
            raise UnsupportedError(
                f"hierarchical: {kind.name!r} between the hosts; it needs a transport that is "
                f"watched by a monitor [rank {world.rank} of {world.size}]. Use 'gloo' or 'mpi'."
            )
        return cls._over(kind.connect(world, deadline), world, deadline)

    def reconnect(self, world: World, deadline: Deadline) -> Backend:
        """Join the ranks that are left, as the outer transport does it."""
        outer = self._outer.reconnect(world, deadline)
        assert isinstance(outer, Monitored)
        return type(self)._over(outer, world, deadline)

    @classmethod
    def _over(cls, outer: Monitored, world: World, deadline: Deadline) -> Self:
        """Return the levels over an outer transport that has been connected."""
        try:
            topology = Topology(_exchange(outer, cls.host_of(world), deadline), world.rank)
            inside = replace(
                world,
                rank=topology.local_rank,
                size=len(topology.local),
                local_rank=topology.local_rank,
                local_size=len(topology.local),
                store=_host_store(outer, topology, deadline),
                address="127.0.0.1",
                comm=None,
            )
            with _abort_on_failure(outer, "hierarchical"):
                inner = ShmBackend.connect(inside, deadline)
            return cls._assemble(outer, inner, topology, deadline)
        except BaseException as error:
            outer.close()
            if isinstance(error, (BackendError, CollectiveTimeoutError, CommunicatorAbortedError)):
                raise RendezvousError(
                    "hierarchical: the ranks have met but cannot connect on two levels [rank "
                    f"{world.rank} of {world.size}]: {error}"
                ) from error
            raise

    @classmethod
    def host_of(cls, world: World) -> str:
        """Return a text that ranks have in common when they can share memory.

        That they see each other's processes: names of hosts need not differ, and several
        containers of one machine are several hosts.
        """
        found = [world.host]
        for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
            with contextlib.suppress(OSError):
                link = os.path.islink(path)
                found.append(os.readlink(path) if link else Path(path).read_text().strip())
        return " ".join(found)

    @classmethod
    def _assemble(
        cls, outer: Monitored, inner: ShmBackend, topology: Topology, deadline: Deadline
    ) -> Self:
        """Connect the ranks of each local rank, and return the whole once it stands everywhere."""
        across: Backend | None = None
        self: Self | None = None
        try:
            if (
                topology.levels
                and len(topology.members) > 1
                and topology.local_rank < topology.common
            ):
                with _abort_on_failure(outer, "hierarchical"):
                    across = outer.group(topology.at(topology.local_rank), deadline)
            self = cls(outer, inner, across, topology)
            # Nobody uses it before it stands everywhere: where a level could not be made, the outer
            # one is broken, which the others hear of here and not in their first call. What a rank
            # that is through has failed in is this one's first call, too, and is told there.
            with contextlib.suppress(PeerFailedError):
                _exchange(outer, "ready", deadline)
            return self
        except BaseException:
            for level in (across, inner):
                if level is not None:
                    level.close()
            raise

    def group(self, ranks: Sequence[int], deadline: Deadline) -> Backend:
        where = Request("group")
        topology = self._topology.of(ranks, self.rank)
        here = [self._topology.local.index(ranks[member]) for member in topology.local]
        if len(topology.members) == 1:
            others = [rank for rank in ranks if rank != self.rank]
            with self._inside(where, deadline, others):
                return self._inner.group(here, deadline)
        outer = self._outer.group(ranks, deadline)
        if not topology.levels:
            return outer
        assert isinstance(outer, Monitored)
        try:
            others = [self._topology.local[each] for each in here]
            others.remove(self.rank)
            with _abort_on_failure(outer, "group"), self._inside(where, deadline, others):
                inner = self._inner.group(here, deadline)
            return type(self)._assemble(outer, inner, topology, deadline)
        except BaseException:
            outer.close()
            raise

    def descriptors(self, ranks: Sequence[int]) -> int:
        topology = self._topology.of(ranks, self.rank)
        inner = self._inner.descriptors(topology.local)
        if len(topology.members) == 1:
            return inner
        across = self._outer.descriptors(topology.at(0))
        outer = self._outer.descriptors(ranks)
        return inner + across + outer if topology.levels else outer

    def observe(self, recorder: Recorder) -> None:
        self._outer.observe(recorder)
        if self._across is not None:
            self._across.observe(recorder)

    def close(self) -> None:
        # The outer one first: whoever sees this rank leave another level asks its monitor why.
        self._outer.close()
        if self._across is not None:
            self._across.close()
        self._inner.close()

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> np.ndarray[Any, Any]:
        made: np.ndarray[Any, Any] | None = None
        problem: AllocationError | None = None
        with Steps(self.explained, request).within(deadline):
            try:
                made = self._inner.empty(nbytes, request.step(0, "empty"), deadline)
            except AllocationError as error:
                problem = error
        ranks = self._outer.lacking(problem is not None, request, deadline)
        if problem is not None:
            raise problem
        if ranks:
            raise AllocationError(
                f"empty: {nbytes} bytes on each of {self.size} ranks: rank {ranks[0]}'s host has "
                f"no memory for it [rank {self.rank}]"
            )
        assert made is not None
        return made

    # -- point to point -------------------------------------------------------------------

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        local_rank = self._topology.local_rank_of(dst)
        if local_rank is None:
            self._outer.send(src, dst, tag, deadline)
            return
        with self._inside(f"send(tag={tag})", deadline, (dst,)):
            self._inner.send(src, local_rank, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        local_rank = self._topology.local_rank_of(src)
        if local_rank is None:
            return self._outer.recv(dst, src, tag, deadline)
        with self._inside(f"recv(tag={tag})", deadline, (src,)):
            self._inner.recv(dst, local_rank, tag, deadline)
        return src

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        into, whence = self._topology.local_rank_of(to), self._topology.local_rank_of(source)
        if into is not None and whence is not None:
            with self._inside(f"sendrecv(tag={tag})", deadline, (to, source)):
                self._inner.sendrecv(src, into, dst, whence, tag, deadline)
        elif into is None and whence is None:
            self._outer.sendrecv(src, to, dst, source, tag, deadline)
        else:
            super().sendrecv(src, to, dst, source, tag, deadline)

    # -- failure --------------------------------------------------------------------------

    def abort(self, failure: Failure) -> None:
        self._outer.abort(failure)

    def _break(self) -> None:
        """Wake whoever waits in one of the other levels: the whole is broken."""
        failure = self.channel.failure
        assert failure is not None
        # The ranks' numbers in it are not theirs; nobody is told of this one.
        self._inner.abort(Failure("aborted", self._inner.rank, failure.text))
        if self._across is not None:
            self._across.abort(Failure("aborted", self._across.rank, failure.text))

    @contextlib.contextmanager
    def _inside(self, where: object, deadline: Deadline, awaited: Sequence[int]) -> Iterator[None]:
        """Run something on the inner level that waits for ``awaited``, ranks of the whole."""
        try:
            yield
        except levels.OF_LEVELS as error:
            explanation = self.explained(error, where, deadline, awaited)
            raise explanation or error from error


def _host_store(outer: Monitored, topology: Topology, deadline: Deadline) -> Store:
    """Return a store for the ranks of one host, whose first one publishes where its segment is."""

    def hand(note: Buffer, publishes: bool) -> None:
        first, *others = topology.local
        if not publishes:
            outer.recv(note, first, _MEETING_TAG, deadline)
            return
        for rank in others:
            outer.send(note, rank, _MEETING_TAG, deadline)

    # A rank that hears of a failure comes no further, and is awaited in vain.
    return HandedStore(hand, lambda: outer.channel.check("connect"))


def _exchange(outer: Backend, text: str, deadline: Deadline) -> list[str]:
    """Return what every rank says."""
    call = Request("connect")

    def collect(src: Buffer, dst: Buffer, counts: Sequence[int]) -> None:
        plan = outer.plan(call.step(0, "all_gather", elements=counts))
        work = plan(src, dst, deadline)
        if work is not None:
            work.wait()

    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = Buffer.empty(outer.size, _INT64)
    collect(Buffer(np.array([encoded.size], np.int64), _INT64), lengths, [1] * outer.size)
    counts = lengths.array.tolist()
    every = Buffer.empty(sum(counts), _UINT8)
    collect(Buffer(encoded, _UINT8), every, counts)
    limits = pieces.limits(counts)
    return [every.array[low:high].tobytes().decode() for low, high in pairwise(limits)]


@contextlib.contextmanager
def _abort_on_failure(outer: Monitored, where: str) -> Iterator[None]:
    """Break ``outer`` if the body fails: the others would wait for this rank."""
    try:
        yield
    except PeerLostError as error:
        # In the numbers of a level: those of all ranks the monitor knows.
        raise outer.channel.explain(where, error) from error
    except CollectiveError as error:
        outer.abort(Failure("aborted", outer.rank, f"rank {outer.rank} in {where}: {error}"))
        raise
