"""Chainer's variables, cut in turn and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import chainer
import chainer.functions as F
import numpy as np

from collective.adapters.chainer import functional
from collective.adapters.chainer.tape import Tape, module_of
from collective.communicator import Communicator
from collective.training.differentiable import CollectiveStep
from collective.training.splits.blocks import Value
from collective.training.splits.exchanges import Exchanges
from collective.training.splits.in_turn import InTurn
from collective.training.splits.over_ranks import OverRanks

from .statistics import moments

if TYPE_CHECKING:
    from .kept import Kept

__all__ = ["VariableExchanges", "VariablesInTurn", "VariablesOverRanks"]


class VariableExchanges(Exchanges):
    """What the framework-neutral executors do with variables, on a rank and between ranks.

    Args:
        kept: counts what pieces keep that are computed again.
    """

    def __init__(self, kept: Kept | None = None) -> None:
        self._kept = kept

    def slice(self, array: Any, dimension: int, rows: range) -> Any:
        return array[(*(slice(None),) * dimension, slice(rows.start, rows.stop))]

    def concatenate(self, arrays: Sequence[Any], dimension: int) -> Any:
        return F.concat(list(arrays), dimension)

    def checkpoint(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        if not chainer.config.enable_backprop:
            return function(*arrays)
        if self._kept is not None:
            self._kept.compute_piece(function, arrays)
        found = F.forget(function, *arrays)
        return found if isinstance(found, tuple) else (found,)

    def entering(self, x: Any) -> Any:
        return chainer.as_variable(x)

    def on_host(self, x: Any) -> Any:
        return chainer.cuda.to_cpu(chainer.as_variable(x).array)

    def has_gradient(self, x: Any) -> bool:
        return isinstance(x, chainer.Variable) and x.requires_grad and x.array is not None

    def used_together(self, arrays: Sequence[Any], comm: Communicator) -> Sequence[Any]:
        if not chainer.config.enable_backprop:
            return arrays
        found: tuple[Any, ...] = _Used(comm).apply(tuple(arrays))
        return found

    def record(self, node: CollectiveStep, array: Any) -> Any:
        return Tape.record(node, array)

    def join_bare(self, arrays: Sequence[Any], dimension: int) -> Any:
        return module_of(arrays[0]).concatenate(arrays, dimension)

    def copy_bare(self, array: Any) -> Any:
        return array.copy()

    def zeros_bare(self, like: Any, shape: Sequence[int]) -> Any:
        return module_of(like).zeros(shape, like.dtype)


class VariablesInTurn(InTurn):
    """Applies the functions of a forward pass block by block.

    Args:
        xp: NumPy or CuPy.
        args: as of ``InTurn``.
    """

    def __init__(self, xp: Any, *args: Any) -> None:
        super().__init__(*args)
        self._xp = xp

    def moments(self, value: Value, groups: int | None, dtype: Any) -> tuple[Any, Any, int]:
        (x,) = self.whole([value])
        count = _count(value, x.shape[1], groups)
        return *moments(x, groups, dtype, lambda sums: sums / count, lambda means: means), count

    def random(self) -> Any:
        return self._xp.random


def _count(value: Value, channels: int, groups: int | None) -> int:
    """Return how many numbers are behind a mean."""
    if groups is None:
        return math.prod(value.lengths)
    return channels // groups * math.prod(value.lengths[1:])


class _Used(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Variables that all ranks have and use: their gradients are summed in one call."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        # The ranks applied the same functions, so that they have gradients of the same variables.
        there = [each for each in grad_outputs if each is not None]
        summed = iter(used_gradients(there, self._comm))
        every = [None if each is None else next(summed) for each in grad_outputs]
        return tuple(every[index] for index in indexes)


def used_gradients(gradients: list[Any], comm: Communicator) -> list[Any]:
    """Return the sums of the ranks' gradients, which can be differentiated again."""
    if chainer.config.enable_backprop and any(each.requires_grad for each in gradients):
        return [functional.all_reduce(each, comm) for each in gradients]
    if not gradients:
        return []
    found = comm.all_reduce([each.array for each in gradients])
    return [chainer.Variable(each, requires_grad=False) for each in found]


class VariablesOverRanks(OverRanks):
    """Applies the functions of a forward pass to this rank's block of every variable.

    Args:
        xp: NumPy or CuPy.
        args, how: as of ``OverRanks``.
    """

    def __init__(self, xp: Any, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._xp = xp
        self._random: Any = None

    def moments(self, value: Value, groups: int | None, dtype: Any) -> tuple[Any, Any, int]:
        x = self._layered.piece(value)
        count = _count(value, x.shape[1], groups)
        cut = range(0 if groups is None else 1, len(value.lengths))
        mine = self._grid.block(value.lengths)[0]

        def average(sums: Any) -> Any:
            found = self._layered.added(sums, cut) / count
            # A rank has the sums of its samples alone.
            return found if groups is None else self._layered.joined(found, 0, value.lengths[0])

        def near(means: Any) -> Any:
            found = self.shared(value, False)(means)
            return found if groups is None else found[mine.start : mine.stop]

        return *moments(x, groups, dtype, average, near), count

    def random(self) -> Any:
        """Return random numbers that are the same on all ranks, as masks have to be."""
        if self._random is None:
            seed = int(np.random.randint(2**31))
            self._random = self._xp.random.RandomState(self._grid.comm.broadcast_object(seed))
        return self._random
