"""The ``tcp`` transport: connecting, closing, messages and collectives."""

from __future__ import annotations

import contextlib
import functools
import socket
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from collective import native
from collective.algorithms import arithmetic, schedules
from collective.algorithms.messages import sendrecv
from collective.backends.mail import CompiledMail, PythonMail
from collective.backends.peers.channel import Channel
from collective.backends.peers.monitored import Paired, Pairing
from collective.contract.backend import COLLECTIVE_TAG, Backend, Capabilities, Plan
from collective.contract.failure import Failure
from collective.contract.mail import PAYLOAD_TAG
from collective.deadline import Deadline
from collective.errors import BackendError
from collective.memory.buffer import Buffer
from collective.native import NOBODY
from collective.platform import unacknowledged, unsent

from .compiled import CompiledMessages
from .connecting import connect_all
from .messages import StreamMessages
from .stream import stream_of

if TYPE_CHECKING:
    from collective.algorithms.schedules import Schedule
    from collective.backends.inbox import Array
    from collective.contract.world import World
    from collective.request import Request

# Seconds that a rank waits for bytes that a peer does not take, before it closes their connection.
_LINGER_S = 30.0


class TcpBackend(Paired):
    """Transport between ranks on any hosts; see the package's docstring."""

    name = "tcp"
    payload_tag = PAYLOAD_TAG
    capabilities = Capabilities(
        across_hosts=True,
        checks_calls=True,
        any_source=True,
        posts=True,
        detects_lost_peers=True,
        shrinks=True,
        grows=True,
    )

    def __init__(self, world: World, channel: Channel) -> None:
        super().__init__(world, channel)
        self._messages: StreamMessages | CompiledMessages = StreamMessages(channel, {})
        # C's function for messages of arrays, if this rank has the core.
        self.exchange = None

    # -- life -----------------------------------------------------------------------------

    def _open(self, pairing: Pairing) -> None:
        connections = connect_all(pairing)
        streams = {
            rank: stream_of(*connection, functools.partial(self.refuse_damaged, rank))
            for rank, connection in connections.items()
        }
        sockets = [stream.sock for stream in streams.values()]
        weakref.finalize(self, _close, sockets).atexit = False
        # C moves plain bytes.
        are_plain = all(connection.records is None for connection in connections.values())
        if native.chosen.extension is not None and streams and are_plain:
            crowded = self._world.local_size > self.channel.cores()
            self._messages = CompiledMessages(self, streams, crowded)
            self.exchange = self._messages.exchange
        else:
            self._messages = StreamMessages(self.channel, streams)
        messages = weakref.ref(self._messages)
        self.channel.silent = lambda: each.silent() if (each := messages()) else set()

    @functools.cached_property
    def mail(self) -> PythonMail | CompiledMail:  # type: ignore[override]  # an attribute elsewhere
        """Posted messages of this rank; most communicators have none."""
        messages = self._messages
        if isinstance(messages, CompiledMessages):
            return messages.make_mail()
        # The mail belongs to this object, and must not refer to it.
        channel, backend = self.channel, weakref.proxy(self)
        return PythonMail(
            messages.engine, messages.wait, lambda where: backend.refuse_all(where),
            lambda: messages.closed or channel.failure, messages.explain,
        )  # fmt: skip

    def delivered(self) -> bool:
        queued = "mail" in self.__dict__ and self.mail.queued()
        return not queued and not any(map(unacknowledged, self._messages.descriptors()))

    def refuse_all(self, where: object) -> None:
        """Raise if the communicator is broken or closed."""
        self.refuse_broken(where)
        self.channel.refuse_closed(where)

    def close(self) -> None:
        # A call of another thread ends, and what it has not sent is not waited for.
        self.channel.end_waits()
        self._linger()
        super().close()

    def _linger(self) -> None:
        """Wait a while for what has not left this host.

        A peer answers messages with credits. The kernel resets a closed connection on which
        something arrives, and drops what it has not sent yet.
        """
        deadline = Deadline(_LINGER_S)
        others = [rank for rank in range(self.size) if rank != self.rank]
        while any(map(unsent, self._messages.descriptors())):
            if self.channel.failure is not None or deadline.expired:
                return
            # Nobody receives what comes now. It is read all the same: otherwise two ranks that
            # close would each wait until the other one reads.
            for rank in others:
                with contextlib.suppress(BackendError):  # it has broken the communicator
                    self.mail.find(rank, 0, 0, False)
            time.sleep(0.001)

    def _cut(self) -> None:
        self._messages.cut()

    def _end(self) -> None:
        self._messages.close()
        if "mail" in self.__dict__:
            self.mail.close()

    def refuse_damaged(self, peer: int, what: str) -> NoReturn:
        """Break the communicator, since rank ``peer`` has sent damaged data.

        Raises:
            BackendError: always.
        """
        text = f"rank {peer}'s messages to rank {self.rank} are damaged: {what}"
        self.channel.abort(Failure("aborted", self.rank, text))
        raise BackendError(
            f"tcp: {text} [rank {self.rank}]. Most likely the ranks have different versions of "
            "this package.",
            "tcp",
        )

    # -- point to point -------------------------------------------------------------------

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._move(src, dst, None, NOBODY, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        return self._move(None, NOBODY, dst, src, tag, deadline)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        if self.rank in (to, source):
            sendrecv(self, src, to, dst, source, tag, deadline)
        else:
            self._move(src, to, dst, source, tag, deadline)

    def _move(
        self,
        src: Buffer | None,
        to: int,
        dst: Buffer | None,
        source: int,
        tag: int,
        deadline: Deadline,
    ) -> int:
        running = self.running if tag == COLLECTIVE_TAG else None
        if self.channel.failure is not None:
            self.refuse_broken(running or f"message of tag {tag}")
        x, out = (None if each is None else each.array.view(np.uint8) for each in (src, dst))
        if isinstance(self._messages, CompiledMessages):
            return self._messages(x, to, out, source, tag, deadline, running)
        return self._messages(x, to, out, source, tag, deadline, running).sender

    def exchange_marked(
        self, src: Array | None, to: int, dst: Array | None, source: int, mark: int,
        deadline: Deadline,
    ) -> int:  # fmt: skip
        """Exchange messages of the comparison; see :class:`schedules.Marked`."""
        assert isinstance(self._messages, StreamMessages)  # the core compares in C
        nothing = np.empty(0, np.uint8)
        sent, received = (nothing if each is None else each for each in (src, dst))
        exchange = self._messages(
            sent, to, received, source, COLLECTIVE_TAG, deadline, self.running, mark
        )
        return int(exchange.prefix.mark)

    # -- collectives ----------------------------------------------------------------------

    def plan(self, request: Request) -> Plan:
        return self.plan_on(request, None)

    def plan_on(self, request: Request, nested: Nested | None) -> Plan:
        """Return a plan as :meth:`plan`; if ``nested`` is not None, long calls use two levels."""
        if request.is_step or request.dtype is None or request.shape is None:
            return _Scheduled(self, request, nested)
        hosts = None if nested is None else nested.hosts
        schedule = schedules.record(request, self.rank, self.size, hosts=hosts)
        return self.replay(schedule, nested)

    def agree(self, request: Request, deadline: Deadline) -> None:
        self.replay(schedules.comparison(request, self.rank, self.size))(None, None, deadline)

    def replay(self, schedule: Schedule, nested: Nested | None = None) -> Plan:
        """Return the plan that replays ``schedule``: in C, if C can fold, and has both levels."""
        compare = None
        inside = None if nested is None else nested.inside
        if self.exchange is not None:
            in_c = None
            if inside is None or inside.exchange is not None:
                exchange = None if inside is None else inside.exchange
                in_c = native.replay(self.exchange, schedule, exchange)
            if in_c is not None:
                return arithmetic.around(in_c, schedule.scale, schedule.finish)
            comparison = native.replay(self.exchange, schedule.comparison)
            assert comparison is not None  # it folds nothing
            compare = comparison.plain
        return functools.partial(self._run, schedule, compare, inside)

    def _run(
        self, schedule: Schedule, compare: Any, inside: Backend | None, src: Buffer | None,
        dst: Buffer | None, deadline: Deadline,
    ) -> None:  # fmt: skip
        self.refuse_broken(schedule.request)
        self.running = schedule.request
        schedule.run(self, src, dst, deadline, compare, inside)


class Nested(NamedTuple):
    """The second level of calls: the ranks of each host, and their own transport.

    Attributes:
        hosts: the ranks of each host, in order.
        inside: transport between the ranks of this host, numbered by their place among these.
    """

    hosts: Sequence[Sequence[int]]
    inside: Backend


class _Scheduled:
    """Plan of a request whose arrays are known only when the call is made."""

    def __init__(self, backend: TcpBackend, request: Request, nested: Nested | None) -> None:
        self._backend, self._request, self._nested = backend, request, nested
        self._plans: dict[tuple[Any, int], Plan] = {}

    def __call__(self, src: Buffer | None, dst: Buffer | None, deadline: Deadline) -> None:
        backend, buffer = self._backend, dst if src is None else src
        key = (None, 0) if buffer is None else (buffer.dtype, buffer.count)
        plan = self._plans.get(key)
        if plan is None:
            hosts = None if self._nested is None else self._nested.hosts
            schedule = schedules.record(
                self._request, backend.rank, backend.size, key[0], key[1], hosts
            )
            self._plans.clear()
            plan = self._plans[key] = backend.replay(schedule, self._nested)
        plan(src, dst, deadline)


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
