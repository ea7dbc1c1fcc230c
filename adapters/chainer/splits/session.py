"""What becomes of functions that take a variable which is cut.

A function with a rule becomes a step; one without is applied to the whole variable. Where its
result has the same rows, what follows goes on in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import chainer
import chainer.functions as F
import numpy as np

from collective.errors import UnsupportedError
from collective.memory import nested
from collective.training.splits.blocks import Read, Run, Step, Value, lengths_of
from collective.training.splits.executor import Executor
from collective.training.splits.serial import fitting

from . import layers, windows
from .context import Context, applied
from .cut import Cut, names
from .filters import LinkFilters
from .statistics import wide

__all__ = ["Session", "VariableExecutor"]


class VariableExecutor(Executor, Protocol):
    """Carries out the steps of one forward pass."""

    def moments(self, value: Value, groups: int | None, dtype: Any) -> tuple[Any, Any, int]:
        """Return the channels' means and variances, and how many numbers are behind each.

        Args:
            value: what they are of.
            groups: of the channels of each sample, which share them, ``[N, groups]``; None: of each
                channel alone over the whole batch, ``[1, C]``.
            dtype: of the results.
        """

    def random(self) -> Any:
        """Return the source of random numbers, as NumPy's; all ranks draw the same."""


# The functions of layers with weights.
_LAYERS = {
    "Convolution2DFunction": layers.convolution,
    "ConvolutionND": layers.convolution,
    "Deconvolution2DFunction": layers.transposed,
    "DeconvolutionND": layers.transposed,
    "LinearFunction": layers.dense,
}
_RECIPES = {
    **_LAYERS,
    "Unpooling2D": layers.unpooling,
    "MaxPooling2D": windows.max_pool,
    "MaxPoolingND": windows.max_pool,
    "AveragePooling2D": windows.avg_pool,
    "AveragePoolingND": windows.avg_pool,
    "ResizeImages": windows.resize,
    "Pad": windows.pad,
    "GetItem": windows.getitem,
    "Reshape": windows.flatten,
}
# Functions that make each row of their result of the same rows of their inputs.
_ROW_FOR_ROW = set(
    "Absolute Add AddConstant Arccos Arcsin Arctan Arctan2 Ceil ClippedReLU Clip Cos Cosh Div "
    "DivFromConstant ELU Erf Erfc Exp Exp2 Expm1 Floor Fmod HardSigmoid Identity LeakyReLU "
    "Log Log10 Log1p Log2 Maximum Minimum Mul MulConstant MultiAdd Neg PowConstVar "
    "PowVarConst PowVarVar ReLU Reciprocal SELU Sigmoid Sign Sin Sinh Softplus Sqrt Square "
    "Sub SubFromConstant Swish Tan Tanh".split()
)


