"""Who hears of a communicator's calls: the trace, and what programs hook in.

Listeners are called in the thread that makes the call, which may be a lane's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collective.contract.work import Lane
    from collective.request import Request

__all__ = ["CallEvent", "Hook", "Listened", "Listener"]


class CallEvent(NamedTuple):
    """One call, as it is about to reach the transport.

    Attributes:
        operation: ``"all_reduce"``, …, ``"send"``, ``"recv"``, ``"sendrecv"``.
        nbytes: bytes of the larger of this rank's two buffers; -1 where nobody knows yet: what
            is received.
        request: what all ranks have to agree on; None for messages.
        number: of the communicator's collective calls, from 1; 0 for messages.
        compares: whether the ranks' calls are only compared, and nothing is moved.
        dst, src, tag: of a message, else None.
    """

    operation: str
    nbytes: int
    request: Request | None = None
    number: int = 0
    compares: bool = False
    dst: int | None = None
    src: int | None = None
    tag: int | None = None


class Listened(Protocol):
    """What a listener knows of the communicator that it listens to."""

    rank: int
    size: int
    backend: str

    @property
    def enqueues(self) -> bool:
        """Whether calls on arrays of GPUs are only enqueued."""

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every call from now on."""


class Listener:
    """Hears of everything, and does nothing about it."""

    def before(self, event: CallEvent) -> None:
        """A call begins."""

    def after(self, event: CallEvent, error: BaseException | None) -> None:
        """It is over: ``error`` is what it raised."""

    def arrives(self, nbytes: int) -> None:
        """The first part of a message has come, and with it how long it is."""

    def group(self, child: Listened, ranks: Sequence[int]) -> None:
        """A communicator among ``ranks`` was made of this one."""

    def close(self) -> None:
        """The communicator is closed."""

    def lane(self, name: str, messages: bool) -> Lane | None:
        """Return what is to run calls in the background, None for the usual.

        Args:
            name: of its thread.
            messages: whether it is for messages of one direction, peer and tag.
        """
        return None


class Hook(Listener):
    """Two functions of a program's."""

    def __init__(
        self,
        before: Callable[[CallEvent], Any] | None,
        after: Callable[[CallEvent, BaseException | None], Any] | None,
    ) -> None:
        self._before = before
        self._after = after

    def before(self, event: CallEvent) -> None:
        if self._before is not None:
            self._before(event)

    def after(self, event: CallEvent, error: BaseException | None) -> None:
        if self._after is not None:
            self._after(event, error)
