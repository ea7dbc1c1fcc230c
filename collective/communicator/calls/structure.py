"""Structures (nested lists, tuples and dicts of arrays): packing their leaves, and unpacking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collective.deadline import Deadline
from collective.memory import dtypes, nested
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType

from ..output import Output, outputs_of
from ..planned import Planned
from ..rows import Rows
from ..streams import nearest
from .call import Call
from .folding import CuttingFoldCall, FoldCall
from .views import Array, View, adapter_for, staged, views

__all__ = [
    "UINT8", "ArrivedLeaf", "StructureReduceScatter", "StructureReduction", "assemble", "bytes_of",
    "pack", "unpack",
]  # fmt: skip

UINT8 = dtypes.BY_NAME["uint8"]


# -- reductions: one message for each dtype ------------------------------------------------------


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


def _by_dtype(leaves: Sequence[View]) -> dict[DType, list[int]]:
    """Return the indices of the leaves of each dtype."""
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
        for dtype, members in _by_dtype(leaves).items():
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

    def __init__(self, call: CuttingFoldCall) -> None:
        path = self.path = call.path
        self._call = call
        self._leaves = leaves = views(path, self.operation, call.x)
        nesting = nested.skeleton(call.x)
        shapes = [[leaf.dtype.name, *leaf.array.shape] for leaf in leaves]
        structure = str(nesting), str(shapes), str(call.counts)
        cuts = [call.cut(leaf.array) for leaf in leaves]
        self._rows = rows = [cut[0] for cut in cuts]
        self._sizes = sizes = [cut[1] for cut in cuts]
        self._messages = []
        for dtype, members in _by_dtype(leaves).items():
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
                    rows[i], _ = call.cut(leaves[i].array)
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


# -- all other calls: one message of bytes ---------------------------------------------------------


class ArrivedLeaf(NamedTuple):
    """Description of one leaf that has arrived, to join its pieces.

    Attributes:
        rows: rows of an array of the leaf's shape.
        dtype: dtype of the leaf.
        lengths: number of rows from each sender.
    """

    rows: Rows
    dtype: DType
    lengths: Sequence[int]


def assemble(
    what: str, messages: Sequence[Array], parts: Sequence[ArrivedLeaf], likes: Sequence[Any],
    out: Any, nesting: Any, template: Any, who: str,
) -> Any:  # fmt: skip
    """Turn received bytes into arrays, and the arrays into a structure.

    Args:
        messages: bytes from each sender: its pieces of all leaves, one after the other.
        parts: descriptions of the leaves.
        likes: model of each leaf's array: an array, the name of a framework, or None.
        out: structure or array that receives the result, or None.
        nesting: nesting of the result; 0 for one array.
        template: structure whose keys and classes the result takes, if it is nested alike.
        what, who: the operation and this rank, for errors.
    """
    positions = [0] * len(messages)
    outs = outputs_of(what, out, nesting, len(parts), "result", who)
    results = []
    for (rows, dtype, lengths), like, leaf_out in zip(parts, likes, outs):
        pieces = []
        for sender, (message, length) in enumerate(zip(messages, lengths)):
            nbytes = length * rows.inner * dtype.itemsize
            pieces.append(message[positions[sender] : positions[sender] + nbytes])
            positions[sender] += nbytes
        raw = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        # The bytes become elements of a wider type, of at most 16 bytes, and must be aligned.
        if Buffer(raw, UINT8).address % 16:
            raw = raw.copy()
        total = sum(lengths)
        model = leaf_out if like is None and leaf_out is not None else like
        adapter = adapter_for(model, on_gpu=not isinstance(raw, np.ndarray))
        # The bytes are on the current stream. The result must be on the stream of the given array.
        near = raw if isinstance(rows.array, np.ndarray) else rows.array
        output = Output(what, leaf_out, adapter, rows.shape_with(total), dtype, near)
        rows.restore(raw.view(dtype.storage), output.flat, total)
        results.append(output.finish())
    if nesting == 0:
        return results[0]
    fits = template is not None and nested.skeleton(template) == nesting
    return nested.rebuild(template if fits else nesting, iter(results))


def bytes_of(arrays: Sequence[Array]) -> Array:
    """Return the bytes of the arrays, one after the other, on the device of the first array."""
    nbytes = sum(array.nbytes for array in arrays)
    packed = Buffer.empty(nbytes, UINT8, arrays[0] if arrays else None).array
    pack(arrays, packed)
    return packed


def pack(arrays: Sequence[Array], packed: Array) -> None:
    """Write the bytes of flat arrays to ``packed``, one after the other."""
    start = 0
    for array in arrays:
        packed[start : start + array.nbytes] = array.view(np.uint8)
        start += array.nbytes


def unpack(packed: Array, arrays: Sequence[Array]) -> None:
    """Read the bytes of flat arrays from ``packed``, one after the other."""
    start = 0
    for array in arrays:
        array.view(np.uint8)[:] = packed[start : start + array.nbytes]
        start += array.nbytes
