"""Reductions of virtual shards: ``order=Shards(…)``.

Each rank folds its own shards into the nodes of the tree that it can fold alone. The ranks then
exchange these nodes and fold the rest of the tree: see :class:`_ShardPlan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms import costs, pieces
from collective.algorithms.folds import Folding
from collective.algorithms.trees import Leaves, NodeFolds
from collective.deadline import Deadline
from collective.errors import InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.arrays import Adapter
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.ops import as_op
from collective.request import Request
from collective.shards import ShardFold, Shards

from ..output import Output, outputs_of
from .call import Call, Planned
from .folding import FoldCall, by_dtype, finish, guarded
from .views import Array, Leaf, View, staged, view

if TYPE_CHECKING:
    from collective.contract.backend import Backend, Plan


class ShardedFold(Call):
    """Reduction of virtual shards: ``all_reduce``, ``reduce`` or ``reduce_scatter``.

    Args:
        call: the call, as the program made it; its ``order`` is a :class:`Shards`.
    """

    def __init__(self, call: FoldCall) -> None:
        path, shards = call.path, call.order
        assert isinstance(shards, Shards)
        self.path = path
        self.operation = call.operation
        self._call = call
        self._shards = shards
        if shards.size != path.size:
            raise InvalidArgumentError(
                f"{call.operation}: order divides the shards among {shards.size} ranks; this "
                f"communicator has {path.size} {path.who}. Divide them among its ranks: "
                f"collective.Shards({shards.total}, comm)."
            )
        if shards.mine != shards.held_by(path.rank):  # such as a group in another order
            raise InvalidArgumentError(
                f"{call.operation}: order is a division by another communicator, in which this "
                f"rank has another number {path.who}. Divide the shards among the ranks of this "
                f"one: collective.Shards({shards.total}, comm)."
            )
        self._nesting = nested.skeleton(call.x)
        self._leaves = leaves = [_ShardedArray(call, shards, x) for x in nested.flatten(call.x)]
        self._outputs = self._make_outputs() if call.receives else []
        self._messages = [
            (members, self._planned(members)) for members in by_dtype(leaves).values()
        ]

    def _make_outputs(self) -> list[Output]:
        what, leaves, outs = self.operation, self._leaves, [self._call.out]
        if self._nesting != 0:
            outs = outputs_of(what, outs[0], self._nesting, len(leaves), "input", self.path.who)
        return [
            Output(what, out, leaf.adapter, leaf.result_shape, leaf.dtype)
            for out, leaf in zip(outs, leaves)
        ]

    def _planned(self, members: Sequence[int]) -> Planned:
        """Return the plan for the leaves of one dtype, which later calls use again."""
        call, path, leaves = self._call, self.path, [self._leaves[nth] for nth in members]
        lengths = [sum(parts) for parts in zip(*(leaf.lengths for leaf in leaves))]
        options: dict[str, Any] = {}
        if call.cuts:
            options |= {"axis": leaves[0].axis, "counts": call.agreed_counts}
        shape = leaves[0].shape
        if self._nesting != 0:
            shape = (sum(lengths),)
            shapes = [[leaf.dtype.name, *leaf.shape] for leaf in self._leaves]
            options |= {"leaves": shapes, "nesting": self._nesting}
        dtype, folded = leaves[0].dtype, isinstance(call.x, ShardFold)
        key = (
            self.operation, dtype, shape, call.op, self._shards, call.root, folded,
            tuple(lengths), str(options) if options else "",
        )  # fmt: skip
        planned = path.plans.get(key)
        if planned is None:
            op = call.reducer_of(dtype)
            options["order"] = str(self._shards)
            request = Request(self.operation, dtype, shape, op=op, root=call.root, **options)
            exchange = _ShardPlan(path.backend, request, self._shards, folded, lengths)
            plan = exchange if op.function is None else guarded(path, request, exchange)
            planned = path.remember(key, Planned(request, plan, fixed=True))
        return planned

    def plan_of_array(self) -> Planned:
        """Return the plan of a call on one array, as C runs it: on all shards in one buffer."""
        ((_, planned),) = self._messages
        exchange = planned.plan
        whole = exchange.whole if isinstance(exchange, _ShardPlan) else None
        return planned if whole is None else Planned(planned.request, whole, fixed=True)

    def run(self, deadline: Deadline) -> Any:
        # Read the inputs of a structure before the first result is written: a leaf of `out` may
        # overlap a leaf of `x` that has another dtype and so belongs to another message.
        inputs = [_Rows(self._rows(members)) for members, _ in self._messages]
        for (members, planned), rows in zip(self._messages, inputs):
            self._send(members, planned, rows, deadline)
        if not self._call.receives:
            return None
        results = iter([output.finish() for output in self._outputs])
        return nested.rebuild(0 if self._nesting == 0 else self._call.x, results)

    def _rows(self, members: Sequence[int]) -> list[Buffer]:
        """Return this rank's shards or nodes, each as the elements of all leaves of one dtype."""
        leaves = [self._leaves[nth] for nth in members]
        dtype = leaves[0].dtype
        if self._nesting == 0:
            return [Buffer(leaves[0].flat(row), dtype) for row in leaves[0].rows]
        # The pieces of one rank are next to each other, whatever leaf they belong to.
        return [
            Buffer(
                np.concatenate([
                    leaf.flat(row)[start:stop]
                    for limits in zip(*(pairwise(pieces.limits(leaf.lengths)) for leaf in leaves))
                    for leaf, row, (start, stop) in zip(leaves, rows, limits)
                ]),
                dtype,
            )
            for rows in zip(*(leaf.rows for leaf in leaves))
        ]  # fmt: skip

    def _send(
        self, members: Sequence[int], planned: Planned, rows: Any, deadline: Deadline
    ) -> None:
        """Make the reduction of the leaves of one dtype, and store its results."""
        dst, outputs = None, [self._outputs[nth] for nth in members if self._outputs]
        leaves = [self._leaves[nth] for nth in members]
        if outputs:
            dtype = leaves[0].dtype
            if self._nesting == 0 and leaves[0].axis == 0:
                dst = Buffer(outputs[0].flat, dtype)
            else:
                dst = Buffer.empty(sum(output.flat.size for output in outputs), dtype)
        self.path.carry(planned, rows, dst, deadline)
        if dst is None or dst.array is outputs[0].flat:
            return
        start = 0
        for leaf, output in zip(leaves, outputs):
            stop = start + output.flat.size
            leaf.restore(dst.array[start:stop], output.flat)
            start = stop


