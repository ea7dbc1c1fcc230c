r"""The inputs of every rank of a case, the expected results, and the bounds of their errors.

The oracle of the conformance kit, :mod:`collective.testing.samples`, folds and moves. This module
adds numbers whose folds are rounded: floating numbers with all the bits of their dtype, of
different magnitudes and signs. Their exact sum or product is computed in Python's integers.
A result may differ from it by as much as the order of a fold can change it. All other results must
be exact. For the minimum and maximum, some numbers are zeros of both signs, infinities and NaN.

**Bounds.** They hold for every order of the operands. With unit roundoff ``u`` (half the distance
from 1 to the next number) and
``gamma(k) = k u / (1 - k u)``, after Higham, *Accuracy and Stability of Numerical Algorithms*,
2nd edition, SIAM 2002:

=============  ==========================================================  ==================
op             \|computed - exact\|   over n ranks is at most               source
=============  ==========================================================  ==================
sum            ``gamma(n - 1) Σ|x|``                                       section 4.2, (4.4)
avg            ``gamma(n) Σ|x| / n``: a division more                      with Lemma 3.1
premul_sum     ``gamma(n) Σ|f x|``: a product before                       with Lemma 3.1
prod           ``gamma(n - 1) Π|x|``                                       Lemma 3.1
prod, complex  ``((1 + √2 gamma(2))**(n - 1) - 1) Π|x|``                   Lemma 3.5
others         0
=============  ==========================================================  ==================

The bounds hold for each order because every term goes through at most that many roundings. They
also hold for transports that add in a wider type and round once. For complex numbers the error is
the modulus of the difference, and the same bounds hold by Minkowski's inequality.

The unit of errors is the unit in the last place of the *magnitude* on the right-hand side
(``Σ|x|``, …): ``ulp(m) = 2**floor(log2 m) · 2 u``. As ``m < 2**(floor(log2 m) + 1)``, an error of
at most ``gamma m`` is an error of at most ``gamma / u`` ULP. This bound depends on dtype and ranks
alone: it is 1 / (1 - u) for the sum of two, for any numbers. A unit in the last place of the result
would not do: if the terms cancel, any digit of the result may be wrong, and no algorithm can help
that.

**Arithmetic.** Every number is a whole multiple of 2**-64, so integers fold them without rounding.
A pair ``(high, low)`` of float64 arrays holds a fold: the nearest numbers, and the nearest ones to
what is left of it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.inner import BY_NAME, encoded, framework
from collective.testing import samples
from collective.testing.frameworks import widened
from collective.testing.samples import INFINITY_AND_NAN

from .cases import REDUCTIONS, Case

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]

# Number of arrays in a cache. Cases of several operations and frameworks share large arrays.
_KEPT = 24
# Number of numbers that are drawn; larger arrays repeat them. No chunk that a transport cuts is a
# multiple of it.
_PERIOD = 8191
#: The reductions that round; all others are exact.
ROUNDED = ("sum", "prod", "avg", "premul_sum")

# Bits of the significand, including the hidden bit.
_PRECISION = {
    "bfloat16": 8, "float16": 11, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53,
}  # fmt: skip
# Every drawn number is a whole multiple of 1 / _ONE.
_ONE = 1 << 64


@dataclass(frozen=True)
class Reference:
    """Expected value of one array of a result.

    Attributes:
        shape: shape of the array.
        bits: the array in its storage, if the result is exact; else None.
        value: the result as a pair; a complex array has a last axis of two.
        magnitude: magnitude for the unit of errors; see "Bounds" above.
        bound: largest error that is allowed, in units in the last place of the magnitude.
    """

    shape: tuple[int, ...]
    bits: Array | None
    value: Pair | None = None
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


def input_of(case: Case, rank: int, turn: int) -> Array:
    """Return the input of ``rank``, as stored."""
    return values(case.dtype, case.shape, rank, _drawn_for(case), (case.seed, turn))


def special(case: Case) -> bool:
    """Tell whether the numbers include zeros with signs, infinities and NaN.

    They do not for arrays on GPUs, where the results for such numbers are up to NCCL.
    """
    if case.operation not in REDUCTIONS or case.op not in ("min", "max"):
        return False
    on_gpu = any(framework(name).on_gpu for name in case.frameworks)
    return case.dtype in INFINITY_AND_NAN and not on_gpu


def _drawn_for(case: Case) -> str:
    """Return the operator that the numbers are drawn for; "" if any numbers will do."""
    extreme = case.op in ("min", "max")
    return case.op if case.operation in REDUCTIONS and (special(case) or not extreme) else ""


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


def reference(case: Case, rank: int, size: int, turn: int) -> Reference | None:
    """Return what ``rank`` should get; None if it gets no result."""
    root, seed = case.root(turn, size), (case.seed, turn)
    if case.operation in ("reduce", "gather") and rank != root:
        return None
    if case.operation in REDUCTIONS:
        ranks = rank + 1 if case.operation == "scan" else size
        drawn = _drawn_for(case)
        whole = _folded(case.dtype, case.shape, case.op, drawn, case.order, ranks, size, seed)
        if case.operation == "reduce_scatter":
            whole = whole if case.shape else whole.part(None)
            return whole.part(samples.piece(whole.shape, rank, size))
        return whole

    def of(other: int) -> Array:
        return input_of(case, other, turn)

    array = samples.moved(case.operation, of, rank, size, root=root)
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
    value, magnitude = _exact(op, arrays, dtype, size)
    return Reference(shape, None, value, magnitude, bound(op, dtype, ranks))


def _exact(op: str, arrays: Sequence[Array], dtype: str, size: int) -> tuple[Pair, Array]:
    """Return the fold, and the magnitude for the unit of its errors."""
    # Large arrays repeat their numbers, so fold each number once.
    terms = [_whole(decoded(array.ravel()[:_PERIOD], dtype)) for array in arrays]
    one = _ONE * size if op == "avg" else _ONE
    if op == "premul_sum":
        factors = np.array([factor(rank) for rank in range(len(terms))])
        rounded = _whole(decoded(encoded(factors, _real(dtype)), _real(dtype)))
        terms, one = [term * multiplier for term, multiplier in zip(terms, rounded)], _ONE**2
    if op == "prod":
        times = _complex_product if BY_NAME[dtype].kind == "c" else operator.mul
        total, one = functools.reduce(times, terms), _ONE ** len(terms)
    else:
        total = functools.reduce(operator.add, terms)
    near = total / one
    rest = np.array([_rest(number, one, high) for number, high in zip(total.flat, near.flat)])
    moduli = [
        _modulus((term / one).astype(float), dtype) for term in ([total] if op == "prod" else terms)
    ]
    shape = arrays[0].shape
    pair_shape = (*shape, 2) if BY_NAME[dtype].kind == "c" else shape
    pair = np.resize(near.astype(float), pair_shape), np.resize(rest.astype(float), pair_shape)
    return pair, np.resize(np.sum(moduli, axis=0), shape)


def _whole(numbers: Array) -> Array:
    """Return numbers in units of ``1 / _ONE``, as an array of Python's integers."""
    whole = [int(number) for number in (numbers * float(_ONE)).ravel().tolist()]
    return np.array(whole, object).reshape(numbers.shape)


