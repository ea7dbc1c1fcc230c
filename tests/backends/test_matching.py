"""The engine of posted messages in Python, over streams that tests make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collective.backends.inbox import StreamLock, Transfer
from collective.backends.matching import RECEIVING, SENDING, Matcher, _SelfPrefix
from collective.contract.backend import ANY_SOURCE
from collective.contract.mail import EAGER_BYTES, FAILED
from collective.native import NOBODY


class _Cut:
    """Streams to and from a peer whose connection has ended."""

    def __init__(self) -> None:
        self.receiving = StreamLock()

    def write(self, content: Any, tag: int) -> Iterator[None]:
        raise BrokenPipeError("the peer has left")
        yield

    def spoil(self) -> None:
        pass


@pytest.mark.parametrize("nbytes", [0, 8, 2 * EAGER_BYTES])
def test_posting_a_send_to_a_rank_that_has_left_fails_the_send_and_raises_nothing(
    nbytes: int,
) -> None:
    engine = Matcher({1: _Cut()})
    posted = engine.post_send(np.zeros(nbytes, np.uint8), 1, tag=0)
    assert posted.state == FAILED
    assert isinstance(posted.error, BrokenPipeError)
    assert not engine.busy


def test_message_does_not_overtake_one_that_was_kept_before_its_receive() -> None:
    engine = Matcher({1: _Cut()})
    inbox = engine._inboxes[1]
    inbox.put(_SelfPrefix(1, 5), np.zeros(1, np.uint8))
    # Another thread posts a receive of any tag, and has not offered it the kept message yet.
    posted = engine._await(Transfer(None, ANY_SOURCE, NOBODY, 0, mask=0))
    inbox.put(_SelfPrefix(1, 6), np.ones(1, np.uint8))
    assert not posted.done
    inbox.deliver()
    assert (posted.tag, bytes(posted.data)) == (5, b"\0")


def test_exchange_that_gives_up_leaves_no_operation_in_flight() -> None:
    engine = Matcher({1: _Full()})
    out = np.zeros(4, np.uint8)
    exchange = engine.exchange(out, 1, out, 1, tag=3)
    assert exchange.advance() == SENDING | RECEIVING
    exchange.give_up()
    assert not engine.wants(1)
    # A part of the message may have left, so no other message follows on the stream.
    assert not engine.post_send(bytes(2 * EAGER_BYTES), 1, tag=3).done


class _Full:
    """Streams to and from a peer that takes nothing and sends nothing."""

    def __init__(self) -> None:
        self.receiving = StreamLock()

    def write(self, content: Any, tag: int) -> Iterator[None]:
        while True:
            yield

    def prefix(self) -> None:
        return None

    def spoil(self) -> None:
        pass