class _ShardedArray:
    """One array of the call.

    Args:
        call: the call, as the program made it.
        shards: division of the shards.
        x: array whose first axis is this rank's shards, or a :class:`ShardFold`.

    Attributes:
        adapter, dtype: adapter and dtype of the array.
        shape, result_shape: shape of one shard, and of this rank's result.
        rows: the shards, or the nodes that a ``ShardFold`` has folded, each of shape ``shape``.
        axis: axis along which the result is cut, not negative; 0 if it is not cut.
        lengths: number of elements of each rank's piece; of the whole result if it is not cut.
    """

    def __init__(self, call: FoldCall, shards: Shards, x: Any) -> None:
        if isinstance(x, ShardFold):
            self.adapter, self.dtype, self.shape = _checked_fold(call, shards, x)
            self.rows = [buffer.array.reshape(self.shape) for buffer in x.folded()]
        else:
            seen = view(call.path, call.operation, x, hosted="array")
            if not isinstance(seen.array, np.ndarray):
                seen = staged(call.path, seen)
            self.adapter, array, self.dtype = seen
            self.shape = _shape_of_shard(call, shards, array)
            self.rows = [array[nth, ...] for nth in range(array.shape[0])]
        self.result_shape, self.axis = self.shape, 0
        self.lengths = [math.prod(self.shape)]
        self._what, self._size = call.operation, 0
        if call.cuts:
            model = self.rows[0] if self.rows else np.empty(self.shape, self.dtype.storage)
            self._model, sizes = call.cut(View(self.adapter, model, self.dtype))
            self.axis, self._size = self._model.axis, sizes[call.path.rank]
            self.lengths = [size * self._model.inner for size in sizes]
            self.result_shape = self._model.shape_with(self._size)

    def flat(self, row: Array) -> Array:
        """Return the elements of one row, with the axis that is cut moved to the front."""
        if self.axis == 0:
            return row.ravel()
        return Leaf(self._what, View(self.adapter, row, self.dtype), self.axis).array.ravel()

    def restore(self, elements: Array, flat: Array) -> None:
        """Copy the elements of the result into ``flat``, with the axis moved back to its place."""
        if self.axis:
            self._model.restore(elements, flat, self._size)
        else:
            flat[:] = elements


