"""Binary tree of a fold whose shape depends only on the number of its leaves.

The leaves are numbered 0 to ``total - 1``. A node covers the leaves ``start`` to ``stop - 1``,
where ``stop - start`` is a power of two and ``start`` is a multiple of it. Its children are its two
halves. At the right edge a node has fewer leaves if ``total`` is no power of two, and a node whose
right half would be empty is its left half. So the tree of seven leaves is
``((0 1) (2 3)) ((4 5) 6)``.

A rank that holds some consecutive leaves can fold the nodes among them without knowing the other
leaves. There are at most two such nodes of each size.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective.memory.buffer import Buffer

from . import arithmetic, pieces

if TYPE_CHECKING:
    from .folds import Folding


class Leaves(NamedTuple):
    """Leaves ``start`` to ``stop - 1`` of a tree."""

    start: int
    stop: int


class Join(NamedTuple):
    """One step of a fold. Its operands and its result are in numbered slots.

    Attributes:
        left, right: slots of the two operands. Without a right operand the step takes an input in.
        out: slot of the result; it may be the slot of an operand.
    """

    left: int
    right: int | None
    out: int


def nodes(start: int, stop: int, total: int) -> list[Leaves]:
    """Return the largest nodes that cover the leaves ``start`` to ``stop - 1``, in order.

    Args:
        start, stop: consecutive leaves of a tree.
        total: number of leaves of the tree.
    """
    found = []
    while start < stop:
        # The largest power of two of which `start` is a multiple.
        width = start & -start if start else 1 << (total - 1).bit_length()
        while min(start + width, total) > stop:
            width //= 2
        found.append(Leaves(start, min(start + width, total)))
        start += width
    return found


@dataclass
class _StackEntry:
    """Node on the stack of a :class:`Merging`.

    Attributes:
        span: leaves of the node.
        slot: slot that holds its value.
        owned: whether the slot is scratch, which later folds may overwrite.
    """

    span: Leaves
    slot: int
    owned: bool


@dataclass
class Merging:
    """Stack that merges nodes as they arrive, from left to right, like a binary counter.

    At most ``2 log2(total)`` nodes are on the stack. The numbers of slots are the caller's for the
    nodes that it pushes, and ``first, first + 1, …`` for scratch.

    Args:
        total: number of leaves of the tree.
        first: number of the first slot of scratch.

    Attributes:
        stack: nodes that no other node on the stack is a sibling of.
        scratch: number of slots of scratch that have been used.
    """

    total: int
    first: int
    stack: list[_StackEntry] = field(default_factory=list)
    scratch: int = 0
    _free: list[int] = field(default_factory=list)

    def room(self) -> int:
        """Return a free slot of scratch."""
        if self._free:
            return self._free.pop()
        self.scratch += 1
        return self.first + self.scratch - 1

    def push(self, span: Leaves, slot: int, owned: bool = False) -> list[Join]:
        """Take the next node, and return the folds that merge it with the nodes before it.

        Args:
            span: leaves of the node.
            slot: slot that holds its value.
            owned: whether the slot is scratch, from :meth:`room`.
        """
        steps = []
        right = _StackEntry(span, slot, owned)
        while self.merges(right.span):
            left = self.stack.pop()
            if left.owned:
                out = left.slot
                if right.owned:
                    self._free.append(right.slot)
            else:
                out = right.slot if right.owned else self.room()
            steps.append(Join(left.slot, right.slot, out))
            right = _StackEntry(Leaves(left.span.start, right.span.stop), out, True)
        self.stack.append(right)
        return steps

    def merges(self, right: Leaves) -> bool:
        """Return whether the next node and the node on top of the stack are halves of one node."""
        if not self.stack:
            return False
        left = self.stack[-1].span
        # Only a node at the right edge may lack leaves, and that node has no right sibling.
        width = left.stop - left.start
        end = min(left.start + 2 * width, self.total)
        return left.start % (2 * width) == 0 and right.stop == end


class _Scratch(threading.local):
    """Scratch that a thread keeps from call to call.

    The kernel maps fresh memory page by page, which takes longer than to fold the elements in it.

    Attributes:
        memory: bytes; None before the first call, and while a call uses them.
    """

    memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def take(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return at least ``nbytes`` bytes, which belong to the caller."""
        memory, self.memory = self.memory, None
        if memory is None or memory.nbytes < nbytes:
            memory = np.empty(nbytes, np.uint8)
        return memory


