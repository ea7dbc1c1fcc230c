"""Checks and plans of calls that fold the ranks' arrays, and folds of structures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective.algorithms import arithmetic
from collective.algorithms.pieces import split_sizes
from collective.contract.failure import Failure
from collective.contract.recorder import Recorder
from collective.contract.work import Work
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    CommunicatorAbortedError,
    DtypeError,
    InvalidArgumentError,
    UnsupportedError,
)
from collective.memory import nested
from collective.memory.arrays import NUMBERS
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.ops import ReduceOp, as_op
from collective.request import Disagreement, Request

from ..output import Output, outputs_of
from ..path import Path
from ..streams import nearest
from .call import Call, Planned
from .views import Array, Leaf, View, staged, views

if TYPE_CHECKING:
    from collective.contract.backend import Backend, Plan


class FoldCall(Call):
    """Call that folds the ranks' arrays with an operator.

    Attributes:
        cuts: whether each rank gets one piece of the result.
    """

    cuts: bool = False

    def plan_fold(
        self, key: Any, dtype: DType, shape: tuple[int, ...], on_host: bool,
        elements: Sequence[int] | None = None, **options: Any,
    ) -> Planned:  # fmt: skip
        """Check a fold, and return its plan, which the path remembers.

        Args:
            key: key by which the path remembers the plan.
            dtype, shape: dtype and shape of this rank's input.
            on_host: whether the input is on the CPU.
            elements: in ``reduce_scatter``, the number of elements that each rank gets.
            options: other values that the ranks must agree on.

        Raises:
            InvalidArgumentError, DtypeError, UnsupportedError: the fold cannot be made.
        """
        path, what, order = self.path, self.operation, self.order
        if order not in (None, "rank"):
            raise InvalidArgumentError(
                f"{what}: order {order!r}; expected 'rank', a collective.Shards or None {path.who}."
            )
        reducer, ordered = self.reducer_of(dtype), order == "rank"
        takes_gpus = on_host or path.backend.supports(what, reducer, dtype, ordered)
        if takes_gpus and not on_host:
            options["device"] = "cuda" if path.enqueues else None
        else:
            self._check_supported(reducer, dtype)
        request = Request(
            what, dtype, shape, op=reducer, ordered=ordered, root=self.root, elements=elements,
            **options,
        )  # fmt: skip
        plan = path.backend.plan(request)
        if reducer.function is not None:
            plan = guarded(path, request, plan)
        return path.remember(key, Planned(request, plan, fixed=True, takes_gpus=takes_gpus))

    def reducer_of(self, dtype: DType) -> ReduceOp:
        """Return the operator, after a check that it is defined for a dtype."""
        reducer = as_op(self.op)
        try:
            arithmetic.check(reducer, dtype)
        except DtypeError as error:
            raise DtypeError(f"{self.operation}: {error} {self.path.who}") from None
        return reducer

    def _check_supported(self, op: ReduceOp, dtype: DType) -> None:
        able = self.path.capabilities
        if op.name not in able.ops or dtype.name not in able.dtypes:
            other = "'nccl', which does it on GPUs" if dtype.kind == "f" else "'shm' or 'threads'"
            raise UnsupportedError(
                f"{self.operation}: op {op} on {dtype} is not supported by backend "
                f"{self.path.backend.name!r} (ops {', '.join(sorted(able.ops))}; dtypes "
                f"{', '.join(sorted(able.dtypes))}) {self.path.who}. Use backend={other}."
            )

    def refuse_long(self, number: View) -> None:
        """Refuse a Python integer if the result might have more than 64 bits.

        Python integers have any number of bits, so a result that wraps would be silently wrong.
        This rank does not know the other ranks' values, and assumes that they are as large as its
        own.
        """
        if number.adapter is not NUMBERS or number.dtype.kind != "i":
            return
        path, value, name = self.path, int(number.array), as_op(self.op).name
        worst = {"sum": abs(value) * path.size, "prod": abs(value) ** path.size}.get(name, 0)
        if worst >= 2**63:
            raise DtypeError(
                f"{self.operation}: op {name} of {value}; if {path.size} ranks have as large a "
                f"value, the result needs more than 64 bits {path.who}. Pass float(x), or "
                "numpy.int64(x), which wraps; or use all_gather_object."
            )

    def cut(self, seen: View) -> tuple[Leaf, list[int]]:
        """Return an array's rows along the axis, and the number of rows that each rank gets."""
        leaf = Leaf(self.operation, seen, self.axis)
        return leaf, split_sizes(self.operation, leaf.length, self.path.size, self.counts)

    @property
    def agreed_counts(self) -> list[int] | None:
        """Counts as the ranks compare them: a list of integers, or None."""
        return None if self.counts is None else list(map(int, self.counts))


