"""Calls that wait, and the wait of one call between two polls of its engine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collective.contract.mail import progress_all
from collective.contract.stalls import look
from collective.contract.waits import Caller
from collective.deadline import Deadline

if TYPE_CHECKING:
    from .channel import Channel

#: Longest time that a wait blocks between two checks.
SLICE_S = 0.1
# The same while posted messages are in flight, which the waits move.
_BUSY_S = 1e-3
# How long a call waits until the hub compares the ranks' recorders, and until it compares again.
_STALL_S = 1.0
# How long before its deadline a call asks which ranks are late, at most, and as a share of the time
# that the wait has. The hub answers at once if all ranks report, and otherwise half a second later.
_ASK_S, _ASK_SHARE = 0.6, 0.5
# Turns of a wait between two checks for news from the monitor (a power of two), and turns before
# the wait sleeps. Until then it yields its core after each poll.
_SPINS, _YIELDS = 16, 2000
_SLEEP_FIRST_S, _SLEEP_LAST_S = 20e-6, 1e-3


def asks_at(seconds: float) -> float:
    """Return how long before its deadline a call of so many seconds asks which ranks are late."""
    return min(_ASK_S, _ASK_SHARE * seconds)


class Running:
    """A call that waits, as the reports of this rank show it.

    Attributes:
        where, awaited: the call, and the ranks that it waits for; see :meth:`Channel.check`.
        who: who makes the call.
    """

    __slots__ = ("__weakref__", "awaited", "where", "who")

    def __init__(self, where: object, awaited: Sequence[int] | None, who: Caller) -> None:
        self.where = where
        self.awaited = awaited
        self.who = who


class Wait(Running):
    """The wait of one call, made after the call's first polls were in vain.

    Engines that are polled call :meth:`turn` between polls. Engines that block with a timeout
    block for :meth:`slice` seconds and then call :meth:`check`. Both methods raise the errors of
    :meth:`Channel.check`, and ``CollectiveTimeoutError`` when the deadline passes.
    """

    __slots__ = (
        "_any_of",
        "_asked",
        "_asks_at",
        "_began",
        "_channel",
        "_deadline",
        "_pause",
        "_sequence",
        "_shown",
        "_turns",
        "_until_compared",
    )  # fmt: skip

    def __init__(
        self,
        channel: Channel,
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None,
        any_of: bool,
        sequence: int | None,
        who: Caller,
    ) -> None:
        super().__init__(where, awaited, who)
        self._shown = False
        self._began = time.monotonic()
        self._deadline = deadline
        self._sequence = sequence
        self._any_of = any_of
        self._channel = channel
        self._until_compared = Deadline(_STALL_S)
        # Seconds before the deadline at which this call asks, and the channel's number of answers
        # then; None before.
        self._asks_at = asks_at(deadline.left())
        self._asked: int | None = None
        self._turns = 0
        self._pause = _SLEEP_FIRST_S

    def turn(self) -> None:
        """Let other threads and processes run: yield the core at first, sleep in a longer wait."""
        self._turns = turns = self._turns + 1
        if turns < _YIELDS:
            # A check costs more than a poll, and the monitor seldom has news.
            if turns & _SPINS - 1 == 0:
                self.check()
                progress_all()
            os.sched_yield()
            return
        self.check()
        progress_all()
        time.sleep(self._pause)
        self._pause = min(1.1 * self._pause, _SLEEP_LAST_S)

    def slice(self) -> float:
        """Return the seconds to block until the next :meth:`check`."""
        left = self._deadline.left()
        if self._asked is None and left > self._asks_at:
            left -= self._asks_at
        return min(_BUSY_S if progress_all() else SLICE_S, left)

    def check(self) -> None:
        """Raise if there is a reason to; once a second have the hub compare the recorders."""
        channel = self._channel
        channel.check(self.where, self.awaited, self._any_of, self._sequence)
        channel.refuse_closed(self.where)
        if not self._shown:
            self._shown = True
            channel._shown.add(self)
        if self._deadline.expired:
            channel.give_up(
                self.where, self._deadline, self.awaited, self._sequence, self.who, self._asked
            )
        if self._asked is None and (left := self._deadline.left()) <= self._asks_at:
            self._asked = channel.answers
            channel.ask(self.awaited, left)
        if self._until_compared.expired:
            self._until_compared = Deadline(_STALL_S)
            channel.compare()
            look(self._deadline, channel.recorder, self.where, self._began)
