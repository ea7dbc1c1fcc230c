"""The listening side of links: one thread that lets in who proves that it knows the key.

Anybody who reaches the socket can connect. So what a stranger costs is bounded before it has
proved anything: its time, its bytes, and how many of them there are at once. Those who are
there longest have to go when others wait, so that whoever holds connections open keeps nobody
out for long. And whatever anybody sends ends at worst its own connection, not this thread.
"""

from __future__ import annotations

import errno
import math
import selectors
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from collective.deadline import Deadline

from .link import Challenge, Link, Message, ProofError

if TYPE_CHECKING:
    from collective.contract.world import Tls

__all__ = ["Handler", "Server"]

# How many strangers there are at once, and how long they may take to prove who they are: at
# least the first while others wait, at most the second. With 1,000 connections held open
# before it, a peer's turn is after 8 times the first.
_STRANGERS = 128
_SHORT_S, _LONG_S = 0.25, 10.0
# What a stranger may send at most: with TLS, certificates are part of it.
_LONGEST = 1 << 17
# What accept(2) says when the process or the system has no room for another socket, and the
# pause before it is tried again.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SCARCE_S = 0.1
# Addresses of strangers that are kept, to be listed in errors.
_LISTED = 8


class Handler(Protocol):
    """What a server serves. All its methods are called in the server's thread."""

    def turn(self) -> bool:
        """Do what is due; return whether to go on."""

    def pause(self) -> float | None:
        """Return the seconds until something is due; None if nothing is."""

    def heard(self, link: Link, message: Message) -> None:
        """Heed what a peer says. An exception ends the peer's connection."""

    def gone(self, link: Link, why: str) -> None:
        """Take note of the end of a peer's connection.

        Args:
            link: closed.
            why: what was wrong with what it said; empty if the connection just ended.
        """


@dataclass
class _Stranger:
    """Somebody who has proved nothing yet."""

    address: str
    # It has the first for sure, and the second if nobody else knocks.
    short: Deadline = field(default_factory=lambda: Deadline(_SHORT_S))
    long: Deadline = field(default_factory=lambda: Deadline(_LONG_S))
    challenge: Challenge = field(default_factory=Challenge)
    received: bytes = b""


