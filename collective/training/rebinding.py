"""Objects that can continue over another communicator after some of its ranks are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["Rebindable"]


@runtime_checkable
class Rebindable(Protocol):
    """Object that holds a communicator, or its rank and size, and can change to another one."""

    def rebind(self, comm: Communicator, /) -> Any:
        """Continue with another communicator. Collective: every rank of ``comm`` calls it."""
