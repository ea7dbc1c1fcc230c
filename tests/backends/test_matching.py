"""The engine of posted messages in Python, over streams that tests make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collective.backends.matching import Engine, StreamLock
from collective.contract.mail import EAGER_BYTES, FAILED


class _Cut:
    """Streams to and from a peer whose connection has ended."""

    def __init__(self) -> None:
        self.sending, self.receiving = StreamLock(), StreamLock()

    def write(self, content: Any, tag: int) -> Iterator[None]:
        raise BrokenPipeError("the peer has left")
        yield

    def spoil(self) -> None:
        pass


@pytest.mark.parametrize("nbytes", [0, 8, 2 * EAGER_BYTES])
def test_posting_a_send_to_a_rank_that_has_left_fails_the_send_and_raises_nothing(
    nbytes: int,
) -> None:
    engine = Engine({1: _Cut()})
    posted = engine.post_send(np.zeros(nbytes, np.uint8), 1, tag=0)
    assert posted.state == FAILED
    assert isinstance(posted.error, BrokenPipeError)
    assert not engine.busy
