"""The store that a process serves: the values that it keeps, and how ranks ask it over a link.

A question has a number, which its answer repeats. If a rank gave up waiting for an answer, that
answer may come before the answer to the rank's next question. All questions are idempotent.

A server may also tell all askers, without a question, which processes it counts as lost
(:class:`Losses`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

from collective.deadline import Deadline

from .link import Link, Message

__all__ = ["LONGEST_MESSAGE", "Losses", "RefusedError", "Values", "ask"]

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
    """The values of a store that a process serves; the handler of a :class:`.server.Server`.

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
