"""What every rank contributes, and what has to come out, worked out with NumPy alone.

Any rank can work out all ranks' arrays. Floating numbers have all the bits of their dtype and
differ in magnitude and sign, so that folds round; among those of which the least or the greatest
is sought are zeros of both signs and NaN. Integers fill their type, so that sums and products
wrap: a result is right or wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.memory import nested
from collective.memory.dtypes import BY_NAME
from collective.testing.checks_extremes import INFINITY_AND_NAN, extreme
from collective.testing.frameworks import framework

from . import double_double as dd
from .bounds import ROUNDED, bound
from .cases import REDUCTIONS, Case, CaseLeaf

__all__ = ["Reference", "decoded", "factor", "inputs", "references", "special", "values"]

Array = np.ndarray[Any, Any]

# Large arrays are shared by the cases of several operations and frameworks.
_KEPT = 24
# So many numbers are drawn, and repeated in larger arrays; no chunk that a transport cuts is a
# multiple of it.
_PERIOD = 8191


@dataclass(frozen=True)
class Reference:
    """What one array of a result has to be.

    Attributes:
        shape: of it.
        bits: the array as it is stored, where the result is exact; else None.
        value: the result in twice float64's precision; complex as a last axis of two.
        magnitude: what errors are measured against; see :mod:`collective.tools.parity.bounds`.
        bound: how many units in the last place of it they may be.
    """

    shape: tuple[int, ...]
    bits: Array | None
    value: dd.Pair | None = None
    magnitude: Array | None = None
    bound: float = 0.0

    def part(self, part: Any) -> Reference:
        """Return the reference of ``result[part]``."""
        cut = [None if each is None else each[part] for each in (self.bits, self.magnitude)]
        pair = None if self.value is None else (self.value[0][part], self.value[1][part])
        model = np.empty(self.shape, np.bool_)[part]
        return Reference(model.shape, cut[0], pair, cut[1], self.bound)


def factor(rank: int) -> float:
    """Return what ``rank`` multiplies by in the cases of ``premul_sum``."""
    return 0.3 * (rank + 1)


def inputs(case: Case, rank: int, size: int, turn: int) -> Any:
    """Return what ``rank`` passes in, as stored; nested as the case says."""
    op = _drawn_for(case)
    found = [
        values(leaf.dtype, _shape(case, leaf, rank), rank, op, (case.seed, turn, number))
        for number, leaf in enumerate(nested.flatten(case.data))
    ]
    return nested.rebuild(case.data, iter(found))


def special(case: Case) -> bool:
    """Tell whether there are zeros with signs, infinities and NaN among the numbers.

    Not for the memory of GPUs: what becomes of them there is left to NCCL.
    """
    if case.operation not in REDUCTIONS or case.op not in ("min", "max"):
        return False
    floating = any(leaf.dtype in INFINITY_AND_NAN for leaf in nested.flatten(case.data))
    return floating and not any(framework(name).on_gpu for name in case.frameworks)


def _drawn_for(case: Case) -> str:
    """Return the operator that the numbers are drawn for; empty if they could be any."""
    extreme = case.op in ("min", "max")
    return case.op if case.operation in REDUCTIONS and (special(case) or not extreme) else ""


def _shape(case: Case, leaf: CaseLeaf, rank: int) -> tuple[int, ...]:
    if case.rows is None:
        return leaf.shape
    shape = list(leaf.shape)
    shape[case.axis] = case.rows[rank % len(case.rows)]
    return tuple(shape)


@functools.lru_cache(_KEPT)
def values(dtype: str, shape: tuple[int, ...], rank: int, op: str, seed: tuple[int, ...]) -> Array:
    """Return numbers for ``rank``, in the storage of ``dtype``; not to be changed.

    Args:
        op: what they are folded with; empty if they are only moved.
        seed: other numbers for each.
    """
    random = np.random.default_rng([rank, BY_NAME[dtype].code, *seed])
    count = math.prod(shape)
    drawn = _drawn(random, dtype, min(count, _PERIOD), op)
    found = np.resize(drawn, shape) if count > _PERIOD else drawn.reshape(shape)
    found.flags.writeable = False
    return found


def _drawn(random: np.random.Generator, dtype: str, count: int, op: str) -> Array:
    kind = BY_NAME[dtype]
    if kind.kind == "b":
        return random.integers(0, 2, count).astype(np.bool_)
    if dtype.startswith("float8"):
        return random.integers(0, 0x78, count).astype(np.uint8)  # no NaN among them
    if kind.kind in "iu":
        return _integers(random, kind.storage, count, op)
    if kind.kind == "c":
        return _floats(random, 2 * count, op).view(np.complex128).astype(kind.storage)
    found = encoded(_floats(random, count, op), dtype)
    return _with_special(random, found, dtype) if op in ("min", "max") else found


def _floats(random: np.random.Generator, count: int, op: str) -> Array:
    numbers = random.uniform(0.5, 1.0, count) * random.choice([-1.0, 1.0], count)
    if op in ("land", "lor"):
        return np.asarray(numbers * random.integers(0, 2, count))
    # Products of 16 stay within float16, and no term of a sum is lost on the others.
    spread = random.integers(0, 2, count) if op == "prod" else random.integers(-3, 4, count)
    return np.asarray(numbers * 2.0**spread)


def _with_special(random: np.random.Generator, found: Array, dtype: str) -> Array:
    """Put zeros of both signs in the place of a fifth, infinities and NaN in that of a few."""
    infinity, nan = INFINITY_AND_NAN[dtype]
    bits = found.view(f"u{found.itemsize}")
    sizes = np.array([0] * 6 + [infinity, nan, nan + 5, infinity + 1], bits.dtype)
    signs = random.integers(0, 2, found.shape).astype(bits.dtype) << (8 * found.itemsize - 1)
    drawn = random.choice(sizes, found.shape) | signs.astype(bits.dtype)
    return np.where(random.integers(0, 3, found.shape), bits, drawn).view(found.dtype)


def _integers(random: np.random.Generator, dtype: np.dtype[Any], count: int, op: str) -> Array:
    limits = (0, 1) if op in ("land", "lor") else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    found = random.integers(*limits, count, dtype, endpoint=True)
    # Products of even numbers are 0 before long.
    return found | dtype.type(1) if op == "prod" else found


def decoded(stored: Array, dtype: str) -> Array:
    """Return what is stored as float64, exactly; complex as a last axis of two."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if BY_NAME[dtype].kind == "c":
        parts = np.ascontiguousarray(stored).reshape(stored.shape)
        return np.stack([parts.real, parts.imag], -1).astype(np.float64)
    return stored.astype(np.float64)


