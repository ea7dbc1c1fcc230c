"""Arithmetic in twice float64's precision, as a reference for float64 results.

A number is a pair ``(high, low)`` of float64 arrays; its value is their exact sum. The error-free
transformations are those of Dekker, "A floating-point technique for extending the available
precision", Numerische Mathematik 18 (1971), and Knuth, as in Ogita, Rump and Oishi, "Accurate sum
and dot product", SIAM J. Sci. Comput. 26 (2005). A result is wrong by a few units of 2**-104.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Pair", "add", "divide", "exact", "multiply"]

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]

_SPLITTER = 2.0**27 + 1.0  # cuts the 53 bits of a float64's significand into halves


def exact(x: Array) -> Pair:
    """Return the pair of an array that float64 holds exactly."""
    high = np.asarray(x, np.float64)
    return high, np.zeros_like(high)


def add(a: Pair, b: Pair) -> Pair:
    """Return ``a + b``."""
    high, low = _two_sum(a[0], b[0])
    return _renormalized(high, low + a[1] + b[1])


def multiply(a: Pair, b: Pair) -> Pair:
    """Return ``a * b``; no factor may be beyond 2**990."""
    high, low = _two_product(a[0], b[0])
    return _renormalized(high, low + (a[0] * b[1] + a[1] * b[0]))


def divide(a: Pair, divisor: float) -> Pair:
    """Return ``a / divisor`` for a divisor that float64 holds exactly."""
    quotient = a[0] / divisor
    high, low = _two_product(quotient, np.full_like(quotient, divisor))
    rest = ((a[0] - high) - low + a[1]) / divisor
    return _renormalized(quotient, rest)


def _renormalized(high: Array, low: Array) -> Pair:
    total = high + low
    return total, low - (total - high)


def _two_sum(a: Array, b: Array) -> Pair:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> Pair:
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    low = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, low


def _halves(a: Array) -> Pair:
    scaled = _SPLITTER * a
    high = scaled - (scaled - a)
    return high, a - high
