"""Data for the checks: every rank can work out what every other rank contributes.

Floating numbers are small multiples of a half (powers of two for products), and integers are
any of their dtype, which wrap: so every fold is exact in every dtype and order, and a wrong
result is one that differs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.memory.dtypes import BY_NAME
from collective.ops import Op

__all__ = [
    "LARGE",
    "LAYOUTS",
    "OPS",
    "SHAPES",
    "assert_bits",
    "assert_close",
    "assert_same",
    "bfloat16",
    "dtypes_at",
    "dtypes_of",
    "expected",
    "has",
    "laid_out",
    "of_bits",
    "plain",
    "regions",
    "values",
]

Array = np.ndarray[Any, Any]

#: Elements: none, one, odd numbers of them, and more than a first message holds.
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (), (1,), (7,), (3, 5), (1001,))
#: Elements of a large array: over 1 MiB in four bytes, and a multiple of nothing.
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
_FOLDS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
}


@functools.cache
def has(module: str) -> bool:
    """Tell whether ``module`` can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def dtypes_of(names: frozenset[str], kinds: str = "biufc") -> list[str]:
    """Return those of ``names`` that are of ``kinds`` and that some array here can have."""
    found = [name for name, dtype in BY_NAME.items() if name in names and dtype.kind in kinds]
    if "bfloat16" in found and not (has("ml_dtypes") or has("torch")):
        found.remove("bfloat16")
    return found


def dtypes_at(root: int, comm: Communicator, names: Sequence[str]) -> Sequence[str]:
    """Return those of ``names`` for which calls with this root are made: each dtype has some root.

    How elements are folded or moved does not depend on who gets them, nor whom they go to on what
    they are: every dtype with every root would be the same again, as many times as there are ranks.
    """
    return names[root % max(1, len(names)) :: comm.size]


