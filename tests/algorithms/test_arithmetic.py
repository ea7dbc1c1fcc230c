"""The arithmetic of reductions. ``test_bfloat16`` tests the arithmetic of bfloat16."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest

from collective.algorithms import arithmetic
from collective.algorithms.arithmetic import bfloat16_to_float32, float32_to_bfloat16
from collective.errors import DtypeError, InvalidArgumentError
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import NAMES, ReduceOp, as_op, premul_sum, user_op
from tests.support.float_modes import MODES, float_mode, needs_float_modes

pytestmark = pytest.mark.quick

Array = np.ndarray[Any, Any]

BF16, F16, F32 = BY_NAME["bfloat16"], BY_NAME["float16"], BY_NAME["float32"]


def fold(op: ReduceOp | str, dtype: DType, a: Array, b: Array) -> Array:
    out = np.empty_like(a)
    arithmetic.fold(as_op(op), dtype)(a, b, out=out)
    return out


def scaled(scale: arithmetic.Scale | None, x: Array) -> Array:
    """Return ``x`` scaled, after checking that scaling in place gives the same bits.

    The checks compare bytes, because a NaN does not equal itself.
    """
    assert scale is not None
    out, before, in_place = np.empty_like(x), x.tobytes(), x.copy()
    scale(x, out)
    assert x.tobytes() == before, "changed its input"
    scale(in_place, in_place)
    assert in_place.tobytes() == out.tobytes(), "differs in place"
    return out


def bf16(*values: float) -> Array:
    return float32_to_bfloat16(np.array(values, np.float32))


# -- folds of NumPy's types ---------------------------------------------------------

FOLDS = [
    ("sum", "int8", [100, -1], [100, 1], [-56, 0]),
    ("sum", "uint8", [255, 3], [1, 4], [0, 7]),
    ("sum", "float16", [2048, 1], [1, 2], [2048, 3]),
    ("sum", "complex64", [1 + 2j], [3 - 5j], [4 - 3j]),
    ("prod", "int16", [300, -2], [300, 7], [24464, -14]),
    ("prod", "complex128", [1j], [1j], [-1]),
    ("min", "float32", [1, np.nan, -np.inf], [2, 0, 0], [1, np.nan, -np.inf]),
    ("max", "float64", [1, 0, np.inf], [2, np.nan, 0], [2, np.nan, np.inf]),
    ("min", "bool", [True, True], [True, False], [True, False]),
    ("max", "uint64", [2**64 - 1, 0], [1, 1], [2**64 - 1, 1]),
    ("band", "uint8", [0b1100], [0b1010], [0b1000]),
    ("bor", "int64", [-(2**63)], [1], [1 - 2**63]),
    ("bxor", "bool", [True, True], [True, False], [False, True]),
    ("land", "bool", [True, True], [True, False], [True, False]),
    ("land", "int32", [2, 4, 0], [4, 0, 0], [1, 0, 0]),
    ("land", "float32", [np.nan, -0.0, 0.5], [2, 1, 3], [1, 0, 1]),
    ("lor", "uint16", [256, 0], [0, 0], [1, 0]),
    ("lor", "float16", [0.5, -0.0], [0, 0], [1, 0]),
    ("lor", "float64", [5e-324, 0], [0, 0], [1, 0]),
]


@pytest.mark.parametrize(
    ("name", "dtype", "a", "b", "expected"), FOLDS, ids=[f"{case[0]}-{case[1]}" for case in FOLDS]
)
@pytest.mark.parametrize("out", ["new", "left", "right"])
def test_fold_matches_expected_values(
    name: str, dtype: str, a: list[Any], b: list[Any], expected: list[Any], out: str
) -> None:
    left, right = np.array(a, dtype), np.array(b, dtype)
    target = {"new": np.empty_like(left), "left": left, "right": right}[out]
    arithmetic.fold(as_op(name), BY_NAME[dtype])(left, right, out=target)
    np.testing.assert_array_equal(target, np.array(expected, dtype))
    assert target.dtype == np.dtype(dtype)


# -- minimum and maximum of floats --------------------------------------------------

# The bits of each dtype's infinity, and of the NaN that min and max return for every NaN.
INFINITY = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}
NAN = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC0_0000,
    "float64": 0x7FF8_0000_0000_0000,
}


def special(dtype: str) -> list[int]:
    """Return the bits of zeros, infinities, extreme numbers, and quiet and signalling NaNs."""
    infinity = INFINITY[dtype]
    quiet = NAN[dtype]
    sizes = [0, 1, infinity - 1, infinity, infinity + 1, quiet, quiet + 7, 2 * infinity // 3]
    sign = 1 << (8 * BY_NAME[dtype].itemsize - 1)
    return sizes + [bits + sign for bits in sizes]


def extreme(name: str, dtype: str, a: int, b: int) -> int:
    """Return the bits of IEEE 754-2019's minimum or maximum of two numbers, given as bits."""
    sign = 1 << (8 * BY_NAME[dtype].itemsize - 1)
    if max(a % sign, b % sign) > INFINITY[dtype]:
        return NAN[dtype]
    choose = min if name == "min" else max
    # The bits of two positive numbers compare as the numbers do; -0 sorts before +0.
    return choose(a, b, key=lambda bits: bits if bits < sign else sign - 1 - bits)


