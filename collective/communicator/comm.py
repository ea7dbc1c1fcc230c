"""A communicator as the functions over it see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from collective.contract.backend import Backend
from collective.contract.capabilities import Capabilities
from collective.contract.failure import Failure
from collective.contract.stalls import Member, Membership
from collective.contract.work import Lane
from collective.elastic.lineage import Lineage
from collective.elastic.succession import Succession
from collective.errors import CollectiveError

from .listener import Listened, Listener
from .plan import Planned

__all__ = ["Comm"]


class Comm(Listened, Member, Protocol):
    """What functions over a communicator use of it, in the room in which its class stands.

    The class calls these functions, so that they cannot name it as the type of their argument.
    """

    local_rank: int
    local_size: int
    host: str
    capabilities: Capabilities
    _backend: Backend
    _broken: CollectiveError | None
    _check: str
    _children: weakref.WeakSet[Any]
    _closed: bool
    _foreign: str
    _lane: Lane
    _lanes: dict[Any, Lane]
    _listeners: tuple[Listener, ...]
    _membership: Membership
    _open: bool
    _plans: dict[Any, Planned]
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
    def on_host(self) -> Any:
        """The communicator, for arrays on the CPU."""

    @property
    def _who(self) -> str: ...

    def group(self, ranks: Sequence[int]) -> Any:
        """Return a communicator among ``ranks``."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the ranks' objects."""

    def fail(self, cause: BaseException | Failure) -> None:
        """Break the communicator for all ranks."""

    def _go(self, what: str, run: Callable[[], Any], async_op: bool) -> Any: ...

    def _open_door(self) -> None: ...

    def _rank(self, what: str, name: str, rank: Any) -> int: ...

    def _transport(self, method: Callable[..., Any], *args: Any) -> Any: ...
