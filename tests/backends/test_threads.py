"""Messages between threads: the order in which a receive from any rank takes them."""

from __future__ import annotations

import numpy as np

from collective.backends.threads import ThreadsBackend, _Message, _SharedState
from collective.contract.backend import ANY_SOURCE
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME


class Receiver:
    """Rank 0 of four ranks, of which the others have sent messages with each of some tags."""

    def __init__(self, *tags: int) -> None:
        hub = _SharedState(4)
        self._backend = ThreadsBackend(hub, 0)
        for tag in tags:
            for source in (1, 2, 3):
                sent = [_Message(np.zeros(1, np.uint8), tag) for _ in range(9)]
                hub.mail[0, source].extend(sent)

    def take(self, source: int = ANY_SOURCE, tag: int = 0) -> int:
        """Receive a message; return its source."""
        buffer = Buffer.empty(1, BY_NAME["uint8"])
        return self._backend.recv(buffer, source, tag, Deadline(5.0))


def test_sources_of_messages_from_any_take_turns() -> None:
    rank = Receiver(0)
    assert [rank.take() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_receive_from_named_source_changes_no_turn() -> None:
    rank = Receiver(0)
    assert [rank.take(source) for source in (ANY_SOURCE, 1) * 4][::2] == [1, 2, 3, 1]


def test_receive_with_another_tag_changes_no_turn() -> None:
    rank = Receiver(0, 1)
    sources = []
    for _ in range(4):
        sources.append(rank.take())
        rank.take(tag=1)
        rank.take(tag=1)
    assert sources == [1, 2, 3, 1]
