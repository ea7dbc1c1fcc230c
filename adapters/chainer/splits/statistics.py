"""Means and variances of channels, or of groups of them, of which ranks may have some rows each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

__all__ = ["moments", "wide"]


def wide(x: Any, gamma: Any) -> Any:
    """Return the dtype for sums over rows of ``x``: Chainer's own, and single at the least."""
    return np.promote_types(np.promote_types(x.dtype, gamma.dtype), np.float32)


def moments(
    x: Any,
    groups: int | None,
    dtype: Any,
    average: Callable[[Any], Any],
    near: Callable[[Any], Any],
) -> tuple[Any, Any]:
    """Return means and variances.

    Args:
        x: this rank's rows, ``(N, C, ...)``.
        groups: of the channels, a mean of each in each sample: ``[N, groups]``. None: a mean of
            each channel over the batch, ``[1, C]``.
        dtype: of the results.
        average: from sums of this rank's rows to means of all.
        near: from means of all to those of this rank's samples.
    """
    samples, channels, *rows = x.shape
    parts = groups or channels
    # A view, however the channels lie in memory: behind NumPy's convolution they lie innermost.
    y = F.reshape(x, (samples, parts, channels // parts, math.prod(rows)))
    axes = (0, 2, 3) if groups is None else (2, 3)
    mean = average(F.sum(F.cast(y, dtype), axes, keepdims=True)[:, :, 0, 0])
    # Twice over the rows, so that no two large numbers are subtracted.
    distances = _Squares(axes).apply((y, near(mean)[:, :, None, None]))[0]
    return mean, average(distances[:, :, 0, 0])


class _Squares(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Sums of squared distances; keeps what it is given, where a product keeps the distances.

    Args:
        axes: that are summed over.
    """

    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self._axes = axes

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0, 1))
        x, centre = inputs
        distance = x - centre
        distance *= distance
        return (distance.sum(self._axes, keepdims=True, dtype=centre.dtype),)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        x, centre = self.get_retained_inputs()
        y = F.cast(x, centre.dtype)
        distance = y - F.broadcast_to(centre, y.shape)
        slope = F.broadcast_to(2 * grad_outputs[0], y.shape) * distance
        return F.cast(slope, x.dtype), -F.sum(slope, self._axes, keepdims=True)