_kept = _Scratch()


class NodeFolds:
    """Folds of consecutive nodes into the fewest nodes that they make up.

    Args:
        spans: nodes of the inputs, in order and without gaps.
        total: number of leaves of the tree.
        folding: arithmetic of the reduction.
        enters: whether the inputs enter the reduction here, so that they may have to be scaled.

    Attributes:
        results: spans of the resulting nodes.
        scales: whether the inputs are scaled.
    """

    def __init__(self, spans: Sequence[Leaves], total: int, folding: Folding, enters: bool) -> None:
        self._folding = folding
        self.scales = enters and folding.scales
        count, steps = len(spans), list[Join]()
        merging = Merging(total, first=count)
        for slot, span in enumerate(spans):
            if self.scales:
                room = merging.room()
                steps.append(Join(slot, None, room))
                steps += merging.push(span, room, owned=True)
            else:
                steps += merging.push(span, slot)
        self.results = [entry.span for entry in merging.stack]
        self._scratch = merging.scratch
        # The last step of each result writes to its output. A result that is an input is copied.
        for nth, entry in enumerate(merging.stack, count + self._scratch):
            last = max((n for n, step in enumerate(steps) if step.out == entry.slot), default=None)
            if last is None:
                steps.append(Join(entry.slot, None, nth))
            else:
                steps[last] = steps[last]._replace(out=nth)
        self._steps = steps
        self._in_c = None
        if not self.scales:
            slots = [(left, -1 if right is None else right, out) for left, right, out in steps]
            self._in_c = arithmetic.schedule(
                folding.op, folding.dtype, count, self._scratch, len(self.results),
                struct.pack(f"{3 * len(slots)}i", *(slot for step in slots for slot in step)),
            )  # fmt: skip

    def run(self, inputs: Sequence[Buffer], outs: Sequence[Buffer]) -> None:
        """Fold the inputs into ``outs``, one buffer for each result.

        All buffers have one length. The elements are folded a chunk at a time, so that the scratch
        stays in the processor's cache. If the native core has the fold, C makes all steps.
        """
        if not outs or not outs[0].count:
            return
        if self._in_c is not None and self._in_c(
            [buffer.array for buffer in inputs], [out.array for out in outs]
        ):
            return
        count, dtype = outs[0].count, outs[0].dtype
        # A step has three operands, so a chunk is half as long as that of a fold of two.
        width = min(max(1, pieces.chunk(dtype.itemsize) // 2), count)
        scratch = _kept.take(self._scratch * width * dtype.itemsize)
        try:
            memory = scratch[: self._scratch * width * dtype.itemsize].view(dtype.storage)
            rooms = pieces.cut(Buffer(memory, dtype), [width] * self._scratch)
            self._run(inputs, outs, rooms, width)
        finally:
            _kept.memory = scratch

    def _run(
        self, inputs: Sequence[Buffer], outs: Sequence[Buffer], rooms: Sequence[Buffer], width: int
    ) -> None:
        count = outs[0].count
        for low in range(0, count, width):
            high = min(low + width, count)
            slots = [buffer.part(low, high) for buffer in inputs]
            slots += [room.part(0, high - low) for room in rooms]
            slots += [out.part(low, high) for out in outs]
            for left, right, out in self._steps:
                if right is not None:
                    self._folding.join(slots[left], slots[right], slots[out])
                elif self.scales:
                    self._folding.enter(slots[left], slots[out])
                else:
                    pieces.copy(slots[left], slots[out])
