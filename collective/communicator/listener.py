"""Listeners of a communicator's calls: the trace, and the hooks of programs.

The methods of a listener run in the thread that makes the call, which may be a lane's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collective.contract.work import Lane
    from collective.request import Request

__all__ = ["CallEvent", "Hook", "Listened", "Listener"]


class CallEvent(NamedTuple):
    """One call that is about to reach the transport.

    Attributes:
        operation: ``"all_reduce"``, …, ``"send"``, ``"recv"``, ``"sendrecv"``.
        nbytes: size of the larger of this rank's two buffers, in bytes; -1 for a receive, whose
            size is not known yet.
        request: request that all ranks must agree on; None for messages.
        number: number of this collective call on its communicator, from 1; 0 for messages.
        compares: whether the ranks' calls are only compared, and no data is moved.
        dst, src, tag: destination, source and tag of a message; else None. A ``sendrecv`` to or
            from :data:`collective.NULL` has None there.
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
    """Communicator as its listeners see it."""

    rank: int
    size: int
    backend: str

    @property
    def enqueues(self) -> bool:
        """Whether calls on GPU arrays return once they are enqueued."""

    def listen(self, listener: Listener) -> None:
        """Notify ``listener`` of every call from now on."""


class Listener:
    """Base class of listeners; its methods do nothing."""

    def before(self, event: CallEvent) -> None:
        """Handle the beginning of a call."""

    def after(self, event: CallEvent, error: BaseException | None) -> None:
        """Handle the end of a call; ``error`` is the exception that it raised, or None."""

    def arrives(self, nbytes: int) -> None:
        """Handle the arrival of the first part of a message, which contains its length."""

    def group(self, child: Listened, ranks: Sequence[int]) -> None:
        """Handle that ``child``, a communicator among ``ranks``, was made from this one."""

    def close(self) -> None:
        """Handle the closing of the communicator."""

    def lane(self, name: str, messages: bool) -> Lane | None:
        """Return the lane that runs calls in the background; None for an ordinary lane.

        Args:
            name: name of the lane's thread.
            messages: whether the lane is for messages of one direction, peer and tag.
        """
        return None


class Hook(Listener):
    """Listener that calls two functions of a program."""

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
