"""All-reduce in place in symmetric memory, prepared once and repeated: the fastest path.

Every rank folds its part of the buffer from all ranks' memory and writes the result to
all of them. With the slices made beforehand, a repetition is two waits and two NumPy
calls for each chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collective import reduction
from collective.backends.onesided import CHUNK_BYTES
from collective.buffer import Buffer
from collective.call import Call
from collective.ops import ReduceOp

from .control import Control
from .symmetric import Heap

__all__ = ["IN_PLACE_BYTES", "InPlace"]

Array = np.ndarray[Any, Any]

#: Below this a copy through the slots costs less than the second wait.
IN_PLACE_BYTES = 24 << 10


class InPlace:
    """An in-place reduction of one buffer, at one place in symmetric memory.

    The call's digest is made to depend on the place: if the ranks' places do not
    correspond, the comparison of digests says so before anything is touched.
    """

    __slots__ = ("_call", "_chunks", "_fold", "_post", "_pre", "_scratch", "_whole")

    def __init__(self, call: Call, chunks: list[tuple[list[Array], list[Array]]]) -> None:
        self._call = call
        self._chunks = chunks

    @classmethod
    def prepare(
        cls, heap: Heap, control: Control, buffer: Buffer, op: ReduceOp, call: Call
    ) -> InPlace | bool:
        """Return the prepared reduction, or False if the buffer is not in symmetric memory."""
        array = buffer.array
        number, offset, _ = heap.locate(array)
        if not number:
            return False
        size, count = control.size, array.size
        start, stop = (count * r // size for r in (control.rank, control.rank + 1))
        step = max(1, CHUNK_BYTES // array.itemsize)
        views = []
        for rank in range(size):
            view = heap.view(number, rank, offset, array.dtype, count)
            assert view is not None  # the buffer itself keeps the segment
            views.append(view)
        chunks = []
        for low in range(start, stop, step):
            pieces = [view[low : min(low + step, stop)] for view in views]
            mine = pieces[control.rank]
            others = [piece for piece in pieces if piece is not mine]
            chunks.append((pieces, [mine, *others]))
        self = cls(call.at(number, offset), chunks)
        self._whole = array
        self._fold = reduction.fold(op, buffer.dtype)
        self._pre = reduction.pre(op, buffer.dtype, size)
        self._post = reduction.post(op, buffer.dtype, size)
        self._scratch = np.empty(min(step, stop - start) if size > 2 else 0, array.dtype)
        return self

    def run(self, control: Control, timeout: float) -> None:
        """Reduce.

        Raises:
            Disagreement: the ranks' calls or places differ; nothing was written.
        """
        if self._pre is not None:
            control.arrive(self._call, timeout)
            self._pre(self._whole, self._whole)
            control.sync(timeout)
        else:
            control.arrive(self._call, timeout)
        fold, post = self._fold, self._post
        for pieces, targets in self._chunks:
            first = targets[0]
            if len(pieces) == 2:
                fold(pieces[0], pieces[1], out=first)
            elif len(pieces) > 2:
                partial = self._scratch[: first.size]
                fold(pieces[0], pieces[1], out=partial)
                for piece in pieces[2:-1]:
                    fold(partial, piece, out=partial)
                fold(partial, pieces[-1], out=first)
            if post is not None:
                post(first, first)
            for target in targets[1:]:
                target[:] = first
        control.sync(timeout)
