"""Calls that wait, and the wait of one call between two polls of its engine."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import NoReturn, Protocol

from collective.contract.stalls import look
from collective.contract.waits import Caller
from collective.deadline import Deadline

__all__ = ["SLICE_S", "Running", "Wait"]

#: Longest time that a wait blocks between two checks.
SLICE_S = 0.1
# How long a call waits until the hub compares the ranks' recorders, and until it compares again.
_STALL_S = 1.0
# Turns of a wait between two checks for news from the monitor (a power of two), and turns before
# the wait sleeps. Until then it yields its core after each poll.
_SPINS, _YIELDS = 16, 2000
_SLEEP_FIRST_S, _SLEEP_LAST_S = 20e-6, 1e-3


class Waited(Protocol):
    """The part of a channel that a wait uses; see :mod:`.channel`."""

    @property
    def _shown(self) -> weakref.WeakSet[Running]: ...

    def check(
        self,
        where: object,
        awaited: Sequence[int] | None = None,
        any_of: bool = False,
        sequence: int | None = None,
    ) -> None: ...

    def refuse_closed(self, where: object) -> None: ...

    def compare(self) -> None: ...

    def give_up(
        self,
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None,
        sequence: int | None = None,
        who: Caller | None = None,
    ) -> NoReturn: ...


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
        channel: Waited,
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None,
        any_of: bool,
        sequence: int | None,
        who: Caller,
    ) -> None:
        super().__init__(where, awaited, who)
        self._shown = False
        self._deadline = deadline
        self._sequence = sequence
        self._any_of = any_of
        self._channel = channel
        self._until_compared = Deadline(_STALL_S)
        self._turns = 0
        self._pause = _SLEEP_FIRST_S

    def turn(self) -> None:
        """Let other threads and processes run: yield the core at first, sleep in a longer wait."""
        self._turns = turns = self._turns + 1
        if turns < _YIELDS:
            # A check costs more than a poll, and the monitor seldom has news.
            if turns & _SPINS - 1 == 0:
                self.check()
            os.sched_yield()
            return
        self.check()
        time.sleep(self._pause)
        self._pause = min(1.1 * self._pause, _SLEEP_LAST_S)

    def slice(self) -> float:
        """Return the seconds to block until the next :meth:`check`."""
        return self._deadline.at_most(SLICE_S)

    def check(self) -> None:
        """Raise if there is a reason to; once a second have the hub compare the recorders."""
        channel = self._channel
        channel.check(self.where, self.awaited, self._any_of, self._sequence)
        channel.refuse_closed(self.where)
        if not self._shown:
            self._shown = True
            channel._shown.add(self)
        if self._deadline.expired:
            channel.give_up(self.where, self._deadline, self.awaited, self._sequence, self.who)
        if self._until_compared.expired:
            self._until_compared = Deadline(_STALL_S)
            channel.compare()
            look(self._deadline)
