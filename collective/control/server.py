"""The listening side of links, and the store that a server keeps.

A :class:`Server` is one thread, which admits peers that prove that they know the key.

Any program that reaches the socket can connect; until it has proved that it knows the key, it is a
*stranger*. The cost of strangers is bounded: the time and the bytes of each, and their number at
once. When others wait, the oldest strangers have to go, so a program that holds connections open
keeps nobody out for long. Bad input ends at worst the sender's own connection, and never this
thread.

:class:`Values` is a handler that keeps the values of a store, and :func:`ask` asks it over a link.
A question has a number, which its answer repeats. If a rank gave up waiting for an answer, that
answer may come before the answer to the rank's next question. All questions are idempotent.
A server may also tell all askers, without a question, which processes it counts as lost
(:class:`Losses`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from collective.deadline import Deadline

from .link import Challenge, Link, Message, ProofError, Tls

# Largest number of strangers at once, and the time that a stranger has to prove that it knows the
# key. It has the short time while others wait, and at most the long time. If a program holds 1,000
# connections open, the turn of a later peer comes after 8 times the short time.
_STRANGERS = 128
_SHORT_S, _LONG_S = 0.25, 10.0
# Bytes that a stranger may send at most; with TLS they include certificates.
_LONGEST = 1 << 17
# Errors of accept(2) when the process or the system has no room for another socket, and the
# pause before the server tries again.
_SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SCARCE_S = 0.1
# Number of addresses of strangers that the server keeps, to list them in errors, and the name under
# which it counts strangers from further addresses.
_LISTED, _OTHERS = 8, "other addresses"


class Handler(Protocol):
    """Object that acts on the peers' messages. The server's thread calls all its methods."""

    def turn(self) -> bool:
        """Do what is due; return whether to go on."""

    def pause(self) -> float | None:
        """Return the seconds until something is due; None if nothing is."""

    def heard(self, link: Link, message: Message) -> None:
        """Act on a peer's message. An exception ends the peer's connection."""

    def gone(self, link: Link, why: str) -> None:
        """Take note of the end of a peer's connection.

        Args:
            link: the peer's link, which is closed.
            why: what was wrong with the peer's message; empty if the connection just ended.
        """


@dataclass
class _Stranger:
    """A connection whose other side has not proved yet that it knows the key."""

    address: str
    # A stranger always has the short time. It has the long time if no other connection waits.
    short: Deadline = field(default_factory=lambda: Deadline(_SHORT_S))
    long: Deadline = field(default_factory=lambda: Deadline(_LONG_S))
    challenge: Challenge = field(default_factory=Challenge)
    received: bytes = b""
    # Whether the other side has sent a proof of another key.
    is_mistaken: bool = False


class Server:
    """Server that passes the messages of all peers that know the key to ``handler``.

    Args:
        listening: a socket from :func:`.link.listen`; the server closes it in the end.
        key: secret key that a peer must prove to know.
        handler: object that acts on the peers' messages.
        tls: TLS contexts for connections that leave this host, or None.
        longest: number of bytes that a message may have; None for the limit of a link.
        room: number of peers that may be connected at once; None for any number. When another
            peer comes the server ends the connection of the peer that was silent longest. The
            silent peer has to connect again for its next message.

    Attributes:
        peers: the links of the peers, which have proved that they know the key. The link of the
            peer that spoke last is at the end.
        mistaken: how many connections sent a proof of another key, by address.
        refused: how many other connections failed to prove the key, by address. Those that sent
            nothing and ended at once do not count.
        scarce: the system's error text when it had no room for a connection, else empty.
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
        self.mistaken: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.scarce = ""
        self._listening = listening
        # Whether the selector watches the listening socket, and if not, until when it does not.
        self._listens, self._rests = True, Deadline(0.0)
        self._key = key
        self._tls = tls.listening if tls and listening.family != socket.AF_UNIX else None
        self._handler = handler
        self._bounds = {} if longest is None else {"longest": longest}
        self._room = room
        self._strangers: dict[Link, _Stranger] = {}  # the oldest comes first
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)  # a waiting connection may be gone again before accept()
        self._selector.register(listening, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the handler's ``turn()`` returns false."""
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
        """Accept no more connections, because all expected peers are there."""
        self._rest(math.inf)
        self._listening.close()
        for stranger in list(self._strangers):
            self._turn_away(stranger)

    def drop(self, link: Link) -> None:
        """End the connection of a peer without a call of the handler's ``gone()``."""
        self.release(link)
        link.close()

    def release(self, link: Link) -> None:
        """Serve a peer no more, and leave its connection as it is."""
        self.peers.pop(link, None)
        self._selector.unregister(link)

    # -- the clock ------------------------------------------------------------------------

    def _pause(self) -> float | None:
        pauses = [] if (pause := self._handler.pause()) is None else [pause]
        if not self._listens:
            pauses.append(self._rests.left())
        for stranger in self._strangers.values():  # only the oldest, which expires first
            pauses.append(stranger.long.left())
            break
        return min(pauses, default=None)

    def _look_at_the_clock(self) -> None:
        if not self._listens and self._rests.expired:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._listens = True
        for link, stranger in list(self._strangers.items()):
            if not stranger.long.expired:
                break
            self._refuse(link)

    def _rest(self, pause: float) -> None:
        """Do not accept connections for ``pause`` seconds."""
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
                # The waiting connection stays in the queue, and would wake the selector at once.
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
        """Turn away the oldest stranger if its short time is over; else accept none until then."""
        for link, stranger in self._strangers.items():
            if not stranger.short.expired:
                self._rest(stranger.short.left())
                return False
            self._refuse(link)
            return True
        return False

    def _refuse(self, link: Link) -> None:
        """Turn away a stranger that has proved nothing, and count it by its address."""
        stranger = self._strangers[link]
        if not link.received and not stranger.short.expired:
            # It only looked whether a server listens here, as ranks do before they connect.
            self._turn_away(link)
            return
        counts = self.mistaken if stranger.is_mistaken else self.refused
        is_listed = stranger.address in counts or len(counts) < _LISTED
        address = stranger.address if is_listed else _OTHERS
        counts[address] = counts.get(address, 0) + 1
        self._turn_away(link)

    def _turn_away(self, link: Link) -> None:
        self._forget(link)
        self._selector.unregister(link)
        link.close()

    def _forget(self, link: Link) -> None:
        del self._strangers[link]
        if self._rests.seconds < math.inf:  # there is room for another stranger
            self._rests = Deadline(0.0)

    # -- incoming messages ----------------------------------------------------------------

    def _read(self, link: Link) -> None:
        if link in self._strangers:
            try:
                self._prove(link, self._strangers[link])
            except (EOFError, OSError):
                self._refuse(link)
        elif link in self.peers:  # otherwise the peer was dropped after the selector saw its link
            why = ""
            try:
                for message in link.receive():
                    if link in self.peers:
                        self.peers[link] = self.peers.pop(link)
                        self._handler.heard(link, message)
                if link in self.peers and not link.flush():
                    # Back-pressure: accept no more messages of this peer until it has read the
                    # answers to its earlier messages.
                    self._selector.modify(link, selectors.EVENT_WRITE)
                return
            except (EOFError, OSError):
                pass
            except Exception as error:
                # A peer that knows the key may still send anything: at worst that ends its own
                # connection.
                why = f"{type(error).__name__}: {error}"
            self._end_link(link, why)

    def _flush(self, link: Link) -> None:
        """Send a peer more of its pending answers; once all are sent, listen to it again."""
        if link in self.peers:
            try:
                if link.flush():
                    self._selector.modify(link, selectors.EVENT_READ)
            except OSError:
                self._end_link(link, "")

    def _end_link(self, link: Link, why: str) -> None:
        if link in self.peers:
            self.drop(link)
            self._handler.gone(link, why)

    def _prove(self, link: Link, stranger: _Stranger) -> None:
        stranger.received += link.read()
        if link.received > _LONGEST:
            raise ProofError("the stranger sent more bytes than a TLS handshake needs")
        if len(stranger.received) < Challenge.length:
            return
        # A rank sends only its proof, and waits for the answer before it sends more.
        if len(stranger.received) > Challenge.length:
            raise ProofError("the stranger sent more bytes than a proof")
        try:
            answer = stranger.challenge.answer(self._key, stranger.received)
        except ProofError:
            stranger.is_mistaken = True
            # It may be a rank of another job, or one that looks for the last listener of this port.
            link.write(Challenge.refusal)
            raise
        link.write(answer)
        self._forget(link)
        if self._room is not None and len(self.peers) >= self._room:
            self._end_link(next(iter(self.peers)), "")
        self.peers[link] = None


# -- the store of a server -----------------------------------------------------------------------

# Limits of a store: bytes of a value, letters of a key, and bytes of all entries together, with
# Python's overhead for each entry. A generation of a thousand ranks has a thousand notes of a
# hundred bytes, and a verdict of some 30 KiB.
_VALUE_BYTES = 1 << 20
_KEY_LETTERS = 1 << 10
_BYTES, _ENTRY_BYTES = 1 << 26, 256
#: Number of bytes that a question or an answer may have: each byte of a value takes two letters.
LONGEST_MESSAGE = 2 * _VALUE_BYTES + (1 << 14)

_numbers = itertools.count()


class RefusedError(Exception):
    """The server refuses a question; the text says why."""


def ask(
    link: Link,
    kind: str,
    key: str,
    value: bytes | None,
    deadline: Deadline,
    unasked: Callable[[Message], object] = lambda message: None,
) -> bytes | None:
    """Return the value that the server at the other end of ``link`` answers with.

    Args:
        link: from :func:`.link.connect`; one thread asks at a time.
        kind: ``"set"``, ``"get"``, ``"put"`` (if absent) or ``"delete"``.
        key: key of the value.
        value: value to keep, or None.
        deadline: moment by which the answer must be there.
        unasked: function that takes the other messages that come before the answer.

    Raises:
        RefusedError: the server refuses; the connection stays usable.
        TimeoutError: the server has not answered by the deadline; the connection stays usable.
        EOFError, OSError, ValueError: the connection failed.
    """
    if value is not None and len(value) > _VALUE_BYTES:
        raise RefusedError(
            f"the value has {len(value)} bytes; the store keeps at most {_VALUE_BYTES} bytes a key"
        )
    question: Message = {"kind": kind, "key": key, "number": (number := next(_numbers))}
    if value is not None:
        question["value"] = value.hex()
    link.send(question)
    while (answer := link.expect(deadline)).get("number") != number:
        unasked(answer)
    if "why" in answer:
        raise RefusedError(str(answer["why"]))
    text = answer.get("value")
    return None if text is None else bytes.fromhex(text)


class Values:
    """The values of a store that a process serves; the handler of a :class:`Server`.

    Args:
        values: initial values, as hexadecimal text.
    """

    def __init__(self, values: dict[str, str] | None = None) -> None:
        self._values = dict(values or {})
        self._bytes = sum(map(_size, self._values.keys(), self._values.values()))

    def turn(self) -> bool:
        """Return True: the values never end the server."""
        return True

    def pause(self) -> float | None:
        """Return None: nothing is ever due."""
        return None

    def heard(self, link: Link, message: Message) -> None:
        """Answer a question.

        Raises:
            ValueError: the message is not a question.
            OSError: the asker is gone, or does not read its answers.
        """
        # If the peer does not read, the answer waits in the link, and this thread goes on.
        link.post(self.answer(message))

    def answer(self, message: Message) -> Message:
        """Return the answer to a question; raise ValueError if the message is none."""
        kind, key, number = message["kind"], message["key"], message["number"]
        if not isinstance(key, str) or type(number) is not int:
            raise ValueError("a question whose key is not a text or whose number is not an integer")
        value, why = None, ""
        if kind == "set":
            why = self._keep(key, message["value"])
        elif kind == "put":  # one thread answers all questions, so exactly one put comes first
            if key not in self._values:
                why = self._keep(key, message["value"])
            value = self._values.get(key)
        elif kind == "get":
            value = self._values.get(key)
        elif kind == "delete":
            self._forget(key)
        else:
            raise ValueError(f"a question of kind {kind!r:.40}")
        return {"number": number, "why": why} if why else {"number": number, "value": value}

    def gone(self, link: Link, why: str) -> None:
        """Do nothing: the peer connects again, or its job fails."""

    def _keep(self, key: str, text: str) -> str:
        """Keep a key's value in place of its last one; return an empty text, or why not."""
        bytes.fromhex(text)
        if len(key) > _KEY_LETTERS:
            return f"the key has {len(key)} letters; the store keeps keys of at most {_KEY_LETTERS}"
        if len(text) > 2 * _VALUE_BYTES:
            return f"the value is too long; the store keeps at most {_VALUE_BYTES} bytes a key"
        last = _size(key, self._values[key]) if key in self._values else 0
        if self._bytes - last + _size(key, text) > _BYTES:
            return (
                f"the store is full: it has {len(self._values)} keys, and keeps at most {_BYTES} "
                "bytes for all keys. Another program writes to the store, or old keys are never "
                "deleted"
            )
        self._forget(key)
        self._values[key] = text
        self._bytes += _size(key, text)
        return ""

    def _forget(self, key: str) -> None:
        if (text := self._values.pop(key, None)) is not None:
            self._bytes -= _size(key, text)


class Losses(Values):
    """Values of a server that tells all askers which processes are lost.

    Every link that has ever asked gets the message ``{"lost": [[host, pid], ...]}`` at a loss. A
    link that asks for the first time gets all earlier losses before its answer.
    """

    def __init__(self) -> None:
        super().__init__()
        # The lock guards both attributes: lose() runs in another thread than the server.
        self._lock = threading.Lock()
        self._askers: dict[Link, None] = {}
        self._lost: list[tuple[str, int]] = []

    def lose(self, processes: Sequence[tuple[str, int]]) -> None:
        """Tell all askers that ``processes`` are lost: host and number of each."""
        with self._lock:
            self._lost += processes
            _tell(self._askers, processes)

    def heard(self, link: Link, message: Message) -> None:
        with self._lock:
            if link not in self._askers:
                self._askers[link] = None
                _tell([link], self._lost)
        super().heard(link, message)

    def gone(self, link: Link, why: str) -> None:
        with self._lock:
            self._askers.pop(link, None)


def _tell(links: Iterable[Link], lost: Sequence[tuple[str, int]]) -> None:
    for link in links if lost else ():
        with contextlib.suppress(OSError):  # the server notices by itself that a peer has gone
            link.post({"lost": lost})


def _size(key: str, text: str) -> int:
    return len(key) + len(text) + _ENTRY_BYTES
