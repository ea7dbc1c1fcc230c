"""The calls that compute: all_reduce, reduce, reduce_scatter, scan."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
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
from collective.ops import ReduceOp, as_op
from collective.request import Disagreement, Request

from .calls import Array, Calls, View
from .output import Output
from .plan import Planned
from .rows import Rows, split_sizes
from .streams import nearest

if TYPE_CHECKING:
    from collective.contract.backend import Plan

__all__ = ["Reductions"]


class Reductions(Calls):
    """The computing part of a communicator."""

    def all_reduce(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give every rank the result.

        Collective: every rank calls it, with one op, shape and dtype.

        Args:
            x: an array of any strides, or a nested list, tuple or dict of arrays, which
                travel together.
            op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"avg"``, ``"band"``,
                ``"bor"``, ``"bxor"``, ``"land"``, ``"lor"``, or what
                ``collective.premul_sum`` or ``collective.user_op`` return. Integers wrap.
                To ``min`` and ``max`` -0 is less than 0, and NaN comes of any NaN, always
                the quiet one without sign and payload (on GPUs as NCCL has it).
            out: where the result goes, of the shape and dtype of ``x``; may be ``x``. For
                a structure, one of the same nesting.
            order: ``"rank"`` folds ``((x0 op x1) op x2) …``, so that the result has the
                same bits on every transport and in every run.
            timeout: seconds; the communicator's by default.
            async_op: return a ``Work`` at once; the arrays must not be touched until its
                ``wait()`` has returned.

        Returns:
            ``out``, or a new array of the framework, shape and dtype of ``x``.

        Raises:
            DtypeError: the op is not defined for the dtype.
            MismatchError: the ranks' calls differ; nothing was written.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: after these ``out``
                holds some, all or none of the result.
            Exception: what a user's operator raised here; the others get PeerFailedError.

        See Also:
            MPI_Allreduce, ncclAllReduce, torch.distributed.all_reduce.
        """
        if type(x) is not np.ndarray and nested.is_tree(x):
            return self._tree_reduction("all_reduce", x, op, out, order, timeout, None, async_op)
        adapter, array, dtype = self._view("all_reduce", x)
        shape = array.shape
        planned = self._plan_of("all_reduce", array, dtype, op, order)
        if not planned.takes_gpus:
            adapter, array, dtype = self._on_the_host(View(adapter, array, dtype))
        seconds = self.timeout if timeout is None else self._seconds(timeout)
        output = Output("all_reduce", out, adapter, shape, dtype, array, x)
        src = self._input(array, dtype, output, out, x)
        dst = src if src.array is output.flat else Buffer(output.flat, dtype)

        def run() -> Any:
            self._carry(planned, src, dst, seconds)
            return output.finish()

        return self._go("all_reduce", run, async_op, array, adapter)

    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give the result to ``root``.

        Collective: every rank calls it, with one root, op, shape and dtype.

        Args:
            x, op, order, timeout, async_op: as in :meth:`all_reduce`.
            root: the rank that gets the result.
            out: at the root, where the result goes; ignored elsewhere.

        Returns:
            At the root ``out`` or a new array; None elsewhere.

        Raises:
            As :meth:`all_reduce`.

        See Also:
            MPI_Reduce, ncclReduce.
        """
        root = self._rank("reduce", "root", root)
        if self.rank != root:
            out = None
        if type(x) is not np.ndarray and nested.is_tree(x):
            return self._tree_reduction("reduce", x, op, out, order, timeout, root, async_op)
        adapter, array, dtype = self._view("reduce", x)
        planned = self._plan_of("reduce", array, dtype, op, order, root)
        if not planned.takes_gpus:
            adapter, array, dtype = self._on_the_host(View(adapter, array, dtype))
        seconds = self._seconds(timeout)
        output = None
        dst = None
        if self.rank == root:
            output = Output("reduce", out, adapter, array.shape, dtype, array, x)
        src = self._input(array, dtype, output, out, x)
        if output is not None:
            dst = src if src.array is output.flat else Buffer(output.flat, dtype)

        def run() -> Any:
            self._carry(planned, src, dst, seconds)
            return None if output is None else output.finish()

        return self._go("reduce", run, async_op, array, adapter)

    def scan(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the arrays of ranks 0 to this one, inclusive, in rank order.

        Collective: every rank calls it, with one op, shape and dtype.

        Args:
            x, out, timeout, async_op: as in :meth:`all_reduce`.
            op: as there, but for ``"avg"``: an average over a varying number of ranks
                is not one operation.

        Returns:
            ``x0 op x1 … op x_rank``, as ``out`` or a new array.

        Raises:
            As :meth:`all_reduce`.

        See Also:
            MPI_Scan.
        """
        if as_op(op).name == "avg":
            raise InvalidArgumentError(
                f"scan: op avg; any other {self._who}. Use op='sum' and divide by rank + 1."
            )
        if type(x) is not np.ndarray and nested.is_tree(x):
            return self._tree_reduction("scan", x, op, out, None, timeout, None, async_op)
        adapter, array, dtype = self._view("scan", x)
        planned = self._plan_of("scan", array, dtype, op, None)
        if not planned.takes_gpus:
            adapter, array, dtype = self._on_the_host(View(adapter, array, dtype))
        output = Output("scan", out, adapter, array.shape, dtype, array, x)
        src = self._input(array, dtype, output, out, x)
        dst = src if src.array is output.flat else Buffer(output.flat, dtype)
        seconds = self._seconds(timeout)

        def run() -> Any:
            self._carry(planned, src, dst, seconds)
            return output.finish()

        return self._go("scan", run, async_op, array, adapter)

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give each rank one piece of the result.

        Collective: every rank calls it, with one op, shape, dtype, axis and counts.

        Args:
            x, op, order, timeout, async_op: as in :meth:`all_reduce`.
            counts: lengths of the ranks' pieces along ``axis``; by default as
                ``numpy.array_split`` cuts.
            axis: the axis that is cut.
            out: where this rank's piece goes, of the piece's shape.

        Returns:
            Piece ``rank`` of the result, as ``out`` or a new array.

        Raises:
            As :meth:`all_reduce`. ShapeError: the counts do not add up to the axis.

        See Also:
            MPI_Reduce_scatter, ncclReduceScatter.
        """
        if type(x) is not np.ndarray and nested.is_tree(x):
            # Each leaf is cut by itself; what a rank gets of all leaves is one message.
            return self._tree_reduce_scatter(x, op, counts, axis, out, order, timeout, async_op)
        adapter, array, dtype = self._view("reduce_scatter", x)
        rows = Rows("reduce_scatter", array, axis)
        sizes = split_sizes("reduce_scatter", rows.length, self.size, counts)
        planned = self._plan_of_pieces(array, dtype, op, order, rows, sizes, counts)
        if not planned.takes_gpus:
            adapter, array, dtype = self._on_the_host(View(adapter, array, dtype))
            rows = Rows("reduce_scatter", array, axis)
        shape = rows.shape_with(sizes[self.rank])
        output = Output("reduce_scatter", out, adapter, shape, dtype, array)
        piece = rows.target(output.flat, sizes[self.rank])
        src = self._input(rows.array, dtype, output, out, None)
        seconds = self._seconds(timeout)
        dst = Buffer(piece, dtype)

        def run() -> Any:
            self._carry(planned, src, dst, seconds)
            rows.restore(piece, output.flat, sizes[self.rank])
            return output.finish()

        return self._go("reduce_scatter", run, async_op, array, adapter)

    # -- shared ---------------------------------------------------------------------------

    def _plan_of(
        self,
        what: str,
        array: Array,
        dtype: DType,
        op: str | ReduceOp,
        order: str | None,
        root: int | None = None,
    ) -> Planned:
        """Return the plan of a reduction whose result is like the input."""
        key = (what, dtype, array.shape, op, order, type(array), root)
        return self._plans.get(key) or self._reduction(key, root)

    def _plan_of_pieces(
        self,
        array: Array,
        dtype: DType,
        op: str | ReduceOp,
        order: str | None,
        rows: Rows,
        sizes: Sequence[int],
        counts: Sequence[int] | None,
    ) -> Planned:
        """Return the plan of a ``reduce_scatter`` that cuts ``rows`` into ``sizes``."""
        key = (
            "reduce_scatter", dtype, array.shape, op, order, type(array), rows.axis, tuple(sizes),
        )  # fmt: skip
        planned: Planned | None = self._plans.get(key)
        if planned is not None:
            return planned
        elements = [size * rows.inner for size in sizes]
        return self._reduction(key, None, elements, axis=rows.axis, counts=counts)

    def _reduction(
        self,
        key: tuple[Any, ...],
        root: int | None = None,
        elements: Sequence[int] | None = None,
        **options: Any,
    ) -> Planned:
        """Check a reduction, and plan it for now and later.

        Args:
            key: by which it is known: operation, dtype, shape, op, order, the kind of array, and
                whatever else tells it from others.
            elements: of ``reduce_scatter``, how many each rank gets.
            options: what else the ranks have to agree on.

        Raises:
            InvalidArgumentError, DtypeError, UnsupportedError: it cannot be made.
        """
        what, dtype, shape, op, order, kind = key[:6]
        if order not in (None, "rank"):
            raise InvalidArgumentError(f"{what}: order {order!r}; 'rank' or None {self._who}.")
        reducer, ordered = as_op(op), order == "rank"
        try:
            arithmetic.check(reducer, dtype)
        except DtypeError as error:
            raise DtypeError(f"{what}: {error} {self._who}") from None
        on_gpu = kind is not np.ndarray
        takes_gpus = not on_gpu or self._backend.supports(what, reducer, dtype, ordered)
        if on_gpu and takes_gpus:
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

    def _check_able(self, what: str, op: ReduceOp, dtype: DType) -> None:
        able = self.capabilities
        if op.name not in able.ops or dtype.name not in able.dtypes:
            other = "'nccl', which does it on GPUs" if dtype.kind == "f" else "'shm' or 'threads'"
            raise UnsupportedError(
                f"{what}: op {op} on {dtype} is not supported by backend "
                f"{self._backend.name!r} (ops {', '.join(sorted(able.ops))}; dtypes "
                f"{', '.join(sorted(able.dtypes))}) {self._who}. Use backend={other}."
            )

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
        nesting = nested.skeleton(x)
        receives = root is None or root == self.rank
        shapes = [[view.dtype.name, *view.array.shape] for view in views]
        seconds = self._seconds(timeout)
        groups = []
        for dtype, members in _by_dtype(views).items():
            count = sum(views[i].array.size for i in members)
            kind = type(views[members[0]].array)
            key = (what, dtype, (count,), op, order, kind, root, str(nesting), str(shapes))
            planned = self._plans.get(key) or self._reduction(
                key, root, leaves=shapes, nesting=nesting
            )
            if not planned.takes_gpus:
                for i in members:
                    views[i] = self._on_the_host(views[i])
            groups.append((dtype, members, count, planned))
        outputs: list[Output] | None = None
        if receives:
            outs = [None] * len(views) if out is None else self._leaves_like(what, out, nesting)
            outputs = [
                Output(what, given, view.adapter, view.array.shape, view.dtype, view.array)
                for given, view in zip(outs, views)
            ]

        def run() -> Any:
            for dtype, members, count, planned in groups:
                arrays = [views[i].array for i in members]
                # Where nothing is enqueued other ranks may have these on the CPU.
                on_gpu = self._enqueues and not isinstance(arrays[0], np.ndarray)
                if on_gpu and what == "all_reduce" and outputs is not None:
                    pairs = [(array, outputs[i]) for i, array in zip(members, arrays)]
                    self._together(pairs, planned, out is None or out is x, seconds)
                    continue
                src = Buffer.empty(count, dtype, arrays[0])
                np.concatenate([array.ravel() for array in arrays], out=src.array)
                dst = src if receives else None
                self._carry(planned, src, dst, seconds)
                if outputs is not None:
                    start = 0
                    for i, array in zip(members, arrays):
                        outputs[i].flat[:] = src.array[start : start + array.size]
                        start += array.size
            if outputs is None:
                return None
            return nested.rebuild(x, iter([output.finish() for output in outputs]))

        return self._go(
            what, run, async_op, *nearest([(view.array, view.adapter) for view in views])
        )

    def _together(
        self, pairs: Sequence[tuple[Array, Output]], planned: Planned, apart: bool, seconds: float
    ) -> None:
        """All-reduce several arrays of a GPU where they are, started at once.

        Args:
            apart: whether it is known that no result overlaps another's input.
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

        self._carry(Planned(planned.request, start), None, None, seconds)

    def _leaves_like(self, what: str, out: Any, nesting: Any) -> list[Any]:
        if nested.skeleton(out) != nesting:
            raise InvalidArgumentError(
                f"{what}: out is nested differently from the input {self._who}."
            )
        return nested.flatten(out)

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
            kind, whole = type(views[members[0]].array), (sum(elements),)
            key = (what, dtype, whole, op, order, kind, axis, *structure)
            planned = self._plans.get(key) or self._reduction(
                key, None, elements, axis=axis, counts=counts, leaves=shapes, nesting=nesting
            )
            if not planned.takes_gpus:
                for i in members:
                    views[i] = self._on_the_host(views[i])
                    rows[i] = Rows(what, views[i].array, axis)
            groups.append((dtype, members, elements[self.rank], planned))
        outs = [None] * len(views) if out is None else self._leaves_like(what, out, nesting)
        outputs = [
            Output(
                what, given, view.adapter, r.shape_with(s[self.rank]), view.dtype, view.array
            )
            for given, view, r, s in zip(outs, views, rows, sizes)
        ]  # fmt: skip

        def run() -> Any:
            for dtype, members, count, planned in groups:
                pieces = [rows[i].piece(sizes[i], r) for r in range(self.size) for i in members]
                src = Buffer(np.concatenate(pieces), dtype)
                dst = Buffer.empty(count, dtype, src.array)
                self._carry(planned, src, dst, seconds)
                start = 0
                for i in members:
                    length = sizes[i][self.rank]
                    stop = start + length * rows[i].inner
                    rows[i].restore(dst.array[start:stop], outputs[i].flat, length)
                    start = stop
            return nested.rebuild(x, iter([output.finish() for output in outputs]))

        return self._go(
            what, run, async_op, *nearest([(view.array, view.adapter) for view in views])
        )


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
