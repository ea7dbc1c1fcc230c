"""The inputs of every rank of a case, and the expected results.

The oracle of the conformance kit, :mod:`collective.testing.samples`, folds and moves. This module
adds numbers whose folds are rounded: floating numbers with all the bits of their dtype, of
different magnitudes and signs. Their exact sum or product is computed in twice float64's precision.
A result may differ from it by as much as the order of a fold can change it. All other results must
be exact. For the minimum and maximum, some numbers are zeros of both signs, infinities and NaN.
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
from collective.testing import samples
from collective.testing.frameworks import encoded, framework, widened
from collective.testing.samples import INFINITY_AND_NAN

from . import double_double as dd
from .bounds import ROUNDED, bound
from .cases import REDUCTIONS, Case, CaseLeaf

__all__ = ["Reference", "decoded", "factor", "inputs", "references", "special", "values"]

Array = np.ndarray[Any, Any]

# Number of arrays in a cache. Cases of several operations and frameworks share large arrays.
_KEPT = 24
# Number of numbers that are drawn; larger arrays repeat them. No chunk that a transport cuts is a
# multiple of it.
_PERIOD = 8191


@dataclass(frozen=True)
class Reference:
    """Expected value of one array of a result.

    Attributes:
        shape: shape of the array.
        bits: the array in its storage, if the result is exact; else None.
        value: the result in twice float64's precision; a complex array has a last axis of two.
        magnitude: magnitude for the unit of errors; see :mod:`collective.tools.parity.bounds`.
        bound: largest error that is allowed, in units in the last place of the magnitude.
    """

    shape: tuple[int, ...]
    bits: Array | None
    value: dd.Pair | None = None
    magnitude: Array | None = None
    bound: float = 0.0

    def part(self, part: Any) -> Reference:
        """Return the reference of ``result[part]``."""
        cut = [None if array is None else array[part] for array in (self.bits, self.magnitude)]
        pair = None if self.value is None else (self.value[0][part], self.value[1][part])
        model = np.empty(self.shape, np.bool_)[part]
        return Reference(model.shape, cut[0], pair, cut[1], self.bound)


def factor(rank: int) -> float:
    """Return the factor of ``rank`` in the cases of ``premul_sum``."""
    return 0.3 * (rank + 1)


def inputs(case: Case, rank: int, size: int, turn: int) -> Any:
    """Return the input of ``rank``, as stored, nested like the case's data."""
    op = _drawn_for(case)
    arrays = [
        values(leaf.dtype, _shape(case, leaf, rank), rank, op, (case.seed, turn, number))
        for number, leaf in enumerate(nested.flatten(case.data))
    ]
    return nested.rebuild(case.data, iter(arrays))


def special(case: Case) -> bool:
    """Tell whether the numbers include zeros with signs, infinities and NaN.

    They do not for arrays on GPUs, where the results for such numbers are up to NCCL.
    """
    if case.operation not in REDUCTIONS or case.op not in ("min", "max"):
        return False
    floating = any(leaf.dtype in INFINITY_AND_NAN for leaf in nested.flatten(case.data))
    return floating and not any(framework(name).on_gpu for name in case.frameworks)


def _drawn_for(case: Case) -> str:
    """Return the operator that the numbers are drawn for; "" if any numbers will do."""
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
    """Return numbers for ``rank``, in the storage of ``dtype``; they must not be changed.

    Args:
        op: operator that folds the numbers; "" if they are only moved.
        seed: seed; each seed gives other numbers.
    """
    random = np.random.default_rng([rank, BY_NAME[dtype].code, *seed])
    count = math.prod(shape)
    drawn = samples.draw(random, dtype, (min(count, _PERIOD),), op, _floats)
    if op in ("min", "max") and dtype in INFINITY_AND_NAN:
        drawn = _with_special(random, drawn, dtype)
    array = np.resize(drawn, shape) if count > _PERIOD else drawn.reshape(shape)
    array.flags.writeable = False
    return array


def _floats(random: np.random.Generator, shape: Sequence[int], op: str) -> Array:
    numbers = random.uniform(0.5, 1.0, shape) * random.choice([-1.0, 1.0], shape)
    if op in ("land", "lor"):
        return np.asarray(numbers * random.integers(0, 2, shape))
    # Products of 16 numbers stay within float16, and no term of a sum is lost by rounding.
    spread = random.integers(0, 2, shape) if op == "prod" else random.integers(-3, 4, shape)
    return np.asarray(numbers * 2.0**spread)


def _with_special(random: np.random.Generator, drawn: Array, dtype: str) -> Array:
    """Replace a third of the numbers by zeros of both signs, extremes, infinities and NaN."""
    bits = samples.special_bits(random, dtype, drawn.size)
    kept = random.integers(0, 3, drawn.shape)
    return np.where(kept, drawn.view(bits.dtype), bits).view(drawn.dtype)


def decoded(stored: Array, dtype: str) -> Array:
    """Return stored numbers as float64, exactly; complex numbers get a last axis of two."""
    numbers = widened(stored, dtype)
    if BY_NAME[dtype].kind == "c":
        numbers = np.stack([numbers.real, numbers.imag], -1)
    return numbers.astype(np.float64)


# -- expected results -------------------------------------------------------------------------


def references(case: Case, rank: int, size: int, turn: int) -> list[Reference] | None:
    """Return what ``rank`` should get, an array for each leaf; None if it gets no result."""
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
            part = samples.piece(whole.shape, rank, size, case.axis, case.counts)
            return whole.part(part)
        return whole

    def of(other: int) -> Array:
        return values(leaf.dtype, _shape(case, leaf, other), other, "", seed)

    array = samples.moved(
        case.operation, of, rank, size, root=root, axis=case.axis, counts=case.counts
    )
    return Reference(array.shape, array)


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
    if op == "user":  # keep_right returns the last operand
        return Reference(shape, arrays[-1])
    # A fold in rank order is that of the kit. If nothing rounds, all orders give its result.
    if order == "rank" or op not in ROUNDED or BY_NAME[dtype].kind not in "fc":
        return Reference(shape, samples.folded(op, arrays, dtype))
    value, magnitude = _in_twice_float64(op, arrays, dtype, size)
    return Reference(shape, None, value, magnitude, bound(op, dtype, ranks))


def _in_twice_float64(
    op: str, arrays: Sequence[Array], dtype: str, size: int
) -> tuple[dd.Pair, Array]:
    """Return the fold to about 100 bits, and the magnitude for the unit of its errors."""
    terms = [dd.exact(decoded(array, dtype)) for array in arrays]
    modulus = functools.partial(_modulus, dtype=dtype)
    if op == "prod":
        times = _complex_product if BY_NAME[dtype].kind == "c" else dd.multiply
        product = functools.reduce(times, terms)
        return product, modulus(product[0])
    if op == "premul_sum":
        factors = np.array([factor(rank) for rank in range(len(terms))])
        rounded = decoded(encoded(factors, _real(dtype)), _real(dtype))
        terms = [
            dd.multiply(term, dd.exact(np.full_like(term[0], multiplier)))
            for term, multiplier in zip(terms, rounded)
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
    """Return the product of pairs whose last axis has the real and the imaginary part."""
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
