"""Transport over shared memory inside each host and another transport between the hosts.

The other transport connects all ranks (the outer level). ``shm`` connects the ranks of a host (the
inner level). A long call has the steps of both levels, which
:mod:`collective.algorithms.schedules` records. Over ``tcp`` that plan makes the short calls, too.
Over another outer transport, its own plans make them.

Each level numbers its ranks in its own way and would break alone. Here one failure breaks both
levels on all hosts. The error that is raised is the one of the outer transport's monitor, with the
numbers of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Self, cast

import numpy as np

from collective import native
from collective.algorithms import levels, pieces, schedules
from collective.backends.matching import describe
from collective.backends.peers.monitored import HandedStore, Monitored, explained, inside
from collective.backends.shm import ShmBackend
from collective.backends.tcp.transport import Nested, TcpBackend
from collective.contract import registry
from collective.contract.backend import ANY_SOURCE, Backend, Capabilities, Plan
from collective.contract.failure import Failure
from collective.contract.mail import EXACTLY, PAYLOAD_TAG
from collective.contract.world import World
from collective.control.store import Store
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
from collective.native import NOBODY
from collective.platform import boot_id, process_namespace
from collective.request import Disagreement, Request

from .mail import TwoLevelMail
from .topology import Topology

_UINT8 = BY_NAME["uint8"]
_INT64 = BY_NAME["int64"]
_MEETING_TAG = -3

# Seconds for which waits inside a host keep polling. Measured at 1 MiB, with two hosts of two ranks
# on two cores: 2.9 to 3.1 ms per call with the 2 ms of shm, 1.9 to 2.7 with this.
_INNER_YIELDS_S = 0.2e-3


class HierarchicalBackend(Monitored):
    """Transport for several hosts, some of which have several ranks; see the module's docstring.

    Attributes:
        channel: channel of the outer transport, and so of both levels.
    """

    name = "hierarchical"
    capabilities = Capabilities(
        across_hosts=True, symmetric_memory=True, any_source=True, posts=True,
        detects_lost_peers=True, shrinks=True, grows=True,
    )  # fmt: skip
    payload_tag = PAYLOAD_TAG

    def __init__(self, outer: Monitored, inner: ShmBackend, topology: Topology) -> None:
        self.rank = outer.rank
        self.size = outer.size
        able = outer.capabilities
        self.capabilities = replace(
            type(self).capabilities, dtypes=able.dtypes, ops=able.ops, shrinks=able.shrinks,
            any_source=able.posts, posts=able.posts,
            checks_calls=able.checks_calls or len(topology.members) == 1,
        )  # fmt: skip
        self.channel = outer.channel
        self._outer = outer
        self._inner = inner
        # Function of the core for one message inside this host and one to or from another host.
        self._both: Callable[..., Any] | None = None
        if (
            isinstance(outer, TcpBackend)
            and outer.exchange is not None
            and inner.exchange is not None
        ):
            self._both = native.exchange_both()
        # While a rank waits on the inner level, its peers are mostly busy with the network.
        inner.sleep_after(_INNER_YIELDS_S)
        # A call that waits in a level asks all ranks who is late.
        inner.while_waiting(self.channel.ask_in_time)
        self._topology = topology
        self.channel.when_broken(self._break)
        if self.channel.failure is not None:
            self._break()

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Connect to the other ranks as the outer transport does; see :meth:`Backend.connect`."""
        kind = registry.find(world.options.get("across", "tcp"))
        if not issubclass(kind, Monitored):
            raise UnsupportedError(
                f"hierarchical: transport {kind.name!r} cannot connect the hosts, because no "
                f"monitor watches its ranks [rank {world.rank} of {world.size}]. Use 'tcp' or "
                "'mpi'."
            )
        return cls._over(kind.connect(world, deadline), world, deadline)

    def reconnect(self, world: World, deadline: Deadline) -> Backend:
        """Connect the remaining ranks, as the outer transport does."""
        outer = self._outer.reconnect(world, deadline)
        assert isinstance(outer, Monitored)
        return type(self)._over(outer, world, deadline)

    @classmethod
    def _over(cls, outer: Monitored, world: World, deadline: Deadline) -> Self:
        """Build the levels over a connected outer transport; return the whole transport."""
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
        """Return a text that is the same on ranks that can share memory.

        Such ranks run on one boot of a kernel and see each other's processes. The host's name is
        not enough: two hosts may have the same name, and several containers on one machine count
        as several hosts.
        """
        return f"{world.host} {boot_id()} {process_namespace()}"

    @classmethod
    def _assemble(
        cls, outer: Monitored, inner: ShmBackend, topology: Topology, deadline: Deadline
    ) -> Self:
        """Return the transport over both levels, once all ranks have connected theirs."""
        try:
            self = cls(outer, inner, topology)
            # No rank uses the transport before every rank has connected. A rank that could not
            # connect a level has broken the outer one, so the other ranks fail here and not in
            # their first call. A rank that has passed this point may have failed in its first call
            # already. This rank's first call reports that failure, so ignore it here.
            with contextlib.suppress(PeerFailedError):
                _exchange(outer, "ready", deadline)
            return self
        except BaseException:
            inner.close()
            raise

    def group(self, ranks: Sequence[int], deadline: Deadline) -> Backend:
        where = Request("group")
        topology = self._topology.of(ranks, self.rank)
        here = [self._topology.local.index(ranks[member]) for member in topology.local]
        if len(topology.members) == 1:
            others = [rank for rank in ranks if rank != self.rank]
            with inside(self.channel, where, deadline, others):
                return self._inner.group(here, deadline)
        outer = self._outer.group(ranks, deadline)
        if not topology.levels:
            return outer
        assert isinstance(outer, Monitored)
        try:
            others = [self._topology.local[place] for place in here]
            others.remove(self.rank)
            with _abort_on_failure(outer, "group"), inside(self.channel, where, deadline, others):
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
        outer = self._outer.descriptors(ranks)
        return inner + outer if topology.levels else outer

    def delivered(self) -> bool:
        return self._outer.delivered() and self._inner.delivered()

    def close(self) -> None:
        # Close the outer level first: a peer that sees this rank leave another level asks the outer
        # level's monitor for the reason.
        self.channel.end_waits()
        self._outer.close()
        self._inner.close()

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] | None = None
        shortage: AllocationError | None = None
        if len(self._topology.members) > 1:
            self.agree(request, deadline)  # the inner level compares the calls of one host
        with self._explaining(request, deadline):
            try:
                array = self._inner.empty(nbytes, request.step(0, "empty"), deadline)
            except AllocationError as error:
                shortage = error
        ranks = self._outer.lacking(shortage is not None, request, deadline)
        if shortage is not None:
            raise shortage
        if ranks:
            raise AllocationError(
                f"empty: {nbytes} bytes on each of {self.size} ranks: the host of rank {ranks[0]} "
                f"does not have enough memory [rank {self.rank}]"
            )
        assert array is not None
        return array

    # -- collectives ----------------------------------------------------------------------

    def agree(self, request: Request, deadline: Deadline) -> None:
        if len(self._topology.members) > 1:
            self._outer.agree(request, deadline)
            return
        with self._explaining(request, deadline):
            self._inner.agree(request, deadline)

    def plan(self, request: Request) -> Plan:
        outer, members = self._outer, self._topology.members
        if not self._topology.levels:
            return outer.plan(request)
        if len(members) == 1:
            return _Explained(self, request, self._inner.plan(request))
        if isinstance(outer, TcpBackend):
            return _Explained(self, request, outer.plan_on(request, Nested(members, self._inner)))
        if (
            request.is_step
            or request.dtype is None
            or request.shape is None
            or request.operation == "scan"
            or not levels.regroups(members, request.op, request.ordered)
        ):
            return outer.plan(request)
        schedule = schedules.record(request, self.rank, self.size, hosts=members)
        if any(schedule.pieces):  # a short call
            return outer.plan(request)

        def compare(src: Any, pieces: Any, deadline: Deadline) -> None:
            outer.agree(request, deadline)

        def run(src: Buffer | None, dst: Buffer | None, deadline: Deadline) -> None:
            # The outer transport compares the calls, so its messages need no marks.
            marked = cast("schedules.Marked", outer)
            schedule.run(marked, src, dst, deadline, compare, self._inner)

        return _Explained(self, request, run)

    def run_explained(
        self, request: Request, plan: Callable[..., Any], x: Any, out: Any, deadline: Deadline
    ) -> None:
        """Run a plan that uses the inner level, and explain its error."""
        with self._explaining(request, deadline):
            self._inner.refuse_broken(request)
            plan(x, out, deadline)

    @contextlib.contextmanager
    def _explaining(self, request: Request, deadline: Deadline) -> Iterator[None]:
        """Raise the monitor's explanation of an error of a level."""
        try:
            yield
        except Disagreement:
            raise  # all ranks have compared their calls, and go on
        except BaseException as error:
            known = explained(self.channel, error, request, deadline)
            if known is None:
                raise
            raise known from error

    # -- point to point -------------------------------------------------------------------

    @cached_property
    def mail(self) -> TwoLevelMail | None:  # type: ignore[override]  # an attribute elsewhere
        """Posted messages on both levels; None if the outer transport has none."""
        outer = self._outer.mail
        if outer is None:
            return None
        return TwoLevelMail(self._inner.mail, outer, self._topology, self.channel)

    @property
    def exchange(self) -> native.Exchange | None:  # type: ignore[override]  # elsewhere a field
        """Function that exchanges plain arrays, if both levels have one in C."""
        return None if self._both is None else self._exchange

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        local_rank = self._topology.local_rank_of(dst)
        if local_rank is None:
            self._outer.send(src, dst, tag, deadline)
            return
        with inside(self.channel, describe(dst, NOBODY, tag), deadline, (dst,)):
            self._inner.send(src, local_rank, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        if src == ANY_SOURCE:
            assert self.mail is not None  # otherwise the communicator refuses such a receive
            posted = self.mail.receive(dst.array.view(np.uint8), src, tag, EXACTLY, True)
            if posted is NotImplemented:
                self.mail.refuse(describe(NOBODY, src, tag))
            self.mail.wait((posted,), False, deadline)
            return int(posted.source)
        local_rank = self._topology.local_rank_of(src)
        if local_rank is None:
            return self._outer.recv(dst, src, tag, deadline)
        with inside(self.channel, describe(NOBODY, src, tag), deadline, (src,)):
            self._inner.recv(dst, local_rank, tag, deadline)
        return src

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        into, whence = self._topology.local_rank_of(to), self._topology.local_rank_of(source)
        if into is not None and whence is not None:
            call = describe(to, source, tag)
            with inside(self.channel, call, deadline, call.peers):
                self._inner.sendrecv(src, into, dst, whence, tag, deadline)
        elif into is None and whence is None:
            self._outer.sendrecv(src, to, dst, source, tag, deadline)
        elif not self._exchange_both(src, to, dst, source, tag, deadline):
            super().sendrecv(src, to, dst, source, tag, deadline)

    def _exchange_both(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> bool:
        """Exchange messages with a rank of this host and one of another; return whether C can.

        Without C the two messages take two threads.
        """
        if self._both is None or self.rank in (to, source):
            return False
        x, out = src.array.view(np.uint8), dst.array.view(np.uint8)
        if np.may_share_memory(x, out):
            x = x.copy()
        return self._exchange(x, to, out, source, tag, deadline, False) is not NotImplemented

    def _exchange(
        self, x: Any, to: int, out: Any, source: int, tag: int, limit: Deadline, heads: int
    ) -> Any:
        """Send, receive, or both, by the functions of the two levels; see ``native.messages``."""
        outer, inner = self._outer.exchange, self._inner.exchange
        if outer is None or inner is None or self._both is None:
            return NotImplemented
        for array, rank in ((x, to), (out, source)):
            is_peer = type(rank) is int and 0 <= rank < self.size and rank != self.rank
            if not is_peer and not (array is None and rank == NOBODY):
                return NotImplemented
        into, whence = self._topology.local_rank_of(to), self._topology.local_rank_of(source)
        if into is None and whence is None:
            return outer(x, to, out, source, tag, limit, heads)
        leaves = into is None and to != NOBODY
        arrives = whence is None and source != NOBODY
        if (leaves or arrives) and out is None:
            return NotImplemented  # the result has no memory yet
        call = describe(to, source, tag)
        with inside(self.channel, call, limit, call.peers):
            if not leaves and not arrives:
                into, whence = (NOBODY if place is None else place for place in (into, whence))
                sender = inner(x, into, out, whence, tag, limit, heads)
            elif leaves:
                sender = self._both(outer, x, to, inner, out, whence, tag, limit, heads)
            else:
                sender = self._both(inner, x, into, outer, out, source, tag, limit, heads)
        return source if type(sender) is int else sender

    # -- failure --------------------------------------------------------------------------

    def abort(self, failure: Failure) -> None:
        self._outer.abort(failure)

    def _break(self) -> None:
        """Break the inner level, so that calls that wait in it end."""
        failure = self.channel.failure
        assert failure is not None
        # The failure has the numbers of all ranks, which the level does not use. So the level gets
        # a failure of its own. No caller sees that one: explained() replaces it.
        self._inner.abort(Failure("aborted", self._inner.rank, failure.text))


class _Explained:
    """Plan that uses the inner level.

    Args:
        backend: the transport.
        request: request of the call.
        plan: the plan, whose errors are of one of the levels.

    Attributes:
        plain: the plan as a function of arrays, if it is in C.
    """

    __slots__ = ("_run", "plain")

    def __init__(self, backend: HierarchicalBackend, request: Request, plan: Plan) -> None:
        self._run = partial(backend.run_explained, request, plan)
        if hasattr(plan, "plain"):
            self.plain = partial(backend.run_explained, request, plan.plain)

    def __call__(self, src: Buffer | None, dst: Buffer | None, deadline: Deadline) -> None:
        self._run(src, dst, deadline)


def _host_store(outer: Monitored, topology: Topology, deadline: Deadline) -> Store:
    """Return a store for the ranks of one host.

    The host's first rank publishes the place of its segment in it.
    """

    def hand(note: Buffer, publishes: bool) -> None:
        first, *others = topology.local
        if not publishes:
            outer.recv(note, first, _MEETING_TAG, deadline)
            return
        for rank in others:
            outer.send(note, rank, _MEETING_TAG, deadline)

    # After a failure the other ranks of the host stop connecting, so waiting for them must end.
    return HandedStore(hand, lambda: outer.channel.check("connect"))


def _exchange(outer: Backend, text: str, deadline: Deadline) -> list[str]:
    """Gather ``text`` from every rank; return the texts by rank."""
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
    gathered = Buffer.empty(sum(counts), _UINT8)
    collect(Buffer(encoded, _UINT8), gathered, counts)
    limits = pieces.limits(counts)
    return [gathered.array[low:high].tobytes().decode() for low, high in pairwise(limits)]


@contextlib.contextmanager
def _abort_on_failure(outer: Monitored, where: str) -> Iterator[None]:
    """Break ``outer`` if the body fails: otherwise the other ranks would wait for this rank."""
    try:
        yield
    except PeerLostError as error:
        # The error has the rank numbers of a level; the monitor knows the numbers of all ranks.
        raise outer.channel.explain(where, error) from error
    except CollectiveError as error:
        outer.abort(Failure("aborted", outer.rank, f"rank {outer.rank} in {where}: {error}"))
        raise
