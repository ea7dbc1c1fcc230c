"""Folds (elementwise reductions) in C: they have the same bits as the Python reference."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

from collective import native
from collective.algorithms import arithmetic
from collective.algorithms.folds import Folding
from collective.algorithms.trees import Leaves, NodeFolds
from collective.errors import DtypeError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import as_op
from tests.support.float_modes import MODES, float_mode, needs_float_modes

core = pytest.importorskip("collective.native._core", reason="the native core is not built")

Array = np.ndarray[Any, Any]

NAMES = ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
# Lengths around the widths of vectors, so that all remainders occur.
COUNTS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 1001)


def _has_meaning(name: str, dtype: DType) -> bool:
    try:
        arithmetic.check(as_op(name), dtype)
    except DtypeError:
        return False
    return not dtype.name.startswith("float8") and (name, dtype.kind) != ("prod", "c")


FOLDS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name, dtype in itertools.product(NAMES, BY_NAME.values())
    if _has_meaning(name, dtype)
]
levels = pytest.mark.parametrize("level", range(len(core.LEVELS)), ids=core.LEVELS)


def refused(*arguments: Any, **options: Any) -> None:
    raise AssertionError("C handed plain arrays to the reference")


def floating(dtype: DType) -> tuple[int, int, int]:
    """Return the bytes of a real number, the bits of its fraction, and the pattern of infinity."""
    nbytes = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    fraction = 7 if dtype.name == "bfloat16" else {2: 10, 4: 23, 8: 52}[nbytes]
    return nbytes, fraction, (1 << (8 * nbytes - 1)) - (1 << fraction)


def drawn(dtype: DType, count: int, seed: int) -> Array:
    """Return elements of random bits; every other float is a zero, an infinity, NaN etc."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype.kind in "fc":
        nbytes, fraction, infinity = floating(dtype)
        words = raw.view(f"u{nbytes}")
        sign = 1 << (8 * nbytes - 1)
        pattern_of_one = (infinity >> 1) & infinity
        ends = [0, 1, (1 << fraction) - 1, 1 << fraction, pattern_of_one, infinity - 1, infinity]
        ends += [infinity + 1, infinity | (1 << (fraction - 1)), sign - 1]
        special = np.array([*ends, *(end + sign for end in ends)], words.dtype)
        words[::2] = random.choice(special, words[::2].size)
        # Numbers of similar size, whose sums and products need rounding.
        words[3::4] = words[3::4] % np.array(1 << (fraction + 1), words.dtype)
        words[3::4] += np.array(pattern_of_one, words.dtype)
    return raw.view(dtype.storage)


def expected(name: str, dtype: DType, a: Array, b: Array) -> Array:
    """Return the result of the reference, but the left NaN if both operands are NaN."""
    out = np.empty_like(a)
    with np.errstate(all="ignore"):
        arithmetic.reference(name, dtype)(a, b, out=out)
    if name in ("sum", "prod") and dtype.kind in "fc":
        nbytes, fraction, infinity = floating(dtype)
        x, y, result = (array.view(f"u{nbytes}") for array in (a, b, out))
        most = np.array((1 << (8 * nbytes - 1)) - 1, x.dtype)
        both = ((x & most) > infinity) & ((y & most) > infinity)
        result[both] = x[both] | np.array(1 << (fraction - 1), x.dtype)
    return out


def folded(function: Any, a: Array, b: Array, where: str) -> Array:
    left, right = a.copy(), b.copy()
    target = {"new": np.empty_like(a), "left": left, "right": right}[where]
    function(left, right, out=target)
    return target


@pytest.mark.parametrize("where", ["new", "left", "right"])
@levels
@pytest.mark.parametrize(("name", "dtype"), FOLDS)
def test_fold_has_same_bits_as_reference(name: str, dtype: DType, level: int, where: str) -> None:
    function = core.make_fold(name, dtype.code, refused, level)
    assert function is not refused, "there is no such fold in C"
    a, b = drawn(dtype, 20_011, 1), drawn(dtype, 20_011, 2)
    wanted = expected(name, dtype, a, b).tobytes()
    assert folded(function, a, b, where).tobytes() == wanted