def values(
    dtype: str, shape: int | Sequence[int], rank: int, seed: int = 0, op: str = "sum"
) -> Any:
    """Return what ``rank`` contributes: an array of ``dtype`` that depends on all arguments."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    # Every rank works out the same of every other, of which drawing is the dearer part.
    draw = _drawn_few if math.prod(shape) <= _FEW else _drawn_many
    drawn = draw(dtype, shape, rank, seed, op)
    return bfloat16(drawn) if dtype == "bfloat16" else drawn.copy()


def _drawn(dtype: str, shape: tuple[int, ...], rank: int, seed: int, op: str) -> Array:
    kind = BY_NAME[dtype].kind
    random = np.random.default_rng([rank, seed, len(shape), *shape])
    if kind == "b":
        return np.asarray(random.integers(0, 2, shape)).astype(bool)
    if kind in "iu":
        return _integers(random, dtype, shape, op)
    numbers = _halves(random, shape, op)
    if kind == "c":
        numbers = numbers + 1j * _halves(random, shape, op)
    return numbers if dtype == "bfloat16" else np.asarray(numbers).astype(dtype)


_FEW = 2048
_drawn_few = functools.lru_cache(maxsize=4096)(_drawn)
_drawn_many = functools.lru_cache(maxsize=16)(_drawn)


def _integers(random: np.random.Generator, dtype: str, shape: Sequence[int], op: str) -> Array:
    limits = np.iinfo(dtype)
    drawn = np.asarray(random.integers(limits.min, limits.max, shape, dtype, endpoint=True))
    if op == "prod":  # products of even numbers are 0 before long
        drawn |= 1
    elif op in ("land", "lor"):
        drawn *= random.integers(0, 2, shape).astype(dtype)
    return drawn


def _halves(random: np.random.Generator, shape: Sequence[int], op: str) -> Array:
    if op == "prod":
        return np.asarray(random.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0], shape))
    return np.asarray(random.integers(-4, 5, shape)) / 2


def bfloat16(numbers: Array) -> Any:
    """Return ``numbers`` as bfloat16, of ml_dtypes or else of PyTorch."""
    if has("ml_dtypes"):
        return np.asarray(numbers).astype(importlib.import_module("ml_dtypes").bfloat16)
    torch = importlib.import_module("torch")
    return torch.from_numpy(np.asarray(numbers, np.float32)).to(torch.bfloat16)


def of_bits(dtype: str, bits: Array) -> Any:
    """Return an array of ``dtype`` that has these bits, unsigned integers of its size."""
    if dtype != "bfloat16":
        return bits.view(dtype).copy()
    if has("ml_dtypes"):
        return bits.view(importlib.import_module("ml_dtypes").bfloat16).copy()
    torch = importlib.import_module("torch")
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def plain(x: Any) -> Array:
    """Return an array of any framework as NumPy, bfloat16 widened to float32."""
    if not isinstance(x, (np.ndarray, np.generic)):
        x = x.float().numpy() if str(x.dtype) == "torch.bfloat16" else np.asarray(x)
    array = np.asarray(x)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def expected(op: str, arrays: Sequence[Any]) -> Array:
    """Return the fold of ``arrays`` in their order, as NumPy."""
    plains = [plain(array) for array in arrays]
    # A logical op gives 0 or 1, of a single rank's elements too.
    first = plains[0] != 0 if op in ("land", "lor") else plains[0]
    folded = np.asarray(functools.reduce(_FOLDS[op], plains[1:], first))
    if op == "avg":
        folded = np.asarray(folded / len(plains))
    return folded.astype(plains[0].dtype)


def assert_same(found: Any, wanted: Any, what: str) -> None:
    """Hold that two arrays have the same dtype, shape and values.

    Raises:
        AssertionError: they differ; tells where first.
    """
    _assert_alike(found, wanted, what, lambda a, b: (a == b) | ((a != a) & (b != b)))


def assert_close(found: Any, wanted: Any, what: str, tolerance: float) -> None:
    """Hold the same, with values that may differ by ``tolerance``, absolute and relative."""
    _assert_alike(
        found, wanted, what, lambda a, b: np.isclose(a, b, rtol=tolerance, atol=tolerance)
    )


def assert_bits(found: Any, wanted: Array, what: str) -> None:
    """Hold that an array has the bits ``wanted``, unsigned integers of its elements' size.

    Raises:
        AssertionError: it does not; tells where first.
    """
    if not isinstance(found, np.ndarray):
        torch = importlib.import_module("torch")
        found = found.view(torch.int16).numpy()
    bits = np.asarray(found).view(wanted.dtype)
    wrong = np.flatnonzero(bits != wanted)
    if wrong.size:
        at = int(wrong[0])
        raise AssertionError(
            f"{what}: the bits of {wrong.size} of {bits.size} elements are wrong; first at {at}: "
            f"{bits[at]:#x}; expected {wanted[at]:#x}"
        )


def _assert_alike(found: Any, wanted: Any, what: str, alike: Callable[[Array, Array], Any]) -> None:
    if found is None:
        raise AssertionError(f"{what}: got None instead of an array")
    if _name(found) != _name(wanted):
        raise AssertionError(f"{what}: dtype {_name(found)}; expected {_name(wanted)}")
    a, b = plain(found), plain(wanted)
    if a.shape != b.shape:
        raise AssertionError(f"{what}: shape {a.shape}; expected {b.shape}")
    wrong = np.argwhere(~np.asarray(alike(a, b), bool))
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.size} elements are wrong; first at {at}: "
            f"{a[at]!r}; expected {b[at]!r}"
        )


def _name(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


#: Names of the ways in which an array can lie in memory; see :func:`laid_out`.
LAYOUTS = ("strided", "fortran", "negative", "transposed", "offset")


def laid_out(layout: str, array: Array) -> Array:
    """Return a writable copy of ``array`` that lies in memory as ``layout`` says."""
    if layout == "strided":
        whole = np.zeros([2 * n for n in array.shape], array.dtype)
        view = whole[(slice(None, None, 2),) * array.ndim]
    elif layout == "fortran":
        view = np.zeros(array.shape, array.dtype, order="F")
    elif layout == "negative":
        view = np.zeros(array.shape, array.dtype)[(slice(None, None, -1),) * array.ndim]
    elif layout == "transposed":
        view = np.zeros(array.shape[::-1], array.dtype).T
    else:
        # Aligned for its elements, but for no vector and no cache line.
        view = np.zeros(array.size + 1, array.dtype)[1:].reshape(array.shape)
    view[...] = array
    return view


def regions(length: int, size: int) -> Iterator[slice]:
    """Yield the parts into which ``numpy.array_split`` cuts ``length`` rows."""
    stop = 0
    for rank in range(size):
        start, stop = stop, stop + length // size + (rank < length % size)
        yield slice(start, stop)
