"""Calls that send Python objects instead of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.contract.secret import REMEDY
from collective.deadline import Deadline
from collective.errors import InvalidArgumentError

from . import objects
from .host_calls import HostCalls
from .status import Status

__all__ = ["ObjectCalls"]


class ObjectCalls:
    """Calls of a communicator that send Python objects, as bytes.

    Args:
        hosted: calls of the communicator that send the bytes.
        operation: name of the communicator's method, for errors.
        pickle: whether objects are sent as pickles.
        open_to_others: whether ranks of several hosts have connected without a secret, so that
            strangers may have joined.

    Raises:
        InvalidArgumentError: ``pickle`` is true and strangers may have joined. Reading a pickle
            runs code that its writer chose.
    """

    __slots__ = ("_hosted", "_operation", "_pickle", "_who")

    def __init__(
        self, hosted: HostCalls, operation: str, pickle: bool, open_to_others: bool
    ) -> None:
        self._hosted = hosted
        self._operation = operation
        self._pickle = pickle
        self._who = f"[rank {hosted.rank} of {hosted.size}]"
        if pickle and open_to_others:
            raise InvalidArgumentError(
                f"{operation}: pickle=True, but the hosts have connected without a secret: anybody "
                f"who reaches the port may have joined, and reading a pickle runs its writer's "
                f"code {self._who}. {REMEDY}; or send plain data."
            )

    def broadcast(self, obj: Any, root: int, timeout: float | None) -> Any:
        """Return the root's object."""
        at_root = self._hosted.rank == root
        encoded = self._encoded(obj) if at_root else None
        raw = self._hosted.broadcast(encoded, root=root, timeout=timeout)
        if at_root and (self._pickle or objects.arrives_alike(obj)):
            return obj
        return self._decoded(raw, root)

    def gather(self, obj: Any, root: int, timeout: float | None) -> list[Any] | None:
        """Return the list of the ranks' objects at the root; None on the other ranks."""
        joined = self._hosted.gather(self._framed(obj), root=root, timeout=timeout)
        return None if joined is None else self._unframed(joined)

    def all_gather(self, obj: Any, timeout: float | Deadline | None) -> list[Any]:
        """Return the list of the ranks' objects."""
        return self._unframed(self._hosted.all_gather(self._framed(obj), timeout=timeout))

    def scatter(self, objs: Sequence[Any] | None, root: int, timeout: float | None) -> Any:
        """Return this rank's item of the root's sequence."""
        joined, counts, size = None, None, self._hosted.size
        if self._hosted.rank == root:
            if objs is None or len(objs) != size:
                count = None if objs is None else len(objs)
                raise InvalidArgumentError(
                    f"scatter_object: {count} objects for {size} ranks {self._who}."
                )
            encoded = [self._encoded(obj) for obj in objs]
            counts = [raw.size for raw in encoded]
            joined = np.concatenate(encoded)
        raw = self._hosted.scatter(joined, root=root, counts=counts, timeout=timeout)
        return self._decoded(raw, root)

    def send(self, obj: object, dst: int, tag: int, timeout: float | None) -> None:
        """Send an object to rank ``dst``."""
        self._hosted.send(self._encoded(obj), dst, tag=tag, timeout=timeout)

    def recv(self, src: int, tag: int, timeout: float | None) -> Any:
        """Return the object that rank ``src`` has sent; None if ``src`` is ``collective.NULL``."""
        status = Status()
        raw = self._hosted.recv(src, tag=tag, timeout=timeout, status=status)
        return None if raw is None else self._decoded(raw, status.source)

    def _encoded(self, obj: Any) -> np.ndarray[Any, Any]:
        return objects.encode(obj, self._pickle, self._operation)

    def _decoded(self, raw: np.ndarray[Any, Any], sender: int) -> Any:
        what = f"{self._operation} from rank {sender} {self._who}"
        return objects.decode(raw, self._pickle, what)

    def _framed(self, obj: Any) -> np.ndarray[Any, Any]:
        """Return the bytes of an object after their length.

        Gathered bytes are joined, so the lengths must show where each rank's bytes end.
        """
        raw = self._encoded(obj)
        return np.concatenate([np.array([raw.size], np.int64).view(np.uint8), raw])

    def _unframed(self, joined: np.ndarray[Any, Any]) -> list[Any]:
        values, start = [], 0
        for sender in range(self._hosted.size):
            length = int(joined[start : start + 8].copy().view(np.int64)[0])
            values.append(self._decoded(joined[start + 8 : start + 8 + length], sender))
            start += 8 + length
        return values
