r"""Error bounds of a fold that hold for every order of the operands.

With unit roundoff ``u`` (half the distance from 1 to the next number) and
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
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["ROUNDED", "bound", "ulp", "unit_roundoff"]

#: The reductions that round; all others are exact.
ROUNDED = ("sum", "prod", "avg", "premul_sum")

# Bits of the significand, including the hidden bit.
_PRECISION = {
    "bfloat16": 8, "float16": 11, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53,
}  # fmt: skip


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
