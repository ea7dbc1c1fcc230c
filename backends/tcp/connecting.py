"""Connecting each pair of ranks of a communicator, and no other process.

Each rank but the highest listens at a port. A rank connects to all lower ranks and admits all
higher ones. A connection begins with the handshake of :mod:`collective.control.link`, so no length,
tag or rank is believed before its sender has proved that it knows the communicator's key. Then the
connecting rank says which rank it is, and the listening rank welcomes it. From then on the
connection carries arrays. If the ranks have certificates, all of this is inside of TLS.
"""

# A rank listens in a thread that ends before connect() returns. Without the thread two ranks that
# connect to third ranks, one after the other, would wait for each other.
#
# In the end the ranks tell each other that they are connected. So a rank whose program fails at
# once, while other ranks still connect, is reported by their first call, and not as a rendezvous
# that failed.

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from collective.backends.peers.monitored import Pairing, listens_at
from collective.contract.failure import Failure
from collective.control.link import Link, Message, Records, connect, listen
from collective.control.server import Server
from collective.errors import BackendError, CommunicatorAbortedError, ConfigError

_ADDRESSES, _CONNECTED = "addresses", "connected"
# The listening side's answer to a rank that it admits.
_WELCOME = b"welcome\n"
# A rank says only its number.
_LONGEST = 64
# How often the listening thread looks whether connecting has been given up, and how long a rank
# pauses before it tries again to reach a rank that has turned it away.
_LOOK_S, _RETRY_S = 0.05, 0.01


class Connection(NamedTuple):
    """A connection to one peer.

    Attributes:
        sock: non-blocking socket.
        early: bytes that the peer has sent already, as plain text.
        records: TLS records that all later bytes pass through, or None.
    """

    sock: socket.socket
    early: bytes
    records: Records | None


def connect_all(pairing: Pairing) -> dict[int, Connection]:
    """Connect this rank to all others of a communicator; return the connections by rank.

    Raises:
        BackendError: this rank cannot listen, or another rank cannot be reached.
        ConfigError: this host does not have the address at which this rank should listen.
        CommunicatorAbortedError, CollectiveTimeoutError: another rank is gone, or late.
    """
    if pairing.channel.size == 1:
        return {}
    connecting = _Connecting(pairing)
    try:
        connecting.run()
    except BaseException:
        for connection in connecting.connections.values():
            connection.sock.close()
        raise
    return connecting.connections


