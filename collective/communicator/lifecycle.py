"""How a communicator begins and ends, with the groups that are made of it."""

from __future__ import annotations

import contextlib
import os
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.stalls import Membership
from collective.contract.store import Store
from collective.elastic.arrivals import Arrivals
from collective.elastic.lineage import Lineage
from collective.errors import CommunicatorClosedError, PeerFailedError, RendezvousError

from .calls import Calls

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.request import Request

__all__ = ["Life"]

_alive: weakref.WeakSet[Life] = weakref.WeakSet()
# Why there is no transport any more, where the program has closed it itself.
_CLOSED = "this communicator is closed. Make another with collective.init()."


class Closed:
    """Stands where a transport was: every use says why it is there no more."""

    exchange = None

    def __init__(self, backend: Backend, why: str) -> None:
        self.name = backend.name
        self._why = why
        # In a forked child it stays as it is: its end would be the parent's as well.
        self._kept = backend if why is not _CLOSED else None

    def refuse_broken(self, where: object) -> NoReturn:
        """Raise why no call can be made."""
        raise CommunicatorClosedError(f"{where}: {self._why}")

    def plan(self, request: Request) -> NoReturn:
        """Raise the same, of a call that would only be planned."""
        self.refuse_broken(request.operation)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise CommunicatorClosedError(f"{attribute}: {self._why}")


class Life(Calls):
    """A communicator as one of a family, which is broken and closed from its root on."""

    def __init__(
        self,
        backend: Backend,
        *,
        local_rank: int,
        local_size: int,
        host: str,
        timeout: float,
        check: str = "auto",
        lineage: Lineage | None = None,
    ) -> None:
        super().__init__(backend, timeout, check)
        self.local_rank = local_rank
        self.local_size = local_size
        self.host = host
        self.backend = backend.name
        self._children: weakref.WeakSet[Self] = weakref.WeakSet()
        # The store in which the ranks met, if this communicator is all that uses it.
        self._store: Store | None = None
        # Who waits to be let in, once that was asked.
        self._arrivals: Arrivals | None = None
        # Where its ranks met and which are left; None for one that cannot be shrunk.
        self._lineage = lineage
        self._membership = Membership(self)
        # In a forked child, why it is not this process's.
        self._foreign = ""
        _alive.add(self)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    @property
    def enqueues(self) -> bool:
        """Whether calls on arrays of GPUs are only enqueued, on their streams."""
        return self._enqueues

    def abort(self, reason: str = "aborted") -> None:
        """Break this communicator and the groups made of it, for every rank, at once.

        Calls that wait, and all later ones, raise ``CommunicatorAbortedError`` with the
        reason. May be called from any thread.
        """
        if self._foreign:
            raise CommunicatorClosedError(f"abort: {self._foreign}")
        self._abort(Failure("aborted", self.rank, f"rank {self.rank} aborted: {reason}"))

    def _abort(self, failure: Failure) -> None:
        for child in list(self._children):
            child._abort(failure)
        if self._arrivals is not None:
            self._arrivals.keep()
        if not self._closed:
            self._backend.abort(failure)

    def close(self) -> None:
        """Leave the communicator and the groups made of it.

        Waits for this rank's own calls in the background, and for nobody else. A second
        close does nothing; any other use afterwards raises ``CommunicatorClosedError``.
        """
        self._shut(self.timeout)

    def _shut(self, seconds: float) -> None:
        """Close, waiting for so many seconds for what is in the background."""
        if self._closed:
            return
        for child in list(self._children):
            child._shut(seconds)
        for lane in (self._lane, *self._lanes.values()):
            lane.close(seconds)
        self._closed = True
        # What was prepared would go on calling the transport, and the frames of an error keep it.
        self._plans.clear()
        self._broken = None
        self._open_door()
        try:
            for listener in self._listeners:
                listener.close()
        finally:
            backend, self._backend = self._backend, Closed(self._backend, _CLOSED)  # type: ignore[assignment]
            backend.close()
            self._end_arrivals()
            if self._store is not None:
                self._store.close()

    def _end_arrivals(self) -> None:
        """Tell those who wait that nobody lets them in any more."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            with contextlib.suppress(RendezvousError):
                arrivals.end()

    def _disown(self) -> None:
        """Refuse every call in a forked child, and have nothing there reach the peers."""
        if self._closed:
            return
        self._closed = True
        self._foreign = (
            f"this process (pid {os.getpid()}) was forked from that of rank {self.rank} of "
            f"{self.size} (pid {os.getppid()}), which alone may use the communicator. Start "
            "processes with the method 'spawn', or call collective.init() in all children, for "
            "a communicator of their own."
        )
        self._plans.clear()
        self._open_door()
        self._backend = Closed(self._backend, self._foreign)  # type: ignore[assignment]

    def _leave(self) -> None:
        """Close the transports, waiting for nothing."""
        for child in list(self._children):
            child._leave()
        if not self._closed:
            self._end_arrivals()
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._tell(error)
        self.close()

    def _tell(self, error: BaseException) -> None:
        """Pass ``error``, which ended this rank's body, to the peers."""
        if isinstance(error, PeerFailedError):
            return  # the peers know of that one
        self._abort(Failure.caused_by(self.rank, error))


def _disown() -> None:
    for comm in list(_alive):
        comm._disown()


os.register_at_fork(after_in_child=_disown)