@pytest.mark.parametrize("count", [1, 900, 100_000])
@pytest.mark.parametrize("out", ["new", "left", "right"])
@pytest.mark.parametrize("dtype", INFINITY)
@pytest.mark.parametrize("name", ["min", "max"])
def test_min_max_of_floats_follow_ieee_754_with_one_nan(
    name: str, dtype: str, out: str, count: int
) -> None:
    """Compare all pairs of special values, on the shortest and the longest path of the fold."""
    kind = BY_NAME[dtype]
    unsigned = np.dtype(f"u{kind.itemsize}")
    pairs = list(itertools.product(special(dtype), repeat=2))
    a, b = (np.array(side, unsigned).view(kind.storage) for side in zip(*pairs, strict=True))
    expected = np.array([extreme(name, dtype, *pair) for pair in pairs], unsigned)
    repeats = -(-count // len(pairs))
    a, b, expected = (np.tile(array, repeats) for array in (a, b, expected))
    results = np.empty_like(expected)
    with np.errstate(all="raise"):
        for start in range(0, a.size, count):
            left, right = a[start : start + count].copy(), b[start : start + count].copy()
            target = {"new": np.empty_like(left), "left": left, "right": right}[out]
            arithmetic.fold(as_op(name), kind)(left, right, out=target)
            results[start : start + count] = target.view(unsigned)
    np.testing.assert_array_equal(results, expected)


@pytest.mark.parametrize("dtype", INFINITY)
@pytest.mark.parametrize("name", ["min", "max"])
def test_min_max_of_single_rank_normalise_nan(name: str, dtype: str) -> None:
    kind = BY_NAME[dtype]
    unsigned = np.dtype(f"u{kind.itemsize}")
    values = np.array(special(dtype), unsigned)
    result = scaled(arithmetic.post(as_op(name), kind, 1), values.view(kind.storage))
    expected = [extreme(name, dtype, bits, bits) for bits in special(dtype)]
    np.testing.assert_array_equal(result.view(unsigned), np.array(expected, unsigned))


# -- operators and dtypes -----------------------------------------------------------

# The dtypes of each operator, copied from MPI 4.1, section 6.9.2.
MEANING = {
    "sum": "int uint float complex",
    "prod": "int uint float complex",
    "avg": "float complex",
    "premul_sum": "float complex",
    "min": "bool int uint float",
    "max": "bool int uint float",
    "band": "bool int uint",
    "bor": "bool int uint",
    "bxor": "bool int uint",
    "land": "bool int uint float",
    "lor": "bool int uint float",
    "user": "bool int uint float complex",
}


@pytest.mark.parametrize("dtype", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize("name", MEANING)
def test_check_accepts_only_dtypes_of_mpi_table(name: str, dtype: DType) -> None:
    op = {"premul_sum": premul_sum(2), "user": user_op(np.add)}.get(name) or as_op(name)
    families = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
    family = families[dtype.kind]
    if family in MEANING[name].split():
        arithmetic.check(op, dtype)
    else:
        allowed = MEANING[name].replace(" ", ", ")
        with pytest.raises(DtypeError, match=f"dtype {dtype}; it is defined for {allowed}; "):
            arithmetic.check(op, dtype)


def test_check_table_lists_every_named_operator() -> None:
    assert set(NAMES) | {"premul_sum", "user"} == set(MEANING)


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(70_000, "float16"), (3.4e38, "bfloat16"), (1e39, "float32"), (-1e300, "complex64")],
)
def test_premul_sum_factor_infinite_in_dtype_raises_dtype_error(factor: float, dtype: str) -> None:
    with pytest.raises(DtypeError, match=f"infinite in dtype {dtype}"):
        arithmetic.check(premul_sum(factor), BY_NAME[dtype])
    arithmetic.check(premul_sum(factor), BY_NAME["float64"])