# -- what comes out ---------------------------------------------------------------------------


def references(case: Case, rank: int, size: int, turn: int) -> list[Reference] | None:
    """Return what ``rank`` gets, an array a leaf; None if it gets nothing."""
    root = (case.root + turn) % size
    if case.operation in ("reduce", "gather") and rank != root:
        return None
    return [
        _reference(case, leaf, number, rank, size, turn, root)
        for number, leaf in enumerate(nested.flatten(case.data))
    ]


def _reference(
    case: Case, leaf: CaseLeaf, number: int, rank: int, size: int, turn: int, root: int
) -> Reference:
    seed = (case.seed, turn, number)
    if case.operation in REDUCTIONS:
        ranks = rank + 1 if case.operation == "scan" else size
        drawn = _drawn_for(case)
        whole = _folded(leaf.dtype, leaf.shape, case.op, drawn, case.order, ranks, size, seed)
        if case.operation == "reduce_scatter":
            whole = whole if leaf.shape else whole.part(None)
            return whole.part(_piece(case, whole.shape[case.axis], rank, size))
        return whole

    def of(other: int) -> Array:
        return values(leaf.dtype, _shape(case, leaf, other), other, "", seed)

    if case.operation == "broadcast":
        found = of(root)
    elif case.operation in ("sendrecv", "send_recv"):
        found = of((rank - 1) % size)
    elif case.operation == "scatter":
        whole_array = np.atleast_1d(of(root))
        found = whole_array[_piece(case, whole_array.shape[case.axis], rank, size)]
    else:
        arrays = [np.atleast_1d(of(other)) for other in range(size)]
        if case.operation == "all_to_all":
            arrays = [a[_piece(case, a.shape[case.axis], rank, size)] for a in arrays]
        found = np.concatenate(arrays, axis=case.axis)
    return Reference(found.shape, found)


def _piece(case: Case, length: int, rank: int, size: int) -> tuple[slice, ...]:
    """Return the part of ``length`` rows that ``rank`` gets."""
    counts: Sequence[int] | None = case.counts
    if counts is None:
        counts = [len(part) for part in np.array_split(np.arange(length), size)]
    start = sum(counts[:rank])
    return (slice(None),) * case.axis + (slice(start, start + counts[rank]),)


@functools.lru_cache(_KEPT)
def _folded(
    dtype: str,
    shape: tuple[int, ...],
    op: str,
    drawn: str,
    order: str | None,
    ranks: int,
    size: int,
    seed: tuple[int, ...],
) -> Reference:
    """Return the fold of the arrays of the first ``ranks`` of ``size`` ranks."""
    arrays = [values(dtype, shape, rank, drawn, seed) for rank in range(ranks)]
    if op not in ROUNDED or BY_NAME[dtype].kind not in "fc":
        return Reference(shape, _exact(op, arrays, dtype))
    if order == "rank":
        # Of one dimension: NumPy multiplies complex scalars by other instructions than arrays.
        flat = _in_rank_order(op, [array.ravel() for array in arrays], dtype, size)
        return Reference(shape, flat.reshape(shape))
    value, magnitude = _in_twice_float64(op, arrays, dtype, size)
    return Reference(shape, None, value, magnitude, bound(op, dtype, ranks))


