"""Inputs, guarded outputs, regimes and parameters shared by the tests of the algorithms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from collective.algorithms import arithmetic, costs, pieces
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import user_op
from collective.request import Request
from tests.support.loopback import Loopback, Rendezvous

Array = np.ndarray[Any, Any]

SIZES = (2, 3, 5, 8)
COUNTS = (0, 1, 33)
#: Values of START_BYTES and CHUNK_BYTES for which few rounds, or few bytes, are the better choice.
REGIMES = {"rounds": (1 << 40, 1 << 20), "bytes": (0, 48)}
#: Every root for the small sizes; for 8 ranks one root that is neither the first nor the last.
ROOTS = [
    pytest.param(size, root, id=f"{size}-root{root}")
    for size in SIZES
    for root in (range(size) if size < 8 else (size // 2 + 1,))
]
CALL = Request("test")
TIMEOUT = 20.0
INT64, FLOAT32 = BY_NAME["int64"], BY_NAME["float32"]

kinds = pytest.mark.parametrize("kind", [Loopback, Rendezvous], ids=["eager", "rendezvous"])
regimes = pytest.mark.parametrize("regime", REGIMES)
sizes = pytest.mark.parametrize("size", SIZES)
counts_ = pytest.mark.parametrize("count", COUNTS)
places = pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
orders = pytest.mark.parametrize("ordered", [False, True], ids=["any_order", "ordered"])


def compose(a: Array, b: Array) -> Array:
    """Compose maps x -> p x + q modulo 251, coded as p * 256 + q: associative, not commutative."""
    p, q = np.divmod(a, 256)
    r, s = np.divmod(b, 256)
    return p * r % 251 * 256 + (p * s + q) % 251


COMPOSE = user_op(compose)
SUBTRACT = user_op(np.subtract)  # It is not associative, so only an ordered fold is right.


@contextlib.contextmanager
def in_regime(name: str) -> Iterator[None]:
    """Set the constants of a regime for the length of a block."""
    start, chunk = REGIMES[name]
    with (
        mock.patch.object(costs, "START_BYTES", start),
        mock.patch.object(pieces, "CHUNK_BYTES", chunk),
    ):
        yield


def sample(dtype: DType, count: int, rank: int) -> Array:
    """Return small whole numbers, whose sums and products are exact in every dtype."""
    numbers = (np.arange(count) * 7 + rank * 3 + np.arange(count) // 5 * rank) % 5
    if dtype.kind in "iu":
        return numbers.astype(dtype.storage)
    if dtype.kind == "b":
        return numbers % 2 == 0
    values = numbers - 2.0 + (1j * (numbers % 2) if dtype.kind == "c" else 0)
    if dtype.name == "bfloat16":
        return arithmetic.float32_to_bfloat16(values.astype(np.float32))
    return values.astype(dtype.storage)


def maps(count: int, rank: int) -> Array:
    """Return elements for COMPOSE that differ between ranks and positions."""
    return (np.arange(count) % 250 + 1) * 256 + (rank * 31 + np.arange(count)) % 251


class Output:
    """Output buffer between guard elements, which no call may change."""

    def __init__(self, count: int, dtype: DType) -> None:
        self._all = np.full(count + 32, 77).astype(dtype.storage)
        self._guard = self._all[0]
        self.buffer = Buffer(self._all[16 : count + 16], dtype)

    def checked(self) -> Array:
        """Check the guards, and return the output."""
        assert (self._all[:16] == self._guard).all(), "wrote before the output"
        assert (self._all[16 + self.buffer.count :] == self._guard).all(), "wrote past the output"
        return self.buffer.array


def same(result: Array, expected: Array) -> None:
    """Check that dtype and elements are equal."""
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def uneven(size: int, count: int) -> list[int]:
    """Return a count for each rank, around ``count``; that of rank 1 is 0."""
    return [max(0, count + 2 * rank - 3) * (rank != 1) for rank in range(size)]