@levels
@pytest.mark.parametrize("name", ["sum", "prod", "min", "land"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fold_of_every_16_bit_float_equals_reference(dtype: str, name: str, level: int) -> None:
    kind = BY_NAME[dtype]
    function = core.make_fold(name, kind.code, refused, level)
    every = np.arange(1 << 16, dtype=np.uint16)
    for other in (every, every[::-1].copy(), np.roll(every, 12345), every ^ 0x8001):
        a, b = every.view(kind.storage), other.view(kind.storage)
        assert folded(function, a, b, "new").tobytes() == expected(name, kind, a, b).tobytes()


@pytest.mark.parametrize("count", COUNTS)
@levels
@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16", "float32", "complex128"])
def test_fold_of_any_length_and_offset_writes_only_out(dtype: str, level: int, count: int) -> None:
    kind = BY_NAME[dtype]
    function = core.make_fold("sum", kind.code, refused, level)
    for first, second, third in itertools.product((0, 1, 3), repeat=3):
        a, b = drawn(kind, count + first, 3)[first:], drawn(kind, count + second, 4)[second:]
        around = np.full((third + count + 5) * kind.itemsize, 0xA5, np.uint8).view(kind.storage)
        function(a, b, out=around[third : third + count])
        inside = around[third : third + count].tobytes()
        assert inside == expected("sum", kind, a, b).tobytes(), (first, second, third)
        outside = around[:third].tobytes() + around[third + count :].tobytes()
        assert set(outside) == {0xA5}, "the fold wrote outside of out"


def near_zero(dtype: DType, count: int, seed: int) -> Array:
    """Return elements of random bits whose numbers are the smallest normal ones, or subnormal."""
    nbytes, fraction, _ = floating(dtype)
    bits = np.random.default_rng(seed).integers(
        0, 1 << 8 * nbytes, count * dtype.itemsize // nbytes, f"u{nbytes}"
    )
    bits &= np.array((1 << 8 * nbytes - 1) | (2 << fraction) - 1, bits.dtype)
    return bits.view(dtype.storage)


@needs_float_modes
@levels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "dtype"), [case for case in FOLDS if case.values[1].kind in "fc"])
def test_fold_in_another_float_mode_has_same_bits(
    name: str, dtype: DType, mode: str, level: int
) -> None:
    a, b = near_zero(dtype, 1001, 1), near_zero(dtype, 1001, 2)
    if name == "prod":
        b = drawn(dtype, 1001, 3)
    fold, wanted, found = core.make_fold(name, dtype.code, refused, level), a.copy(), a.copy()
    fold(a, b, out=wanted)
    with float_mode(mode):
        fold(a, b, out=found)
    assert found.tobytes() == wanted.tobytes()


def _arrays(case: str) -> tuple[Array, Array, Array]:
    a, b, out = (np.arange(24, dtype=np.float32) + start for start in (0, 5, 9))
    raw = np.zeros(25 * 4, np.uint8)
    return {
        "strides": (a[::2], b[::2], out[::2]),
        "alignment": (raw[1:97].view(np.float32), b, out),
        "another dtype": (a.astype(np.float64), b, out),
        "another dtype of the same size": (a.astype(np.int32), b, out),
        "part of an input": (out[:20], b[:20], out[1:21]),
        "two dimensions": (a.reshape(4, 6), b.reshape(4, 6), out.reshape(4, 6)),
        "lists": (list(a), b, out),
    }[case]  # type: ignore[return-value]


@pytest.mark.parametrize(
    "case",
    ["strides", "alignment", "another dtype", "another dtype of the same size", "part of an input",
     "two dimensions", "lists"],
)  # fmt: skip
def test_fold_of_other_arrays_equals_numpy(case: str) -> None:
    reference, arrays = _arrays(case), _arrays(case)
    function = core.make_fold("sum", BY_NAME["float32"].code, np.add)
    options = {"casting": "unsafe"} if "dtype" in case else {}
    np.add(*reference[:2], out=reference[2], **options)
    function(*arrays[:2], out=arrays[2], **options)
    np.testing.assert_array_equal(arrays[2], reference[2])


