"""Collective calls of ``MPI.Comm`` on buffers and on objects.

Each rank posts all its messages at once, to the ranks that need them. So blocking, non-blocking and
persistent calls share their code, and none depends on another rank's coming back to an earlier
call. Reductions, broadcasts and barriers that the library itself has plans for run on these
instead, when they are blocking.

A call is described by what this rank sends to whom, and what it receives from whom. Its forms with
one count for all ranks, with a count for each (v) and with a datatype for each (w) differ in the
function that reads the description of a buffer with a part for each rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import reduce as combined
from itertools import accumulate
from typing import Any

import numpy as np

from collective import CollectiveError

from .exceptions import CLASSES, TRANSLATED, MPIError, translated
from .handles import IN_PLACE, Handle
from .layouts import Piece
from .messages import NOTHING, PLAIN, equal, simple, vector, vector_of_types
from .operations import Operation, await_posted
from .operators import SUM, check_alike, check_defined, fold, operator_of
from .pickling import loads, pickle
from .requests import forms

# Types of the elements that the library's plans reduce, by its name of the operator.
_ORDERED = frozenset(map(np.dtype, "bhilqBHILQfd"))
_NUMBERS = _ORDERED | {np.dtype("F"), np.dtype("D")}
_REDUCED = {"sum": _NUMBERS, "prod": _NUMBERS, "max": _ORDERED, "min": _ORDERED}

#: Number of tags of collective calls; higher tags are for calls of some of the ranks.
CALL_TAGS = 2**30

#: Function that reads a buffer's description with a part for each rank: see :mod:`.messages`.
Read = Callable[[Any, bool, int], list[Piece]]
_Pieces = Iterable[tuple[int, Piece]]


def in_place(buf: Any) -> bool:
    """Return whether an argument says that the other one has this rank's input."""
    return buf is None or buf is IN_PLACE


def _gathering(read: Read) -> Any:
    def prepare(self: CollectiveMethods, sendbuf: Any, recvbuf: Any, root: int = 0) -> Operation:
        """Put all ranks' buffers together at the root."""
        rank, size = self._rooted(root)
        receives = list(enumerate(read(recvbuf, True, size))) if rank == root else []
        if rank == root and in_place(sendbuf):
            del receives[root]
            return self._moving([], receives)
        return self._moving([(root, simple(sendbuf, False))], receives)

    return forms(prepare)


def _scattering(read: Read) -> Any:
    def prepare(self: CollectiveMethods, sendbuf: Any, recvbuf: Any, root: int = 0) -> Operation:
        """Give each rank its part of the root's buffer."""
        rank, size = self._rooted(root)
        sends = list(enumerate(read(sendbuf, False, size))) if rank == root else []
        if rank == root and in_place(recvbuf):
            del sends[root]
            return self._moving(sends, [])
        return self._moving(sends, [(root, simple(recvbuf, True))])

    return forms(prepare)


def _gathering_everywhere(read: Read) -> Any:
    def prepare(self: CollectiveMethods, sendbuf: Any, recvbuf: Any) -> Operation:
        """Put all ranks' buffers together on all ranks."""
        rank, size = self._live.rank, self._live.size
        receives = list(enumerate(read(recvbuf, True, size)))
        if not in_place(sendbuf):
            piece = simple(sendbuf, False)
            return self._moving([(other, piece) for other in range(size)], receives)
        _, own = receives.pop(rank)
        return self._moving([(other, own) for other, _ in receives], receives)

    return forms(prepare)


def _exchanging(read: Read) -> Any:
    def prepare(self: CollectiveMethods, sendbuf: Any, recvbuf: Any) -> Operation:
        """Give each rank its part of each rank's buffer."""
        size = self._live.size
        receives = list(enumerate(read(recvbuf, True, size)))
        if in_place(sendbuf):
            return self._moving(receives, receives, True)
        return self._moving(enumerate(read(sendbuf, False, size)), receives)

    return forms(prepare)