# -- scaling ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "int32"])
@pytest.mark.parametrize("name", ["sum", "prod", "bxor", "min"])
def test_operators_without_factor_have_no_scaling(name: str, dtype: str) -> None:
    assert arithmetic.pre(as_op(name), BY_NAME[dtype], 3) is None
    assert arithmetic.post(as_op(name), BY_NAME[dtype], 3) is None


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_avg_divides_sum_by_size(dtype: str, size: int) -> None:
    kind = BY_NAME[dtype]
    assert arithmetic.pre(as_op("avg"), kind, size) is None
    x = (np.array([6, 1, -7.5, 1e-40]) * (1 + (2j if kind.kind == "c" else 0))).astype(dtype)
    parts = x.view(x.real.dtype)
    expected = (parts / parts.dtype.type(size)).view(dtype)
    np.testing.assert_array_equal(scaled(arithmetic.post(as_op("avg"), kind, size), x), expected)


@pytest.mark.parametrize(("value", "size"), [(60000, 3), (65504, 2), (600, 300)])
def test_avg_of_float16_does_not_overflow(value: float, size: int) -> None:
    inputs = [np.array([value, -value], np.float16)] * size
    assert arithmetic.post(as_op("avg"), F16, size) is None
    divided = [scaled(arithmetic.pre(as_op("avg"), F16, size), x) for x in inputs]
    total = divided[0]
    for x in divided[1:]:
        total = fold("avg", F16, total, x)
    np.testing.assert_array_equal(total, inputs[0])


@pytest.mark.parametrize("size", [3, 300, 5000, 70_000])
def test_avg_of_float16_rounds_once(size: int) -> None:
    x = np.random.default_rng(size).integers(0, 0x7C00, 5000).astype(np.uint16).view(np.float16)
    expected = (x.astype(np.float64) / size).astype(np.float16)
    result = scaled(arithmetic.pre(as_op("avg"), F16, size), x)
    np.testing.assert_allclose(result, expected, rtol=0, atol=6e-8)
    if size <= 2048:  # NumPy 1 rounds a larger size to float16
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        ("float16", np.float64(np.float16(0.1))),
        ("bfloat16", 0.10009765625),
        ("float32", np.float64(np.float32(0.1))),
        ("float64", 0.1),
    ],
)
def test_premul_sum_rounds_its_factor_to_the_dtype(dtype: str, factor: float) -> None:
    kind = BY_NAME[dtype]
    one = bf16(1) if dtype == "bfloat16" else np.ones(1, dtype)
    result = scaled(arithmetic.pre(premul_sum(0.1), kind, 4), one)
    wide = bfloat16_to_float32(result) if dtype == "bfloat16" else result
    assert float(wide[0]) == factor
    assert arithmetic.post(premul_sum(0.1), kind, 4) is None


def test_real_factor_keeps_complex_infinity_without_nan() -> None:
    x = np.array([complex(np.inf, 1), complex(1, -np.inf)], np.complex64)
    result = scaled(arithmetic.pre(premul_sum(2), BY_NAME["complex64"], 2), x)
    np.testing.assert_array_equal(result.view(np.float32), [np.inf, 2, 2, -np.inf])
    result = scaled(arithmetic.post(as_op("avg"), BY_NAME["complex64"], 2), x)
    np.testing.assert_array_equal(result.view(np.float32), [np.inf, 0.5, 0.5, -np.inf])


@pytest.mark.parametrize("name", ["land", "lor"])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "bfloat16"])
def test_logical_result_of_single_rank_is_0_or_1(name: str, dtype: str) -> None:
    post = arithmetic.post(as_op(name), BY_NAME[dtype], 1)
    if dtype == "bool":
        result = scaled(post, np.array([5, 0, 1], np.uint8).view(bool))
        np.testing.assert_array_equal(result.view(np.uint8), [1, 0, 1])
    elif dtype == "bfloat16":
        result = scaled(post, bf16(5, 0, -0.0, np.nan))
        np.testing.assert_array_equal(bfloat16_to_float32(result), [1, 0, 0, 1])
    else:
        np.testing.assert_array_equal(scaled(post, np.array([5, 0, 1], dtype)), [1, 0, 1])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_product_has_same_bits_alone_and_in_long_array(dtype: str) -> None:
    product = arithmetic.fold(as_op("prod"), BY_NAME[dtype])
    drawn = np.random.default_rng(7).normal(size=(100, 4))
    left, right = drawn.copy().view(np.complex128).T.astype(dtype)
    together = fold("prod", BY_NAME[dtype], left, right)
    for index, expected in enumerate(together):
        a, b = left[index : index + 1], right[index : index + 1]
        out, into_left, into_right = np.empty_like(a), a.copy(), b.copy()
        product(a, b, out=out)
        product(into_left, b, out=into_left)
        product(a, into_right, out=into_right)
        products = {out[0], into_left[0], into_right[0]}
        assert products == {expected}, f"{a[0]} * {b[0]}, number {index}"


# -- functions of users -------------------------------------------------------------


def _in_python(name: str, dtype: DType, a: Array, b: Array) -> Array:
    out = np.empty_like(a)
    arithmetic.reference(name, dtype)(a, b, out=out)
    return out


