"""What goes on over another communicator, when some ranks of the one before are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["Rebindable"]


@runtime_checkable
class Rebindable(Protocol):
    """What holds a communicator, or knows of its rank and size, and can change to another."""

    def rebind(self, comm: Communicator, /) -> Any:
        """Go on with another communicator. Collective: every rank of it calls it."""
