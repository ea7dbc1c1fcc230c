"""Messages of one rank over its connections, in Python, and the waits for them."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from collective.backends.inbox import Array, Transfer
from collective.backends.matching import (
    RECEIVING,
    SENDING,
    Exchange,
    Matcher,
    Waiter,
    awaited,
    describe,
)
from collective.contract.backend import ANY_SOURCE
from collective.deadline import Deadline
from collective.platform import is_silent, tcp_info

from .stream import TcpStream

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel

# A wait polls for this long before it sleeps in the kernel.
_POLL_S = 30e-6


class StreamMessages:
    """Messages of one rank: a function that sends, receives, or does both.

    Several threads may call it at once. A thread that waits sleeps until bytes move on one of its
    connections. It is also woken by another thread of this rank that has taken bytes off the same
    connection, or has left it.

    Args:
        channel: channel of the communicator.
        streams: the connections to the other ranks, by rank.
    """

    def __init__(self, channel: Channel, streams: Mapping[int, TcpStream]) -> None:
        self._channel = channel
        self._streams = streams
        self.engine = Matcher(streams, self._wake_others, channel.rank)
        self._running: set[Waiter] = set()
        self.closed = False
        # Event descriptors of the threads that wait, by thread.
        self._bells: dict[int, int] = {}

    def __call__(
        self,
        src: Array | None,
        to: int,
        dst: Array | None,
        source: int,
        tag: int,
        deadline: Deadline,
        collective: object = None,
        mark: int | None = None,
    ) -> Exchange:
        """Send, receive, or both; neither half waits for the other.

        Args:
            src, to, dst, source, tag, mark: as in :meth:`Matcher.exchange`.
            deadline: deadline of the call.
            collective: the collective call to which the messages belong, or None.
        """
        if self.closed:
            raise self._channel.closed_error(collective or describe(to, source, tag))
        exchange = self.engine.exchange(src, to, dst, source, tag, mark)
        try:
            self.wait(exchange, to, source, tag, deadline, collective)
        except (EOFError, OSError) as error:
            exchange.give_up()
            where, ranks = collective or describe(to, source, tag), None
            if collective is None:
                ranks = awaited(exchange.pending, to, source, self._streams)
            any_of = source == ANY_SOURCE
            raise self._channel.explain(where, error, ranks, any_of) from error
        except BaseException:
            # The caller gets its arrays back.
            exchange.give_up()
            raise
        return exchange

    def silent(self) -> set[int]:
        """Return the ranks whose hosts do not answer."""
        return {r for r, stream in self._streams.items() if is_silent(tcp_info(stream.sock))}

    def descriptors(self) -> list[int]:
        """Return the descriptors of the connections."""
        return [stream.sock.fileno() for stream in self._streams.values()]

    def wait(
        self, waiter: Waiter, to: int, source: int, tag: int, deadline: Deadline,
        collective: object = None,
    ) -> None:  # fmt: skip
        """Wait for posted operations."""
        self._running.add(waiter)
        try:
            if self._polls(waiter):
                self._wait(waiter, to, source, tag, deadline, collective)
        finally:
            self._running.discard(waiter)
            if self.closed:
                self._close_sockets()

    def explain(self, posted: Transfer) -> BaseException:
        """Return the error to raise for a posted operation whose stream has ended."""
        where = describe(posted.to, posted.source, posted.tag)
        assert posted.error is not None
        if self.closed:
            return self._channel.closed_error(where)
        if not isinstance(posted.error, (EOFError, OSError)):
            return posted.error
        ranks = [max(posted.to, posted.source)]
        return self._channel.explain(where, posted.error, ranks)

    def cut(self) -> None:
        """End all connections, which wakes all threads that wait, here and at the peers."""
        for stream in self._streams.values():
            stream.cut()

    def close(self) -> None:
        """Close the connections; calls in other threads end first."""
        self.closed = True
        self.cut()
        self._close_sockets()

    def _close_sockets(self) -> None:
        # As long as a thread uses them, their descriptors must not get another meaning.
        if not self._running:
            for stream in self._streams.values():
                stream.sock.close()

    # -- waiting --------------------------------------------------------------------------------

    def _polls(self, waiter: Waiter) -> int:
        """Poll for a moment; return the sum of the unfinished parts."""
        pending = waiter.advance()
        if pending:
            until = time.perf_counter() + _POLL_S
            while pending and time.perf_counter() < until:
                pending = waiter.advance()
        return pending

    def _wait(
        self,
        waiter: Waiter,
        to: int,
        source: int,
        tag: int,
        deadline: Deadline,
        collective: object,
    ) -> None:
        where = collective or describe(to, source, tag)
        wait = self._channel.wait(where, deadline, None, source == ANY_SOURCE)
        with self._bell() as bell:
            # Another thread may have changed something before this one had its bell.
            while waiter.advance():
                moves = self._sleep(waiter, bell, wait.slice())
                # As long as bytes move, no peer is missing. A failure ends the connections.
                if not moves or deadline.expired:
                    if waiter.advance() == 0:
                        return
                    if collective is None:
                        wait.awaited = awaited(waiter.pending, to, source, self._streams)
                    wait.check()

    def _sleep(self, waiter: Waiter, bell: int, seconds: float) -> bool:
        """Sleep until bytes can move; return False if that took longer than ``seconds``."""
        events = {bell: select.POLLIN}
        for part, event in ((SENDING, select.POLLOUT), (RECEIVING, select.POLLIN)):
            for rank in waiter.awaited.get(part, ()):
                if rank in self._streams:  # the others are this rank, whose threads ring the bell
                    descriptor = self._streams[rank].sock.fileno()
                    events[descriptor] = events.get(descriptor, 0) | event
        sleeping = select.poll()
        for descriptor, mask in events.items():
            sleeping.register(descriptor, mask)
        ready = sleeping.poll(1000 * seconds)
        if (bell, select.POLLIN) in ready:
            os.eventfd_read(bell)
        return bool(ready)

    @contextlib.contextmanager
    def _bell(self) -> Any:
        thread = threading.get_ident()
        try:
            bell = _idle.pop()
        except IndexError:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bells[thread] = bell
        try:
            yield bell
        finally:
            del self._bells[thread]
            # A thread that has found this bell may still ring it. That wakes the next user once
            # for nothing.
            _idle.append(bell)

    def _wake_others(self) -> None:
        if self._bells:
            me = threading.get_ident()
            for thread, bell in list(self._bells.items()):
                if thread != me:
                    os.eventfd_write(bell, 1)


# Event descriptors that no thread uses.
_idle: list[int] = []


def _forget() -> None:
    """Close the idle descriptors in a forked child: they would wake its parent."""
    while _idle:
        os.close(_idle.pop())


os.register_at_fork(after_in_child=_forget)