class Server:
    """Serves ``handler`` to all who know the key.

    Args:
        listening: a socket from :func:`.link.listen`; closed in the end.
        key: what peers have to know.
        handler: what is done with what they say.
        tls: for connections that leave this host, or None.
        longest: how many bytes a message may have; None for what a link allows.
        room: how many peers there may be at once. When another comes the server ends the
            connection of the peer that was silent longest, which has to connect again for its next
            message. None for any number.

    Attributes:
        peers: the links of those who have proved that they know the key, the one that spoke last
            at the end.
        refused: how often somebody has failed to, by address.
        scarce: what the system said when it had no room for a connection, else empty.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        handler: Handler,
        tls: Tls | None = None,
        *,
        longest: int | None = None,
        room: int | None = None,
    ) -> None:
        self.peers: dict[Link, None] = {}
        self.refused: dict[str, int] = {}
        self.scarce = ""
        self._listening = listening
        # Whether the selector looks at it, and if not, until when.
        self._listens, self._rests = True, Deadline(0.0)
        self._key = key
        self._tls = tls.listening if tls and listening.family != socket.AF_UNIX else None
        self._handler = handler
        self._bounds = {} if longest is None else {"longest": longest}
        self._room = room
        self._strangers: dict[Link, _Stranger] = {}  # those who came first first
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)  # whoever knocked may have gone again
        self._selector.register(listening, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the handler is through."""
        try:
            while self._handler.turn():
                for key, events in self._selector.select(self._pause()):
                    if not isinstance(key.fileobj, Link):
                        self._accept()
                    elif events & selectors.EVENT_WRITE:
                        self._flush(key.fileobj)
                    else:
                        self._read(key.fileobj)
                self._look_at_the_clock()
        finally:
            self.stop_listening()
            for link in self.peers:
                link.close()
            self._selector.close()

    def stop_listening(self) -> None:
        """Take nobody in any more: all who were to come are there."""
        self._rest(math.inf)
        self._listening.close()
        for stranger in list(self._strangers):
            self._turn_away(stranger)

    def drop(self, link: Link) -> None:
        """End the connection of a peer, of which the handler is not told."""
        self.peers.pop(link, None)
        self._selector.unregister(link)
        link.close()

    def refusals(self) -> str:
        """Tell who has not proved that it knows the key; empty if nobody failed to."""
        return ", ".join(
            f"{count} connection{'s' * (count > 1)} from {address}"
            for address, count in self.refused.items()
        )

    # -- the clock ------------------------------------------------------------------------

    def _pause(self) -> float | None:
        left = [] if (pause := self._handler.pause()) is None else [pause]
        if not self._listens:
            left.append(self._rests.left())
        for stranger in self._strangers.values():  # the oldest
            left.append(stranger.long.left())
            break
        return min(left, default=None)

    def _look_at_the_clock(self) -> None:
        if not self._listens and self._rests.expired:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._listens = True
        for link, stranger in list(self._strangers.items()):
            if not stranger.long.expired:
                break
            self._refuse(link)

    def _rest(self, pause: float) -> None:
        """Heed the listening socket no more for ``pause`` seconds."""
        if self._listens:
            self._selector.unregister(self._listening)
            self._listens = False
        self._rests = Deadline(pause)

    # -- strangers ------------------------------------------------------------------------

    def _accept(self) -> None:
        if len(self._strangers) >= _STRANGERS and not self._make_room():
            return
        try:
            sock, address = self._listening.accept()
        except OSError as error:
            if error.errno in _SCARCE:
                self.scarce = str(error)
                # The one who waits stays in the queue, and would wake us at once.
                self._rest(0.0 if self._make_room() else _SCARCE_S)
            return
        try:
            link = Link(sock, self._tls, **self._bounds)
            stranger = _Stranger(address[0] if address else "this host")
            link.write(stranger.challenge.greeting)
        except OSError:
            sock.close()
            return
        self._strangers[link] = stranger
        self._selector.register(link, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Turn the oldest stranger away if it had its time; else take nobody in until then."""
        for link, stranger in self._strangers.items():
            if not stranger.short.expired:
                self._rest(stranger.short.left())
                return False
            self._refuse(link)
            return True
        return False

    def _refuse(self, link: Link) -> None:
        """Turn a stranger away who has proved nothing, and remember where it came from."""
        address = self._strangers[link].address
        if address in self.refused or len(self.refused) < _LISTED:
            self.refused[address] = self.refused.get(address, 0) + 1
        self._turn_away(link)

    def _turn_away(self, link: Link) -> None:
        self._forget(link)
        self._selector.unregister(link)
        link.close()

    def _forget(self, link: Link) -> None:
        del self._strangers[link]
        if self._rests.seconds < math.inf:  # there is room for another
            self._rests = Deadline(0.0)

    # -- what arrives ---------------------------------------------------------------------

    def _read(self, link: Link) -> None:
        if link in self._strangers:
            try:
                self._prove(link, self._strangers[link])
            except (EOFError, OSError):
                self._refuse(link)
        elif link in self.peers:  # or it has been dropped since the selector saw it
            why = ""
            try:
                for message in link.receive():
                    if link in self.peers:
                        self.peers[link] = self.peers.pop(link)
                        self._handler.heard(link, message)
                if link in self.peers and not link.flush():
                    # It says no more before it has read the answers to what it has said.
                    self._selector.modify(link, selectors.EVENT_WRITE)
                return
            except (EOFError, OSError):
                pass
            except Exception as error:
                # Whatever a peer says that knows the key, at worst its own connection ends.
                why = f"{type(error).__name__}: {error}"
            self._lose(link, why)

    def _flush(self, link: Link) -> None:
        """Send a peer more of what it has not read yet, and listen to it when that is all."""
        if link in self.peers:
            try:
                if link.flush():
                    self._selector.modify(link, selectors.EVENT_READ)
            except OSError:
                self._lose(link, "")

    def _lose(self, link: Link, why: str) -> None:
        if link in self.peers:
            self.drop(link)
            self._handler.gone(link, why)

    def _prove(self, link: Link, stranger: _Stranger) -> None:
        stranger.received += link.read()
        if link.received > _LONGEST:
            raise ProofError("it says more than TLS takes")
        if len(stranger.received) < Challenge.length:
            return
        # One who sends more than that without waiting for our answer is none of ours.
        if len(stranger.received) > Challenge.length:
            raise ProofError("it says more than a proof")
        link.write(stranger.challenge.answer(self._key, stranger.received))
        self._forget(link)
        if self._room is not None and len(self.peers) >= self._room:
            self._lose(next(iter(self.peers)), "")
        self.peers[link] = None