class CollectiveMethods(Handle):
    """Methods of communicators that all ranks call."""

    __slots__ = ()

    def _rooted(self, root: int) -> tuple[int, int]:
        """Return rank and size, once the root is valid."""
        context = self._live
        if not 0 <= root < context.size:
            raise MPIError(CLASSES["ERR_ROOT"], f"root {root} of {context.size}")
        return context.rank, context.size

    def _collective(self, plan: Callable[[Operation], object], tag: int = 0) -> Operation:
        """Return an operation whose messages have a tag of their own, or the one given."""
        context = self._live
        return Operation(plan, context.calls, tag or context.next_tag())

    def _moving(self, sends: _Pieces, receives: _Pieces, copies: bool = False) -> Operation:
        """Return what sends pieces to ranks, and receives others from ranks.

        Args:
            sends, receives: ranks with pieces.
            copies: if true, the receives may overwrite what is sent.
        """
        sends, receives = list(sends), list(receives)

        def plan(operation: Operation) -> None:
            data = [piece.packed() for _, piece in sends]
            if copies:
                data = [memory.copy() for memory in data]
            for source, piece in receives:
                operation.receive(piece, source)
            for (target, _), memory in zip(sends, data):
                operation.send(memory, target)

        return self._collective(plan)

    # -- objects -----------------------------------------------------------------------------

    def _swap(
        self, sends: Iterable[tuple[int, bytes]], sources: Iterable[int], tag: int = 0
    ) -> list[Any]:
        """Send pickles to ranks, and return an object from each source."""
        context = self._live
        mail, rank, tag = context.calls, context.rank, tag or context.next_tag()
        # Several edges of a topology may lead from this rank to itself.
        own, sent = deque[bytes](), []
        with TRANSLATED:
            received = [None if s == rank else mail.receive(None, s, tag) for s in sources]
            for target, data in sends:
                if target == rank:
                    own.append(data)
                else:
                    sent.append(mail.send(data, target, tag))
            items = [each for each in (*received, *sent) if each is not None]
            if not all(each.whole for each in items):
                await_posted(mail, *items)
        return [loads(own.popleft() if each is None else each.data) for each in received]

    def _swap_one(
        self, obj: Any, targets: Iterable[int], sources: Iterable[int], tag: int = 0
    ) -> list[Any]:
        """Send one object to all targets, and return one from each source."""
        data = pickle.dumps(obj)
        return self._swap([(target, data) for target in targets], sources, tag)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        rank, size = self._rooted(root)
        if rank != root:
            return self._swap((), [root])[0]
        self._swap_one(obj, [target for target in range(size) if target != root], ())
        return obj

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects at the root."""
        rank, size = self._rooted(root)
        objects = self._swap_one(sendobj, [root], range(size) if rank == root else ())
        return objects if rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return the root's object for this rank."""
        rank, size = self._rooted(root)
        sends = enumerate(pickles(sendobj, size) if rank == root else [])
        return self._swap(sends, [root])[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all ranks' objects."""
        ranks = range(self._live.size)
        return self._swap_one(sendobj, ranks, ranks)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return each rank's object for this one."""
        size = self._live.size
        return self._swap(enumerate(pickles(sendobj, size)), range(size))

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Return all ranks' objects combined, in the order of the ranks, at the root."""
        objects = self.gather(sendobj, root)
        return None if objects is None else combined(op, objects)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return all ranks' objects combined, in the order of the ranks."""
        return combined(op, self.allgather(sendobj))

    # -- buffers -----------------------------------------------------------------------------

    Gather, Igather, Gather_init = _gathering(equal)
    Gatherv, Igatherv, Gatherv_init = _gathering(vector)
    Scatter, Iscatter, Scatter_init = _scattering(equal)
    Scatterv, Iscatterv, Scatterv_init = _scattering(vector)
    Allgather, Iallgather, Allgather_init = _gathering_everywhere(equal)
    Allgatherv, Iallgatherv, Allgatherv_init = _gathering_everywhere(vector)
    Alltoall, Ialltoall, Alltoall_init = _exchanging(equal)
    Alltoallv, Ialltoallv, Alltoallv_init = _exchanging(vector)
    Alltoallw, Ialltoallw, Alltoallw_init = _exchanging(vector_of_types)

    def _Barrier(self) -> Operation:
        """Wait for all ranks."""
        context = self._live
        others = [(rank, NOTHING) for rank in range(context.size) if rank != context.rank]
        return self._moving(others, others)

    _, Ibarrier, Barrier_init = forms(_Barrier)

    def Barrier(self) -> None:
        """Wait for all ranks."""
        core = self._live.core()
        if core is None:
            self._Barrier().run()
            return
        with TRANSLATED:
            core.barrier()

    def _Bcast(self, buf: Any, root: int = 0) -> Operation:
        """Copy the root's buffer to all ranks."""
        rank, size = self._rooted(root)
        piece = simple(buf, rank != root)
        if rank != root:
            return self._moving([], [(root, piece)])
        return self._moving([(target, piece) for target in range(size) if target != root], [])

    _, Ibcast, Bcast_init = forms(_Bcast)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's buffer to all ranks."""
        rank, _ = self._rooted(root)
        core = self._live.core()
        # The ranks may describe the same bytes in different ways, so only the length decides.
        plain = type(buf) is np.ndarray and buf.size and buf.dtype in PLAIN and buf.flags.carray
        if core is not None and plain:
            data = buf.reshape(-1).view(np.uint8)
            with TRANSLATED:
                core.broadcast(data, root=root, out=data)
            return
        piece = simple(buf, rank != root)
        if core is None or not piece.nbytes:
            self._Bcast(buf, root).run()
            return
        data = piece.packed()
        with TRANSLATED:
            # The root's memory may be read-only, such as bytes.
            core.broadcast(data, root=root, **({"out": data} if data.flags.writeable else {}))
        if rank != root and piece.direct is None:
            piece.unpack(data)

    # -- reductions --------------------------------------------------------------------------

    def _folding(
        self, op: Any, sends: _Pieces, sources: Sequence[int], into: Piece | None
    ) -> Operation:
        """Return what sends pieces to ranks, and folds those of other ranks into a piece.

        Args:
            op: the operator.
            sends: ranks with pieces for them.
            sources: ranks whose pieces are folded, in their order.
            into: piece that gets the result; None if there are no sources.
        """
        operator, rank = operator_of(op), self._live.rank
        nbytes = into.nbytes if into is not None else 0
        arrivals = {source: np.empty(nbytes, np.uint8) for source in sources}
        # What this rank has for itself needs no message.
        sends = list(sends)
        check_defined(operator, (into if into is not None else sends[0][1]).layout)
        own = [piece for target, piece in sends if target == rank]
        moving = self._moving(
            [(target, piece) for target, piece in sends if target != rank],
            [(source, Piece(memory, 0, nbytes, NOTHING.layout))
             for source, memory in arrivals.items() if source != rank],
        )  # fmt: skip

        def plan(operation: Operation) -> None:
            moving._plan(operation)  # type: ignore[misc]
            for piece in own:
                arrivals[rank][:] = piece.packed()
            if into is not None and arrivals:
                received = operation.posted[: len(arrivals) - len(own)]
                operation.then(lambda: finish(into, received))

        def finish(target: Piece, received: Iterable[Any]) -> None:
            for each in received:
                if each.nbytes != nbytes:
                    other = moving.mail.status(each).source
                    raise MPIError(
                        CLASSES["ERR_COUNT"],
                        f"reduction: rank {other} gave {each.nbytes} bytes, and rank {rank} "
                        f"gave {nbytes}. All ranks must give as many elements of one type.",
                    )
            target.unpack(combined(fold_next, arrivals.values()))

        def fold_next(lower: Any, higher: Any) -> Any:
            assert into is not None
            fold(operator, lower, higher, into)
            return higher

        return Operation(plan, moving.mail, moving.tag)

    def _pair(self, sendbuf: Any, recvbuf: Any) -> tuple[Piece, Piece]:
        """Return input and output of a reduction, which are alike."""
        target = simple(recvbuf, True)
        if in_place(sendbuf):
            return target, target
        source = simple(sendbuf, False)
        check_alike(source, target)
        return source, target

    def _inputs(self, sendbuf: Any, recvbuf: Any, root: int) -> tuple[Piece, Piece | None]:
        rank, _ = self._rooted(root)
        if rank == root:
            return self._pair(sendbuf, recvbuf)
        return simple(recvbuf if in_place(sendbuf) else sendbuf, False), None

    def _Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0) -> Operation:
        """Combine all ranks' buffers at the root, in the order of the ranks."""
        source, target = self._inputs(sendbuf, recvbuf, root)
        sources = range(self._live.size) if target is not None else ()
        return self._folding(op, [(root, source)], sources, target)

    def _Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Operation:
        """Combine all ranks' buffers on all ranks, in the order of the ranks."""
        source, target = self._pair(sendbuf, recvbuf)
        ranks = range(self._live.size)
        return self._folding(op, [(rank, source) for rank in ranks], ranks, target)

    _, Ireduce, Reduce_init = forms(_Reduce)
    _, Iallreduce, Allreduce_init = forms(_Allreduce)

    def _by_core(self, call: str, piece: Piece, target: Piece | None, op: Any, **to: int) -> bool:
        """Reduce by the library's plans; return False if they do not reduce such elements.

        All ranks decide alike: by operator, type of the elements and whether there are any.
        """
        dtype: Any = piece.layout.dtype
        core = None
        if piece.layout.char and dtype in _REDUCED.get(operator_of(op).core, ()) and piece.count:
            core = self._live.core()
        if core is None:
            return False
        out = None if target is None else target.packed().view(dtype)
        with TRANSLATED:
            getattr(core, call)(piece.packed().view(dtype), op=op._live.core, out=out, **to)
        if target is not None and out is not None and target.direct is None:
            target.unpack(out.view(np.uint8))
        return True

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """Combine all ranks' buffers on all ranks, in the order of the ranks."""
        context, operator = self._inner, getattr(op, "_inner", None)
        source = recvbuf if sendbuf is IN_PLACE or sendbuf is None else sendbuf
        if (
            context is not None
            and context.plans is not None
            and type(source) is type(recvbuf) is np.ndarray
            and source.dtype is recvbuf.dtype
            and operator is not None
            and source.dtype in _REDUCED.get(operator.core, ())
            and source.ndim == recvbuf.ndim == 1
            and len(source) == len(recvbuf) > 0
            and source.flags.c_contiguous
            and recvbuf.flags.carray
        ):
            try:
                context.plans.all_reduce(source, op=operator.core, out=recvbuf)
            except CollectiveError as error:
                raise translated(error) from error
            return
        if not self._by_core("all_reduce", *self._pair(sendbuf, recvbuf), op):
            self._Allreduce(sendbuf, recvbuf, op).run()

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0) -> None:
        """Combine all ranks' buffers at the root, in the order of the ranks."""
        if not self._by_core("reduce", *self._inputs(sendbuf, recvbuf, root), op, root=root):
            self._Reduce(sendbuf, recvbuf, op, root).run()

    def _Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Operation:
        """Combine all ranks' buffers, and give each rank an equal part."""
        size = self._live.size
        if in_place(sendbuf):
            parts = equal(recvbuf, True, size)
            target = parts[0]
        else:
            parts, target = equal(sendbuf, False, size), simple(recvbuf, True)
            check_alike(parts[0], target)
        return self._folding(op, enumerate(parts), range(size), target)

    def _Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Any = SUM
    ) -> Operation:
        """Combine all ranks' buffers, and give each rank a part of its length."""
        rank, size = self._live.rank, self._live.size
        target = simple(recvbuf, True)
        source = target if in_place(sendbuf) else simple(sendbuf, False)
        if recvcounts is None and not in_place(sendbuf):
            counts = self.allgather(target.count)
        else:
            counts = [int(count) for count in recvcounts]  # type: ignore[union-attr]
            if len(counts) != size:
                raise ValueError(f"message: expecting {size} items, got {len(counts)}")
        layout = source.layout
        if layout is not target.layout:
            raise ValueError("mismatch in send and receive MPI datatypes")
        if source.count != sum(counts):
            raise ValueError(f"mismatch in count {source.count} and sum(counts) {sum(counts)}")
        if not in_place(sendbuf) and target.count != counts[rank]:
            raise ValueError(
                f"mismatch in receive count {target.count} and counts[{rank}] {counts[rank]}"
            )
        parts = [
            Piece(source.memory, source.offset + start * layout.extent, count, layout)
            for start, count in zip(accumulate(counts, initial=0), counts)
        ]
        target = Piece(target.memory, target.offset, counts[rank], layout)
        return self._folding(op, enumerate(parts), range(size), target)

    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = forms(
        _Reduce_scatter_block
    )
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = forms(_Reduce_scatter)


