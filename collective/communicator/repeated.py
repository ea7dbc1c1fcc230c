"""Calls that a library in C repeats on other arrays, without the interpreter lock if possible."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import native
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import in_thread

if TYPE_CHECKING:
    from .calls.call import Planned
    from .communicator import Communicator

Array = np.ndarray[Any, np.dtype[Any]]
# Which of the two arrays that the library passes a plan reads or writes.
_NEITHER, _IN, _OUT = -1, 0, 1


@functools.lru_cache(maxsize=512)
def _memory(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


def view(address: int | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a library's array at an address, without a copy.

    Args:
        address: address of the first element; None or 0 for an array without elements.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    if not address:
        raise ValueError(f"an array of {nbytes} bytes at no address")
    # NumPy knows bfloat16 and its like only by name, so view the bytes first.
    flat: Array = np.frombuffer(_memory(nbytes).from_address(address), np.uint8).view(dtype)
    return flat.reshape(shape)


class RepeatedCall:
    """One call of a communicator, which a library in C makes again and again.

    The library first calls the core's ``run(first, second, in, out)``. If that returns another
    number than 0, the library calls Python, which calls :meth:`make`. After a call that was one
    plan of the native core on the library's own arrays, ``run`` can make the next one.

    Args:
        comm: the communicator.
        key: the two numbers by which the library names the call, of 64 bits each.
        clears: whether the library's output is zero after the call, which does not write it.
        turn: lock that the caller of :meth:`make` holds, from :func:`collective.native.turn`, if
            several threads of the library use the communicator.
        drain: function that waits until the library's calls have ended, if it makes them in the
            background while the program makes other calls; see :class:`Path`.
    """

    def __init__(
        self,
        comm: Communicator,
        key: tuple[int, int],
        clears: bool = False,
        turn: Any = None,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._path = comm._path
        if drain is not None:
            self._path.share(drain)
        self._key = key
        self._clears = clears
        self._turn = turn
        # The path opens its doors anew whenever the way of its calls changes. Only then may a call
        # that could not be unlocked be one that can.
        self._tried = 0

    def make(self, call: Callable[[], object], x: Array, out: Array) -> None:
        """Make the call in Python, or raise the error of the call that ``run`` has made.

        Args:
            call: function that makes the call with these arrays, alike each time.
            x, out: the library's input and output.
        """
        path, error = self._path, native.failure()
        if error is not None:
            path.capture(call, error)
            return
        door = path.door_of_library
        if door is None or self._tried == path.opened:
            call()
            return
        self._tried = path.opened
        carried = path.capture(call)
        if len(carried) == 1 and path.door_of_library is door:
            planned, src, dst = carried[0]
            arrays = _arrays(planned, src, dst, x, out, self._clears, path.rank)
            if arrays is not None:
                door.unlock(
                    *self._key, planned.plan, planned.request, arrays, in_thread.site or "",
                    path.timeout, self._turn,
                )  # fmt: skip

    def forget(self) -> None:
        """Let Python make the next call, if there is one."""
        native.forget(*self._key)


def _arrays(
    planned: Planned, src: Any, dst: Any, x: Array, out: Array, clears: bool, rank: int
) -> tuple[int, int, bool, bool, int, int, int] | None:
    """Return what ``Door.unlock`` needs to know about the arrays; None if C cannot repeat this."""
    source, target = _which(src, x, out), _which(dst, x, out)
    if planned.compares or source is None or target is None:
        return None
    # The root of a broadcast sends its input in place, and copies it to its output.
    copies = target == _IN
    if copies and not (
        source == _IN
        and (planned.request.operation, planned.request.root) == ("broadcast", rank)
        and x.nbytes == out.nbytes
    ):
        return None
    # Exactly one of these writes the output.
    if (target == _OUT) + copies + clears != 1:
        return None
    of_both = {buffer.dtype.code for buffer in (src, dst) if buffer is not None}
    code = max(of_both, default=0)
    # C has no codes of the 8-bit floats, which come after its own.
    if len(of_both) > 1 or code > BY_NAME["bfloat16"].code:
        return None
    return source, target, copies, clears, code, x.nbytes, out.nbytes


def _which(buffer: Any, x: Array, out: Array) -> int | None:
    """Return which array a buffer is; None if it is neither, or could be both."""
    if buffer is None:
        return _NEITHER
    if not isinstance(buffer, Buffer) or not isinstance(buffer.array, np.ndarray):
        return None
    same = [
        number
        for number, array in ((_IN, x), (_OUT, out))
        if (buffer.address, buffer.nbytes) == (array.__array_interface__["data"][0], array.nbytes)
    ]
    return same[0] if len(same) == 1 else None
