"""The memory of peers: symmetric memory, which all ranks map, and memory that the kernel reads."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.backends.onesided import Region
from collective.deadline import Deadline
from collective.errors import AllocationError
from collective.platform import SHARED_MEMORY, descriptor_path

from .control import Control, address_of
from .segment import Segment, map_shared

Array = np.ndarray[Any, Any]
_PAGE = 4096


class _SymmetricSegment:
    """Symmetric segment. It refers to the array of the whole mapping, but does not keep it alive.

    Attributes:
        own, own_bytes: address and length of this rank's part.
    """

    def __init__(self, number: int, root: Array, rank: int, stride: int) -> None:
        self.number = number
        self.root = weakref.ref(root)
        self.start = address_of(root)
        self.stop = self.start + root.size
        self.own = self.start + rank * stride
        self.own_bytes = stride

    def of(self, rank: int) -> Array | None:
        """Return the part of ``rank``, or None if it is no longer mapped in this process."""
        root, stride = self.root(), self.own_bytes
        return None if root is None else root[rank * stride : (rank + 1) * stride]


class _Adopted(_SymmetricSegment):
    """Symmetric segment of memory that the ranks already had: one mapping for each rank.

    The mapping of this rank's own memory is the root.
    """

    def __init__(self, number: int, mapped: Sequence[Array], rank: int) -> None:
        super().__init__(number, mapped[rank], 0, mapped[rank].size)
        self._rank = rank
        # An entry for the root would keep the root alive, and with it the other mappings.
        self._others = [None if r == rank else array for r, array in enumerate(mapped)]

    def of(self, rank: int) -> Array | None:
        return self.root() if rank == self._rank else self._others[rank]


class Heap:
    """Symmetric segments of this rank. A segment is unmapped when its last array is dropped."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._count = 0
        self._listener: Callable[..., object] = lambda *segment: None
        self._by_root: dict[int, _SymmetricSegment] = {}
        self._by_number: dict[int, _SymmetricSegment] = {}

    def empty(self, nbytes: int, deadline: Deadline) -> Array:
        """Return this rank's part of a new segment; all ranks call it together.

        Raises:
            AllocationError: on every rank, if there is no memory for all the parts.
        """
        control = self._control
        self._count += 1
        stride = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        segment = None
        message = b""
        if control.rank == 0:
            try:
                segment = Segment.create(stride * control.size)
                message = segment.path.encode()
            except Exception as error:  # send the error to the other ranks, which wait for a path
                message = b"!" + str(error).encode()
        message = control.share(message, deadline)[0]
        failed = b""
        if not message.startswith(b"!") and segment is None:
            try:
                segment = Segment.open(message.decode(), stride * control.size)
            except Exception as error:
                failed = str(error).encode()
        failures = [message[1:]] if message.startswith(b"!") else control.share(failed, deadline)
        if segment is not None:
            segment.unlink()
            # Only the mapping is needed. The locks of the control segment show which ranks live.
            segment.close_descriptor()
        for rank, text in enumerate(failures):
            if text:
                raise AllocationError(
                    f"empty: {nbytes} bytes on each of {control.size} ranks: "
                    f"{text.decode(errors='replace')} "
                    f"[on rank {rank}]"
                )
        assert segment is not None
        root = np.frombuffer(segment.map, np.uint8)
        self._know(_SymmetricSegment(self._count, root, control.rank, stride), root)
        return root[control.rank * stride : control.rank * stride + nbytes]

    def adopt(
        self, nbytes: int, move: Callable[[], int], allowed: bool, deadline: Deadline
    ) -> Array | None:
        """Make memory symmetric that each rank already has; all ranks call this together.

        Args:
            nbytes, move: as in :meth:`Communicator.adopt`.
            allowed: whether this rank's settings allow this.
            deadline: for the whole call.

        Returns:
            This rank's memory, mapped a second time; None on every rank if some rank failed.
        """
        control = self._control
        self._count += 1
        if not control.unanimous(allowed and _has_room(nbytes * control.size), deadline):
            return None
        message = b""
        try:
            descriptor = move()
            status = os.fstat(descriptor)
            file = descriptor_path(descriptor), status.st_dev, status.st_ino
            message = json.dumps(file).encode()
        except Exception:
            # The framework may raise any error. The other ranks wait for the message, and an empty
            # message makes all ranks return None.
            pass
        mapped = []
        messages = control.share(message, deadline)
        if all(messages):
            try:
                for path, device, inode in map(json.loads, messages):
                    shared = map_shared(path, (device, inode), nbytes)
                    mapped.append(np.frombuffer(shared, np.uint8))
            except (OSError, TypeError, ValueError):
                mapped.clear()
        if not control.unanimous(bool(mapped), deadline):
            return None
        root = mapped[control.rank]
        self._know(_Adopted(self._count, mapped, control.rank), root)
        return root

    def tell(self, listener: Callable[..., object]) -> None:
        """Call ``listener`` for every new segment, and for every segment that is unmapped.

        For a new segment the arguments are its number, the bytes of a part and the addresses of the
        parts. For an unmapped segment the only argument is its number.
        """
        self._listener = listener

    def _know(self, part: _SymmetricSegment, root: Array) -> None:
        ranks = range(self._control.size)
        addresses = [address_of(array) for r in ranks if (array := part.of(r)) is not None]
        self._listener(part.number, part.own_bytes, addresses)
        self._by_root[id(root)] = self._by_number[part.number] = part
        weakref.finalize(root, self._forget, id(root), part.number).atexit = False

    def _forget(self, root: int, number: int) -> None:
        self._by_root.pop(root, None)
        self._by_number.pop(number, None)
        self._listener(number)

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
        # The base of a view is the segment's root, or an array over the memory of another
        # framework. The second kind does not refer to the root, so compare the address.
        if part is None and getattr(base, "base", base) is not None:
            for candidate in list(self._by_root.values()):
                if candidate.start <= address < candidate.stop:
                    part = candidate
        if part is None:
            return 0, 0, address
        offset = address - part.own
        if offset < 0 or offset + array.nbytes > part.own_bytes:
            return 0, 0, address  # the array is in a peer's part
        return part.number, offset, address

    def view(
        self, number: int, rank: int, offset: int, dtype: np.dtype[Any], count: int
    ) -> Array | None:
        """Return ``count`` elements of ``rank``'s part, or None if this process has not mapped it.

        Raises:
            BackendError: the rank has announced an offset that is not in its part.
        """
        part = self._by_number.get(number)
        whole = None if part is None else part.of(rank)
        if whole is None:
            return None
        nbytes = count * dtype.itemsize
        if not 0 <= offset <= whole.size - nbytes or offset % dtype.alignment:
            text = f"{nbytes} bytes at offset {offset} of symmetric memory of {whole.size} bytes"
            self._control.refuse(rank, text)
        return whole[offset : offset + nbytes].view(dtype)


def _has_room(nbytes: int) -> bool:
    """Tell whether POSIX shared memory may grow by ``nbytes``, at most half of the free space."""
    try:
        free = os.statvfs(SHARED_MEMORY)
    except OSError:
        return False
    return 2 * nbytes <= free.f_bavail * free.f_frsize


class RemoteRegion(Region):
    """Ordinary memory of a peer, which the kernel reads in one copy."""

    __slots__ = ("_address", "_fetch", "_itemsize", "_rank")

    def __init__(self, control: Control, rank: int, address: int, itemsize: int) -> None:
        self._fetch = control.fetch
        self._rank = rank
        self._address = address
        self._itemsize = itemsize

    def read(self, start: int, stop: int, scratch: Array) -> Array:
        out = scratch[: stop - start]
        self.copy(start, stop, out)
        return out

    def copy(self, start: int, stop: int, out: Array) -> None:
        self._fetch(self._rank, self._address + start * self._itemsize, out)
