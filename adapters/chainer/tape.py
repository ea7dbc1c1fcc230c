"""What the differentiable collectives are made of in Chainer: nodes of its graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from collective.errors import DtypeError, InvalidArgumentError
from collective.ops import Op
from collective.training.differentiable import CollectiveStep, check_op

from .arrays import array_of

__all__ = ["Tape", "bare", "module_of"]


class _GraphNode(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """A collective on one variable, the first input; the last is a token without a value."""

    def __init__(self, step: CollectiveStep) -> None:
        super().__init__()
        self._step = step

    @property
    def label(self) -> str:
        return self._step.forward.__qualname__.partition(".")[0]

    def forward(self, inputs: Any) -> Any:
        x: Any = inputs[0] if len(inputs) == 2 else None
        found = self._step.forward(x)
        return (module_of(x).zeros((), x.dtype) if found is None else found,)


class _Linear(_GraphNode):
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


class _Nonlinear(_GraphNode):
    """A collective whose derivative depends on the ranks' arrays."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return super().forward(inputs)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        x = self.get_retained_inputs()[0]
        y = self.get_retained_outputs()[0].array
        return F.reshape(self._step.backward(grad_outputs[0], x, y), x.shape), None


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


class Tape:
    """Chainer's graph, as :class:`collective.training.differentiable.Tape` describes it."""

    @staticmethod
    def record(step: CollectiveStep, x: Any, near: Any = None) -> Any:
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
        node = (_Nonlinear if step.keeps else _Linear)(step)
        (found,) = node.apply((token,) if x is None else (x, token))
        return found

    @staticmethod
    def check(what: str, x: Any, op: Op = "sum") -> None:
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
        if isinstance(x, chainer.Variable):
            array_of(x, what)
        check_op(what, op)
        if x.dtype.kind not in "biuf" or (op == "avg" and x.dtype.kind != "f"):
            of = "op avg of " if op == "avg" else ""
            raise DtypeError(
                f"{what}: {of}{x.dtype}; float16, float32 or float64, and but for avg integers, "
                "without gradients. Convert with F.cast(x, ...)."
            )

    bare = staticmethod(bare)

    @staticmethod
    def room(x: Any, shape: Sequence[int]) -> Callable[[], Any]:
        return partial(module_of(x).empty, tuple(shape), x.dtype)

    @staticmethod
    def integers(x: Any) -> Callable[[Sequence[int]], Any]:
        made: Callable[[Sequence[int]], Any] = module_of(x).array
        return made

    @staticmethod
    def copy(array: Any) -> Any:
        return array.copy()

    @staticmethod
    def stack(g: Any, array: Any) -> Any:
        return F.stack([g, chainer.Variable(array)])

    @staticmethod
    def product_of_others(pieces: Any, rank: int) -> Any:
        return F.prod(F.concat([pieces[:rank], pieces[rank + 1 :]], 0), 0)

    @staticmethod
    def equal(x: Any, y: Any) -> Any:
        return (x == y).astype(y.dtype)
