"""The calls that compute: all_reduce, reduce, reduce_scatter, scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.errors import InvalidArgumentError
from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.memory.numbers import NUMBERS
from collective.ops import ReduceOp, as_op

from .calls import Array
from .gpu_calls import View
from .output import Output
from .plan import Planned
from .reduction_plans import ReductionPlans
from .rows import Rows, split_sizes

__all__ = ["Reductions"]


class Reductions(ReductionPlans):
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
            x: an array of any strides, or one of Python's numbers; or a nested list, tuple or dict
                of these, which travel together. An ``int`` has 64 bits on the way, and is refused
                where the ranks' sum or product might not fit (arrays wrap).
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
            ``out``, or a new array of the framework, shape and dtype of ``x``; a number of the type
            of ``x``.

        Raises:
            DtypeError: the op is not defined for the dtype, or integers might not fit.
            MismatchError: the ranks' calls differ; nothing was written.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: after these ``out``
                holds some, all or none of the result.
            Exception: what a user's operator raised here; the others get PeerFailedError.

        See Also:
            MPI_Allreduce, ncclAllReduce, torch.distributed.all_reduce.
        """
        return self._reduce("all_reduce", x, op, out, order, timeout, None, async_op)

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
        return self._reduce("reduce", x, op, out, order, timeout, root, async_op)

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
        return self._reduce("scan", x, op, out, None, timeout, None, async_op)

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
        piece = rows.target(output.flat)
        src = self._input(rows.array, dtype, output, out, None)
        seconds = self._seconds(timeout)
        dst = Buffer(piece, dtype)

        def run() -> Any:
            self._carry(planned, src, dst, seconds)
            rows.restore(piece, output.flat, sizes[self.rank])
            return output.finish()

        return self._go("reduce_scatter", run, async_op, array, adapter)

    # -- shared ---------------------------------------------------------------------------

    def _reduce(
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
        """Make a reduction whose result is like the input, at ``root`` or at all ranks."""
        receives = root is None or root == self.rank
        spot = self._spot(x) if self._enqueues else None
        if spot is not None:
            planned = self._plans.get((what, spot.dtype, spot.shape, op, order, False, root))
            shape = spot.shape if receives else None
            done = self._straight(planned, spot, shape, x, out, timeout, async_op)
            if done is not NotImplemented:
                return done
        if type(x) is not np.ndarray and nested.is_tree(x):
            return self._tree_reduction(what, x, op, out, order, timeout, root, async_op)
        adapter, array, dtype = self._view(what, x)
        if adapter is NUMBERS:
            self._refuse_long(what, array, dtype, op)
        # As _plan_of does it, without a call.
        key = (what, dtype, array.shape, op, order, type(array) is np.ndarray, root)
        planned = self._plans.get(key) or self._reduction(key, root)
        if not planned.takes_gpus:
            adapter, array, dtype = self._on_the_host(View(adapter, array, dtype))
        seconds = self.timeout if timeout is None else self._seconds(timeout)
        output: Output | None = None
        if receives:
            output = Output(what, out, adapter, array.shape, dtype, array, x)
        src = self._input(array, dtype, output, out, x)
        dst: Buffer | None = None
        if output is not None:
            dst = src if src.array is output.flat else Buffer(output.flat, dtype)

        def run() -> Any:
            self._carry(planned, src, dst, seconds)
            return None if output is None else output.finish()

        return self._go(what, run, async_op, array, adapter)

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
        key = (what, dtype, array.shape, op, order, type(array) is np.ndarray, root)
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
            "reduce_scatter", dtype, array.shape, op, order, type(array) is np.ndarray, rows.axis,
            tuple(sizes),
        )  # fmt: skip
        planned = self._plans.get(key)
        if planned is not None:
            return planned
        elements = [size * rows.inner for size in sizes]
        return self._reduction(key, None, elements, axis=rows.axis, counts=counts)
