"""Oracle of the kit and of ``collective parity``: the ranks' inputs and the expected results.

Every rank can compute the inputs of every other rank. Floating numbers of :func:`values` are small
multiples of a half (powers of two for products). Integers take any value of their dtype, and wrap.
So every fold is exact in every dtype and order, and a result that differs is wrong. The oracle
computes with NumPy alone; :mod:`collective.testing.frameworks` makes and reads arrays of other
frameworks.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective import Communicator
from collective.inner import BY_NAME, Op

from .frameworks import encoded, framework, widened

Array = np.ndarray[Any, Any]

#: Shapes: no element, one, odd numbers of elements, and more than a first message holds.
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (), (1,), (7,), (3, 5), (1001,))
#: Number of elements of a large array: over 1 MiB in four bytes, and a multiple of no small number.
LARGE = 300_007
#: Operator -> the kinds of dtype for which it is defined.
OPS: dict[Op, str] = {
    "sum": "iufc",
    "prod": "iufc",
    "min": "biuf",
    "max": "biuf",
    "avg": "fc",
    "band": "biu",
    "bor": "biu",
    "bxor": "biu",
    "land": "biuf",
    "lor": "biuf",
}
#: dtype -> the bits of infinity, and of the NaN that min and max return if any number is NaN.
INFINITY_AND_NAN = {
    "float16": (0x7C00, 0x7E00),
    "bfloat16": (0x7F80, 0x7FC0),
    "float32": (0x7F80_0000, 0x7FC0_0000),
    "float64": (0x7FF0_0000_0000_0000, 0x7FF8_0000_0000_0000),
}


@functools.cache
def has(module: str) -> bool:
    """Tell whether ``module`` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def dtypes_of(names: frozenset[str], kinds: str = "biufc") -> list[str]:
    """Return the ``names`` that are of ``kinds`` and that an array of a framework here can have."""
    dtypes = [name for name, dtype in BY_NAME.items() if name in names and dtype.kind in kinds]
    if "bfloat16" in dtypes and not (has("ml_dtypes") or has("torch")):
        dtypes.remove("bfloat16")
    return dtypes


def dtypes_at(root: int, comm: Communicator, names: Sequence[str]) -> Sequence[str]:
    """Return the ``names`` to test with this root, so that each dtype is tested with some root.

    How elements are folded or moved does not depend on the root, and the route of elements does
    not depend on their dtype. So every dtype with every root would repeat each test as many times
    as there are ranks.
    """
    return names[root % max(1, len(names)) :: comm.size]


# -- inputs of the ranks --------------------------------------------------------------------------