def _exact(op: str, arrays: Sequence[Array], dtype: str) -> Array:
    """Fold in the dtype's own arithmetic, which does not round here."""
    if op == "user":
        return arrays[-1]
    if op in ("land", "lor"):
        truths = [decoded(array, dtype) != 0 for array in arrays]
        together = np.all(truths, axis=0) if op == "land" else np.any(truths, axis=0)
        return encoded(np.asarray(together, np.float64), dtype)
    if op in ("min", "max"):
        if dtype in INFINITY_AND_NAN:
            every = np.stack(arrays)
            return extreme(op, dtype, every.view(f"u{every.itemsize}")).view(every.dtype)
        return np.asarray(np.stack(arrays).min(0) if op == "min" else np.stack(arrays).max(0))
    return np.asarray(functools.reduce(_FOLDS[op], arrays)).astype(arrays[0].dtype)


_FOLDS: dict[str, Any] = {
    "sum": np.add, "avg": np.add, "premul_sum": np.add, "prod": np.multiply,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip


def encoded(numbers: Array, dtype: str) -> Array:
    """Round float64 to what is stored; to nearest, ties to even."""
    if dtype != "bfloat16":
        return np.asarray(numbers).astype(BY_NAME[dtype].storage)
    bits = np.asarray(numbers).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _in_rank_order(op: str, arrays: Sequence[Array], dtype: str, size: int) -> Array:
    """Fold from rank 0 upwards, each step rounded to the dtype."""
    fold, narrow = _FOLDS[op], dtype == "bfloat16"
    terms = [decoded(a, dtype).astype(np.float32) for a in arrays] if narrow else list(arrays)
    if op == "avg" and dtype == "float16":  # whose sums overflow early
        terms = [_divided(term, size) for term in terms]
    total = terms[0]
    for term in terms[1:]:
        total = fold(total, term)
        if narrow:
            total = decoded(encoded(total, dtype), dtype).astype(np.float32)
    if op == "avg" and dtype != "float16":
        total = _divided(total, size)
    return encoded(total, dtype)


def _divided(x: Array, size: int) -> Array:
    if x.dtype.kind == "c":
        parts = x.view(x.real.dtype)
        return np.asarray(parts / parts.dtype.type(size)).view(x.dtype)
    # float16 is divided in float32, and rounded once.
    divisor = np.float32(size) if x.dtype == np.float16 else x.dtype.type(size)
    return np.asarray(x / divisor).astype(x.dtype)


def _in_twice_float64(
    op: str, arrays: Sequence[Array], dtype: str, size: int
) -> tuple[dd.Pair, Array]:
    """Return the fold to about 100 bits, and what its errors are measured against."""
    terms = [dd.exact(decoded(array, dtype)) for array in arrays]
    modulus = functools.partial(_modulus, dtype=dtype)
    if op == "prod":
        times = _complex_product if BY_NAME[dtype].kind == "c" else dd.multiply
        product = functools.reduce(times, terms)
        return product, modulus(product[0])
    if op == "premul_sum":
        given = np.array([factor(rank) for rank in range(len(terms))])
        rounded = decoded(encoded(given, _real(dtype)), _real(dtype))
        terms = [
            dd.multiply(term, dd.exact(np.full_like(term[0], each)))
            for term, each in zip(terms, rounded)
        ]
    total = functools.reduce(dd.add, terms)
    magnitude = np.sum([modulus(term[0]) for term in terms], axis=0)
    if op == "avg":
        return dd.divide(total, float(size)), magnitude / size
    return total, magnitude


def _modulus(x: Array, dtype: str) -> Array:
    return np.hypot(x[..., 0], x[..., 1]) if BY_NAME[dtype].kind == "c" else np.abs(x)


def _real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def _complex_product(a: dd.Pair, b: dd.Pair) -> dd.Pair:
    """Multiply pairs whose last axis holds real and imaginary part."""
    (ar, ai), (br, bi) = (_parts(x) for x in (a, b))
    minus = dd.multiply(ai, bi)
    real = dd.add(dd.multiply(ar, br), (-minus[0], -minus[1]))
    imaginary = dd.add(dd.multiply(ar, bi), dd.multiply(ai, br))
    return (
        np.stack([real[0], imaginary[0]], -1),
        np.stack([real[1], imaginary[1]], -1),
    )


def _parts(x: dd.Pair) -> tuple[dd.Pair, dd.Pair]:
    return (x[0][..., 0], x[1][..., 0]), (x[0][..., 1], x[1][..., 1])
