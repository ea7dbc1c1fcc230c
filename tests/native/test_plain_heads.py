"""Heads in C, for transports that send messages themselves: the same bytes as in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective import native
from collective.communicator import Communicator
from collective.communicator.calls.heads import message_of
from collective.testing import run_ranks

pytestmark = pytest.mark.skipif(
    native.chosen.extension is None, reason="the native core is not in use"
)

ARRAYS = [
    np.arange(3.0),
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.array(1.5, np.float32),
    np.zeros((0, 4), np.uint8),
    np.ones(native.HEAD_ROOM, np.bool_),
    np.ones(native.HEAD_ROOM + 1, np.uint8),
]
IDS = [f"{x.dtype}{list(x.shape)}" for x in ARRAYS]


def _heads() -> native.Heads:
    heads = native.heads()
    assert heads is not None
    return heads


def _by_python(comm: Communicator) -> list[bytes]:
    return [message_of(comm._path, "send", x)[0].buffer.array.tobytes() for x in ARRAYS]


def test_head_equals_head_of_python() -> None:
    (expected,) = run_ranks(1, _by_python, backend="threads")
    for x, expected_bytes in zip(ARRAYS, expected, strict=True):
        head = np.zeros(native.HEAD_BYTES, np.uint8)
        assert _heads().write_head(x, head) == x.nbytes
        written = 128 + (x.nbytes if x.nbytes <= native.HEAD_ROOM else 0)
        assert head.tobytes()[:written] == expected_bytes[:written]


@pytest.mark.parametrize("x", ARRAYS, ids=IDS)
def test_head_contains_short_array(x: Any) -> None:
    head, out = np.zeros(native.HEAD_BYTES, np.uint8), np.zeros_like(x)
    _heads().write_head(x, head)
    assert _heads().read_head(head, out)
    assert (out == (x if x.nbytes <= native.HEAD_ROOM else 0)).all()


def test_read_head_refuses_unsuitable_output() -> None:
    head = np.zeros(native.HEAD_BYTES, np.uint8)
    _heads().write_head(np.arange(6.0), head)
    fixed = np.zeros(6)
    fixed.flags.writeable = False
    for out in (np.zeros(5), np.zeros((2, 3)), np.zeros(6, np.int64), np.zeros(12)[::2], fixed):
        assert not _heads().read_head(head, out)
        assert not out.any()


def test_array_that_is_not_plain_is_left_to_python() -> None:
    head = np.zeros(native.HEAD_BYTES, np.uint8)
    for x in (np.zeros(12)[::2], [1.0], None, 1.0, np.array(["text"])):
        assert _heads().write_head(x, head) is None
        assert _heads().room_in(x) is None
    assert not head.any()
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    assert _heads().write_head(fixed, head) == 24
    assert _heads().room_in(fixed) is None
    assert _heads().room_in(np.zeros(3)) == 24


@pytest.mark.parametrize("head", [np.zeros(127, np.uint8), b"x" * 1024, None])
def test_head_without_memory_raises_type_error(head: Any) -> None:
    with pytest.raises(TypeError, match="128 bytes"):
        _heads().write_head(np.ones(1), head)
    with pytest.raises(TypeError, match="128 bytes"):
        _heads().read_head(head, np.ones(1))