def values(
    dtype: str, shape: int | Sequence[int], rank: int, seed: int = 0, op: str = "sum"
) -> Any:
    """Return the array that ``rank`` contributes: of ``dtype``, and determined by all arguments."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    # Every rank computes the inputs of all ranks. Drawing is the larger part of the cost: cache it.
    drawn = _drawn_few if math.prod(shape) <= _FEW else _drawn_many
    return of_bits(dtype, drawn(dtype, shape, rank, seed, op))


def _drawn(dtype: str, shape: tuple[int, ...], rank: int, seed: int, op: str) -> Array:
    random = np.random.default_rng([rank, seed, len(shape), *shape])
    return draw(random, dtype, shape, op, _halves)


_FEW = 2048
_drawn_few = functools.lru_cache(maxsize=4096)(_drawn)
_drawn_many = functools.lru_cache(maxsize=16)(_drawn)


def draw(
    random: np.random.Generator,
    dtype: str,
    shape: Sequence[int],
    op: str,
    floats: Callable[[np.random.Generator, Sequence[int], str], Array],
) -> Array:
    """Return random numbers in the storage of ``dtype``.

    Args:
        random: source of the numbers.
        dtype, shape: dtype and shape of the array.
        op: operator that folds the numbers; empty if calls only move them.
        floats: function that draws floating numbers of a shape for an operator, as float64.
    """
    kind = BY_NAME[dtype].kind
    if kind == "b":
        return np.asarray(random.integers(0, 2, shape)).astype(bool)
    if dtype.startswith("float8"):
        # Numbers below 0x78 are not NaN in any float8.
        return np.asarray(random.integers(0, 0x78, shape)).astype(np.uint8)
    if kind in "iu":
        return _integers(random, dtype, shape, op)
    numbers = floats(random, shape, op)
    return encoded(numbers + 1j * floats(random, shape, op) if kind == "c" else numbers, dtype)


def _integers(random: np.random.Generator, dtype: str, shape: Sequence[int], op: str) -> Array:
    limits = np.iinfo(dtype)
    drawn = np.asarray(random.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    if op == "prod":  # odd numbers only: products of even numbers soon become 0
        drawn |= 1
    elif op in ("land", "lor"):
        drawn *= np.asarray(random.integers(0, 2, shape)).astype(dtype)
    return drawn


def _halves(random: np.random.Generator, shape: Sequence[int], op: str) -> Array:
    if op == "prod":
        return np.asarray(random.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], shape))
    return np.asarray(random.integers(-4, 5, shape)) / 2


# Weights of the sizes in special_bits: columns with two zeros or with NaN shall be frequent, and
# columns of NaN alone rare.
_WEIGHTS = (6, 2, 2, 2, 1, 1, 1)


def special_bits(random: np.random.Generator, dtype: str, count: int) -> Array:
    """Return random bits of floating numbers, many of the same magnitude with differing signs."""
    infinity, nan = INFINITY_AND_NAN[dtype]
    # Zero, the least number, a large one, infinity; NaN: quiet, with a payload, signalling.
    sizes = np.array([0, 1, infinity - 7, infinity, nan, nan + 5, infinity + 1], np.uint64)
    drawn = random.choice(sizes, count, p=np.array(_WEIGHTS) / sum(_WEIGHTS))
    sign_bit = np.uint64(8 * BY_NAME[dtype].itemsize - 1)
    signs = random.integers(0, 2, count).astype(np.uint64) << sign_bit
    return np.asarray(drawn | signs).astype(f"u{BY_NAME[dtype].itemsize}")


def of_bits(dtype: str, bits: Array) -> Any:
    """Return a new array of ``dtype`` with these bits, given in any dtype of the same size.

    An array of bfloat16 has a dtype of ml_dtypes if that is installed, else it is PyTorch's.
    """
    return framework(_holder(dtype)).make(bits.view(BY_NAME[dtype].storage), dtype, ())


@functools.cache
def _holder(dtype: str) -> str:
    """Return the framework for arrays of ``dtype`` where any framework will do."""
    return "numpy" if dtype in framework("numpy").dtypes() else "torch"


def plain(x: Any) -> Array:
    """Return an array of any framework as NumPy's; bfloat16 is widened to float32."""
    return widened(_stored(x), "bfloat16") if _name(x) == "bfloat16" else np.asarray(x)


def _stored(x: Any) -> Array:
    """Return an array of NumPy or PyTorch in the storage of its dtype."""
    return framework("numpy" if isinstance(x, (np.ndarray, np.generic)) else "torch").stored(x)