class Prefixes(CollectiveMethods):
    """Methods of communicators of one group that combine the inputs of the lower ranks."""

    __slots__ = ()

    def _prefix(self, sendbuf: Any, recvbuf: Any, op: Any, own: int) -> Operation:
        source, target = self._pair(sendbuf, recvbuf)
        rank, size = self._live.rank, self._live.size
        sends = [(higher, source) for higher in range(rank + 1 - own, size)]
        return self._folding(op, sends, range(rank + own), target)

    def _Scan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Operation:
        """Combine the buffers of this rank and the lower ones."""
        return self._prefix(sendbuf, recvbuf, op, 1)

    def _Exscan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Operation:
        """Combine the buffers of the lower ranks."""
        return self._prefix(sendbuf, recvbuf, op, 0)

    Scan, Iscan, Scan_init = forms(_Scan)
    Exscan, Iexscan, Exscan_init = forms(_Exscan)

    def scan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the objects of this rank and the lower ones combined."""
        rank, size = self._live.rank, self._live.size
        return combined(op, self._swap_one(sendobj, range(rank, size), range(rank + 1)))

    def exscan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the objects of the lower ranks combined; None on rank 0."""
        rank, size = self._live.rank, self._live.size
        objects = self._swap_one(sendobj, range(rank + 1, size), range(rank))
        return combined(op, objects) if objects else None


def pickles(objects: Sequence[Any] | None, size: int) -> list[bytes]:
    """Return an object for each rank as bytes."""
    items = list(objects) if objects is not None else [None] * size
    if len(items) != size:
        raise ValueError(f"expecting {size} items, got {len(items)}")
    return [pickle.dumps(item) for item in items]
