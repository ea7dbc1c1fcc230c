"""Interface of a communicator for the functions in this package."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from collective.contract.backend import Backend
from collective.contract.capabilities import Capabilities
from collective.contract.failure import Failure
from collective.contract.stalls import Member, Membership
from collective.generations.lineage import Lineage
from collective.generations.succession import Succession

from .host_calls import HostCalls
from .listener import Listened
from .path import Path

__all__ = ["Comm"]


class Comm(Listened, Member, Protocol):
    """Communicator as the functions in this package use it.

    The class ``Communicator`` calls these functions, so their modules cannot import it as the type
    of their argument.
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
        """Calls on the library's own arrays."""

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a communicator among ``ranks``."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the list of the ranks' objects."""

    def fail(self, cause: BaseException | Failure) -> None:
        """Break the communicator for all ranks."""
