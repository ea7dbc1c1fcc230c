"""The ``mpi`` transport."""

from __future__ import annotations

import functools
import hashlib
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collective.backend import Failure
from collective.backends.channel import Channel, Monitored
from collective.backends.monitor import Monitor
from collective.buffer import Buffer
from collective.call import in_thread
from collective.capabilities import Capabilities
from collective.dtypes import BY_NAME
from collective.errors import (
    BackendUnavailableError,
    CollectiveError,
    MismatchError,
    RendezvousError,
)

from . import folds, library
from .arrival import BLOCKING, BY_MESSAGES, POLLED, Arrival
from .datatypes import type_of
from .errors import explained
from .folds import Fold, making, prepare, slot
from .messages import Messages
from .polling import settle
from .watchdog import Blocking, watch

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.call import Call
    from collective.ops import ReduceOp
    from collective.world import World

__all__ = ["MpiBackend"]

Array = np.ndarray[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])

_UINT8 = BY_NAME["uint8"]
_GROUP_TAG = -2
_NOTE_BYTES = 16
# Reductions that are kept prepared: as many as a communicator remembers calls.
_KEPT = 1024
#: Elements that a call takes where counts are C integers: in MPI before version 4.
MOST = 2**31 - 1
# NumPy takes 4 ns for a 16-bit float, so that folding is what takes the time. With an operator
# that is not their own MPICH and Intel MPI fold whole arrays on every rank; the algorithms fold
# a part a rank. Measured with 2 ranks, 16 MiB of float16, in ms: MPICH 38, by messages 20; Intel
# MPI 38, 19; Open MPI, which divides, too, 26, 24. Below 1 MiB the algorithms divide nothing.
_SLOW_FOLD_BYTES = 1 << 20
_PAUSE_S = 0.5e-3
_ENDS = "mpi ends"
_now = time.monotonic


