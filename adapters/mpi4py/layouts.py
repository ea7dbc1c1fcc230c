"""Which bytes of memory belong to a message: layouts of elements, and pieces of memory with some.

A layout is a list of blocks: (displacement in bytes, number of elements, their layout). A message
travels packed, that is without the gaps. The indices of a layout's bytes are computed at its first
use, as one NumPy array.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .exceptions import CLASSES, MPIError
from .handles import OpaqueObject
from .memory import Bytes, address_of, raw

_Block = tuple[int, int, "TypeLayout"]


class TypeLayout(OpaqueObject):
    """Bytes of one element.

    Args:
        combiner: how it was made, one of ``COMBINERS``.
        params: arguments of the method that made it, without the datatype itself.
        blocks: its blocks; a predefined type has none.
        bounds: lower bound and extent, if the blocks do not determine them.

    Attributes:
        size: number of bytes that travel.
        lb, extent: lower bound and extent.
        true_lb, true_extent: the same of the bytes that travel.
        dense: whether the bytes follow each other without gaps from the first.
        dtype: NumPy's type of the elements as they travel; None if they are of several types.
        char: their character code, or "".
        text, code: type string and code, such as "i4".
    """

    def __init__(
        self, combiner: str, params: dict[str, Any] | None = None, blocks: Sequence[_Block] = (),
        bounds: tuple[int, int] | None = None, base: TypeLayout | None = None,
    ) -> None:  # fmt: skip
        self.combiner = combiner
        self.params = params or {}
        self.base = base
        self.lb: int
        self.extent: int
        self.true_lb: int
        self.true_extent: int
        self.blocks = [block for block in blocks if block[1]]
        self.size: int = sum(count * child.size for _, count, child in self.blocks)
        ends: list[int] = []
        true_ends: list[int] = []
        for offset, count, child in self.blocks:
            last = offset + (count - 1) * child.extent
            for start in (offset, last):
                ends += (start + child.lb, start + child.lb + child.extent)
                if child.size:
                    first = start + child.true_lb
                    true_ends += (first, first + child.true_extent)
        self.align: int = max((child.align for *_, child in self.blocks), default=1)
        self.lb, self.extent = bounds or _bounds(ends)
        if combiner == "STRUCT" and bounds is None:
            self.extent += -self.extent % self.align
        self.true_lb, self.true_extent = _bounds(true_ends)
        self.dense = self.lb == 0 and self.size == self.extent and self._in_sequence()
        leaves = {child.dtype for *_, child in self.blocks}
        self.dtype: np.dtype[Any] | None = leaves.pop() if len(leaves) == 1 else None
        self.char = self.text = self.code = ""

    def _in_sequence(self) -> bool:
        position = 0
        for offset, count, child in self.blocks:
            if offset != position or not child.dense:
                return False
            position += count * child.size
        return True

    @cached_property
    def _leaves(self) -> int:
        """Number of predefined elements in one element."""
        return sum(count * child._leaves for _, count, child in self.blocks) or 1

    def basic_elements(self, nbytes: int) -> tuple[int, int]:
        """Return how many predefined elements ``nbytes`` bytes hold, and the bytes left."""
        whole, rest = divmod(nbytes, self.size) if self.size else (0, nbytes)
        elements = whole * self._leaves
        for _, count, child in self.blocks if rest else ():
            part = min(rest, count * child.size)
            number, left = child.basic_elements(part)
            elements, rest = elements + number, rest - part + left
            if left:
                break
        return elements, rest

    @cached_property
    def indices(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Offsets of the bytes of one element, in the order in which they travel."""
        if not self.blocks:
            return np.arange(self.size)
        parts = [
            ((offset + np.arange(count) * child.extent)[:, None] + child.indices).reshape(-1)
            for offset, count, child in self.blocks
        ]
        return np.concatenate(parts)

    def places(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the offsets of the bytes of ``count`` elements."""
        return ((np.arange(count) * self.extent)[:, None] + self.indices).reshape(-1)

    def span(self, count: int) -> tuple[int, int]:
        """Return the first offset of the bytes of ``count`` elements, and that after the last."""
        ends = [self.true_lb, self.true_lb + (count - 1) * self.extent]
        return min(ends), max(ends) + self.true_extent


def _bounds(ends: Sequence[int]) -> tuple[int, int]:
    return (min(ends), max(ends) - min(ends)) if ends else (0, 0)


class Piece:
    """Elements of one datatype in memory.

    Args:
        memory: the bytes of the object; None for ``BOTTOM``.
        offset: offset of the first element in ``memory`` in bytes; an address for ``BOTTOM``.
        count: number of elements.
        layout: their datatype.

    Attributes:
        nbytes: number of bytes that travel.

    Raises:
        MPIError: ``count`` is negative.
    """

    __slots__ = ("count", "layout", "memory", "nbytes", "offset")

    def __init__(self, memory: Bytes | None, offset: int, count: int, layout: TypeLayout) -> None:
        if count < 0:
            raise MPIError(CLASSES["ERR_COUNT"], f"message: negative count {count}")
        self.memory = memory
        self.offset = offset
        self.count = count
        self.layout = layout
        self.nbytes = count * layout.size

    def _whole(self) -> tuple[Bytes, int]:
        """Return the memory that the elements span, and the offset of the first in it."""
        low, high = self.layout.span(self.count)
        start = self.offset if self.memory is None else address_of(self.memory) + self.offset
        # Elements may lie outside of the object, as with one column of a matrix that begins at
        # an element of its own.
        array = raw(start + low, high - low, self.memory)
        return array, low

    @property
    def direct(self) -> Bytes | None:
        """The bytes themselves, if they follow each other; None if there are gaps."""
        layout, nbytes = self.layout, self.nbytes
        if not nbytes:
            return np.empty(0, np.uint8)
        if not layout.dense:
            return None
        if self.memory is None:
            return raw(self.offset, nbytes)
        if self.offset < 0:
            raise ValueError(
                f"message: {self.count} elements of {layout.name or 'the datatype'} begin "
                f"{-self.offset} bytes before the buffer"
            )
        if self.offset + nbytes > len(self.memory):
            raise ValueError(
                f"message: {self.count} elements of {layout.name or 'the datatype'} are "
                f"{nbytes} bytes, but the buffer has {len(self.memory) - self.offset} bytes"
            )
        return self.memory[self.offset : self.offset + nbytes]

    def packed(self) -> Bytes:
        """Return the bytes that travel: the memory itself, or a copy without gaps."""
        direct = self.direct
        if direct is not None:
            return direct
        array, low = self._whole()
        places: Bytes = array[self.layout.places(self.count) - low]
        return places

    def unpack(self, data: Any) -> None:
        """Write received bytes to their places; fewer than expected fill the first elements."""
        received = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        direct = self.direct
        if direct is not None:
            direct[: len(received)] = received
            return
        array, low = self._whole()
        array[(self.layout.places(self.count) - low)[: len(received)]] = received
