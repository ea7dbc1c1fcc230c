"""How reductions are checked and planned, and those of structures made."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms import arithmetic
from collective.contract.work import Work
from collective.errors import (
    CollectiveError,
    CommunicatorAbortedError,
    DtypeError,
    InvalidArgumentError,
    UnsupportedError,
)
from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.memory.numbers import NUMBERS
from collective.ops import ReduceOp, as_op
from collective.request import Disagreement, Request

from .calls import Array
from .gpu_calls import View, nearest
from .output import Output
from .plan import Planned
from .rows import Rows, split_sizes
from .straight import StraightCalls

if TYPE_CHECKING:
    from collective.contract.backend import Plan

__all__ = ["ReductionPlans"]


class ReductionPlans(StraightCalls):
    """The part of a communicator that plans reductions, and computes with nested structures."""

    def _reduction(
        self,
        key: tuple[Any, ...],
        root: int | None = None,
        elements: Sequence[int] | None = None,
        **options: Any,
    ) -> Planned:
        """Check a reduction, and plan it for now and later.

        Args:
            key: by which it is known: operation, dtype, shape, op, order, whether it is on the CPU,
                and whatever else tells it from others.
            elements: of ``reduce_scatter``, how many each rank gets.
            options: what else the ranks have to agree on.

        Raises:
            InvalidArgumentError, DtypeError, UnsupportedError: it cannot be made.
        """
        what, dtype, shape, op, order, on_host = key[:6]
        if order not in (None, "rank"):
            raise InvalidArgumentError(f"{what}: order {order!r}; 'rank' or None {self._who}.")
        reducer, ordered = as_op(op), order == "rank"
        try:
            arithmetic.check(reducer, dtype)
        except DtypeError as error:
            raise DtypeError(f"{what}: {error} {self._who}") from None
        takes_gpus = on_host or self._backend.supports(what, reducer, dtype, ordered)
        if takes_gpus and not on_host:
            options["device"] = "cuda" if self._enqueues else None
        else:
            self._check_able(what, reducer, dtype)
        if options.get("counts") is not None:
            options["counts"] = list(map(int, options["counts"]))
        request = Request(
            what, dtype, shape, op=reducer, ordered=ordered, root=root, elements=elements, **options
        )
        plan = self._backend.plan(request)
        if reducer.function is not None:
            outcome = self._backend.plan(request.step(1, "barrier"))
            plan = functools.partial(self._fold, plan, outcome)
        return self._remember(key, Planned(request, plan, takes_gpus=takes_gpus))

    def _fold(
        self, fold: Plan, outcome: Plan, src: Buffer, dst: Buffer | None, seconds: float
    ) -> None:
        """Fold with a user's operator, and return when all ranks have.

        A rank whose operator raised does not come. Otherwise the others would go on with a result
        that they cannot tell from a right one. MPI in particular has no way to stop a reduction
        from within.

        Args:
            fold: the transport's part.
            outcome: the barrier after it.
        """
        end = time.monotonic() + seconds
        try:
            _finish(fold(src, dst, seconds))
        except (Disagreement, CommunicatorAbortedError):
            raise  # nothing has been folded, or all ranks know why
        except CollectiveError as error:
            self._half_done(error)  # it may be the operator's
            raise
        _finish(outcome(None, None, max(0.0, end - time.monotonic())))

    def _refuse_long(self, what: str, array: Array, dtype: DType, op: str | ReduceOp) -> None:
        """Refuse a Python integer if the result might have more than 64 bits.

        Python's have as many as they need, so that one that wraps would be wrong in silence. What
        the other ranks have is not known: it is taken to be as much.
        """
        if dtype.kind != "i":
            return
        number, name = int(array), as_op(op).name
        worst = {"sum": abs(number) * self.size, "prod": abs(number) ** self.size}.get(name, 0)
        if worst >= 2**63:
            raise DtypeError(
                f"{what}: op {name} of {number}; if {self.size} ranks have as much the result "
                f"takes more than 64 bits {self._who}. Pass float(x), or numpy.int64(x), which "
                "wraps; or use all_gather_object."
            )

    def _check_able(self, what: str, op: ReduceOp, dtype: DType) -> None:
        able = self.capabilities
        if op.name not in able.ops or dtype.name not in able.dtypes:
            other = "'nccl', which does it on GPUs" if dtype.kind == "f" else "'shm' or 'threads'"
            raise UnsupportedError(
                f"{what}: op {op} on {dtype} is not supported by backend "
                f"{self._backend.name!r} (ops {', '.join(sorted(able.ops))}; dtypes "
                f"{', '.join(sorted(able.dtypes))}) {self._who}. Use backend={other}."
            )

    # -- of structures ------------------------------------------------------------------

    def _tree_reduction(
        self,
        what: str,
        x: Any,
        op: str | ReduceOp,
        out: Any,
        order: str | None,
        timeout: float | None,
        root: int | None,
        async_op: bool,
    ) -> Any:
        """Start the reduction of a structure: one message for each dtype in it."""
        views = self._views(what, x)
        for view in views:
            if view.adapter is NUMBERS:
                self._refuse_long(what, view.array, view.dtype, op)
        nesting = nested.skeleton(x)
        receives = root is None or root == self.rank
        shapes = [[view.dtype.name, *view.array.shape] for view in views]
        seconds = self._seconds(timeout)
        groups = []
        for dtype, members in _by_dtype(views).items():
            count = sum(views[i].array.size for i in members)
            on_host = type(views[members[0]].array) is np.ndarray
            key = (what, dtype, (count,), op, order, on_host, root, str(nesting), str(shapes))
            planned = self._plans.get(key) or self._reduction(
                key, root, leaves=shapes, nesting=nesting
            )
            if not planned.takes_gpus:
                for i in members:
                    views[i] = self._on_the_host(views[i])
            groups.append((dtype, members, count, planned))
        outputs: list[Output] | None = None
        if receives:
            outs = self._outs(what, out, nesting, len(views), "input")
            outputs = [
                Output(what, given, view.adapter, view.array.shape, view.dtype, view.array)
                for given, view in zip(outs, views)
            ]

        def run() -> Any:
            # A leaf of `out` may overlap a leaf of `x` that has another dtype, and so is in another
            # message: all inputs are read before the first result is written.
            messages = []
            for dtype, members, count, planned in groups:
                arrays = [views[i].array for i in members]
                # Where nothing is enqueued other ranks may have these on the CPU.
                on_gpu = self._enqueues and not isinstance(arrays[0], np.ndarray)
                if on_gpu and what == "all_reduce" and outputs is not None:
                    pairs = [(array, outputs[i]) for i, array in zip(members, arrays)]
                    send = self._together(pairs, planned, out is None or out is x, seconds)
                else:
                    room = Buffer.empty(count, dtype, arrays[0])
                    results = None if outputs is None else [outputs[i].flat for i in members]
                    send = self._joined(arrays, room, planned, results, seconds)
                messages.append(send)
            for send in messages:
                send()
            if outputs is None:
                return None
            return nested.rebuild(x, iter([output.finish() for output in outputs]))

        return self._go(what, run, async_op, *nearest(views))

    def _joined(
        self, arrays: Sequence[Array], room: Buffer, planned: Planned,
        results: Sequence[Array] | None, seconds: float,
    ) -> Callable[[], None]:  # fmt: skip
        """Copy several arrays into one; return a function that reduces it.

        Args:
            room: memory for all of the arrays.
            results: where the arrays' results go; None at a rank that gets none.
        """
        np.concatenate([array.ravel() for array in arrays], out=room.array)

        def send() -> None:
            self._carry(planned, room, None if results is None else room, seconds)
            start = 0
            for result in results or ():
                result[:] = room.array[start : start + result.size]
                start += result.size

        return send

    def _together(
        self, pairs: Sequence[tuple[Array, Output]], planned: Planned, apart: bool, seconds: float
    ) -> Callable[[], None]:
        """Return a function that all-reduces several arrays of a GPU where they are, all at once.

        Args:
            apart: true if no result overlaps the input of another; false if that is not known,
                and the inputs are copied.
        """
        buffers = []
        for array, output in pairs:
            src = array.ravel()
            dtype = planned.request.dtype
            assert dtype is not None
            if not apart:
                src = src.copy()
            elif np.may_share_memory(src, output.flat):
                src = output.flat  # in place
            buffers.append((Buffer(src, dtype), Buffer(output.flat, dtype)))

        def start(src: None, dst: None, seconds: float) -> None:
            with self._backend.batch():
                for source, target in buffers:
                    planned.plan(source, target, seconds)

        return functools.partial(self._carry, Planned(planned.request, start), None, None, seconds)

    def _tree_reduce_scatter(
        self,
        x: Any,
        op: str | ReduceOp,
        counts: Sequence[int] | None,
        axis: int,
        out: Any,
        order: str | None,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        what = "reduce_scatter"
        views = self._views(what, x)
        nesting = nested.skeleton(x)
        shapes = [[view.dtype.name, *view.array.shape] for view in views]
        structure = str(nesting), str(shapes), str(counts)
        seconds = self._seconds(timeout)
        rows = [Rows(what, view.array, axis) for view in views]
        sizes = [split_sizes(what, r.length, self.size, counts) for r in rows]
        groups = []
        for dtype, members in _by_dtype(views).items():
            elements = [sum(sizes[i][r] * rows[i].inner for i in members) for r in range(self.size)]
            on_host, whole = type(views[members[0]].array) is np.ndarray, (sum(elements),)
            key = (what, dtype, whole, op, order, on_host, axis, *structure)
            planned = self._plans.get(key) or self._reduction(
                key, None, elements, axis=axis, counts=counts, leaves=shapes, nesting=nesting
            )
            if not planned.takes_gpus:
                for i in members:
                    views[i] = self._on_the_host(views[i])
                    rows[i] = Rows(what, views[i].array, axis)
            groups.append((dtype, members, elements[self.rank], planned))
        outs = self._outs(what, out, nesting, len(views), "input")
        outputs = [
            Output(
                what, given, view.adapter, r.shape_with(s[self.rank]), view.dtype, view.array
            )
            for given, view, r, s in zip(outs, views, rows, sizes)
        ]  # fmt: skip

        def run() -> Any:
            inputs = []  # copied before the first result is written, which may overlap them
            for _, members, _, _ in groups:
                pieces = [rows[i].piece(sizes[i], r) for r in range(self.size) for i in members]
                inputs.append(np.concatenate(pieces))
            for (dtype, members, count, planned), packed in zip(groups, inputs):
                src = Buffer(packed, dtype)
                dst = Buffer.empty(count, dtype, src.array)
                self._carry(planned, src, dst, seconds)
                start = 0
                for i in members:
                    length = sizes[i][self.rank]
                    stop = start + length * rows[i].inner
                    rows[i].restore(dst.array[start:stop], outputs[i].flat, length)
                    start = stop
            return nested.rebuild(x, iter([output.finish() for output in outputs]))

        return self._go(what, run, async_op, *nearest(views))


def _finish(work: Work[Any] | None) -> None:
    """Wait for what a transport may have left running."""
    if work is not None:
        work.wait()


def _by_dtype(views: Sequence[View]) -> dict[DType, list[int]]:
    """Return which of the arrays have each dtype."""
    found: dict[DType, list[int]] = {}
    for index, view in enumerate(views):
        found.setdefault(view.dtype, []).append(index)
    return found
