"""Symmetric memory: segments in which every rank has a part and sees all parts."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from collective.errors import AllocationError

from .control import Control
from .segment import Segment

__all__ = ["Heap", "address_of"]

Array = np.ndarray[Any, Any]
_PAGE = 4096


def address_of(array: Array) -> int:
    """Return where the first element of ``array`` is."""
    return int(array.__array_interface__["data"][0])


class _Part:
    """One segment, known by its whole mapping without keeping it alive."""

    def __init__(self, number: int, root: Array, stride: int) -> None:
        self.number = number
        self.stride = stride
        self.root = weakref.ref(root)
        self.start = address_of(root)
        self.stop = self.start + root.size


class Heap:
    """This rank's symmetric segments. One is unmapped when its last array is dropped."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._count = 0
        self._by_root: dict[int, _Part] = {}
        self._by_number: dict[int, _Part] = {}

    def empty(self, nbytes: int, timeout: float) -> Array:
        """Return this rank's part of a new segment; all ranks call it together.

        Raises:
            AllocationError: on every rank, if there is no memory for all the parts.
        """
        control = self._control
        self._count += 1
        stride = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        segment = None
        note = b""
        if control.rank == 0:
            try:
                segment = Segment.create(stride * control.size)
                note = segment.path.encode()
            except Exception as error:  # the others wait for the path: tell them instead
                note = b"!" + str(error).encode()
        note = control.exchange(note, timeout)[0]
        failed = b""
        if not note.startswith(b"!") and segment is None:
            try:
                segment = Segment.open(note.decode())
            except Exception as error:
                failed = str(error).encode()
        failures = [note[1:]] if note.startswith(b"!") else control.exchange(failed, timeout)
        if segment is not None:
            segment.unlink()
            segment.close_descriptor()
        for rank, text in enumerate(failures):
            if text:
                raise AllocationError(
                    f"empty: {nbytes} bytes on each of {control.size} ranks: {text.decode()} "
                    f"[on rank {rank}]"
                )
        assert segment is not None
        root = np.frombuffer(segment.map, np.uint8)
        part = _Part(self._count, root, stride)
        self._by_root[id(root)] = self._by_number[part.number] = part
        weakref.finalize(root, self._forget, id(root), part.number).atexit = False
        return root[control.rank * stride : control.rank * stride + nbytes]

    def _forget(self, root: int, number: int) -> None:
        self._by_root.pop(root, None)
        self._by_number.pop(number, None)

    def locate(self, array: Array | None) -> tuple[int, int, int]:
        """Return the segment's number, the offset in this rank's part, and the address.

        The number is 0 for ordinary memory and for no array.
        """
        if array is None:
            return 0, 0, 0
        address = address_of(array)
        base = array.base
        if base is None or not self._by_root:
            return 0, 0, address
        part = self._by_root.get(id(base))
        # A view's base is the segment's root, or an array over the memory of another
        # framework, which does not lead to the root: such memory is known by its address.
        if part is None and getattr(base, "base", base) is not None:
            for candidate in list(self._by_root.values()):
                if candidate.start <= address < candidate.stop:
                    part = candidate
        if part is None:
            return 0, 0, address
        offset = address - part.start - self._control.rank * part.stride
        if offset < 0 or offset + array.nbytes > part.stride:
            return 0, 0, address  # a peer's part
        return part.number, offset, address

    def view(
        self, number: int, rank: int, offset: int, dtype: np.dtype[Any], count: int
    ) -> Array | None:
        """Return ``count`` elements of ``rank``'s part, or None if they are not mapped here."""
        part = self._by_number.get(number)
        root = None if part is None else part.root()
        if part is None or root is None:
            return None
        start = rank * part.stride + offset
        return root[start : start + count * dtype.itemsize].view(dtype)