def _shape_of_shard(call: FoldCall, shards: Shards, array: Array) -> tuple[int, ...]:
    """Return the shape of one shard, after a check that the first axis is this rank's shards."""
    expected = len(shards.mine)
    if not array.shape or array.shape[0] != expected:
        raise ShapeError(
            f"{call.operation}: an array of shape {array.shape}; expected a first axis of length "
            f"{expected}, one entry for each shard of this rank {call.path.who}. Stack the arrays "
            "of the shards, or add them to a collective.ShardFold."
        )
    return tuple(array.shape[1:])


def _checked_fold(
    call: FoldCall, shards: Shards, fold: ShardFold
) -> tuple[Adapter, DType, tuple[int, ...]]:
    """Return adapter, dtype and shape of a :class:`ShardFold`, after a check that it is full."""
    what, who = call.operation, call.path.who
    if fold.shards != shards or fold.op != as_op(call.op):
        raise InvalidArgumentError(
            f"{what}: a ShardFold with op {fold.op} of {fold.shards}; the call has op "
            f"{as_op(call.op)} and {shards} {who}. Both must be the same."
        )
    if fold.added != len(shards.mine):
        raise InvalidArgumentError(
            f"{what}: a ShardFold of {fold.added} shards; this rank has {len(shards.mine)} {who}. "
            "Add one array for each shard of shards.mine."
        )
    if fold.adapter is None or fold.dtype is None:
        raise InvalidArgumentError(
            f"{what}: a ShardFold that knows no shape, since this rank has no shards {who}. Pass "
            "an array of a shard's shape and dtype: ShardFold(shards, op, like=array)."
        )
    return fold.adapter, fold.dtype, fold.shape


class _Rows(list[Buffer]):
    """Shards or nodes of this rank, which a plan takes in place of one input buffer."""

    @property
    def nbytes(self) -> int:
        """Length of all rows in bytes."""
        return sum(row.nbytes for row in self)


