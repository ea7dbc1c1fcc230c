"""Calls that compute: ``all_reduce``, ``reduce``, ``scan``, ``reduce_scatter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.deadline import Deadline
from collective.errors import InvalidArgumentError
from collective.memory import nested
from collective.memory.arrays import NUMBERS
from collective.memory.buffer import Buffer, Spot
from collective.memory.dtypes import DType
from collective.ops import ReduceOp, as_op
from collective.shards import Shards

from ..output import Output, input_buffer
from ..path import Path
from ..streams import Near
from .call import Call, Planned, straight
from .folding import FoldCall, StructureReduceScatter, StructureReduction
from .sharded import ShardedFold
from .views import Array, Leaf, staged, view


class Reduction(FoldCall):
    """Fold whose result has the shape of its input: ``all_reduce``, ``reduce``, ``scan``."""

    def plan_for_c(self) -> Planned | None:
        if type(self.order) is Shards:
            return ShardedFold(self).plan_of_array()
        _, array, dtype = view(self.path, self.operation, self.x)
        return self._plan_of(array, dtype)

    def _plan_of(self, array: Array, dtype: DType) -> Planned:
        on_host = type(array) is np.ndarray
        key = self.operation, dtype, array.shape, self.op, self.order, on_host, self.root
        return self.path.plans.get(key) or self.plan_fold(key, dtype, array.shape, on_host)

    def known_plan(self, spot: Spot) -> tuple[Planned | None, tuple[int, ...] | None]:
        key = self.operation, spot.dtype, spot.shape, self.op, self.order, False, self.root
        return self.path.plans.get(key), spot.shape if self.receives else None

    def prepare(self) -> Call:
        path, x = self.path, self.x
        if type(self.order) is Shards:
            return ShardedFold(self)
        if type(x) is not np.ndarray:
            if path.enqueues and (short := straight(self, x, self.out)) is not None:
                return short
            if nested.is_tree(x):
                return StructureReduction(self)
        seen = view(path, self.operation, x)
        adapter, array, dtype = seen
        if adapter is NUMBERS:
            self.refuse_long(seen)
        self._planned = planned = self._plan_of(array, dtype)
        if not planned.takes_gpus:
            adapter, array, dtype = staged(path, seen)
        if type(array) is not np.ndarray:
            self.near = Near(array, adapter)
        output = None
        if self.receives:
            output = Output(self.operation, self.out, adapter, array.shape, dtype, array, x)
        self._output = output
        self._src = self._dst = src = input_buffer(array, dtype, output, self.out, x)
        if output is None:
            self._dst = None
        elif src.array is not output.flat:
            self._dst = Buffer(output.flat, dtype)
        return self

    _dst: Buffer | None

    def run(self, deadline: Deadline) -> Any:
        self.path.carry(self._planned, self._src, self._dst, deadline)
        return None if self._output is None else self._output.finish()


class AllReduce(Reduction):
    """See :meth:`Communicator.all_reduce`."""

    operation = "all_reduce"


class Reduce(Reduction):
    """See :meth:`Communicator.reduce`."""

    operation = "reduce"
    rooted = to_root = True


class Scan(Reduction):
    """See :meth:`Communicator.scan`."""

    operation = "scan"

    def __init__(self, path: Path, x: Any, op: str | ReduceOp, out: Any = None) -> None:
        if as_op(op).name == "avg":
            raise InvalidArgumentError(
                f"scan: op avg; expected any other {path.who}. Use op='sum' and divide by rank + 1."
            )
        super().__init__(path, x, op=op, out=out)


class ReduceScatter(FoldCall):
    """See :meth:`Communicator.reduce_scatter`."""

    operation = "reduce_scatter"
    cuts = True

    def plan_for_c(self) -> Planned | None:
        if type(self.order) is Shards:
            return ShardedFold(self).plan_of_array()
        return self._plan_of(*self.cut(view(self.path, self.operation, self.x)))

    def _plan_of(self, leaf: Leaf, sizes: Sequence[int]) -> Planned:
        on_host = type(leaf.array) is np.ndarray
        # The ranks compare the counts, so the plan of a call without counts has another digest.
        key = (
            self.operation, leaf.dtype, leaf.shape, self.op, self.order, on_host, leaf.axis,
            None if self.counts is None else tuple(sizes),
        )  # fmt: skip
        planned = self.path.plans.get(key)
        if planned is not None:
            return planned
        elements = [size * leaf.inner for size in sizes]
        return self.plan_fold(
            key, leaf.dtype, leaf.shape, on_host, elements, axis=leaf.axis,
            counts=self.agreed_counts,
        )  # fmt: skip

    def prepare(self) -> Call:
        if type(self.order) is Shards:
            return ShardedFold(self)
        if type(self.x) is not np.ndarray and nested.is_tree(self.x):
            return StructureReduceScatter(self)
        path = self.path
        seen = view(path, self.operation, self.x)
        leaf, sizes = self.cut(seen)
        self._planned = self._plan_of(leaf, sizes)
        if not self._planned.takes_gpus:
            seen = staged(path, seen)
            leaf, _ = self.cut(seen)
        adapter, array, dtype = seen
        if type(array) is not np.ndarray:
            self.near = Near(array, adapter)
        self._leaf, self._length = leaf, sizes[path.rank]
        shape = leaf.shape_with(self._length)
        # The rows, and not x: x is no input of the transport if another axis than the first is cut.
        self._output = output = Output(self.operation, self.out, adapter, shape, dtype, leaf.array)
        self._src = input_buffer(leaf.array, dtype, output, self.out, None)
        self._piece = leaf.target(output.flat)
        self._dst = Buffer(self._piece, dtype)
        return self

    def run(self, deadline: Deadline) -> Any:
        self.path.carry(self._planned, self._src, self._dst, deadline)
        self._leaf.restore(self._piece, self._output.flat, self._length)
        return self._output.finish()
