"""Calls that NCCL takes as one (``ncclGroupStart``, ``ncclGroupEnd``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .watch import Asked, Pending, Watch

if TYPE_CHECKING:
    from collective.cuda import Stream

    from .engine import NcclComm

__all__ = ["Batch"]


class Batch:
    """Calls that NCCL takes as one.

    Attributes:
        asked: the first of them, None before it.
    """

    def __init__(self, watch: Watch) -> None:
        self.asked: Asked | None = None
        self._watch = watch
        self._comm: NcclComm | None = None
        self._last: dict[int, tuple[Stream, Asked]] = {}

    def add(self, comm: NcclComm | None, asked: Asked, stream: Stream) -> None:
        """Take note of a call that is about to be made."""
        if self._comm is None:
            assert comm is not None
            self.asked = self._watch.inside[0] = asked
            if self._watch.asleep:
                self._watch.wake()
            comm.group_start()
            self._comm = comm
        self._last[stream.handle] = stream, asked

    def end(self, settle: Callable[[Asked], None] | None = None) -> None:
        """Have NCCL enqueue the calls; look after them, unless they are lost."""
        assert self._comm is not None
        assert self.asked is not None
        watch = self._watch
        try:
            pending = self._comm.group_end()
            if settle is not None:
                if pending:
                    settle(self.asked)
                for stream, asked in self._last.values():
                    watch.add(Pending(stream.record(), stream, asked))
        finally:
            watch.inside[0] = None
