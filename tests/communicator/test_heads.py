"""Malformed heads of messages: ``recv`` raises an error, and allocates no memory for the message.

No sender of this version writes such a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective.communicator.calls.heads import Head
from collective.deadline import Deadline
from collective.errors import CollectiveError
from collective.testing import run_ranks

pytestmark = pytest.mark.quick

# The fields are kind, dtype, bytes, number of dimensions, and shape. This head is consistent:
SOUND = [0, 11, 8, 1, 1]
HEADS = {
    "kind": [4, 11, 8, 1, 1],
    "negative kind": [-1, 11, 8, 1, 1],
    "dtype": [0, 99, 8, 1, 1],
    "negative dtype": [0, -1, 8, 1, 1],
    "bytes": [0, 11, 16, 1, 1],
    "negative bytes": [0, 11, -8, 1, -1],
    "shape": [0, 11, 8, 2, 1, 0],
    "negative shape": [0, 11, 8, 2, -1, -1],
    "dimensions": [0, 11, 8, 13, 1],
    "negative dimensions": [0, 11, 8, -1, 1],
    "negative length of an object": [1, 0, -1],
}


def receives(comm: Any, words: list[int]) -> str:
    if comm.rank == 1:
        head = Head(16)
        head.words[:] = [*words, *[0] * (16 - len(words))]
        comm.inner.transport.send(head.buffer, 0, 5, Deadline(10.0))
        return ""
    out = np.zeros(1)
    try:
        comm.recv(out, 1, tag=5)
    except CollectiveError as error:
        assert out[0] == 0
        return str(error)
    return "received"


@pytest.mark.parametrize("words", HEADS.values(), ids=HEADS)
def test_malformed_head_raises_error(words: list[int]) -> None:
    text = run_ranks(2, receives, words)[0]
    assert text.startswith(f"recv: a message begins with {', '.join(map(str, words))}")


def test_sound_head_is_received() -> None:
    """Show that the changed field alone makes each malformed head wrong."""
    assert run_ranks(2, receives, SOUND)[0] == "received"