def _mapped(method: F) -> F:
    """Turn MPI's errors into ours."""
    operation = method.__name__
    collective = operation not in ("send", "recv", "sendrecv", "group")

    @functools.wraps(method)
    def call(self: MpiBackend, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except self._mpi.Exception as error:
            where = arguments[-2] if collective else operation
            raise explained(self._mpi, self.channel, where, error) from error

    return call  # type: ignore[return-value]


class _Plan:
    """How a reduction is carried out; depends on the call alone.

    Attributes:
        of: operator, element count, dtype and whether in rank order.
        fold: prepared for MPI.
        by_messages: whether the algorithms do it better, or only they do it right.
        plain: whether it is one call of MPI and nothing else.
    """

    __slots__ = ("by_messages", "fold", "of", "plain")

    def __init__(
        self, module: Any, op: ReduceOp, src: Buffer, ordered: bool, size: int, most: int
    ) -> None:
        dtype = src.dtype
        self.of = op, src.count, dtype, ordered
        self.fold = fold = Fold(module, op, dtype, size)
        # MPI leaves open in which order it folds. Of integers every order gives the same.
        exact = dtype.kind in "biu" and op.function is None
        slow = dtype.kind == "f" and dtype.itemsize == 2 and src.nbytes >= _SLOW_FOLD_BYTES
        self.by_messages = (ordered and not exact) or slow or src.count > most
        self.plain = not self.by_messages and not fold.pre and not fold.post and bool(fold.type)


class MpiBackend(Monitored):
    """Ranks of one MPI communicator; see the package's docstring."""

    name = "mpi"
    launcher = "mpiexec"
    capabilities = Capabilities(
        across_hosts=True,
        checks_calls=True,
        any_source=True,
        detects_lost_peers=True,
    )

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        comm.Set_errhandler(module.ERRORS_RETURN)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.channel = channel
        self._mpi = module
        self._comm = comm
        self._all_reduce = comm.Allreduce
        self._in_place = module.IN_PLACE
        self._most = 2**63 - 1 if module.Get_version() >= (4, 0) else MOST
        self._arrival = Arrival(module, comm, channel)
        self._arrive = self._arrival.come
        self._messages = Messages(module, comm, channel)
        self._blocking = Blocking(module, comm, channel)
        self._plans: dict[Call, _Plan] = {}
        self._closed = False
        watch(self._blocking)
        library.enrol(self)
        channel.on_failure.append(functools.partial(_note_loss, channel))
        _note_loss(channel)
        # One that is dropped without being closed has left; its process is not gone.
        weakref.finalize(self, channel.close).atexit = False

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, timeout: float) -> Self:
        """Join the other ranks of ``world.comm``, or else of ``MPI_COMM_WORLD``.

        See :meth:`Backend.connect`. The program's communicator is duplicated, not used.

        Raises:
            BackendUnavailableError: no MPI library, or not the one that ``mpiexec`` is of.
            RendezvousError: the world is not the communicator's.
        """
        end = _now() + timeout
        module = library.start(timeout)
        prepare(module)
        given = world.comm if world.comm is not None else module.COMM_WORLD
        _compare(module, world, given)
        monitor = Monitor.start(world, timeout)
        channel = monitor.channel
        try:
            with making(lambda: _pause(channel, "connect", end)):
                comm, request = given.Idup()
                settle([request], lambda: channel.wait("connect", _left(end)))
                return cls(module, comm, channel)
        except BaseException:
            channel.close()
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        healthy = self.channel.failure is None and self._blocking.running is None
        if healthy and library.idle() and self._arrival.close():
            # Waits for nobody in MPICH, Open MPI, Intel MPI: tried with a peer that sleeps.
            self._comm.Free()

    @_mapped
    def group(self, ranks: Sequence[int], timeout: float) -> MpiBackend:
        end = _now() + timeout
        channel = self.channel.group(ranks)
        self._meet(ranks, channel.name, timeout)
        # Groups that are made at once by threads of their own must not take each other's part.
        tag = int(hashlib.blake2b(channel.name.encode(), digest_size=4).hexdigest(), 16) % 30_000
        what = f"group({list(ranks)})"
        with making(lambda: _pause(channel, what, end)):
            mine = self._comm.Get_group()
            members = mine.Incl(list(ranks))
            self._blocking.end = end
            self._blocking.running = what
            try:
                comm = self._comm.Create_group(members, tag)
            finally:
                self._blocking.running = None
                members.Free()
                mine.Free()
            return type(self)(self._mpi, comm, channel)

    def _meet(self, ranks: Sequence[int], name: str, timeout: float) -> None:
        """Return when all members have come, and mean the same group."""
        first, *others = ranks
        mine = Buffer.empty(_NOTE_BYTES, _UINT8)
        mine.array[:] = list(hashlib.blake2b(name.encode(), digest_size=_NOTE_BYTES).digest())
        theirs = Buffer.empty(_NOTE_BYTES, _UINT8)
        for rank in others if self.rank == first else [first]:
            self.sendrecv(mine, rank, theirs, rank, _GROUP_TAG, timeout)
            if (theirs.array != mine.array).any():
                text = f"group: rank {self.rank} makes {list(ranks)}, rank {rank} another one"
                self.abort(Failure("mismatch", self.rank, text))
                raise MismatchError(f"{text} [rank {self.rank} of {self.size}]")

    def empty(self, nbytes: int, call: Call, timeout: float) -> Array:
        self.agree(call, timeout)
        return super().empty(nbytes, call, timeout)

    # -- point to point -------------------------------------------------------------------

    @_mapped
    def send(self, src: Buffer, dst: int, tag: int, timeout: float) -> None:
        self._messages.send(src, dst, tag, timeout)

    @_mapped
    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        return self._messages.recv(dst, src, tag, timeout)

    @_mapped
    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, timeout: float
    ) -> None:
        self._messages.sendrecv(src, to, dst, source, tag, timeout)

    # -- how a call is carried out ----------------------------------------------------------

    def _come(self, call: Call, timeout: float, large: bool = False) -> int:
        """Wait for all ranks; return how they carry the call out, the same on all of them."""
        how = BLOCKING if in_thread.site is None and not folds.being_made else POLLED
        return self._arrive(call, timeout, BY_MESSAGES if large else how)

    def _move(self, how: int, call: Call, end: float, name: str, *arguments: Any) -> None:
        """Have MPI do ``name``."""
        if how == BLOCKING:
            self._blocking.end = end
            self._blocking.running = call
            try:
                getattr(self._comm, name)(*arguments)
            finally:
                self._blocking.running = None
        else:
            request = getattr(self._comm, f"I{name.lower()}")(*arguments)
            settle([request], lambda: self.channel.wait(call, _left(end)))

    def _plan(self, call: Call, op: ReduceOp, src: Buffer, ordered: bool) -> _Plan:
        plan = self._plans.get(call)
        if plan is not None and plan.of == (op, src.count, src.dtype, ordered):
            return plan
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        plan = self._plans[call] = _Plan(self._mpi, op, src, ordered, self.size, self._most)
        return plan

    def _reduction(
        self, call: Call, op: ReduceOp, src: Buffer, ordered: bool, timeout: float
    ) -> tuple[int, Fold]:
        """Wait for all ranks; return how they fold."""
        how = self._come(call, timeout)
        plan = self._plan(call, op, src, ordered)
        return self._carry(how, plan), plan.fold

    @staticmethod
    def _carry(how: int, plan: _Plan) -> int:
        # In the background other threads work with MPI, and in MPICH a function of ours
        # must not be called then: see folds.py.
        if plan.by_messages or (how == POLLED and plan.fold.function is not None):
            return BY_MESSAGES
        return how

    def _fold(
        self, how: int, call: Call, end: float, fold: Fold, name: str,
        specify: Callable[[Any], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        """Have MPI do the reduction ``name`` with the arguments that ``specify(type)`` gives."""
        if fold.type is not None:
            self._move(how, call, end, name, *specify(fold.type))
            return

        try:
            with slot(fold, lambda: _pause(self.channel, call, end)) as mine:
                self._move(how, call, end, name, *specify(mine.types[fold.storage.itemsize]))
        except CollectiveError:
            # Of the function. The other ranks may not have come across it.
            self.abort(Failure("failed", self.rank, traceback.format_exc()))
            raise

    # -- collectives that fold ----------------------------------------------------------------

    def all_reduce(
        self, src: Buffer, dst: Buffer, op: ReduceOp, ordered: bool, call: Call, timeout: float
    ) -> None:
        end = _now() + timeout
        try:
            # _reduction() and _move() once more, not called: here microseconds count.
            alone = in_thread.site is None and not folds.being_made
            how = self._arrive(call, timeout, BLOCKING if alone else POLLED)
            plan = self._plans.get(call)
            if plan is None or plan.of != (op, src.count, src.dtype, ordered):
                plan = self._plan(call, op, src, ordered)
            if how != BLOCKING or not plan.plain:
                self._all_reduce_otherwise(how, plan, src, dst, call, end)
                return
            memo = dst.memo
            kept = None if memo is None else memo.get(_ENDS)
            if kept is None or kept[0] is not src:
                kept = self._ends(src, dst, plan.fold.type)
            blocking = self._blocking
            blocking.end = end
            blocking.running = call
            try:
                self._all_reduce(kept[1], kept[2], plan.fold.op)
            finally:
                blocking.running = None
        except self._mpi.Exception as error:
            raise explained(self._mpi, self.channel, call, error) from error

    def _ends(self, src: Buffer, dst: Buffer, kind: Any) -> tuple[Buffer, Any, Any]:
        """Return MPI's first two arguments; kept where the buffers will be used again."""
        given = self._send_or_in_place(src.array, dst.array, kind)
        ends = src, given, _spec(dst.array, kind)
        if dst.memo is not None:
            dst.memo[_ENDS] = ends
        return ends

    def _all_reduce_otherwise(
        self, how: int, plan: _Plan, src: Buffer, dst: Buffer, call: Call, end: float
    ) -> None:
        fold = plan.fold
        if self._carry(how, plan) == BY_MESSAGES:
            op, _, _, ordered = plan.of
            super().all_reduce(src, dst, op, ordered, call, _left(end))
            return
        given, out = fold.enter(src, dst), dst.array
        self._fold(
            how, call, end, fold, "Allreduce",
            lambda kind: (self._send_or_in_place(given, out, kind), _spec(out, kind), fold.op),
        )  # fmt: skip
        fold.leave(out)

    @_mapped
    def reduce(
        self,
        src: Buffer,
        dst: Buffer | None,
        op: ReduceOp,
        root: int,
        ordered: bool,
        call: Call,
        timeout: float,
    ) -> None:
        end = _now() + timeout
        how, fold = self._reduction(call, op, src, ordered, timeout)
        if how == BY_MESSAGES:
            super().reduce(src, dst, op, root, ordered, call, _left(end))
            return
        given = fold.enter(src, dst)
        out = None if dst is None else dst.array
        self._fold(
            how, call, end, fold, "Reduce",
            lambda kind: (
                self._send_or_in_place(given, out, kind), out is not None and _spec(out, kind),
                fold.op, root,
            ),
        )  # fmt: skip
        if out is not None:
            fold.leave(out)

    @_mapped
    def reduce_scatter(
        self,
        src: Buffer,
        dst: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        ordered: bool,
        call: Call,
        timeout: float,
    ) -> None:
        end = _now() + timeout
        how, fold = self._reduction(call, op, src, ordered, timeout)
        if how == BY_MESSAGES:
            super().reduce_scatter(src, dst, counts, op, ordered, call, _left(end))
            return
        given, out = fold.enter(src, None), dst.array
        if np.may_share_memory(given, out):  # which MPI allows in an arrangement of its own only
            out = np.empty_like(out)
        if min(counts) == max(counts):
            name = "Reduce_scatter_block"

            def specify(kind: Any) -> tuple[Any, ...]:
                return (given, out.size, kind), _spec(out, kind), fold.op
        else:
            name = "Reduce_scatter"

            def specify(kind: Any) -> tuple[Any, ...]:
                return _spec(given, kind), _spec(out, kind), list(counts), fold.op

        self._fold(how, call, end, fold, name, specify)
        fold.leave(out)
        if out is not dst.array:
            dst.array[:] = out

    @_mapped
    def scan(self, src: Buffer, dst: Buffer, op: ReduceOp, call: Call, timeout: float) -> None:
        end = _now() + timeout
        # MPI may fold in another order than rank after rank, which floats would show.
        how, fold = self._reduction(call, op, src, True, timeout)
        if how == BY_MESSAGES:
            super().scan(src, dst, op, call, _left(end))
            return
        given, out = fold.enter(src, dst), dst.array
        self._fold(
            how, call, end, fold, "Scan",
            lambda kind: (self._send_or_in_place(given, out, kind), _spec(out, kind), fold.op),
        )  # fmt: skip
        fold.leave(out)

    def _send_or_in_place(self, given: Array, out: Array | None, kind: Any) -> Any:
        """Return MPI's first argument: the input, or that it is where the result goes."""
        if out is not None and (given is out or np.may_share_memory(given, out)):
            return self._in_place
        return _spec(given, kind)

    # -- collectives that move --------------------------------------------------------------

    @_mapped
    def agree(self, call: Call, timeout: float) -> None:
        self._come(call, timeout)

    @_mapped
    def barrier(self, call: Call, timeout: float) -> None:
        self._come(call, timeout)

    @_mapped
    def broadcast(self, buffer: Buffer, root: int, call: Call, timeout: float) -> None:
        end = _now() + timeout
        how = self._come(call, timeout, buffer.count > self._most)
        if how == BY_MESSAGES:
            super().broadcast(buffer, root, call, _left(end))
            return
        spec = _spec(buffer.array, type_of(self._mpi, buffer.dtype))
        self._move(how, call, end, "Bcast", spec, root)

    @_mapped
    def scatter(
        self,
        src: Buffer | None,
        dst: Buffer,
        counts: Sequence[int],
        root: int,
        call: Call,
        timeout: float,
    ) -> None:
        end = _now() + timeout
        how = self._come(call, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().scatter(src, dst, counts, root, call, _left(end))
            return
        kind = type_of(self._mpi, dst.dtype)
        out = _spec(dst.array, kind)
        if src is not None and np.may_share_memory(src.array, dst.array):
            out = self._in_place
        given = None if src is None else (src.array, list(counts), None, kind)
        self._move(how, call, end, "Scatterv", given, out, root)

    @_mapped
    def gather(
        self,
        src: Buffer,
        dst: Buffer | None,
        counts: Sequence[int],
        root: int,
        call: Call,
        timeout: float,
    ) -> None:
        end = _now() + timeout
        how = self._come(call, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().gather(src, dst, counts, root, call, _left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, None if dst is None else dst.array, kind)
        out = None if dst is None else (dst.array, list(counts), None, kind)
        self._move(how, call, end, "Gatherv", given, out, root)

    @_mapped
    def all_gather(
        self, src: Buffer, dst: Buffer, counts: Sequence[int], call: Call, timeout: float
    ) -> None:
        end = _now() + timeout
        how = self._come(call, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().all_gather(src, dst, counts, call, _left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, dst.array, kind)
        if min(counts) == max(counts):
            self._move(how, call, end, "Allgather", given, (dst.array, counts[0], kind))
        else:
            self._move(how, call, end, "Allgatherv", given, (dst.array, list(counts), None, kind))

    @_mapped
    def all_to_all(
        self,
        src: Buffer,
        dst: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        call: Call,
        timeout: float,
    ) -> None:
        end = _now() + timeout
        # Each rank knows its own counts only: the arrival tells if they are too many for one.
        large = max(src.count, dst.count) > self._most
        how = self._come(call, timeout, large)
        if how == BY_MESSAGES:
            super().all_to_all(src, dst, send_counts, recv_counts, call, _left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = (src.array, list(send_counts), None, kind)
        out = (dst.array, list(recv_counts), None, kind)
        self._move(how, call, end, "Alltoallv", given, out)


def _note_loss(channel: Channel) -> None:
    if channel.failure is not None and channel.failure.kind == "lost":
        library.lose_a_peer()


def _spec(array: Array, kind: Any) -> tuple[Array, int, Any]:
    return array, array.size, kind


def _pause(channel: Channel, where: object, end: float) -> None:
    """Wait a moment for a thread of this process; raise if there is a reason to."""
    channel.wait(where, _left(end), ()).check()
    time.sleep(_PAUSE_S)


def _left(end: float) -> float:
    return max(0.0, end - _now())


def _compare(module: Any, world: World, comm: Any) -> None:
    """Refuse a communicator whose ranks are not the world's.

    Raises:
        BackendUnavailableError: MPI knows of one rank only.
        RendezvousError: it numbers them differently.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if (rank, size) == (world.rank, world.size):
        return
    if size == 1 and world.comm is None:
        but = "says rank 0 of 1"
        raise BackendUnavailableError(
            library.other_mpiexec(world.rank, world.size, world.launcher, but)
        )
    raise RendezvousError(
        f"mpi: rank {world.rank} of {world.size} ({world.launcher!r} or the settings say so), but "
        f"MPI says rank {rank} of {size}. Leave COLLECTIVE_RANK and COLLECTIVE_SIZE unset under "
        "mpiexec, and let one launcher start the ranks."
    )
