"""What the differentiable collectives are made of: nodes of Chainer's graph that call others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from collective.communicator import Communicator
from collective.errors import DtypeError, InvalidArgumentError
from collective.training.adjoints import Step, check_op

__all__ = [
    "Fold",
    "Lengths",
    "Like",
    "Linear",
    "bare",
    "check",
    "module_of",
    "record",
]


class Like:
    """What an array looks like, without its memory."""

    def __init__(self, x: Any, shape: Sequence[int] | None = None) -> None:
        self.shape = tuple(x.shape if shape is None else shape)
        self.dtype, self._xp = x.dtype, module_of(x)

    def empty(self) -> Any:
        return self._xp.empty(self.shape, self.dtype)


class Lengths:
    """The ranks' lengths along an axis, exchanged when they are first needed."""

    def __init__(self, x: Any, comm: Communicator, axis: int, known: Sequence[int] | None) -> None:
        self._mine, self._xp, self._comm = (x.shape or (1,)), module_of(x), comm
        self._axis = axis
        self._known = None if known is None else list(known)

    def __call__(self) -> list[int]:
        if self._known is None:
            mine = self._xp.array([self._mine[self._axis]])
            self._known = self._comm.all_gather(mine, counts=[1] * self._comm.size).tolist()
        return self._known


class _Node(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """A collective on one variable, the first input; the last is a token without a value."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    @property
    def label(self) -> str:
        return self._step.forward.__qualname__.partition(".")[0]

    def forward(self, inputs: Any) -> Any:
        x: Any = inputs[0] if len(inputs) == 2 else None
        found = self._step.forward(x)
        return (module_of(x).zeros((), x.dtype) if found is None else found,)


class Linear(_Node):
    """A collective that is linear in the ranks' arrays: nothing has to be kept for backward."""

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        # Whether x needs a gradient or not: other ranks' x may.
        found = self._step.backward(grad_outputs[0])
        if 0 not in indexes or len(self.inputs) == 1:
            return (None,) * len(indexes)
        x = self.inputs[0]
        if self._step.linked:
            found = F.reshape(found, x.shape)
        else:  # zero, and tied to the collective that backward was
            found = F.broadcast_to(F.cast(found, x.dtype), x.shape)
        return found, None


class Fold(_Node):
    """A collective whose derivative depends on the ranks' arrays."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return super().forward(inputs)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        x = self.get_retained_inputs()[0]
        y = self.get_retained_outputs()[0].array
        return F.reshape(self._step.backward(grad_outputs[0], x, y), x.shape), None


def record(function: type[_Node], step: Step, x: Any, near: Any = None) -> Any:
    """Run a step as a node of the graph, wherever gradients are enabled.

    Args:
        x: a variable, an array or None.
        near: where ``x`` is None, an array of the kind that backward will be given, or None
            for one of NumPy.
    """
    if x is not None:
        x = chainer.as_variable(x)
        if x.dtype.kind != "f":
            return chainer.Variable(step.forward(x.array), requires_grad=False)
    # The token makes it a node even if x requires no gradient: other ranks' arrays may.
    token = chainer.Variable(module_of(near if x is None else x).zeros((), np.float32))
    # Of the nodes that are ready, Chainer's backward takes the one of the highest rank.
    token.node._rank = _next_rank(0 if x is None else x.rank)
    (found,) = function(step).apply((token,) if x is None else (x, token))
    return found


def _next_rank(least: int) -> int:
    """Return a rank for a node, above those of this thread's earlier ones."""
    _created.rank = max(least, getattr(_created, "rank", 0)) + 1
    return int(_created.rank)


# The rank of this thread's latest node.
_created = threading.local()


def module_of(x: Any) -> Any:
    """Return NumPy or CuPy, whose array ``x`` or its array is; of None NumPy."""
    return chainer.backend.get_array_module(x)


def bare(x: Any) -> Any:
    """Return the array of a variable, anything else as it is."""
    return x.array if isinstance(x, chainer.Variable) else x


def check(what: str, x: Any, op: str = "sum") -> None:
    """Refuse what is no array, or not differentiated.

    Raises:
        InvalidArgumentError: ``x`` is no variable or array, or has no array yet; or ``op`` is
            another one.
        DtypeError: an average of integers, or a type that Chainer does not differentiate.
    """
    kinds: tuple[Any, ...] = (chainer.Variable, *chainer.get_array_types())
    if not isinstance(x, kinds):
        raise InvalidArgumentError(
            f"{what}: {type(x).__name__}; a single variable or array. The communicator's own "
            "calls take structures and other frameworks' arrays, without gradients."
        )
    if isinstance(x, chainer.Variable) and x.array is None:
        raise InvalidArgumentError(
            f"{what}: {type(x).__name__} {x.name or ''!r} is not initialized and has no array; "
            "call its initialize(shape), or the link once, on every rank."
        )
    check_op(what, op)
    if x.dtype.kind not in "biuf" or (op == "avg" and x.dtype.kind != "f"):
        of = "op avg of " if op == "avg" else ""
        raise DtypeError(
            f"{what}: {of}{x.dtype}; float16, float32 or float64, and but for avg integers, "
            "without gradients. Convert with F.cast(x, ...)."
        )
