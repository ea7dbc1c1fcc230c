"""``MPI.Pickle``: objects as bytes, by functions that the program may replace."""

from __future__ import annotations

import pickle as python
from collections.abc import Callable, Iterable
from typing import Any

from .memory import buffer

_THRESHOLD = 256 * 1024


class Pickle:
    """Functions that turn objects into bytes and back.

    Args:
        dumps: function of an object, or of an object and a protocol, that returns bytes.
        loads: function of bytes that returns the object.
        protocol: number of the protocol of pickle.
        threshold: number of bytes from which a buffer travels beside the pickle.
    """

    def __init__(
        self, dumps: Callable[..., bytes] | None = None, loads: Callable[..., Any] | None = None,
        protocol: int | None = None, threshold: int | None = None,
    ) -> None:  # fmt: skip
        self._dumps, self._loads = dumps or python.dumps, loads or python.loads
        highest = python.HIGHEST_PROTOCOL if dumps is None else None
        self.PROTOCOL = highest if protocol is None else protocol
        self.THRESHOLD = threshold

    @property
    def THRESHOLD(self) -> int:
        """Number of bytes from which a buffer travels beside the pickle; None sets the default."""
        return self._threshold

    @THRESHOLD.setter
    def THRESHOLD(self, threshold: int | None) -> None:
        self._threshold = _THRESHOLD if threshold is None else threshold

    def dumps(self, obj: Any) -> bytes:
        """Return an object as bytes."""
        if self.PROTOCOL is None:
            return self._dumps(obj)
        return self._dumps(obj, self.PROTOCOL)

    def loads(self, data: Any) -> Any:
        """Return the object of bytes."""
        return self._loads(data)

    def dumps_oob(self, obj: Any) -> tuple[bytes, list[buffer]]:
        """Return an object as bytes, and its long buffers beside them."""
        buffers: list[buffer] = []

        def keep_in(picked: python.PickleBuffer) -> bool:
            raw = picked.raw()
            if raw.nbytes < self._threshold:
                return True
            buffers.append(buffer(raw))
            return False

        protocol = self.PROTOCOL
        if protocol is None or 0 <= protocol < 5:
            protocol = 5
        return self._dumps(obj, protocol, buffer_callback=keep_in), buffers

    def loads_oob(self, data: Any, buffers: Iterable[Any]) -> Any:
        """Return the object of bytes, and of buffers beside them."""
        return self._loads(data, buffers=buffers)


#: The functions that the calls on objects use.
pickle = Pickle()


def loads(data: Any) -> Any:
    """Return the object of bytes, by ``MPI.pickle``; None for a message without bytes."""
    return pickle.loads(data) if len(data) else None
