"""A communicator as the functions over it see it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from collective.contract.backend import Backend
from collective.contract.capabilities import Capabilities
from collective.contract.failure import Failure
from collective.contract.stalls import Member, Membership
from collective.elastic.lineage import Lineage
from collective.elastic.succession import Succession

from .host_calls import HostCalls
from .listener import Listened
from .path import Path

__all__ = ["Comm"]


class Comm(Listened, Member, Protocol):
    """What functions over a communicator use of it, in the room in which its class stands.

    The class calls these functions, so that they cannot name it as the type of their argument.
    """

    local_rank: int
    local_size: int
    host: str
    capabilities: Capabilities
    _path: Path
    _children: weakref.WeakSet[Any]
    _foreign: str
    _membership: Membership
    _open: bool
    _succession: Succession

    def __init__(
        self,
        backend: Backend,
        *,
        local_rank: int,
        local_size: int,
        host: str,
        timeout: float,
        check: str,
        lineage: Lineage | None,
        open_to_others: bool,
    ) -> None: ...

    @property
    def on_host(self) -> HostCalls:
        """Calls on arrays of the library's own."""

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a communicator among ``ranks``."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the ranks' objects."""

    def fail(self, cause: BaseException | Failure) -> None:
        """Break the communicator for all ranks."""
