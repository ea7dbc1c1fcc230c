"""One reduction, as the algorithms apply it to buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collective.memory.buffer import Buffer

from . import arithmetic, pieces

if TYPE_CHECKING:
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp

__all__ = ["Folding"]


class Folding:
    """What happens to the elements: each input enters once, each result leaves once.

    Args:
        op: the operator.
        dtype: the element type.
        size: the number of ranks that are folded.
    """

    __slots__ = ("_fold", "_post", "_pre")

    def __init__(self, op: ReduceOp, dtype: DType, size: int) -> None:
        self._fold = arithmetic.fold(op, dtype)
        self._pre = arithmetic.pre(op, dtype, size)
        self._post = arithmetic.post(op, dtype, size)

    def enter(self, src: Buffer, room: Buffer | None = None) -> Buffer:
        """Return what this rank contributes: ``src`` itself, or scaled in ``room``.

        Args:
            src: a part of this rank's input.
            room: as many elements, to be overwritten if need be; it may be ``src``.
                None takes new memory.
        """
        if self._pre is None:
            return src
        if room is None:
            room = Buffer.empty(src.count, src.dtype)
        self._pre(src.array, room.array)
        return room

    def join(self, left: Buffer, right: Buffer, out: Buffer) -> None:
        """Set ``out``, which may be one of the two, to ``left op right``."""
        self._fold(left.array, right.array, out=out.array)

    def in_order(self, values: Sequence[Buffer], room: Buffer, out: Buffer) -> None:
        """Set ``out`` to ``((v0 op v1) op v2) op …``.

        Args:
            values: at least one, all of one length.
            room: scratch of that length, none of the others.
            out: may be one of ``values``.
        """
        total = values[0]
        for value in values[1:-1]:
            self.join(total, value, room)
            total = room
        if len(values) > 1:
            self.join(total, values[-1], out)
        else:
            pieces.copy(total, out)

    def leave(self, dst: Buffer) -> None:
        """Make a folded value, in place, the result."""
        if self._post is not None:
            self._post(dst.array, dst.array)
