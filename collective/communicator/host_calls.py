"""Calls on arrays that belong to the library, and Python objects that travel as such arrays.

A transport that only takes a program's arrays on GPUs takes these arrays, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.control.secret import REMEDY
from collective.deadline import Deadline
from collective.errors import InvalidArgumentError

from . import objects
from .calls.broadcasting import Broadcast
from .calls.gathering import AllGather, AllGatherObjects, Gather
from .calls.message import Recv, Send, Status
from .calls.scattering import Scatter
from .path import Path


class HostCalls:
    """Calls of a communicator on NumPy arrays, ordered with the communicator's other calls.

    Args:
        path: path of the communicator.
    """

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def broadcast(self, x: Any, *, root: int = 0) -> Any:
        """Give every rank the array of ``root``; the other ranks pass None."""
        return self._path.make(Broadcast(self._path, x, root=root, hosted="array"), None, False)

    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Join the ranks' arrays at every rank."""
        call = AllGather(self._path, x, counts=counts, hosted="array")
        return self._path.make(call, timeout, False)

    def send(self, x: Any, dst: int, *, tag: int = 0) -> None:
        """Send an array to rank ``dst``."""
        self._path.post(Send(self._path, x, dst, tag, hosted="array"), None, False)

    def recv(self, src: int, *, tag: int = 0) -> Any:
        """Receive an array from rank ``src``."""
        call = Recv(self._path, None, src, tag, None, None, hosted="array")
        return self._path.post(call, None, False)


class ObjectCalls:
    """Calls of a communicator that send Python objects, as bytes.

    Args:
        path: path of the communicator.
        operation: name of the communicator's method, for errors.
        pickle: whether objects are sent as pickles.
        open_to_others: whether ranks of several hosts have connected without a secret, so that
            strangers may have joined.

    Raises:
        InvalidArgumentError: ``pickle`` is true and strangers may have joined. Reading a pickle
            runs code that its writer chose.
    """

    __slots__ = ("_operation", "_path", "_pickle", "_who")

    def __init__(self, path: Path, operation: str, pickle: bool, open_to_others: bool) -> None:
        self._path = path
        self._operation = operation
        self._pickle = pickle
        self._who = path.who
        if pickle and open_to_others:
            raise InvalidArgumentError(
                f"{operation}: pickle=True, but the hosts have connected without a secret: anybody "
                f"who reaches the port may have joined, and reading a pickle runs its writer's "
                f"code {self._who}. {REMEDY}; or send plain data."
            )

    def broadcast(self, obj: Any, root: int, timeout: float | None) -> Any:
        """Return the root's object."""
        at_root = self._path.rank == root
        encoded = self._encoded(obj) if at_root else None
        call = Broadcast(self._path, encoded, root=root, hosted="object")
        raw = self._path.make(call, timeout, False)
        if at_root and (self._pickle or objects.arrives_alike(obj)):
            return obj
        return self._decoded(raw, root)

    def gather(self, obj: Any, root: int, timeout: float | None) -> list[Any] | None:
        """Return the list of the ranks' objects at the root; None on the other ranks."""
        call = Gather(self._path, self._framed(obj), root=root, hosted="object")
        joined = self._path.make(call, timeout, False)
        return None if joined is None else self._unframed(joined)

    def all_gather(self, obj: Any, timeout: float | Deadline | None) -> list[Any]:
        """Return the list of the ranks' objects."""
        if self._path.object_heads:
            gathering = AllGatherObjects(self._path, self._encoded(obj))
            parts = self._path.make(gathering, timeout, False)
            return [self._decoded(raw, sender) for sender, raw in enumerate(parts)]
        call = AllGather(self._path, self._framed(obj), hosted="object")
        return self._unframed(self._path.make(call, timeout, False))

    def scatter(self, objs: Sequence[Any] | None, root: int, timeout: float | None) -> Any:
        """Return this rank's item of the root's sequence."""
        joined, counts, size = None, None, self._path.size
        if self._path.rank == root:
            if objs is None or len(objs) != size:
                count = None if objs is None else len(objs)
                raise InvalidArgumentError(
                    f"scatter_object: {count} objects for {size} ranks {self._who}."
                )
            encoded = [self._encoded(obj) for obj in objs]
            counts = [raw.size for raw in encoded]
            joined = np.concatenate(encoded)
        call = Scatter(self._path, joined, root=root, counts=counts, hosted="object")
        return self._decoded(self._path.make(call, timeout, False), root)

    def send(self, obj: object, dst: int, tag: int, timeout: float | None) -> None:
        """Send an object to rank ``dst``."""
        call = Send(self._path, self._encoded(obj), dst, tag, hosted="object")
        self._path.post(call, timeout, False)

    def recv(self, src: int, tag: int, timeout: float | None) -> Any:
        """Return the object that rank ``src`` has sent; None if ``src`` is ``collective.NULL``."""
        status = Status()
        call = Recv(self._path, None, src, tag, None, status, hosted="object")
        raw = self._path.post(call, timeout, False)
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
        for sender in range(self._path.size):
            length = int(joined[start : start + 8].copy().view(np.int64)[0])
            values.append(self._decoded(joined[start + 8 : start + 8 + length], sender))
            start += 8 + length
        return values
