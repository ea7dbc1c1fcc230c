"""Base class of transports whose peers a monitor watches."""

from __future__ import annotations

from collections.abc import Mapping, Set

from collective.contract.backend import Backend, Note
from collective.contract.failure import Failure
from collective.contract.recorder import Recorder
from collective.contract.store import Store

from .channel import Channel

__all__ = ["Monitored"]


class Monitored(Backend):
    """Transport whose peers a monitor watches.

    Attributes:
        channel: this communicator's channel of the monitor.
    """

    channel: Channel

    @property
    def meeting(self) -> str:  # type: ignore[override]  # an attribute elsewhere
        """Text that is derived from the secret of this meeting, and does not reveal the secret."""
        return self.channel.secret.key("meeting")[:8].hex()

    def lost(self) -> Set[int]:
        return self.channel.lost()

    def lasting(self, store: Store) -> Store:
        return self.channel.lasting(store)

    def observe(self, recorder: Recorder) -> None:
        self.channel.recorder = recorder

    def refuse_broken(self, where: object) -> None:
        if self.channel.failure is not None:
            self.channel.check(where, ())

    def post(self, note: Note, rank: int) -> Mapping[int, Note]:
        self.channel.post(note)
        return {}  # the hub searches for circles

    def abort(self, failure: Failure) -> None:
        self.channel.abort(failure)