def guarded(path: Path, request: Request, plan: Plan) -> Plan:
    """Return a plan that ends once a user's operator has succeeded on all ranks.

    Args:
        path: path of the communicator.
        request, plan: request and plan of the fold.
    """
    outcome = path.backend.plan(request.step(1, "barrier"))
    # The plan must not refer to the path, because the path keeps the plan: the cycle would keep a
    # dropped path alive.
    fail = partial(_fail, path.recorder, path.backend)
    return partial(_fold_with_function, fail, plan, outcome)


def _fold_with_function(
    fail: Callable[[BaseException], None], fold: Plan, outcome: Plan, src: Buffer,
    dst: Buffer | None, deadline: Deadline,
) -> None:  # fmt: skip
    """Fold with a user's operator, and return when the operator has succeeded on all ranks.

    A barrier follows the fold, and a rank whose operator raised does not enter it. Without the
    barrier the other ranks would continue with a result that they cannot distinguish from a correct
    one. MPI in particular has no way to stop a reduction from inside the operator.

    Args:
        fail: function that breaks the communicator.
        fold: plan of the fold, made by the transport.
        outcome: plan of the barrier after the fold.
    """
    try:
        finish(fold(src, dst, deadline))
    except (Disagreement, CommunicatorAbortedError):
        raise  # nothing has been folded, or all ranks know the reason
    except CollectiveError as error:
        fail(error)  # the operator may have raised it, and the other ranks do not know
        raise
    finish(outcome(None, None, deadline))


def _fail(recorder: Recorder, backend: Backend, error: BaseException) -> None:
    recorder.fail()
    backend.abort(Failure.caused_by(backend.rank, error))


def finish(work: Work[Any] | None) -> None:
    """Wait for the work that a plan has returned, if the plan left work in flight."""
    if work is not None:
        work.wait()


# -- structures: one message for each dtype --------------------------------------------------------


class _Fused(NamedTuple):
    """Leaves of one dtype, fused into one message.

    Attributes:
        dtype: dtype of the leaves.
        members: indices of the leaves among all leaves.
        elements: number of elements of the result.
        planned: plan of the message.
    """

    dtype: DType
    members: list[int]
    elements: int
    planned: Planned


def by_dtype(leaves: Sequence[Any]) -> dict[DType, list[int]]:
    """Return the indices of the leaves (objects with a ``dtype``) of each dtype."""
    members: dict[DType, list[int]] = {}
    for index, leaf in enumerate(leaves):
        members.setdefault(leaf.dtype, []).append(index)
    return members


class StructureReduction(Call):
    """Reduction of a structure whose result has the structure of its input.

    Args:
        call: the call, as the program made it.
    """

    def __init__(self, call: FoldCall) -> None:
        path = self.path = call.path
        what = self.operation = call.operation
        self._call = call
        self._leaves = leaves = views(path, what, call.x)
        for leaf in leaves:
            call.refuse_long(leaf)
        nesting = nested.skeleton(call.x)
        shapes = [[leaf.dtype.name, *leaf.array.shape] for leaf in leaves]
        self._messages = []
        for dtype, members in by_dtype(leaves).items():
            count = sum(leaves[i].array.size for i in members)
            on_host = type(leaves[members[0]].array) is np.ndarray
            key = (
                what, dtype, count, call.op, call.order, on_host, call.root, str(nesting),
                str(shapes),
            )  # fmt: skip
            planned = path.plans.get(key) or call.plan_fold(
                key, dtype, (count,), on_host, leaves=shapes, nesting=nesting
            )
            if not planned.takes_gpus:
                for i in members:
                    leaves[i] = staged(path, leaves[i])
            self._messages.append(_Fused(dtype, members, count, planned))
        self._outputs: list[Output] | None = None
        if call.receives:
            outs = outputs_of(what, call.out, nesting, len(leaves), "input", path.who)
            self._outputs = [
                Output(what, out, leaf.adapter, leaf.array.shape, leaf.dtype, leaf.array)
                for out, leaf in zip(outs, leaves)
            ]
        self.run_by(nearest(leaves))

    def run(self, deadline: Deadline) -> Any:
        # Read all inputs before the first result is written. A leaf of `out` may overlap a leaf of
        # `x` that has another dtype and so belongs to another message.
        sends = [self._send_later(fused, deadline) for fused in self._messages]
        for send in sends:
            send()
        if self._outputs is None:
            return None
        return nested.rebuild(self._call.x, iter([output.finish() for output in self._outputs]))

    def _send_later(self, fused: _Fused, deadline: Deadline) -> Callable[[], None]:
        """Read the inputs of a message; return a function that reduces them."""
        arrays = [self._leaves[i].array for i in fused.members]
        # If the transport does not enqueue calls, other ranks may have these arrays on the CPU.
        on_gpu = self.path.enqueues and not isinstance(arrays[0], np.ndarray)
        if on_gpu and self.operation == "all_reduce" and self._outputs is not None:
            pairs = [(array, self._outputs[i]) for i, array in zip(fused.members, arrays)]
            return self._batched(pairs, fused.planned, deadline)
        room = Buffer.empty(fused.elements, fused.dtype, arrays[0])
        results = None
        if self._outputs is not None:
            results = [self._outputs[i].flat for i in fused.members]
        np.concatenate([array.ravel() for array in arrays], out=room.array)
        return partial(self._send, fused.planned, room, results, deadline)

    def _send(
        self, planned: Planned, room: Buffer, results: Sequence[Array] | None, deadline: Deadline
    ) -> None:
        """Reduce several arrays that were copied into one buffer.

        Args:
            room: buffer with the copies, one after the other.
            results: arrays that receive the results; None on a rank that gets no result.
        """
        self.path.carry(planned, room, None if results is None else room, deadline)
        start = 0
        for result in results or ():
            result[:] = room.array[start : start + result.size]
            start += result.size

    def _batched(
        self, pairs: Sequence[tuple[Array, Output]], planned: Planned, deadline: Deadline
    ) -> Callable[[], None]:
        """Return a function that all-reduces several GPU arrays in one batch, without packing them.

        Args:
            pairs: the arrays, each with the output for its result.
        """
        out = self._call.out
        # Unless this holds, a result may overlap the input of another array.
        apart = out is None or out is self._call.x
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
        backend = self.path.backend

        def start(src: None, dst: None, deadline: Deadline) -> None:
            with backend.batch():
                for source, target in buffers:
                    planned.plan(source, target, deadline)

        batch = Planned(planned.request, start, fixed=True)
        return partial(self.path.carry, batch, None, None, deadline)


