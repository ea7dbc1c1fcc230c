"""Treatment of Chainer's functions that take a variable which is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from collective.training.splits.blocks import Step, Value
from collective.training.splits.recipes import LayerCall, row_for_row
from collective.training.splits.session import SplitSession, names

from .cut import Cut, intercepting
from .recipes import LAYERS, RECIPES, ROW_FOR_ROW, applied


class VariableSession(SplitSession):
    """One forward pass of a link whose variables are cut."""

    kind = Cut

    def calls_of(self, model: chainer.Link) -> AbstractContextManager[None]:
        return intercepting(model, self)

    def cut(self, value: Value, shape: Sequence[int], like: Any) -> Cut:
        return Cut(value, self, shape, like.dtype)

    # -- a function that was applied -------------------------------------------------------

    def call(self, node: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Apply ``node`` to ``inputs`` in place of ``node.apply(inputs)``."""
        kind = type(node).__name__
        name = f"{names.current} ({kind})"
        result: Cut | None = None
        if kind not in LAYERS or not isinstance(inputs[0], Cut):
            inputs = tuple(map(self._executor.parameter, inputs))
            if not any(isinstance(x, Cut) for x in inputs):
                return tuple(node.apply(inputs))
        if kind in RECIPES:
            result = self._recipe(RECIPES[kind], node, name, inputs)
        elif kind == "BatchNormalization":
            result = self._batch_normalization(node, name, inputs)
        elif kind == "GroupNormalization":
            result = self._group_normalization(node, name, inputs)
        elif kind == "FixedBatchNormalization":
            result = self._fixed_batch_normalization(node, name, inputs)
        elif kind == "Dropout" and node.mask is None and not node.return_mask:
            result = self._dropout(node, name, inputs[0])
        elif kind in ROW_FOR_ROW or (kind == "Concat" and node.axis % inputs[0].ndim == 1):
            result = self._row_for_row(node, name, inputs)
        elif kind in ("Softmax", "LogSoftmax") and node.axis % inputs[0].ndim == 1:
            result = self._row_for_row(node, name, inputs, by_channel=False)
        if result is not None:
            return (result,)
        cut = next(x for x in inputs if isinstance(x, Cut))
        outputs = node.apply(tuple(self._wholes(name, inputs)))
        return tuple(self._again(y, cut) for y in outputs)

    def _added(self, step: Step, dtype: Any) -> Cut:
        value = self._executor.add(step)
        first, *rest = value.lengths
        return Cut(value, self, (first, step.channels, *rest), dtype)

    def _recipe(
        self, recipe: Callable[..., Step | None], node: Any, name: str, inputs: tuple[Any, ...]
    ) -> Cut | None:
        x, *rest = inputs
        if not isinstance(x, Cut) or any(isinstance(other, Cut) for other in rest):
            return None
        context = LayerCall(self.arrays, self._executor, node, name, (x.value,), x.shape[1])
        step = recipe(context, *map(chainer.as_variable, rest))
        return None if step is None else self._added(step, x.dtype)

    def _row_for_row(
        self, node: Any, name: str, inputs: tuple[Any, ...], by_channel: bool = True
    ) -> Cut | None:
        """Record a function that works row by row, on arrays of one shape or broadcast ones."""
        if type(node).__name__ == "Concat":
            first, _, *rest = inputs[0].shape
            shape, by_channel = (first, sum(x.shape[1] for x in inputs), *rest), False
        else:
            shape = tuple(np.broadcast_shapes(*(x.shape for x in inputs)))
        dtype = np.result_type(*(x.dtype for x in inputs if isinstance(x, Cut)))
        leaves = self._broadcast_whole(inputs, shape)
        cut = [x for x in leaves if isinstance(x, Cut)]
        if not cut:
            return None
        along = by_channel and all(x.shape[1] == shape[1] for x in cut)
        return self._rows(
            node, name, leaves, shape, dtype, lambda given: applied(node, given), along
        )

    def _rows(
        self,
        node: Any,
        name: str,
        leaves: Sequence[Any],
        shape: Sequence[int],
        dtype: Any,
        call: Callable[[list[Any]], Any],
        along: bool = True,
    ) -> Cut:
        """Record a function whose rows depend on the same rows of cut and of broadcast operands."""
        if self._kept is not None:
            arrays = (chainer.as_variable(x) for x in leaves if not isinstance(x, Cut))
            self._kept.held += [(node.label, x.array) for x in arrays if not x.requires_grad]
        operands = [x.value if isinstance(x, Cut) else x for x in leaves]
        values = tuple(x for x in operands if isinstance(x, Value))
        context = LayerCall(self.arrays, self._executor, None, name, values, shape[1])
        return self._added(row_for_row(context, operands, len(shape), call, along=along), dtype)

    # -- functions with statistics or random numbers ---------------------------------------

    def _batch_normalization(self, node: Any, name: str, inputs: tuple[Any, ...]) -> Cut | None:
        x, gamma, beta = inputs
        if not _by_channel(node, x, gamma):
            return None
        mean, variance, count = self._executor.moments(x.value, None, _wide(x, gamma))
        for kept, new, factor in (
            (node.running_mean, mean, 1.0),
            (node.running_var, variance, count / max(count - 1, 1)),
        ):
            if kept is not None:
                kept *= node.decay
                kept += (1 - node.decay) * factor * new.array[0]
        return self._normalized(name, x, gamma, beta, mean, variance, node)

    def _group_normalization(self, node: Any, name: str, inputs: tuple[Any, ...]) -> Cut | None:
        x, gamma, beta = inputs
        if not isinstance(x, Cut) or x.shape[1] % node.groups or gamma.shape != x.shape[1:2]:
            return None  # Chainer's own function raises the error
        mean, variance, _ = self._executor.moments(x.value, node.groups, _wide(x, gamma))
        width = x.shape[1] // node.groups
        mean, variance = (F.repeat(array, width, 1) for array in (mean, variance))
        return self._normalized(name, x, gamma, beta, mean, variance, node)

    def _fixed_batch_normalization(
        self, node: Any, name: str, inputs: tuple[Any, ...]
    ) -> Cut | None:
        x, gamma, beta, mean, variance = inputs
        if not _by_channel(node, x, gamma):
            return None
        mean, variance = (chainer.as_variable(array)[None] for array in (mean, variance))
        return self._normalized(name, x, gamma, beta, mean, variance, node)

    def _normalized(
        self, name: str, x: Cut, gamma: Any, beta: Any, mean: Any, variance: Any, node: Any
    ) -> Cut:
        """Record the normalisation by known moments of shape ``[N or 1, C]``."""
        dtype = _wide(x, gamma)
        wide = [F.cast(chainer.as_variable(v), dtype) for v in (gamma, beta, mean, variance)]
        gamma, beta, mean, variance = (F.broadcast_to(v, mean.shape) for v in wide)
        scale = gamma / F.sqrt(variance + node.eps)
        shape = (*mean.shape, *(1,) * (x.ndim - 2))
        parts = [F.reshape(v, shape) for v in (scale, beta - mean * scale)]

        def call(given: list[Any]) -> Any:
            piece, *parts = given
            factor, offset = (F.broadcast_to(v, piece.shape) for v in parts)
            return F.cast(F.cast(piece, dtype) * factor + offset, piece.dtype)

        return self._rows(node, name, [x, *parts], x.shape, x.dtype, call)

    def _dropout(self, node: Any, name: str, x: Cut) -> Cut | None:
        """Record dropout by a whole mask, drawn as Chainer draws it, of which pieces use parts."""
        flags = self._executor.generator().rand(*x.shape) >= node.dropout_ratio
        factor = x.dtype.type(1.0 / (1 - node.dropout_ratio))

        def call(given: list[Any]) -> Any:
            piece, mask = given
            return piece * (mask * factor).astype(piece.dtype)

        return self._rows(node, name, [x, flags], x.shape, x.dtype, call)


def _by_channel(node: Any, x: Any, gamma: Any) -> bool:
    """Return whether a batch normalisation has statistics of each channel of a cut variable.

    If the parameters do not fit the number of channels, Chainer raises the error when its function
    gets the whole array.
    """
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    axis = node.axis if node.axis is not None else axes
    return isinstance(x, Cut) and tuple(axis) == axes and gamma.shape == x.shape[1:2]


def _wide(x: Any, gamma: Any) -> Any:
    """Return the dtype for sums over rows of ``x``: Chainer's own, but at least float32."""
    return np.promote_types(np.promote_types(x.dtype, gamma.dtype), np.float32)