class _ShardPlan:
    """Plan of a reduction of shards. It takes them as :class:`_Rows`, or in one buffer.

    There are three ways:

    - Two ranks with one node each make the fold of an ordinary reduction, in rank order. So do the
      shards of a single rank.
    - Short nodes are gathered whole, and folded by each rank that gets a result.
    - Otherwise an all-to-all gives each rank its piece of all nodes. The rank folds its piece, and
      an all-gather or a gather joins the pieces, unless the call is a ``reduce_scatter``.

    Args:
        backend: the transport.
        request: request of the call.
        shards: division of the shards.
        folded: whether the rows are nodes already, and not shards.
        lengths: number of elements of each rank's piece; one number if the result is not cut.

    Attributes:
        whole: the transport's plan, if that alone makes the whole call; otherwise None.
    """

    whole: Plan | None = None

    def __init__(
        self, backend: Backend, request: Request, shards: Shards, folded: bool,
        lengths: Sequence[int],
    ) -> None:  # fmt: skip
        dtype, size, rank = request.dtype, backend.size, backend.rank
        assert dtype is not None
        self._dtype, self._rank = dtype, rank
        self._count = count = sum(lengths)
        self._cuts = request.operation == "reduce_scatter"
        self._root = request.options.get("root")
        self._lengths = list(lengths) if self._cuts else pieces.even(count, size)
        self._folding = folding = Folding(request.op, dtype, shards.total)
        every = [shards.nodes_of(rank) for rank in range(size)]
        self._held = [len(spans) for spans in every]
        spans = every[rank] if folded else [Leaves(s, s + 1) for s in shards.mine]
        self._rows = [count] * len(spans)
        self._local = NodeFolds(spans, shards.total, folding, enters=not folded)
        # The nodes arrive in the order of the ranks, which need not be that of their shards.
        arrived = [span for spans in every for span in spans]
        self._order = sorted(range(len(arrived)), key=arrived.__getitem__)
        self._rest = NodeFolds([arrived[n] for n in self._order], shards.total, folding, False)
        self._steps = self._plan_steps(backend, request)

    def _plan_steps(self, backend: Backend, request: Request) -> list[Plan]:
        """Choose the way, and return the transport's plans of its steps."""
        held, size, count = self._held, backend.size, self._count
        self._ordinary = size <= 2 and self._held == [1] * size and self._order == [*range(size)]
        nbytes = sum(held) * count * self._dtype.itemsize
        self._whole = not self._ordinary and costs.whole_pays(nbytes // size)
        root, gathers = self._root, "all_gather" if self._root is None else "gather"
        if self._ordinary:
            # The scaling of `avg` and `premul_sum` is done here, for the number of shards.
            summed = request.op.name in ("avg", "premul_sum")
            first = request.step(
                2, request.operation, op=as_op("sum") if summed else request.op, root=root,
                elements=self._lengths if self._cuts else None,
            )  # fmt: skip
            first.ordered = True
            plan = backend.plan(first)
            if len(self._rows) == 1 and not (self._local.scales or self._folding.finishes):
                self.whole = plan
            return [plan]
        if self._whole:
            whole = [nodes * count for nodes in held]
            return [backend.plan(request.step(2, gathers, root=root, elements=whole))]
        mine = self._lengths[self._rank]
        first = request.step(
            2, "all_to_all", elements=[held[self._rank] * length for length in self._lengths],
            incoming=[nodes * mine for nodes in held],
        )  # fmt: skip
        first.shape = None  # the ranks cut their nodes differently
        if self._cuts:
            return [backend.plan(first)]
        second = request.step(3, gathers, root=root, elements=self._lengths)
        return [backend.plan(first), backend.plan(second)]

    def plain(self, x: Array, out: Array | None, deadline: Deadline) -> None:
        """Make a call on contiguous arrays of NumPy; C calls this."""
        dst = None if out is None else Buffer(out.reshape(-1), self._dtype)
        self(Buffer(x.reshape(-1), self._dtype), dst, deadline)

    def __call__(self, rows: _Rows | Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        if isinstance(rows, Buffer):
            rows = _Rows(pieces.cut(rows, self._rows))
        with np.errstate(all="ignore"):
            if self._ordinary:
                self._by_ordinary_fold(rows, dst, deadline)
            elif self._whole:
                self._by_whole_nodes(rows, dst, deadline)
            else:
                self._by_pieces(rows, dst, deadline)

    def _by_ordinary_fold(
        self, rows: Sequence[Buffer], dst: Buffer | None, deadline: Deadline
    ) -> None:
        node = self._node(rows, dst)
        finish(self._steps[0](node, dst, deadline))
        if dst is not None:
            self._folding.leave(dst)

    def _node(self, rows: Sequence[Buffer], dst: Buffer | None) -> Buffer:
        """Return this rank's only node: a row itself, if there is nothing to fold."""
        alone = len(rows) == 1 and not self._local.scales
        if alone and (dst is None or not np.may_share_memory(rows[0].array, dst.array)):
            return rows[0]
        node = dst if dst is not None and dst.count == self._count else None
        if node is None or any(np.may_share_memory(row.array, node.array) for row in rows):
            node = Buffer.empty(self._count, self._dtype)
        self._local.run(rows, [node])
        return node

    def _by_whole_nodes(
        self, rows: Sequence[Buffer], dst: Buffer | None, deadline: Deadline
    ) -> None:
        count, held = self._count, self._held
        mine = Buffer.empty(held[self._rank] * count, self._dtype)
        self._local.run(rows, pieces.cut(mine, [count] * held[self._rank]))
        every = None if dst is None else Buffer.empty(sum(held) * count, self._dtype)
        finish(self._steps[0](mine, every, deadline))
        if every is None or dst is None:
            return
        start = sum(self._lengths[: self._rank]) if self._cuts else 0
        nodes = pieces.cut(every, [count] * sum(held))
        self._fold_rest([node.part(start, start + dst.count) for node in nodes], dst)

    def _by_pieces(self, rows: Sequence[Buffer], dst: Buffer | None, deadline: Deadline) -> None:
        held, lengths, rank = self._held, self._lengths, self._rank
        outgoing = Buffer.empty(held[rank] * self._count, self._dtype)
        limits = pairwise(pieces.limits(lengths))
        for (start, stop), part in zip(
            limits, pieces.cut(outgoing, [held[rank] * length for length in lengths])
        ):
            outs = pieces.cut(part, [stop - start] * held[rank])
            self._local.run([row.part(start, stop) for row in rows], outs)
        arrived = Buffer.empty(sum(held) * lengths[rank], self._dtype)
        finish(self._steps[0](outgoing, arrived, deadline))
        nodes = pieces.cut(arrived, [lengths[rank]] * sum(held))
        piece = dst
        if not self._cuts:
            start = sum(lengths[:rank])
            piece = (
                Buffer.empty(lengths[rank], self._dtype)
                if dst is None
                else dst.part(start, start + lengths[rank])
            )
        assert piece is not None
        self._fold_rest(nodes, piece)
        if not self._cuts:
            finish(self._steps[1](piece, dst, deadline))

    def _fold_rest(self, nodes: Sequence[Buffer], dst: Buffer) -> None:
        """Fold the nodes of all ranks into the result."""
        self._rest.run([nodes[nth] for nth in self._order], [dst])
        self._folding.leave(dst)
