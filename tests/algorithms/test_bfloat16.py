"""bfloat16 in NumPy, compared with torch, with ml_dtypes and with cases worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from collective.algorithms import arithmetic
from collective.algorithms.arithmetic import bfloat16_to_float32, float32_to_bfloat16
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op, premul_sum
from tests.algorithms.test_arithmetic import bf16, fold, scaled

Array = np.ndarray[Any, Any]

BF16 = BY_NAME["bfloat16"]
EVERY_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16)
BLOCK = arithmetic._BLOCK


def some_bfloat16(seed: int, count: int = 20_000) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 16, count).astype(np.uint16)


def same_values(result: Array, expected: Array) -> None:
    """Compare bfloat16 bits as numbers: any NaN equals any NaN."""
    np.testing.assert_array_equal(bfloat16_to_float32(result), bfloat16_to_float32(expected))


# -- bfloat16 and float32 -----------------------------------------------------------

ROUNDING = {
    "one": (0x3F800000, 0x3F80),
    "just below a tie": (0x3F807FFF, 0x3F80),
    "tie to even, down": (0x3F808000, 0x3F80),
    "just above a tie": (0x3F808001, 0x3F81),
    "tie to even, up": (0x3F818000, 0x3F82),
    "negative tie": (0xBF818000, 0xBF82),
    "carry into the exponent": (0x3FFFFFFF, 0x4000),
    "largest that stays finite": (0x7F7F7FFF, 0x7F7F),
    "tie at the top": (0x7F7F8000, 0x7F80),
    "largest float32": (0x7F7FFFFF, 0x7F80),
    "infinity": (0x7F800000, 0x7F80),
    "minus infinity": (0xFF800000, 0xFF80),
    "minus zero": (0x80000000, 0x8000),
    "smallest denormal": (0x00000001, 0x0000),
    "denormal tie to zero": (0x00008000, 0x0000),
    "denormal above the tie": (0x00008001, 0x0001),
    "denormal tie up": (0x00018000, 0x0002),
    "denormal to normal": (0x007F8000, 0x0080),
    "NaN whose payload is cut off": (0x7F800001, 0x7FC0),
    "NaN that a carry would wrap": (0xFFFFFFFF, 0xFFFF),
    "quiet NaN": (0x7FC00000, 0x7FC0),
}


@pytest.mark.parametrize(("wide", "narrow"), ROUNDING.values(), ids=ROUNDING)
def test_bfloat16_rounding_matches_cases_by_hand(wide: int, narrow: int) -> None:
    bits = float32_to_bfloat16(np.array([wide], np.uint32).view(np.float32))
    assert bits.dtype == np.uint16
    assert hex(bits[0]) == hex(narrow)


def test_bfloat16_widening_is_exact() -> None:
    wide = bfloat16_to_float32(EVERY_BFLOAT16)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.view(np.uint32), EVERY_BFLOAT16.astype(np.uint32) << 16)


def test_bfloat16_round_trip_through_float32_keeps_every_value() -> None:
    wide = bfloat16_to_float32(EVERY_BFLOAT16)
    back = float32_to_bfloat16(wide)
    number = ~np.isnan(wide)
    np.testing.assert_array_equal(back[number], EVERY_BFLOAT16[number])
    assert np.isnan(bfloat16_to_float32(back[~number])).all()


def test_bfloat16_rounding_matches_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint64)
    values = bits.astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        reference = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    same_values(float32_to_bfloat16(values), reference)


@settings(deadline=None)  # the first example imports torch
@given(arrays(np.float32, 50, elements=st.floats(width=32)))
def test_bfloat16_rounding_matches_torch(values: Array) -> None:
    torch = pytest.importorskip("torch")
    reference = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    same_values(float32_to_bfloat16(values), reference.view(np.uint16))


# -- folds of bfloat16 --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "a", "b", "expected"),
    [
        ("sum", 1.0, 2.0**-8, 1.0),  # a tie, to even
        ("sum", 1.0078125, 2.0**-8, 1.015625),  # a tie, to even, the other way
        ("sum", 3.3895314e38, 3.3895314e38, np.inf),
        ("sum", np.inf, -np.inf, np.nan),
        ("prod", 3.0, -0.5, -1.5),
        ("prod", 1e-30, 1e-30, 0.0),
        ("min", np.nan, 1.0, np.nan),
        ("max", 1.0, np.nan, np.nan),
        ("max", -np.inf, -5.0, -5.0),
        ("land", np.nan, 2.0, 1.0),
        ("land", -0.0, 2.0, 0.0),
        ("lor", -0.0, 0.0, 0.0),
        ("lor", 0.0, -7.0, 1.0),
    ],
)
def test_fold_of_bfloat16_matches_cases_by_hand(
    name: str, a: float, b: float, expected: float
) -> None:
    with np.errstate(all="ignore"):
        result = fold(name, BF16, bf16(a), bf16(b))
    np.testing.assert_array_equal(bfloat16_to_float32(result), np.float32(expected))


@pytest.mark.parametrize("name", ["sum", "prod", "min", "max"])
def test_fold_of_bfloat16_matches_ml_dtypes(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a, b = some_bfloat16(1), some_bfloat16(2)
    function = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[name]
    with np.errstate(all="ignore"):
        reference = function(a.view(ml_dtypes.bfloat16), b.view(ml_dtypes.bfloat16))
        same_values(fold(name, BF16, a, b), reference.view(np.uint16))


@pytest.mark.parametrize("name", ["sum", "prod", "min", "max"])
def test_fold_of_bfloat16_matches_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    a, b = some_bfloat16(3), some_bfloat16(4)
    x, y = (torch.from_numpy(v.view(np.int16)).view(torch.bfloat16) for v in (a, b))
    function = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}
    reference = function[name](x, y).view(torch.int16).numpy().view(np.uint16)
    with np.errstate(all="ignore"):
        same_values(fold(name, BF16, a, b), reference)


@pytest.mark.parametrize("out", ["new", "left", "right"])
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_fold_of_bfloat16_is_right_around_block_length(count: int, out: str) -> None:
    a = bf16(*(np.arange(count) % 100))
    b = bf16(*(np.arange(count) % 90))
    expected = bf16(*(np.arange(count) % 100 + np.arange(count) % 90))
    target = {"new": np.empty_like(a), "left": a, "right": b}[out]
    arithmetic.fold(as_op("sum"), BF16)(a, b, out=target)
    np.testing.assert_array_equal(target, expected)


# -- scaling ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 7, 256, 257, 300, 1000])
def test_avg_of_bfloat16_divides_by_unrounded_size(size: int) -> None:
    torch = pytest.importorskip("torch")
    x = some_bfloat16(size)
    reference = (torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) / size).view(torch.int16)
    with np.errstate(all="ignore"):
        same_values(
            scaled(arithmetic.post(as_op("avg"), BF16, size), x), reference.numpy().view(np.uint16)
        )


@pytest.mark.parametrize(
    ("total", "size", "mean"),
    [(9, 3, 3), (1, 3, 0.333984375), (900, 300, 3), (256, 257, 0.99609375)],
)
def test_avg_of_bfloat16_matches_cases_by_hand(total: float, size: int, mean: float) -> None:
    result = scaled(arithmetic.post(as_op("avg"), BF16, size), bf16(total))
    assert bfloat16_to_float32(result)[0] == mean


def test_premul_sum_of_bfloat16_matches_cases_by_hand() -> None:
    result = scaled(arithmetic.pre(premul_sum(-1.5), BF16, 2), bf16(1, 3, 0.0078125))
    np.testing.assert_array_equal(bfloat16_to_float32(result), [-1.5, -4.5, -0.01171875])
