"""Calls on the library's own arrays, which work on every transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collective.deadline import Deadline

from .calls.broadcasting import Broadcast
from .calls.gathering import AllGather, Gather
from .calls.message import Recv, Send
from .calls.scattering import Scatter
from .path import Path
from .status import Status

__all__ = ["HostCalls"]


class HostCalls:
    """Calls of a communicator on NumPy arrays that belong to the library.

    A transport that only takes a program's arrays on GPUs takes these arrays, too. These calls are
    ordered with the communicator's other calls.

    Args:
        path: path of the communicator.
        hosted: ``"array"``, or ``"object"`` if the arrays are encoded objects. Ranks that make a
            call on an array and on an object get an error.
    """

    __slots__ = ("_hosted", "_path", "rank", "size")

    def __init__(self, path: Path, hosted: str = "array") -> None:
        self._path = path
        self._hosted = hosted
        self.rank = path.rank
        self.size = path.size

    def broadcast(self, x: Any, *, root: int = 0, timeout: float | None = None) -> Any:
        """Give every rank the array of ``root``; the other ranks pass None."""
        call = Broadcast(self._path, x, root, None, None, hosted=self._hosted)
        return self._path.make(call, timeout, False)

    def gather(self, x: Any, *, root: int = 0, timeout: float | None = None) -> Any:
        """Join the ranks' arrays at ``root``."""
        call = Gather(self._path, x, root, None, 0, None, hosted=self._hosted)
        return self._path.make(call, timeout, False)

    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        timeout: float | Deadline | None = None,
    ) -> Any:
        """Join the ranks' arrays at every rank."""
        call = AllGather(self._path, x, counts, 0, None, hosted=self._hosted)
        return self._path.make(call, timeout, False)

    def scatter(
        self, x: Any, *, root: int, counts: Sequence[int] | None, timeout: float | None = None
    ) -> Any:
        """Cut the array of ``root`` into pieces, and give each rank one."""
        call = Scatter(self._path, x, root, counts, 0, None, None, hosted=self._hosted)
        return self._path.make(call, timeout, False)

    def send(self, x: Any, dst: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send an array to rank ``dst``."""
        self._path.post(Send(self._path, x, dst, tag, hosted=self._hosted), timeout, False)

    def recv(
        self, src: int, *, tag: int = 0, timeout: float | None = None, status: Status | None = None
    ) -> Any:
        """Receive an array from rank ``src``."""
        call = Recv(self._path, None, src, tag, None, status, hosted=self._hosted)
        return self._path.post(call, timeout, False)