# Numbers around the smallest normal float32, and around 1.
_TINY, _ONES = np.random.default_rng(3).standard_normal((2, 99)).astype(np.float32)
_TINY = _TINY * np.float32(1e-38)
_C64 = BY_NAME["complex64"]
# Functions, and the arguments for which they give other bits in other modes.
_COMPUTED: dict[str, tuple[Any, ...]] = {
    "sum": (_in_python, "sum", F32, _TINY, _TINY[::-1]),
    "sum of bfloat16": (_in_python, "sum", BF16, bf16(*_TINY), bf16(*_TINY[::-1])),
    "product": (_in_python, "prod", F32, _TINY, _ONES),
    "product of complex": (_in_python, "prod", _C64, _TINY + 1j * _TINY, _ONES + 1j * _TINY),
    "maximum": (_in_python, "max", F32, _TINY / 1000, _TINY[::-1] / 1000),
    "logical or": (_in_python, "lor", F32, _TINY / 1000, 0 * _TINY),
    "user's function": (fold, user_op(np.add), F32, _TINY, _TINY[::-1]),
    "scaled input": (lambda x: scaled(arithmetic.pre(premul_sum(0.3), F32, 2), x), _TINY),
    "factor": (lambda x: scaled(arithmetic.pre(premul_sum(3e-39), F32, 2), x), _ONES),
    "mean": (lambda x: scaled(arithmetic.post(as_op("avg"), F32, 3), x), _TINY),
    "truth": (lambda x: scaled(arithmetic.post(as_op("land"), F32, 1), x), _TINY / 1000),
}


@needs_float_modes
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", _COMPUTED)
def test_arithmetic_in_another_float_mode_has_same_bits(name: str, mode: str) -> None:
    function, *arguments = _COMPUTED[name]
    with np.errstate(all="ignore"):
        wanted = function(*arguments)
        with float_mode(mode):
            found = function(*arguments)
    assert found.tobytes() == wanted.tobytes()


def test_user_op_gets_lower_rank_left_and_casts_result() -> None:
    op = user_op(lambda a, b: a.astype(float) - b)
    result = fold(op, BY_NAME["int16"], np.array([5, 7], np.int16), np.array([2, 9], np.int16))
    np.testing.assert_array_equal(result, np.array([3, -2], np.int16))


def test_user_op_sees_bfloat16_as_float32() -> None:
    seen: list[Any] = []

    def hypot(a: Array, b: Array) -> Array:
        seen.extend((a.dtype, b.dtype))
        return np.hypot(a, b)

    result = fold(user_op(hypot), BF16, bf16(3, 6), bf16(4, 8))
    np.testing.assert_array_equal(bfloat16_to_float32(result), [5, 10])
    assert seen == [np.float32, np.float32]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("returned", "shape"),
    [
        pytest.param(lambda a, b: a[:-1], r"\(2,\)", id="shorter"),
        pytest.param(lambda a, b: a[:, None], r"\(3, 1\)", id="two-dimensional"),
        pytest.param(lambda a, b: a.sum(), r"\(\)", id="scalar"),
        pytest.param(lambda a, b: None, r"\(\)", id="nothing"),
    ],
)
def test_user_op_returning_other_shape_raises_invalid_argument(
    dtype: DType, returned: Any, shape: str
) -> None:
    a = np.zeros(3, dtype.storage)
    with pytest.raises(
        InvalidArgumentError, match=rf"user_op\(<lambda>\): returned shape {shape} .* \(3,\)"
    ):
        fold(user_op(returned), dtype, a, a.copy())


def test_user_op_cannot_write_its_inputs() -> None:
    def in_place(a: Array, b: Array) -> Array:
        a += b
        return a

    a = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        fold(user_op(in_place), F32, a, a.copy())
    np.testing.assert_array_equal(a, 1)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_user_op_may_return_its_input(dtype: DType, which: int) -> None:
    inputs = [bf16(1, 2), bf16(3, 4)]
    if dtype is F32:
        inputs = [bfloat16_to_float32(x) for x in inputs]
    result = fold(user_op(lambda a, b: (a, b)[which]), dtype, *inputs)
    np.testing.assert_array_equal(result, inputs[which])


def test_user_op_accepts_unhashable_function() -> None:
    class Add:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, a: Array, b: Array) -> Array:
            return a + b

    np.testing.assert_array_equal(fold(user_op(Add()), F32, np.ones(2, "f4"), np.ones(2, "f4")), 2)


def test_user_op_does_not_keep_function_alive() -> None:
    def add(a: Array, b: Array) -> Array:
        return a + b

    alive = weakref.ref(add)
    fold(user_op(add), F32, np.ones(2, np.float32), np.ones(2, np.float32))
    del add
    gc.collect()
    assert alive() is None
