"""What stands in place of a transport that a communicator does not have any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from collective.errors import CommunicatorClosedError

if TYPE_CHECKING:
    from collective.contract.backend import Backend
    from collective.request import Request

__all__ = ["CLOSED", "Closed"]

#: Why there is no transport any more, where the program has closed it itself.
CLOSED = "this communicator is closed. Make another with collective.init()."


class Closed:
    """Stands where the transport was: every use says why it is there no more."""

    exchange = None

    def __init__(self, backend: Backend, why: str) -> None:
        self.name = backend.name
        self._why = why
        # In a forked child it stays as it is: its end would be the parent's as well.
        self._kept = backend if why is not CLOSED else None

    def refuse_broken(self, where: object) -> NoReturn:
        """Raise why no call can be made."""
        raise CommunicatorClosedError(f"{where}: {self._why}")

    def plan(self, request: Request) -> NoReturn:
        """Raise the same, of a call that would only be planned."""
        self.refuse_broken(request.operation)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise CommunicatorClosedError(f"{attribute}: {self._why}")