class StructureReduceScatter(Call):
    """Reduction of a structure in which each rank gets a piece of every leaf.

    A rank's pieces of all leaves of one dtype form one message.

    Args:
        call: the call, as the program made it.
    """

    operation = "reduce_scatter"

    def __init__(self, call: FoldCall) -> None:
        path = self.path = call.path
        self._call = call
        self._leaves = leaves = views(path, self.operation, call.x)
        nesting = nested.skeleton(call.x)
        shapes = [[leaf.dtype.name, *leaf.array.shape] for leaf in leaves]
        structure = str(nesting), str(shapes), str(call.counts)
        cuts = [call.cut(leaf) for leaf in leaves]
        self._rows = rows = [cut[0] for cut in cuts]
        self._sizes = sizes = [cut[1] for cut in cuts]
        self._messages = []
        for dtype, members in by_dtype(leaves).items():
            elements = [
                sum(sizes[i][rank] * rows[i].inner for i in members) for rank in range(path.size)
            ]
            on_host, shape = type(leaves[members[0]].array) is np.ndarray, (sum(elements),)
            key = (
                self.operation, dtype, shape, call.op, call.order, on_host, call.axis, *structure,
            )  # fmt: skip
            planned = path.plans.get(key) or call.plan_fold(
                key, dtype, shape, on_host, elements, axis=call.axis,
                counts=call.agreed_counts, leaves=shapes, nesting=nesting,
            )  # fmt: skip
            if not planned.takes_gpus:
                for i in members:
                    leaves[i] = staged(path, leaves[i])
                    rows[i], _ = call.cut(leaves[i])
            self._messages.append(_Fused(dtype, members, elements[path.rank], planned))
        outs = outputs_of(self.operation, call.out, nesting, len(leaves), "input", path.who)
        self._outputs = [
            Output(
                self.operation, out, leaf.adapter, r.shape_with(s[path.rank]), leaf.dtype,
                leaf.array,
            )
            for out, leaf, r, s in zip(outs, leaves, rows, sizes)
        ]  # fmt: skip
        self.run_by(nearest(leaves))

    def run(self, deadline: Deadline) -> Any:
        # Copy all inputs before the first result is written: a result may overlap an input.
        inputs = []
        for fused in self._messages:
            pieces = [
                self._rows[i].piece(self._sizes[i], rank)
                for rank in range(self.path.size)
                for i in fused.members
            ]
            inputs.append(np.concatenate(pieces))
        for fused, packed in zip(self._messages, inputs):
            src = Buffer(packed, fused.dtype)
            dst = Buffer.empty(fused.elements, fused.dtype, src.array)
            self.path.carry(fused.planned, src, dst, deadline)
            start = 0
            for i in fused.members:
                length = self._sizes[i][self.path.rank]
                stop = start + length * self._rows[i].inner
                self._rows[i].restore(dst.array[start:stop], self._outputs[i].flat, length)
                start = stop
        return nested.rebuild(self._call.x, iter([output.finish() for output in self._outputs]))
