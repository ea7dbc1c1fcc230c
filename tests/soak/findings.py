"""Mutations of messages, and a record of their effects. The targets in ``messages`` use it."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from collective.errors import CollectiveError
from tests.backends.peers.test_strangers import ENTRY

__all__ = ["EDGES", "Findings", "framed", "mutated", "watched"]

_SLOW_S = 20.0
#: Numbers at the limits of fields, lengths and buffers.
EDGES = (0, 1, 2, 7, 63, 64, 127, 128, 255, 1023, 1024, 4096, 1 << 31, 1 << 32, 1 << 62, 1 << 63)


class Findings:
    """Record of the effects of mutated messages on one target.

    Attributes:
        made: number of messages sent to the target.
        ends: number of messages for each visible effect.
        problems: for each forbidden effect a text with the effect and the message.
    """

    def __init__(self) -> None:
        self.made = 0
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []

    def add(self, other: Findings) -> None:
        """Add the findings of another run of the same target."""
        self.made += other.made
        self.ends.update(other.ends)
        self.problems += other.problems

    def hold(self, message: object, call: Callable[[], object]) -> None:
        """Record a problem if ``call`` raises a foreign error or is slow."""
        since = time.monotonic()
        self.made += 1
        try:
            call()
            self.ends["accepted"] += 1
        except CollectiveError as error:
            self.ends[type(error).__name__] += 1
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error} after {message!r:.400}")
        if time.monotonic() - since > _SLOW_S:
            self.problems.append(f"{time.monotonic() - since:.0f} s after {message!r:.400}")


@contextlib.contextmanager
def watched(findings: Findings) -> Iterator[None]:
    """Record exceptions that end a thread as problems."""

    def note(arguments: Any) -> None:
        findings.problems.append(f"thread {arguments.thread}: {arguments.exc_value!r}")

    before, threading.excepthook = threading.excepthook, note
    try:
        yield
    finally:
        threading.excepthook = before


# -- mutations -----------------------------------------------------------------------------------


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return ``data`` with some of its bytes changed, removed, duplicated or replaced."""
    new = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        at = dice.randrange(len(new) + 1)
        to = min(len(new), at + dice.choice((1, 1, 2, 8, 100)))
        how = dice.randrange(7)
        if how == 0:
            del new[at:to]
        elif how == 1:
            new[at:at] = new[at:to]
        elif how == 2:
            new[at:at] = dice.randbytes(dice.choice((1, 4, 30)))
        elif how == 3:
            new[at:to] = dice.randbytes(to - at)
        elif how == 4:
            number = dice.choice(EDGES) + dice.choice((-1, 0, 1))
            new[at : at + 8] = (number % (1 << 64)).to_bytes(8, dice.choice(("little", "big")))
        elif how == 5:
            new[at:at] = str(dice.choice(EDGES) * dice.choice((-1, 1))).encode()
        elif new:
            new[at % len(new)] ^= 1 << dice.randrange(8)
    return bytes(new)


def mutated_json(message: Any, dice: random.Random) -> Any:
    """Return a JSON value in which one part is replaced or removed."""
    if dice.random() < 0.15 or not isinstance(message, (dict, list)) or not message:
        return dice.choice(
            (None, True, -1, dice.choice(EDGES), 0.5, "", "world", [], {}, [0], ENTRY, "\ud800")
        )
    if isinstance(message, list):
        at = dice.randrange(len(message))
        return [*message[:at], mutated_json(message[at], dice), *message[at + 1 :]]
    key = dice.choice(list(message))
    if dice.random() < 0.2:
        return {name: value for name, value in message.items() if name != key}
    return {**message, key: mutated_json(message[key], dice)}


def framed(message: Any, dice: random.Random) -> bytes:
    """Return a message for an authenticated connection, mutated as JSON or as bytes."""
    if dice.random() < 0.7:
        text = json.dumps(mutated_json(message, dice)).encode()
        return len(text).to_bytes(4, "little") + text
    text = json.dumps(message).encode()
    return mutated(len(text).to_bytes(4, "little") + text, dice)
