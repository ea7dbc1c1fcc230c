"""The ``gloo`` transport: connecting, closing, and the choice of algorithm for each collective.

Gloo's own collectives run in a thread of the process group. For a short call, that thread costs
more than the messages. Gloo's collectives are faster where there is much to fold or to forward.
The limits were measured with two and four ranks on one machine of two cores (``docs/gloo.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch.distributed as dist

from collective.algorithms import arithmetic, pieces
from collective.backends.peers.channel import Channel
from collective.backends.peers.monitor import Monitor
from collective.contract.backend import Plan
from collective.contract.capabilities import Capabilities
from collective.contract.descriptors import shortage
from collective.contract.failure import Failure
from collective.contract.forking import keep
from collective.deadline import Deadline
from collective.errors import CollectiveError, RendezvousError
from collective.memory.buffer import Buffer

from . import exchanges
from .connecting import Connector, is_broken_after
from .engine import device, ended
from .messages import Messenger, limit
from .tensors import GlooFold, as_bytes, gloo_fold

if TYPE_CHECKING:
    from collective.contract.world import World
    from collective.ops import ReduceOp
    from collective.request import Request

__all__ = ["GlooBackend"]

# In a single round each rank sends as many messages as there are other ranks. With more than _FEW
# ranks a call therefore uses trees and rings, unless it has at least _LONG_BYTES.
_FEW, _LONG_BYTES = 8, 1 << 20
# All-reduces up to this length are prepared; see PreparedAllReduce.
_SMALL_BYTES = 4 << 10
# Largest total size of all ranks' inputs for which every rank collects and folds them all, and for
# which a root does.
_COLLECTED_BYTES, _COLLECTED_AT_ROOT_BYTES = 2 << 20, 64 << 20
# Descriptors of a device of Gloo: its listening socket, and those of its I/O thread.
_DEVICE_DESCRIPTORS = 4
# From this length on, Gloo's own broadcast is faster.
_BROADCAST_BYTES = 256 << 10


class GlooBackend(Messenger):
    """Transport between ranks on any hosts; see the package's docstring."""

    name = "gloo"
    capabilities = Capabilities(
        across_hosts=True, any_source=True, detects_lost_peers=True, shrinks=True, grows=True
    )

    def __init__(self, world: World, channel: Channel) -> None:
        super().__init__(channel)
        self._world = world

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Connect to the other ranks through ``world.store``; see :meth:`Backend.connect`."""
        device(world)  # find a wrong address or interface before the ranks meet
        channel = Monitor.start(world, deadline).channel
        self = cls(world, channel)
        try:
            if short := shortage(self.descriptors(range(world.size))):
                channel.abort(Failure("aborted", world.rank, f"rank {world.rank}: {short}"))
            self._connect(channel, range(world.size), "connect", deadline, world.store.check)
        except CollectiveError as error:
            raise RendezvousError(
                f"gloo: the ranks have met but cannot connect [rank {world.rank} of "
                f"{world.size}]: {error}"
            ) from error
        return self

    def group(self, ranks: Sequence[int], deadline: Deadline) -> GlooBackend:
        self.refuse_broken("group")
        child = type(self)(self._world, self.channel.group(ranks))
        child._connect(self.channel, ranks, "group", deadline, lambda: None)
        return child

    def descriptors(self, ranks: Sequence[int]) -> int:
        # Two connections per peer, for collectives and for messages, and those of the device.
        return 2 * (len(ranks) - 1) + _DEVICE_DESCRIPTORS if len(ranks) > 1 else 0

    def _connect(
        self,
        channel: Channel,
        ranks: Sequence[int],
        where: str,
        deadline: Deadline,
        look: Callable[[], None],
    ) -> None:
        """Connect with the other ranks of ``ranks``, watching them by ``channel`` and ``look``."""
        channel.check(where, ())
        self._running = where
        try:
            connector = Connector(self._world, self.channel, channel, ranks, where, deadline, look)
            self._groups = connector.connect()
            self.channel.when_broken(self._cut)
            if is_broken_after(self.channel):
                self._cut()  # the first call raises the reason
            else:
                self.channel.check(where, ())  # it may have broken before when_broken()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.channel.end_waits()
        # Tell the monitor before the connections end: peers that see them end ask it why.
        self.channel.close()
        self._cut()
        if self._work is not None and not ended(self._work):
            keep(*self._groups)  # their destructors would wait for threads that do not end
        self._groups = ()

    # -- collectives ----------------------------------------------------------------------

    def _one_round(self, nbytes: int) -> bool:
        """Return whether a call on ``nbytes`` sends all of its messages in one round."""
        return 1 < self.size <= _FEW or (self.size > _FEW and nbytes >= _LONG_BYTES)

    def plan(self, request: Request) -> Plan:
        # A plan prepared with a user's function would keep that function alive.
        small = 0 < request.nbytes <= _SMALL_BYTES and 1 < self.size <= _FEW
        if request.operation == "all_reduce" and small and request.op.function is None:
            begin, move = partial(self._begin, request), self._exchange_tensors
            return exchanges.PreparedAllReduce(request, self.rank, self.size, begin, move)
        return super().plan(request)

    def barrier(self, request: Request, src: None, dst: None, deadline: Deadline) -> None:
        self._begin(request)
        if self.size <= 2:
            super().barrier(request, src, dst, deadline)
        else:
            self._run(
                self._groups[0].barrier, _options("Barrier", deadline.seconds), deadline=deadline
            )

    def broadcast(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        self._begin(request)
        if self.size <= 2 or dst.nbytes < _BROADCAST_BYTES:
            super().broadcast(request, src, dst, deadline)
        else:
            options = _options("Broadcast", deadline.seconds, rootRank=request.root)
            self._meet(deadline)
            self._run(self._groups[0].broadcast, [as_bytes(dst)], options, deadline=deadline)

    def reduce(self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        self._begin(request)
        op, root = request.op, request.root
        exchange, gloos = partial(self._exchange, deadline), gloo_fold(op.name, src.dtype)
        total = src.nbytes * self.size
        if not self._one_round(src.nbytes):
            super().reduce(request, src, dst, deadline)
        elif self.size <= _FEW and total <= _COLLECTED_AT_ROOT_BYTES:
            exchanges.reduce(exchange, self.rank, self.size, src, dst, op, root)
        elif gloos is not None and not request.ordered:
            # Gloo also overwrites the buffer on ranks other than the root, so it needs scratch.
            room = Buffer.empty(src.count, src.dtype) if dst is None else dst
            options = _options("Reduce", deadline.seconds, rootRank=root, reduceOp=gloos.op)
            self._fold_by_gloo(self._groups[0].reduce, gloos, options, src, room, op, deadline)
        else:
            counts = pieces.even(src.count, self.size)
            mine = Buffer.empty(counts[self.rank], src.dtype)
            exchanges.reduce_scatter(exchange, self.rank, src, mine, counts, op)
            exchanges.gather(exchange, self.rank, mine, dst, counts, root)

    def all_reduce(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        self._begin(request)
        op = request.op
        exchange, gloos = partial(self._exchange, deadline), gloo_fold(op.name, src.dtype)
        total = src.nbytes * self.size
        if not self._one_round(src.nbytes):
            super().all_reduce(request, src, dst, deadline)
        elif self.size <= _FEW and total <= _COLLECTED_BYTES:
            exchanges.all_reduce(exchange, self.rank, self.size, src, dst, op)
        elif gloos is not None and not request.ordered:
            options = _options("Allreduce", deadline.seconds, reduceOp=gloos.op)
            self._fold_by_gloo(self._groups[0].allreduce, gloos, options, src, dst, op, deadline)
        else:
            counts = pieces.even(src.count, self.size)
            start = sum(counts[: self.rank])
            mine = dst.part(start, start + counts[self.rank])
            exchanges.reduce_scatter(exchange, self.rank, src, mine, counts, op)
            exchanges.all_gather(exchange, self.rank, mine, dst, counts)

    def _fold_by_gloo(
        self,
        start: Callable[..., Any],
        gloos: GlooFold,
        options: Any,
        src: Buffer,
        dst: Buffer,
        op: ReduceOp,
        deadline: Deadline,
    ) -> None:
        """Let Gloo fold in place in ``dst``; scale before or after if ``op`` requires it."""
        self._meet(deadline)
        pre = arithmetic.pre(op, src.dtype, self.size)
        post = arithmetic.post(op, src.dtype, self.size)
        with np.errstate(all="ignore"):
            if pre is not None:
                pre(src.array, dst.array)
            else:
                pieces.copy(src, dst)
            self._run(start, [as_bytes(dst).view(gloos.dtype)], options, deadline=deadline)
            if post is not None:
                post(dst.array, dst.array)

    def reduce_scatter(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> None:
        self._begin(request)
        if self._one_round(src.nbytes):
            exchange = partial(self._exchange, deadline)
            exchanges.reduce_scatter(exchange, self.rank, src, dst, request.elements, request.op)
        else:
            super().reduce_scatter(request, src, dst, deadline)

    def scan(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        self._begin(request)
        super().scan(request, src, dst, deadline)

    def scatter(
        self, request: Request, src: Buffer | None, dst: Buffer, deadline: Deadline
    ) -> None:
        self._begin(request)
        elements, root = request.elements, request.root
        if self._one_round(sum(elements) * dst.dtype.itemsize):
            exchange = partial(self._exchange, deadline)
            exchanges.scatter(exchange, self.rank, src, dst, elements, root)
        else:
            super().scatter(request, src, dst, deadline)

    def gather(self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        self._begin(request)
        elements, root = request.elements, request.root
        if self._one_round(sum(elements) * src.dtype.itemsize):
            exchange = partial(self._exchange, deadline)
            exchanges.gather(exchange, self.rank, src, dst, elements, root)
        else:
            super().gather(request, src, dst, deadline)

    def all_gather(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        self._begin(request)
        if self._one_round(dst.nbytes):
            exchange = partial(self._exchange, deadline)
            exchanges.all_gather(exchange, self.rank, src, dst, request.elements)
        else:
            super().all_gather(request, src, dst, deadline)

    def all_to_all(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        self._begin(request)
        if self.size == 1:
            super().all_to_all(request, src, dst, deadline)
        else:
            exchange = partial(self._exchange, deadline)
            elements, incoming = request.elements, request.incoming
            exchanges.all_to_all(exchange, self.rank, src, dst, elements, incoming)

    def agree(self, request: Request, deadline: Deadline) -> None:
        self._begin(request, comparing=True)
        super().agree(request, deadline)


@lru_cache(maxsize=256)
def _options(kind: str, patience: float, **settings: Any) -> Any:
    """Return Gloo's options object for a collective; Gloo does not change it, so it is cached."""
    options = getattr(dist, f"{kind}Options")()
    options.timeout = limit(patience)
    for name, value in settings.items():
        setattr(options, name, value)
    return options