def _name(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


# -- expected results -----------------------------------------------------------------------------

_FOLDS: dict[str, Any] = {
    "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
    "land": np.logical_and, "lor": np.logical_or,
}  # fmt: skip


def expected(op: str, arrays: Sequence[Any]) -> Array:
    """Return the fold of ``arrays`` in their order, as NumPy's; see :func:`folded`."""
    dtype = _name(arrays[0])
    return widened(folded(op, [_stored(array) for array in arrays], dtype), dtype)


def folded(op: str, arrays: Sequence[Array], dtype: str) -> Array:
    """Return the fold of arrays from rank 0 upwards, each step rounded to ``dtype``.

    Args:
        op: one of :data:`OPS`.
        arrays: the ranks' arrays, in the storage of ``dtype``.
        dtype: dtype of the arrays and of the result.

    Returns:
        The result, in the storage of ``dtype``.
    """
    if op in ("min", "max") and dtype in INFINITY_AND_NAN:
        every = np.stack(arrays)
        return extreme(op, dtype, every.view(f"u{every.itemsize}")).view(every.dtype)
    # Keep a dimension: NumPy multiplies complex scalars with other instructions than arrays.
    terms = [widened(array, dtype).ravel() for array in arrays]
    if op == "avg" and dtype == "float16":  # divide first: sums of float16 overflow early
        terms = [_divided(term, len(arrays)) for term in terms]
    # A logical op returns 0 or 1, also for the elements of a single rank.
    total = terms[0] != 0 if op in ("land", "lor") else terms[0]
    for term in terms[1:]:
        total = _FOLDS[op](total, term)
        if dtype == "bfloat16":
            total = widened(encoded(total, dtype), dtype)
    if op == "avg" and dtype != "float16":
        total = _divided(total, len(arrays))
    return encoded(total, dtype).reshape(arrays[0].shape)


def _divided(x: Array, size: int) -> Array:
    if x.dtype.kind == "c":
        parts = x.view(x.real.dtype)
        return np.asarray(parts / parts.dtype.type(size)).view(x.dtype)
    # float16 is divided in float32, and rounded once.
    divisor = np.float32(size) if x.dtype == np.float16 else x.dtype.type(size)
    return np.asarray(x / divisor).astype(x.dtype)


def extreme(op: str, dtype: str, every: Array) -> Array:
    """Return the bits of the minimum or maximum of rows of bits (IEEE 754-2019, section 9.6)."""
    infinity, nan = INFINITY_AND_NAN[dtype]
    sign = every.dtype.type(1 << (8 * every.itemsize - 1))
    size = every & ~sign
    # Map bits to integers in the order of the numbers: -0 becomes -1, and +0 becomes 0.
    order = np.where(every & sign, -1 - size.astype(np.int64), size.astype(np.int64))
    least = order.min(axis=0) if op == "min" else order.max(axis=0)
    bits = np.where(least < 0, (-1 - least).astype(every.dtype) | sign, least.astype(every.dtype))
    return np.asarray(np.where((size > infinity).any(axis=0), nan, bits)).astype(every.dtype)


def pieces(counts: Sequence[int]) -> list[slice]:
    """Return slices of ``counts`` rows, one behind the other."""
    stops = [0, *itertools.accumulate(counts)]
    return [slice(start, stop) for start, stop in itertools.pairwise(stops)]


def regions(length: int, size: int) -> list[slice]:
    """Return the slices into which ``numpy.array_split`` cuts ``length`` rows."""
    return pieces([length // size + (rank < length % size) for rank in range(size)])


def piece(
    shape: Sequence[int], rank: int, size: int, axis: int = 0, counts: Sequence[int] | None = None
) -> tuple[slice, ...]:
    """Return the index of the piece of ``rank`` in an array.

    Args:
        shape: shape of the array that is cut.
        rank, size: index of the piece, and number of pieces.
        axis: axis along which the array is cut, not negative.
        counts: lengths of the pieces; None if ``numpy.array_split`` cuts.
    """
    parts = regions(shape[axis], size) if counts is None else pieces(counts)
    return (*[slice(None)] * axis, parts[rank])


def joined(arrays: Sequence[Any], axis: int = 0) -> Array:
    """Return arrays joined along an axis; an array without dimensions has length 1."""
    return np.concatenate([np.atleast_1d(array) for array in arrays], axis)


def moved(
    call: str,
    of: Callable[[int], Any],
    rank: int,
    size: int,
    *,
    root: int = 0,
    axis: int = 0,
    counts: Sequence[int] | None = None,
) -> Array:
    """Return the array that ``rank`` gets from a call that only moves arrays.

    Args:
        call: name of the call. In ``"sendrecv"`` and ``"send_recv"`` each rank sends to the next.
        of: function that returns the array of a rank.
        rank, size: this rank, and number of ranks.
        root: the root of a call that has one.
        axis: axis along which arrays are cut or joined.
        counts: lengths of the pieces where arrays are cut; None if ``numpy.array_split`` cuts.
    """

    def part(of_rank: int) -> Array:
        whole = np.atleast_1d(of(of_rank))
        return whole[piece(whole.shape, rank, size, axis, counts)]

    if call == "broadcast":
        return np.asarray(of(root))
    if call in ("sendrecv", "send_recv"):
        return np.asarray(of((rank - 1) % size))
    if call == "scatter":
        return part(root)
    return joined([(part if call == "all_to_all" else of)(other) for other in range(size)], axis)


# -- comparisons ----------------------------------------------------------------------------------


def assert_same(found: Any, wanted: Any, what: str) -> None:
    """Check that two arrays have the same dtype, shape and values.

    Raises:
        AssertionError: the arrays differ; the text names the first difference.
    """
    _assert_alike(found, wanted, what, lambda a, b: (a == b) | ((a != a) & (b != b)))


def assert_close(found: Any, wanted: Any, what: str, tolerance: float) -> None:
    """Check as :func:`assert_same`, with an absolute and relative ``tolerance`` for the values."""
    _assert_alike(
        found, wanted, what, lambda a, b: np.isclose(a, b, rtol=tolerance, atol=tolerance)
    )


def assert_bits(found: Any, wanted: Array, what: str) -> None:
    """Check that an array has the bits of ``wanted``, so that -0 is not 0.

    Args:
        wanted: the elements, or unsigned integers of their size.

    Raises:
        AssertionError: the bits differ; the text names the first difference.
    """
    unsigned = f"u{wanted.itemsize}"
    bits, wanted = _stored(found).view(unsigned), wanted.view(unsigned)
    if bits.shape != wanted.shape:
        raise AssertionError(f"{what}: shape {bits.shape}; expected {wanted.shape}")
    if not np.array_equal(bits, wanted):
        raise AssertionError(f"{what}, by their bits: {told(bits != wanted, bits, wanted, hex)}")


def _assert_alike(found: Any, wanted: Any, what: str, alike: Callable[[Array, Array], Any]) -> None:
    if found is None:
        raise AssertionError(f"{what}: got None instead of an array")
    if _name(found) != _name(wanted):
        raise AssertionError(f"{what}: dtype {_name(found)}; expected {_name(wanted)}")
    a, b = plain(found), plain(wanted)
    if a.shape != b.shape:
        raise AssertionError(f"{what}: shape {a.shape}; expected {b.shape}")
    wrong = ~np.asarray(alike(a, b), bool)
    if wrong.any():
        raise AssertionError(f"{what}: {told(wrong, a, b)}")


def told(wrong: Array, found: Array, wanted: Array, text: Callable[[Any], str] = repr) -> str:
    """Return a text: how many elements are wrong, and the first of them with its expected value.

    Args:
        wrong: true where an element is wrong.
        found, wanted: arrays whose first axes are those of ``wrong``.
        text: function that returns the text of an element, given as Python's number.
    """
    at = tuple(map(int, np.argwhere(wrong)[0]))
    return (
        f"{int(wrong.sum())} of {wrong.size} elements are wrong; first at {at}: "
        f"{text(found[at].tolist())}; expected {text(wanted[at].tolist())}"
    )


# -- layouts --------------------------------------------------------------------------------------

#: Names of the layouts of an array in memory; see :func:`laid_out`.
LAYOUTS = ("strided", "fortran", "negative", "transposed", "offset", "unaligned")


def laid_out(layout: str, array: Array) -> Array:
    """Return a writable copy of ``array`` in memory of a layout."""
    if layout in ("strided", "negative"):
        whole, part = spread(array, [2 if layout == "strided" else -1] * array.ndim, 0)
        return whole[part]
    if layout == "fortran":
        view = np.zeros(array.shape, array.dtype, order="F")
    elif layout == "transposed":
        view = np.zeros(array.shape[::-1], array.dtype).T
    else:
        # Unaligned as a file's bytes behind a header, or aligned for its elements (a complex one as
        # its halves), but not for vectors or cache lines.
        skip = 1 if layout == "unaligned" else array.real.itemsize
        view = np.zeros(array.nbytes + skip, np.uint8)[skip:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def spread(array: Array, steps: Sequence[int], rest: int) -> tuple[Array, tuple[slice, ...]]:
    """Return an array full of ``rest`` with a copy of ``array`` in it, and the copy's index."""
    part = tuple(slice(None, None, step) for step in steps)
    lengths = [abs(s) * (n - 1) + 1 if n else 0 for n, s in zip(array.shape, steps)]
    whole = np.full(lengths, rest, array.dtype)
    whole[part] = array
    return whole, part