class Session:
    """One forward pass of a link whose variables are cut.

    Args:
        executor: applies the functions.
        xp: NumPy or CuPy.
        strict: whether functions without a rule are refused.
        filters: which parameters this rank has a piece of.

    Attributes:
        joined: the names of the functions that took whole variables.
        masks: drawn for dropout, whole.
    """

    def __init__(
        self, executor: VariableExecutor, xp: Any, strict: bool, filters: LinkFilters | None = None
    ) -> None:
        self._executor = executor
        self._strict = strict
        self._filters = filters
        self.xp = xp
        self.joined: list[str] = []
        self.masks: list[Any] = []

    def enter(self, x: Any) -> Cut:
        """Return what stands for a variable that is there."""
        value = self._executor.enter(x)
        first, *rest = value.lengths
        return Cut(value, self, (first, x.shape[1], *rest), x.dtype)

    def whole(self, cut: Cut) -> Any:
        """Return all of a variable that is cut."""
        return self._executor.whole([cut.value])[0]

    def leave(self, result: Any) -> Any:
        """Return a forward's result with whole variables in it."""
        leaves = nested.flatten(result)
        found = iter(self._executor.results([x.value for x in leaves if isinstance(x, Cut)]))
        return nested.rebuild(result, (next(found) if isinstance(x, Cut) else x for x in leaves))

    def has_piece(self, x: Any) -> bool:
        """Return whether ``x`` is a parameter of which this rank has a piece."""
        return self._filters is not None and self._filters.share(x) is not None

    # -- a function that was applied -------------------------------------------------------

    def call(self, node: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Be ``node.apply(inputs)``."""
        kind = type(node).__name__
        name = f"{names.current} ({kind})"
        made: Cut | None = None
        own = self._own(kind, inputs)
        if own is None:
            inputs = tuple(map(self._executor.parameter, inputs))
            if not any(isinstance(x, Cut) for x in inputs):
                return tuple(node.apply(inputs))
        if kind in _RECIPES:
            made = self._recipe(_RECIPES[kind], node, name, inputs, own)
        elif kind == "BatchNormalization":
            made = self._batch_normalization(node, name, inputs)
        elif kind == "GroupNormalization":
            made = self._group_normalization(node, name, inputs)
        elif kind == "FixedBatchNormalization":
            made = self._fixed_batch_normalization(node, name, inputs)
        elif kind == "Dropout" and node.mask is None and not node.return_mask:
            made = self._dropout(node, name, inputs[0])
        elif kind in _ROW_FOR_ROW or (kind == "Concat" and node.axis % inputs[0].ndim == 1):
            made = self._row_for_row(node, name, inputs)
        elif kind in ("Softmax", "LogSoftmax") and node.axis % inputs[0].ndim == 1:
            made = self._row_for_row(node, name, inputs, by_channel=False)
        if made is not None:
            return (made,)
        return self._whole(node, name, inputs)

    def _shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of all of an array or a parameter."""
        share = None if self._filters is None else self._filters.share(x)
        return tuple(x.shape) if share is None else share.shape

    def _own(self, kind: str, inputs: tuple[Any, ...]) -> str | None:
        """Return how this rank's weights of a layer are cut that reads a cut variable."""
        if kind not in _LAYERS or not isinstance(inputs[0], Cut):
            return None
        _, weight, *bias = inputs
        return self._executor.layout(weight, bias[0] if bias else None)

    def _cut(self, step: Step, shape: Sequence[int], dtype: Any) -> Cut:
        value = self._executor.add(step, lengths_of(shape))
        return Cut(value, self, shape, dtype)

    def _recipe(
        self,
        recipe: Callable[[Context], Any],
        node: Any,
        name: str,
        inputs: tuple[Any, ...],
        own: str | None,
    ) -> Cut | None:
        x, *rest = inputs
        if not isinstance(x, Cut) or any(isinstance(each, Cut) for each in rest):
            return None
        shared, in_part = (self._executor.shared(x.value, part) for part in (False, True))
        given = tuple(map(chainer.as_variable, rest))
        whole = self._shape(rest[0]) if rest else ()
        found = recipe(
            Context(node, name, x.value, x.shape, x.dtype, given, shared, in_part, own, whole)
        )
        if found is None:
            return None
        step, shape = found
        return self._cut(step, shape, x.dtype)

    def _row_for_row(
        self, node: Any, name: str, inputs: tuple[Any, ...], by_channel: bool = True
    ) -> Cut | None:
        """Record a function that works row for row, of one shape or several that broadcast."""
        kind = type(node).__name__
        shape = tuple(np.broadcast_shapes(*(x.shape for x in inputs))) if kind != "Concat" else (
            inputs[0].shape[0], sum(x.shape[1] for x in inputs), *inputs[0].shape[2:])  # fmt: skip
        dtype = np.result_type(*(x.dtype for x in inputs if isinstance(x, Cut)))
        # What is broadcast along a cut axis is there for every piece.
        lengths = lengths_of(shape)
        inputs = tuple(
            self.whole(x)
            if isinstance(x, Cut) and (x.value.lengths != lengths or x.ndim != len(shape))
            else x
            for x in inputs
        )
        if not any(isinstance(x, Cut) for x in inputs):
            return None
        step = _row_for_row(node, name, inputs, shape, self._executor)
        if not by_channel or kind == "Concat":
            step = Step(step.name, step.sources, step.rules, step.run, shape[1], uses=step.uses)
        return self._cut(step, shape, dtype)

    def _whole(self, node: Any, name: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._strict:
            raise UnsupportedError(
                f"Split: {name} needs its input whole, which strict=True refuses. Split the links "
                "before it, and call it on their result."
            )
        cut = [x for x in inputs if isinstance(x, Cut)]
        whole = dict(zip(map(id, cut), self._executor.whole([x.value for x in cut])))
        self.joined.append(name)
        found = node.apply(tuple(whole.get(id(x), x) for x in inputs))
        rows = cut[0].value.lengths
        return tuple(
            Cut(self._executor.enter_whole(y), self, y.shape, y.dtype)
            if y.ndim == cut[0].ndim and lengths_of(y.shape) == rows
            else y
            for y in found
        )

    # -- functions with statistics or random numbers ---------------------------------------

    def _batch_normalization(self, node: Any, name: str, inputs: tuple[Any, ...]) -> Cut | None:
        x, gamma, beta = inputs
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        axis = node.axis if node.axis is not None else axes
        if not isinstance(x, Cut) or tuple(axis) != axes:
            return None
        mean, variance, count = self._executor.moments(x.value, None, wide(x, gamma))
        for kept, new, factor in (
            (node.running_mean, mean, 1.0),
            (node.running_var, variance, count / max(count - 1, 1)),
        ):
            if kept is not None:
                kept *= node.decay
                kept += (1 - node.decay) * factor * new.array[0]
        return self._normalized(name, x, gamma, beta, mean, variance, node.eps)

    def _group_normalization(self, node: Any, name: str, inputs: tuple[Any, ...]) -> Cut | None:
        x, gamma, beta = inputs
        if not isinstance(x, Cut) or x.shape[1] % node.groups:
            return None  # Chainer says what is wrong with that
        mean, variance, _ = self._executor.moments(x.value, node.groups, wide(x, gamma))
        each = x.shape[1] // node.groups
        mean, variance = (F.repeat(array, each, 1) for array in (mean, variance))
        return self._normalized(name, x, gamma, beta, mean, variance, node.eps)

    def _fixed_batch_normalization(
        self, node: Any, name: str, inputs: tuple[Any, ...]
    ) -> Cut | None:
        x, gamma, beta, mean, variance = inputs
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        axis = node.axis if node.axis is not None else axes
        if not isinstance(x, Cut) or tuple(axis) != axes:
            return None
        mean, variance = (chainer.as_variable(each)[None] for each in (mean, variance))
        return self._normalized(name, x, gamma, beta, mean, variance, node.eps)

    def _normalized(
        self, name: str, x: Cut, gamma: Any, beta: Any, mean: Any, variance: Any, eps: float
    ) -> Cut:
        """Record the normalisation by known moments, ``[N or 1, C]``."""
        dtype = wide(x, gamma)
        given = [F.cast(chainer.as_variable(each), dtype) for each in (gamma, beta, mean, variance)]
        gamma, beta, mean, variance = (F.broadcast_to(each, mean.shape) for each in given)
        scale = gamma / F.sqrt(variance + eps)
        shape = (*mean.shape, *(1,) * (x.ndim - 2))
        parts = [F.reshape(each, shape) for each in (scale, beta - mean * scale)]
        value = x.value
        shared = [self._executor.shared(value, part) for part in (False, True)]
        uses = tuple(share(each) for share in shared for each in parts)

        def run_of(some: range | None) -> Run:
            def run(arrays: Sequence[Any], read: Read) -> Any:
                piece, *used = arrays
                chosen = used[:2] if some is None else used[2:]
                factor, offset = (
                    F.broadcast_to(_fitting(each, read, x.ndim, some, x.shape[1]), piece.shape)
                    for each in chosen
                )
                return F.cast(F.cast(piece, dtype) * factor + offset, piece.dtype)

            return run

        step = Step(name, (value,), (None,) * len(value.lengths), run_of(None), x.shape[1],
                    along=run_of, uses=uses)  # fmt: skip
        return self._cut(step, x.shape, x.dtype)

    def _dropout(self, node: Any, name: str, x: Cut) -> Cut | None:
        """Drop by a mask that is drawn whole, as Chainer draws it, and cut."""
        flags = self._executor.random().rand(*x.shape) >= node.dropout_ratio
        self.masks.append(flags)
        factor = x.dtype.type(1.0 / (1 - node.dropout_ratio))

        def run_of(some: range | None) -> Run:
            def run(arrays: Sequence[Any], read: Read) -> Any:
                (piece,) = arrays
                mask = _fitting(flags, read, piece.ndim, some, x.shape[1])
                return piece * (mask * factor).astype(piece.dtype)

            return run

        rules = (None,) * len(x.value.lengths)
        step = Step(name, (x.value,), rules, run_of(None), x.shape[1], along=run_of)
        return self._cut(step, x.shape, x.dtype)


def _row_for_row(
    node: Any, name: str, inputs: Sequence[Any], shape: Sequence[int], executor: VariableExecutor
) -> Step:
    values = tuple(x.value for x in inputs if isinstance(x, Cut))
    plain = [chainer.as_variable(x) for x in inputs if not isinstance(x, Cut)]
    shared = [executor.shared(values[0], part) for part in (False, True)]
    uses = tuple(share(x) for share in shared for x in plain)
    count = len(plain)

    def run_of(some: range | None) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            pieces = iter(arrays[: len(values)])
            rest = arrays[len(values) :]
            used = iter(rest[:count] if some is None else rest[count:])
            found = [
                next(pieces)
                if isinstance(x, Cut)
                else _fitting(next(used), read, len(shape), some, shape[1])
                for x in inputs
            ]
            return applied(node, found)

        return run

    cut = [x for x in inputs if isinstance(x, Cut)]
    along = run_of if len(shape) > 1 and all(x.shape[1] == shape[1] for x in cut) else None
    rules = (None,) * len(values[0].lengths)
    return Step(name, values, rules, run_of(None), shape[1], along=along, uses=uses)


def _fitting(x: Any, read: Read, dims: int, some: range | None, channels: int) -> Any:
    """Return the rows and channels of a whole array that a piece is combined with."""
    index = [slice(None)] * x.ndim
    for at, rows in fitting(x.shape, read, dims, some, channels):
        index[at] = slice(rows.start, rows.stop)
    return x if all(each == slice(None) for each in index) else x[tuple(index)]
