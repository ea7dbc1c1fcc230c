"""Objects from rank to rank as ChainerMN's programs expect them: of any tag, in order."""

from __future__ import annotations

from typing import Any, NamedTuple

from collective import ANY_SOURCE
from collective.communicator import Communicator
from collective.errors import InvalidArgumentError

__all__ = ["ANY_TAG", "OBJECT_TAG", "Letter", "Mailbox"]

#: Every negative tag means any, as MPI libraries have different ones for it.
ANY_TAG = -1
#: With what all objects travel; arrays may have any other tag.
OBJECT_TAG = 2**31 - 1


class Letter(NamedTuple):
    """An object on its way."""

    source: int
    tag: int
    content: Any


class Mailbox:
    """Sends and receives objects, and keeps those that came before they were asked for.

    All objects have one tag in the messages themselves, so that a receiver may ask for any. Of
    one sender they arrive in the order in which they were sent.

    Args:
        comm: carries the messages.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._kept: list[Letter] = []

    def send(self, content: Any, dest: int, tag: int, pickle: bool) -> None:
        """Send an object; see :meth:`Communicator.send_object`."""
        if isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
            raise InvalidArgumentError(f"send_obj: tag {tag!r}; an integer from 0.")
        letter = tuple(Letter(self._comm.rank, tag, content))
        self._comm.send_object(letter, dest, tag=OBJECT_TAG, pickle=pickle)

    def recv(self, source: int, tag: int, pickle: bool) -> Letter:
        """Receive an object from ``source`` (any if negative) with ``tag`` (any if negative)."""
        source = ANY_SOURCE if source < 0 else source
        for number, letter in enumerate(self._kept):
            if source in (ANY_SOURCE, letter.source) and (tag < 0 or letter.tag == tag):
                return self._kept.pop(number)
        while True:
            received = self._comm.recv_object(source, tag=OBJECT_TAG, pickle=pickle)
            letter = Letter(*received)
            if tag < 0 or letter.tag == tag:
                return letter
            self._kept.append(letter)
