r"""How wrong a fold may be: bounds that hold for every order in which it can be done.

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

They hold for each order because every term goes through at most that many roundings, and for
transports that add in a wider type and round once. Of complex numbers the error is the
modulus of the difference, and the same bounds hold by Minkowski's inequality.

Errors are told in units in the last place of the *magnitude* on the right-hand side (``Σ|x|``, …):
``ulp(m) = 2**floor(log2 m) · 2 u``. As ``m < 2**(floor(log2 m) + 1)``, an error of at most
``gamma m`` is one of at most ``gamma / u`` ULP, which depends on dtype and ranks alone: 1 / (1 - u)
for the sum of two, whatever the numbers are. A unit of the result itself would not do: where the
terms cancel, any of its digits may be wrong, and no algorithm can help it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["ROUNDED", "bound", "ulp", "unit_roundoff"]

#: The reductions that round; all others are exact.
ROUNDED = ("sum", "prod", "avg", "premul_sum")

# Bits of the significand, the hidden one included.
_PRECISION = {
    "bfloat16": 8, "float16": 11, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53,
}  # fmt: skip


def unit_roundoff(dtype: str) -> float:
    """Return ``u``, the largest relative error of rounding to ``dtype``; of a complex one's parts.

    Raises:
        KeyError: it does not round.
    """
    return 2.0 ** -_PRECISION[dtype]


def bound(op: str, dtype: str, terms: int) -> float:
    """Return how wrong the fold of ``terms`` arrays may be, in ULP of its magnitude."""
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
    """Return the unit in the last place of ``dtype`` at each of some magnitudes, none of them 0."""
    _, exponent = np.frexp(magnitude)
    return np.ldexp(2 * unit_roundoff(dtype), exponent - 1)
