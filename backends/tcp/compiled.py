"""Messages and collective calls in C over the connections; see ``collective/native/streams.c``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from collective import native
from collective.algorithms.agreement import compare_headers
from collective.algorithms.messages import Messages
from collective.backends.inbox import Array
from collective.backends.mail import CompiledMail
from collective.backends.matching import RECEIVING, SENDING, awaited, describe, exchange_in_c
from collective.contract.backend import ANY_SOURCE, COLLECTIVE_TAG
from collective.contract.failure import Failure
from collective.deadline import Deadline
from collective.platform import TCP_INFO_BYTES, is_silent

if TYPE_CHECKING:
    from collective.request import Request

    from .stream import TcpStream
    from .transport import TcpBackend

# Seconds for which C polls before Python waits, if each rank has a core of its own. Meanwhile the
# peer's message comes without the kernel's wake-up, which takes some 5 µs, and as long again if the
# core has begun to sleep. If ranks share cores, a rank that polls keeps its peer from running.
_IDLE_S, _IDLE_CROWDED_S = 200e-6, 5e-6


class CompiledMessages:
    """Messages of one rank: a function that sends, receives, or does both, as StreamMessages.

    Args:
        backend: transport of this rank.
        streams: the connections to the other ranks, by rank.
        crowded: whether this host has more ranks than cores.

    Attributes:
        exchange: C's function for arrays; see :func:`collective.native.streams`.
    """

    def __init__(
        self, backend: TcpBackend, streams: Mapping[int, TcpStream], crowded: bool
    ) -> None:
        rank, size = backend.rank, backend.size
        self._backend = backend
        self._flag = bytearray(8)  # C makes no call once this is not zero
        sockets, early = [-1] * size, [b""] * size
        for peer, stream in streams.items():
            sockets[peer], early[peer] = stream.sock.detach(), stream.early()
        self._descriptors = [descriptor for descriptor in sockets if descriptor >= 0]
        idle = _IDLE_CROWDED_S if crowded else _IDLE_S
        callbacks = _WaitCallbacks(backend, self)
        exchange = native.streams(self._flag, rank, size, sockets, early, idle, callbacks)
        assert exchange is not None  # the transport makes this object only if it has the core
        self.exchange = exchange
        self._callbacks = callbacks
        _living.add(self)

    def __call__(
        self,
        x: Array | None,
        to: int,
        out: Array | None,
        source: int,
        tag: int,
        deadline: Deadline,
        collective: object = None,
    ) -> int:
        """Send, receive, or both; see :class:`StreamMessages`. Return the sender's rank."""

        def refuse_broken() -> None:
            self._backend.refuse_all(collective or describe(to, source, tag))

        return exchange_in_c(self.exchange, x, to, out, source, tag, deadline, refuse_broken)

    def make_mail(self) -> CompiledMail:
        """Return the posted messages beside those of this object."""
        return CompiledMail(self.exchange, self._callbacks, self._callbacks.refuse_broken)

    def cut(self) -> None:
        """End all connections, which wakes all threads that wait, here and at the peers."""
        self._flag[0] = 1
        native.cut_streams(self.exchange)

    def descriptors(self) -> list[int]:
        """Return the descriptors of the connections, as long as this object is open."""
        return self._descriptors

    def silent(self) -> set[int]:
        """Return the ranks whose hosts do not answer."""
        infos = native.stream_infos(self.exchange, TCP_INFO_BYTES)
        return {rank for rank, info in enumerate(infos) if is_silent(info)}

    def disown(self) -> None:
        """Close this process's descriptors, but leave the connections to its parent."""
        self._flag[0] = 1
        native.close_streams(self.exchange, at_once=True)

    def close(self) -> None:
        """End the connections; C closes its descriptors once no thread uses them."""
        self.cut()
        self._descriptors = []
        native.close_streams(self.exchange)


# The messages of this process. A forked child closes its descriptors: as long as any process has a
# connection open, the peer does not see that the parent has died.
_living: weakref.WeakSet[CompiledMessages] = weakref.WeakSet()


def _disown() -> None:
    for messages in list(_living):
        messages.disown()


os.register_at_fork(after_in_child=_disown)


class _WaitCallbacks:
    """Methods that C calls when a message or a collective call cannot go on by itself."""

    def __init__(self, backend: TcpBackend, messages: CompiledMessages) -> None:
        self._channel = backend.channel
        self._peers = [rank for rank in range(backend.size) if rank != backend.rank]
        # C refers to this object, and the two to C.
        self._backend, self._of_rank = weakref.proxy(backend), weakref.proxy(messages)

    def wait(
        self,
        advance: Callable[[float], int],
        to: int,
        source: int,
        what: int | Request,
        deadline: Deadline,
    ) -> None:
        """Wait for the rest of an exchange; ``what`` is its tag, or the request of a call."""
        where, collective = self._where(to, source, what)
        wait = self._channel.wait(where, deadline, None, source == ANY_SOURCE)
        pending = SENDING | RECEIVING
        try:
            while pending := advance(wait.slice()):
                if not collective:
                    wait.awaited = awaited(pending, to, source, self._peers)
                wait.check()
        except BaseException:
            # The caller gets its arrays back. What would follow a part of a message is no prefix.
            if pending > SENDING | RECEIVING:
                for rank in awaited(pending, to, source, self._peers):
                    native.cut_streams(self._of_rank.exchange, rank)
            raise

    def ended(self, rank: int, text: str, to: int, source: int, what: int | Request) -> None:
        """Raise the error that explains why the connection to ``rank`` has ended."""
        where, collective = self._where(to, source, what)
        error = EOFError(f"rank {rank}: {text}")
        ranks = None if collective else awaited(SENDING | RECEIVING, to, source, self._peers)
        raise self._channel.explain(where, error, ranks, source == ANY_SOURCE) from error

    def refuse(self, rank: int, text: str, to: int, source: int, what: int | Request) -> None:
        """Break the communicator, since ``rank`` has sent damaged data."""
        self._backend.refuse_damaged(rank, text)

    def refuse_broken(self, where: object) -> None:
        """Raise if the communicator is broken or closed."""
        self._backend.refuse_all(where)

    def moved(self, to: int, source: int, what: int | Request) -> None:
        """Raise an error, since an array of the running call has got other memory."""
        channel = self._channel
        channel.abort(Failure.moved(channel.rank))
        channel.check(self._where(to, source, what)[0], ())

    def differ(self, request: Request, deadline: Deadline) -> None:
        """Raise an error that says how the ranks' calls differ."""
        compare_headers(Messages(self._backend, deadline), request)

    def _where(self, to: int, source: int, what: Any) -> tuple[object, bool]:
        """Return the running call, for errors, and whether it is a collective call."""
        if what == COLLECTIVE_TAG:
            return self._backend.running, True
        return (describe(to, source, what), False) if isinstance(what, int) else (what, True)