def _rest(number: int, one: int, near: float) -> float:
    """Return ``number / one - near``, rounded once."""
    over, under = near.as_integer_ratio()
    return (number * under - over * one) / (one * under)


def _complex_product(a: Array, b: Array) -> Array:
    """Return the product of arrays whose last axis has the real and the imaginary part."""
    real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    imaginary = a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]
    return np.stack([real, imaginary], -1)


def _modulus(x: Array, dtype: str) -> Array:
    return np.hypot(x[..., 0], x[..., 1]) if BY_NAME[dtype].kind == "c" else np.abs(x)


def _real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


# -- bounds and units of errors ----------------------------------------------------------------


def unit_roundoff(dtype: str) -> float:
    """Return ``u``, the largest relative error of rounding to ``dtype``, or to a complex's parts.

    Raises:
        KeyError: results of this dtype are not rounded.
    """
    return 2.0 ** -_PRECISION[dtype]


def bound(op: str, dtype: str, terms: int) -> float:
    """Return the error bound for the fold of ``terms`` arrays, in ULP of its magnitude."""
    if dtype not in _PRECISION or op not in ROUNDED:
        return 0.0
    u = unit_roundoff(dtype)

    def gamma(k: int) -> float:
        return k * u / (1 - k * u)

    if op in ("avg", "premul_sum"):
        return gamma(terms) / u
    if op == "prod" and dtype.startswith("complex"):
        return math.expm1((terms - 1) * math.log1p(math.sqrt(2) * gamma(2))) / u
    return gamma(terms - 1) / u


def ulp(magnitude: Any, dtype: str) -> Any:
    """Return the unit in the last place of ``dtype`` at some magnitudes, none of which is 0."""
    _, exponent = np.frexp(magnitude)
    return np.ldexp(2 * unit_roundoff(dtype), exponent - 1)
