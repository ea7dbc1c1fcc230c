"""Operations on Chainer's variables that are cut, in turn and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from collective import Communicator
from collective.adapters.chainer.functional import all_reduce
from collective.adapters.chainer.tape import Tape, module_of
from collective.inner import differentiable
from collective.training.splits.arrays import Arrays


class Variables(Arrays):
    """Operations on variables, on one rank and between ranks."""

    def entering(self, x: Any) -> Any:
        return chainer.as_variable(x)

    def bare(self, x: Any) -> Any:
        return chainer.as_variable(x).array

    def is_array(self, x: Any) -> bool:
        return isinstance(x, (chainer.Variable, *chainer.get_array_types()))

    def has_gradient(self, x: Any) -> bool:
        return isinstance(x, chainer.Variable) and x.requires_grad and x.array is not None

    def slice(self, array: Any, dimension: int, rows: range) -> Any:
        return array[(*(slice(None),) * dimension, slice(rows.start, rows.stop))]

    def take(self, array: Any, dimension: int, rows: Any) -> Any:
        return F.get_item(array, (*(slice(None),) * dimension, array.xp.asarray(rows)))

    def concatenate(self, arrays: Sequence[Any], dimension: int) -> Any:
        return F.concat(list(arrays), dimension)

    def pad(self, array: Any, widths: Sequence[tuple[int, int]], fill: float) -> Any:
        return F.pad(array, widths, "constant", constant_values=fill)

    def tied(self, result: Any, *arrays: Any) -> Any:
        result = chainer.as_variable(result)
        for x in arrays:
            # The sum of an empty array is zero, whatever values x holds.
            nothing_of_it = F.sum(F.reshape(x, (-1,))[:0])
            result = result + F.broadcast_to(F.cast(nothing_of_it, result.dtype), result.shape)
        return result

    def numbers(self, like: Any, dimension: int, numbers: Any) -> Any:
        shape = [-1 if at == dimension else 1 for at in range(like.ndim)]
        return like.xp.asarray(numbers, like.dtype).reshape(shape)

    def full_bare(self, like: Any, shape: Sequence[int], fill: float) -> Any:
        return module_of(like).full(tuple(shape), fill, like.dtype)

    def copy_bare(self, array: Any) -> Any:
        return array.copy()

    def checkpoint(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        if not chainer.config.enable_backprop:
            return function(*arrays)
        if self._kept is not None:
            self._kept.compute_piece(function, arrays)
        results = F.forget(function, *arrays)
        return results if isinstance(results, tuple) else (results,)

    def moments(
        self,
        x: Any,
        groups: int | None,
        dtype: Any,
        average: Callable[[Any], Any],
        near: Callable[[Any], Any] | None,
    ) -> tuple[Any, Any]:
        samples, channels, *rows = x.shape
        parts = groups or channels
        # This is a view for any memory order; after NumPy's convolution, channels lie innermost.
        y = F.reshape(x, (samples, parts, channels // parts, math.prod(rows)))
        axes = (0, 2, 3) if groups is None else (2, 3)
        mean = average(F.sum(F.cast(y, dtype), axes, keepdims=True)[:, :, 0, 0])
        centre = mean if near is None else near(mean)
        # A second pass over the rows avoids the subtraction of two large numbers.
        distances = _Squares(axes).apply((y, centre[:, :, None, None]))[0]
        return mean, average(distances[:, :, 0, 0])

    def seed(self) -> int:
        return int(np.random.randint(2**31))

    def generator(self, seed: int | None) -> Any:
        random = self.like.xp.random
        return random if seed is None else random.RandomState(seed)

    def used_together(self, arrays: Sequence[Any], comm: Communicator) -> Sequence[Any]:
        if not chainer.config.enable_backprop:
            return arrays
        used: tuple[Any, ...] = _Used(comm).apply(tuple(arrays))
        return used

    def record(self, node: differentiable.CollectiveStep, array: Any) -> Any:
        return Tape().record(node, array)

    def join_bare(self, arrays: Sequence[Any], dimension: int) -> Any:
        return module_of(arrays[0]).concatenate(arrays, dimension)


class _Squares(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Sums of squared distances; keeps its inputs, where a product would keep the distances.

    Args:
        axes: axes that are summed over.
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


class _Used(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Variables that all ranks use: their gradients are summed over the ranks in one call."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        # All ranks applied the same functions, so they have gradients of the same variables.
        present = [gradient for gradient in grad_outputs if gradient is not None]
        summed = iter(_summed(present, self._comm))
        every = [None if gradient is None else next(summed) for gradient in grad_outputs]
        return tuple(every[index] for index in indexes)


def _summed(gradients: list[Any], comm: Communicator) -> list[Any]:
    """Return the sums of the ranks' gradients, which can be differentiated again."""
    if chainer.config.enable_backprop and any(gradient.requires_grad for gradient in gradients):
        return [all_reduce(gradient, comm) for gradient in gradients]
    if not gradients:
        return []
    sums = comm.all_reduce([gradient.array for gradient in gradients])
    return [chainer.Variable(array, requires_grad=False) for array in sums]
