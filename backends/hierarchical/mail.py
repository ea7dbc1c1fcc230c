"""Posted messages on two levels: those of the host, and those between hosts.

A receive from a named rank is posted on the level of that rank. A receive from any rank is not: a
message of either level may be the one that it gets. It waits here, and so do all receives that are
posted behind it, as they must not overtake it. For those this module looks at the messages that the
levels keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from collective.backends.inbox import Transfer
from collective.backends.mail import BaseMail
from collective.backends.matching import describe
from collective.backends.peers.monitored import inside
from collective.contract.backend import ANY_SOURCE, Turns
from collective.contract.mail import CANCELLED, EXACTLY
from collective.deadline import Deadline
from collective.native import NOBODY

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.contract.mail import Engine

    from .topology import Topology


class _OnLevel:
    """A posted operation of a level, with the rank's number in the whole communicator."""

    def __init__(self, posted: Any, level: Engine, peer: int) -> None:
        self.posted, self.level = posted, level
        self.source, self.to = (NOBODY, peer) if posted.to >= 0 else (peer, NOBODY)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.posted, name)


class TwoLevelMail(BaseMail):
    """Posted messages of one rank on two levels; see :class:`collective.contract.mail.Engine`.

    Args:
        inner, outer: messages of the ranks of this host, and of all ranks.
        topology: ranks of the levels.
        channel: channel of the whole communicator.
    """

    def __init__(self, inner: Engine, outer: Engine, topology: Topology, channel: Channel) -> None:
        self._inner, self._outer = inner, outer
        self._topology = topology
        self._channel = channel
        # Receives from any rank, and those behind them.
        self._waiting: list[Transfer] = []
        self._turns = Turns()

    def send(self, data: Any, to: int, tag: int) -> Any:
        """Post a send."""
        level, rank = self._level_of(to)
        return self._placed(level.send(data, rank, tag), level, to)

    def receive(self, memory: Any, source: int, tag: int, mask: int, wait: bool) -> Any:
        """Post a receive."""
        if source != ANY_SOURCE and not self._waiting:
            level, rank = self._level_of(source)
            return self._placed(level.receive(memory, rank, tag, mask, wait), level, source)
        if self._channel.failure or self._channel.closed:
            return NotImplemented
        posted = Transfer(memory, source, NOBODY, tag, mask)
        self._waiting.append(posted)
        self.progress()
        return posted

    def find(self, source: int, tag: int, mask: int, take: bool) -> Any:
        """Return a message that no receive has got, or None."""
        self.progress()
        return self._find(source, tag, mask, take)

    def cancel(self, posted: Any) -> bool:
        """Withdraw a receive; return False if it has a message already."""
        if isinstance(posted, _OnLevel):
            return posted.level.cancel(posted.posted)
        if posted not in self._waiting:
            return False
        self._waiting.remove(posted)
        posted.end(CANCELLED)
        return True

    def progress(self) -> None:
        """Do all that is possible without waiting."""
        self._inner.progress()
        self._outer.progress()
        index = 0
        while index < len(self._waiting):
            posted = self._waiting[index]
            found = self._find(posted.source, posted.tag, posted.mask, False)
            if found is None:
                index += 1
                continue
            # A message that has come since may be for a receive that was posted before this one.
            if any(_match(earlier, found) for earlier in self._waiting[:index]):
                index = 0
                continue
            if posted.source == ANY_SOURCE:
                self._turns.serve(range(self._channel.size), found.source, posted.tag)
            found = self._find(found.source, found.tag, EXACTLY, True)
            if found is None:
                return  # it was only announced, and its bytes are on their way
            del self._waiting[index]
            posted.source, posted.tag, posted.nbytes = found.source, found.tag, found.nbytes
            if posted.memory is None:
                posted.data = found.data
            else:
                count = min(found.nbytes, posted.room)
                posted.memory[:count] = memoryview(found.data)[:count]
            posted.end()

    def busy(self) -> bool:
        """Return whether operations are in flight."""
        return bool(self._waiting) or self._inner.busy() or self._outer.busy()

    def disown(self) -> None:
        """Touch the connections no more, in a forked child."""
        self._inner.disown()
        self._outer.disown()

    def deliver(self, deadline: Deadline) -> None:
        """Wait until the posted sends have left, or until they cannot leave any more."""
        self._inner.deliver(deadline)
        self._outer.deliver(deadline)

    def refuse(self, where: object) -> None:
        """Raise the reason why the communicator is broken or closed."""
        self._channel.check(where, ())
        self._channel.refuse_closed(where)

    def explain(self, posted: Any) -> NoReturn:
        """Raise the error of an operation that has failed."""
        peer = max(posted.to, posted.source)
        where = describe(posted.to, posted.source, posted.tag)
        with inside(self._channel, where, Deadline(0.0), (peer,)):
            posted.level.explain(posted.posted)
        raise AssertionError(posted.damage)

    def _step(self, items: Sequence[Any], any_of: bool, seconds: float) -> bool:
        self.progress()
        return (any if any_of else all)(item.done for item in items)

    def _wait(
        self, advance: Callable[[], int], to: int, source: int, tag: int, deadline: Deadline
    ) -> None:
        others = [rank for rank in range(self._channel.size) if rank != self._channel.rank]
        ranks = others if source == ANY_SOURCE else [max(to, source)]
        where = describe(to, source, tag)
        wait = self._channel.wait(where, deadline, ranks, source == ANY_SOURCE)
        while advance():
            wait.turn()

    def _level_of(self, rank: int) -> tuple[Engine, int]:
        local_rank = self._topology.local_rank_of(rank)
        return (self._outer, rank) if local_rank is None else (self._inner, local_rank)

    @staticmethod
    def _placed(posted: Any, level: Engine, peer: int) -> Any:
        return posted if posted is NotImplemented else _OnLevel(posted, level, peer)

    def _find(self, source: int, tag: int, mask: int, take: bool) -> Any:
        """Look for a message of a rank, or of any: then the ranks take turns."""
        sources = range(self._channel.size) if source == ANY_SOURCE else (source,)
        for rank in self._turns.of(sources, tag):
            level, place = self._level_of(rank)
            found = level.find(place, tag, mask, take)
            if found is not None:
                return _OnLevel(found, level, rank)
        return None


def _match(posted: Transfer, message: Any) -> bool:
    return message.tag & posted.mask == posted.tag and posted.source in (message.source, ANY_SOURCE)