class _Connecting:
    """The work of :func:`connect_all`, and the handler of the server that admits higher ranks.

    Attributes:
        connections: the connections so far, by rank. The server's thread adds those of higher
            ranks, and this thread adds those of lower ranks.
    """

    def __init__(self, pairing: Pairing) -> None:
        self.connections: dict[int, Connection] = {}
        self._pairing = pairing
        self._channel = channel = pairing.channel
        self._key = channel.secret.key("tcp")
        self._higher = range(channel.rank + 1, channel.size)
        self._given_up = False
        # Connections that do not leave this host are not encrypted.
        world = pairing.world
        self._tls = None if world.local_size == world.size else world.tls

    def run(self) -> None:
        # No rank connects to the highest one, which needs no port.
        with self._admitting() if self._higher else contextlib.nullcontext("") as own:
            addresses = self._shared(_ADDRESSES, own)
            for rank in range(self._channel.rank):
                self.connections[rank] = self._reach(rank, addresses[rank])
        with contextlib.suppress(_GoneOnError):
            self._shared(_CONNECTED, "")

    @contextlib.contextmanager
    def _admitting(self) -> Iterator[str]:
        """Admit the higher ranks during the body and after it; yield the address of this rank."""
        try:
            listening, address = self._listen()
        except ConfigError as error:
            # The other ranks get the reason, too, and do not wait for this one.
            watched = self._pairing.parent
            watched.abort(Failure("aborted", watched.rank, f"rank {watched.rank}: {error}"))
            raise
        self._server = Server(listening, self._key, self, self._tls, longest=_LONGEST)
        admitting = threading.Thread(
            target=self._server.run, name="collective-tcp-listen", daemon=True
        )
        admitting.start()
        try:
            yield address
            self._wait(lambda: not admitting.is_alive(), self._missing)
        finally:
            self._given_up = True
            admitting.join()

    def _listen(self) -> tuple[socket.socket, str]:
        """Return a socket at which this rank listens, and its address.

        Raises:
            ConfigError: this host does not have the address, or no port is free.
        """
        world = self._pairing.world
        host = listens_at(world)
        try:
            return listen(host, world.ports)
        except OSError as error:
            raise ConfigError(
                f"tcp: host {world.host} cannot listen on {host}: {error} [rank {world.rank} of "
                f"{world.size}]. Set COLLECTIVE_INTERFACE to the interface that reaches the other "
                "hosts (`collective doctor` lists them)."
            ) from error

    def _missing(self) -> list[int]:
        return [rank for rank in self._higher if rank not in self.connections]

    def _shared(self, name: str, text: str) -> dict[int, str]:
        """Offer a text to all ranks; return the texts of all ranks, by rank."""
        channel = self._channel
        channel.offer(name, text)
        others = [rank for rank in range(channel.size) if rank != channel.rank]
        self._wait(
            lambda: len(channel.offered(name)) == channel.size,
            lambda: [rank for rank in others if rank not in channel.offered(name)],
            gone_on=name == _CONNECTED,
        )
        texts = channel.offered(name)
        channel.withdraw(name)
        return texts

    def _wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], gone_on: bool = False
    ) -> None:
        """Wait until ``ready()`` is true; ``missing()`` returns the ranks that it waits for.

        Raises:
            _GoneOnError: another rank had connected, has gone on and has broken the communicator;
                only if ``gone_on`` is set.
        """
        wait = self._pairing.wait()
        while not ready():
            wait.awaited = [self._pairing.ranks[rank] for rank in missing()]
            self._pairing.look()
            try:
                wait.turn()
            except CommunicatorAbortedError:
                if gone_on and self._channel.broken_by_connected:
                    raise _GoneOnError from None
                raise

    # -- the connecting side ----------------------------------------------------------------

    def _reach(self, rank: int, address: str) -> Connection:
        """Return a connection to a lower rank."""
        pairing, deadline = self._pairing, self._pairing.deadline
        wait = pairing.wait(rank)

        def look() -> None:
            pairing.look()
            wait.check()

        while True:
            try:
                link = connect(address, self._key, deadline, self._tls, look)
                try:
                    link.send({"rank": self._channel.rank})
                    if link.exactly(len(_WELCOME), deadline, look) != _WELCOME:
                        raise OSError("it sent no welcome")
                except BaseException:
                    link.close()
                    raise
                return Connection(*link.hand_over())
            except (EOFError, OSError) as error:
                # Strangers may fill the listening rank's room. If it has died, look() tells.
                look()
                if deadline.expired:
                    place = address.replace(" ", ":")
                    raise BackendError(
                        f"{pairing.where}: rank {rank} cannot be reached at {place}: {error!r} "
                        f"[rank {self._channel.rank}]. Check that this is an address of the right "
                        "interface of its host (COLLECTIVE_INTERFACE), and that no firewall "
                        "blocks it.",
                        "tcp",
                    ) from error
                time.sleep(_RETRY_S)

    # -- the listening side: the handler of the server ----------------------------------------

    def turn(self) -> bool:
        """Return whether there are still ranks to admit."""
        return not self._given_up and bool(self._missing())

    def pause(self) -> float | None:
        """Return the seconds until the next :meth:`turn`."""
        return _LOOK_S

    def heard(self, link: Link, message: Message) -> None:
        """Admit a rank.

        Raises:
            ValueError: the message does not come from a rank that should connect.
        """
        rank = message.get("rank")
        if type(rank) is not int or rank not in self._higher or rank in self.connections:
            raise ValueError(f"a connection of rank {rank!r:.20}, which is not expected")
        link.write(_WELCOME)
        self._server.release(link)
        self.connections[rank] = Connection(*link.hand_over())

    def gone(self, link: Link, why: str) -> None:
        """Do nothing: a rank that is turned away tries again, until its deadline."""


class _GoneOnError(Exception):
    """All ranks have connected, and one of them has broken the communicator since."""
