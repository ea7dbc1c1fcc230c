"""Reductions of structures: one message for each dtype in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.errors import InvalidArgumentError
from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.memory.numbers import NUMBERS
from collective.ops import ReduceOp

from .calls import Array
from .gpu_calls import View
from .output import Output
from .plan import Planned
from .reduction_plans import ReductionPlans
from .rows import Rows, split_sizes
from .streams import nearest

__all__ = ["StructureReductions"]


class StructureReductions(ReductionPlans):
    """The part of a communicator that computes with nested lists, tuples and dicts of arrays."""

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
                results = None if outputs is None else [outputs[i].flat for i in members]
                self._joined(
                    arrays, Buffer.empty(count, dtype, arrays[0]), planned, results, seconds
                )
            if outputs is None:
                return None
            return nested.rebuild(x, iter([output.finish() for output in outputs]))

        return self._go(
            what, run, async_op, *nearest([(view.array, view.adapter) for view in views])
        )

    def _joined(
        self, arrays: Sequence[Array], room: Buffer, planned: Planned,
        results: Sequence[Array] | None, seconds: float,
    ) -> None:  # fmt: skip
        """Reduce several arrays as one.

        Args:
            room: for all of them.
            results: where theirs go; None at a rank that gets none.
        """
        np.concatenate([array.ravel() for array in arrays], out=room.array)
        self._carry(planned, room, None if results is None else room, seconds)
        start = 0
        for result in results or ():
            result[:] = room.array[start : start + result.size]
            start += result.size

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


def _by_dtype(views: Sequence[View]) -> dict[DType, list[int]]:
    """Return which of the arrays have each dtype."""
    found: dict[DType, list[int]] = {}
    for index, view in enumerate(views):
        found.setdefault(view.dtype, []).append(index)
    return found