@pytest.mark.parametrize("error", ["read-only", "length", "arguments"])
def test_fold_refuses_invalid_arguments_and_writes_nothing(error: str) -> None:
    function = core.make_fold("sum", BY_NAME["float32"].code, np.add)
    a, b, out = np.ones(8, np.float32), np.ones(8, np.float32), np.zeros(8, np.float32)
    if error == "read-only":
        out.flags.writeable = False
    if error == "length":
        b = b[:5]
    with pytest.raises((ValueError, TypeError)):
        function(a, *[b] * (error != "arguments"), out=out)
    assert not out.any()


def test_fold_of_complex_product_is_left_to_numpy() -> None:
    # Its last bit depends on whether NumPy's loops use fused multiply-add on this machine.
    assert core.make_fold("prod", BY_NAME["complex64"].code, refused) is refused


@pytest.mark.skipif(not native.chosen.extension, reason="switched off")
@pytest.mark.parametrize("name", ["avg", "max", "lor"])
def test_arithmetic_fold_returns_c_function(name: str) -> None:
    function = arithmetic.fold(as_op(name), BY_NAME["float32"])
    assert inspect.isbuiltin(function)


@pytest.mark.parametrize(("name", "dtype"), FOLDS)
def test_schedule_has_bits_of_its_folds_one_by_one(name: str, dtype: DType) -> None:
    leaves = [Leaves(leaf, leaf + 1) for leaf in range(3, 10)]
    folds = NodeFolds(leaves, 11, Folding(as_op(name), dtype, 11), enters=True)
    assert folds._in_c is not None
    inputs = [Buffer(drawn(dtype, 5003, seed), dtype) for seed in range(len(leaves))]
    results = []
    for run in (folds._in_c, None):
        folds._in_c = run
        outs = [Buffer(np.zeros(5003, dtype.storage), dtype) for _ in folds.results]
        with np.errstate(all="ignore"):
            folds.run(inputs, outs)
        results.append([out.array.tobytes() for out in outs])
    assert len(results[0]) == 3
    assert results[0] == results[1]


_X = np.ones(9, np.float32)
_SUM_OF_TWO = np.array([0, 1, 2], "i").tobytes()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(_X[::2][:4], id="stride"),
        pytest.param(_X.view(np.int32)[:4], id="dtype"),
        pytest.param(_X[:3], id="length"),
        pytest.param(_X.view(np.uint8)[1:17].view(np.float32), id="alignment"),
    ],
)
def test_schedule_refuses_array_that_is_not_plain(other: Array) -> None:
    run, out = _sum_of_two(), np.zeros(4, np.float32)
    assert not run([_X[:4], other], [out])
    assert not out.any()


def test_schedule_refuses_result_that_overlaps_an_input() -> None:
    x, run = _X.copy(), _sum_of_two()
    assert not run([x[:4], x[4:8]], [x[1:5]])
    assert run([x[:4], x[4:8]], [out := np.zeros(4, np.float32)])
    assert out.tolist() == [2] * 4


def _sum_of_two() -> Any:
    run = native.schedule("sum", BY_NAME["float32"].code, 2, 0, 1, _SUM_OF_TWO)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("slots", "steps"),
    [((2, 0, 1), [0, 1, 3]), ((2, 0, 1), [0, 1, 1]), ((2, 0, 1), [-1, 1, 2]), ((2, 0, 1), [0, 1]),
     ((-1, 0, 1), []), ((2, -1, 1), []), ((2, 0, 1), [0, -2, 2])],
)  # fmt: skip
def test_schedule_refuses_impossible_steps(slots: tuple[int, ...], steps: list[int]) -> None:
    with pytest.raises(ValueError, match="make_schedule"):
        core.make_schedule("sum", BY_NAME["float32"].code, *slots, np.array(steps, "i").tobytes())


@pytest.mark.parametrize(
    ("inputs", "results"),
    [
        pytest.param([], [], id="none"),
        pytest.param([_X, _X], [], id="no-result"),
        pytest.param([1, 1, 1], [1], id="three-inputs"),
    ],
)
def test_schedule_refuses_wrong_numbers_of_arrays(inputs: list[Any], results: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected 2 and 1"):
        _sum_of_two()(inputs, results)


def test_schedule_refuses_inputs_that_are_no_list() -> None:
    with pytest.raises(TypeError):
        _sum_of_two()((1, 2), [3])
