"""Nodes of Chainer's graph for the differentiable collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import chainer
import chainer.functions as F
import numpy as np

from collective import DtypeError, InvalidArgumentError
from collective.inner import Op, differentiable

from .arrays import array_of


class _GraphNode(chainer.FunctionNode):  # type: ignore[misc, unused-ignore]
    """Collective on one variable, the first input; the last input is a token without a value."""

    def __init__(self, step: differentiable.CollectiveStep) -> None:
        super().__init__()
        self._step = step

    @property
    def label(self) -> str:
        return self._step.forward.__qualname__.partition(".")[0]

    def forward(self, inputs: Any) -> Any:
        x: Any = inputs[0] if len(inputs) == 2 else None
        result = self._step.forward(x)
        return (module_of(x).zeros((), x.dtype) if result is None else result,)


class _Linear(_GraphNode):
    """Collective that is linear in the ranks' arrays, so that nothing is kept for backward."""

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        # This call is needed even if x needs no gradient, because other ranks' x may need one.
        gradient = self._step.backward(grad_outputs[0])
        if 0 not in indexes or len(self.inputs) == 1:
            return (None,) * len(indexes)
        x = self.inputs[0]
        if self._step.linked:
            gradient = F.reshape(gradient, x.shape)
        else:  # a zero gradient that keeps the backward collective in the graph
            gradient = F.broadcast_to(F.cast(gradient, x.dtype), x.shape)
        return gradient, None


class _Nonlinear(_GraphNode):
    """Collective whose derivative depends on the ranks' arrays."""

    def forward(self, inputs: Any) -> Any:
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        return super().forward(inputs)

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        x = self.get_retained_inputs()[0]
        y = self.get_retained_outputs()[0].array
        return F.reshape(self._step.backward(grad_outputs[0], x, y), x.shape), None


def _next_rank(least: int) -> int:
    """Return a rank for a node that is above the ranks of this thread's earlier nodes."""
    _created.rank = max(least, getattr(_created, "rank", 0)) + 1
    return int(_created.rank)


# Thread-local: the rank of this thread's latest node.
_created = threading.local()


def module_of(x: Any) -> Any:
    """Return the module of an array or variable, NumPy or CuPy; NumPy for None."""
    return chainer.backend.get_array_module(x)


def bare(x: Any) -> Any:
    """Return the array of a variable; return any other object unchanged."""
    return x.array if isinstance(x, chainer.Variable) else x


class Tape(differentiable.Differentiable[Any]):
    """Differentiable collectives of Chainer: their operations on its graph."""

    like = "numpy"

    def record(self, step: differentiable.CollectiveStep, x: Any, near: Any = None) -> Any:
        """Run a step as a node of the graph, if gradients are enabled.

        Args:
            x: variable, array or None.
            near: if ``x`` is None, an array of the kind that the backward pass will get, or None
                for NumPy.
        """
        if x is not None:
            x = chainer.as_variable(x)
            if x.dtype.kind != "f":
                return chainer.Variable(step.forward(x.array), requires_grad=False)
        # The token adds a node even if x requires no gradient, because other ranks' arrays may.
        token = chainer.Variable(module_of(near if x is None else x).zeros((), np.float32))
        # Among the nodes that are ready, Chainer's backward pass takes the one of highest rank.
        token.node._rank = _next_rank(0 if x is None else x.rank)
        node = (_Nonlinear if step.keeps else _Linear)(step)
        (result,) = node.apply((token,) if x is None else (x, token))
        return result

    def check(self, what: str, x: Any, op: Op = "sum") -> None:
        """Refuse an object that is no array, or that cannot be differentiated.

        Raises:
            InvalidArgumentError: ``x`` is no variable or array, or has no array yet; or the
                derivative of ``op`` is not supported.
            DtypeError: an average of integers, or a dtype that Chainer does not differentiate.
        """
        kinds: tuple[Any, ...] = (chainer.Variable, *chainer.get_array_types())
        if not isinstance(x, kinds):
            raise InvalidArgumentError(
                f"{what}: x is a {type(x).__name__} (expected a single variable or array). Use the "
                "communicator's own calls for structures and other frameworks' arrays, without "
                "gradients."
            )
        if isinstance(x, chainer.Variable):
            array_of(x, what)
        differentiable.check_op(what, op)
        if x.dtype.kind not in "biuf" or (op == "avg" and x.dtype.kind != "f"):
            of = "op avg of " if op == "avg" else ""
            raise DtypeError(
                f"{what}: {of}{x.dtype} (expected float16, float32 or float64; also integers, "
                "without gradients, except for avg). Convert with F.cast(x, ...)."
            )

    def bare(self, x: Any) -> Any:
        return bare(x)

    def room(self, x: Any, shape: Sequence[int]) -> Callable[[], Any]:
        return partial(module_of(x).empty, tuple(shape), x.dtype)

    def integers(self, x: Any) -> Callable[[Sequence[int]], Any]:
        make: Callable[[Sequence[int]], Any] = module_of(x).array
        return make

    def copy(self, array: Any) -> Any:
        return array.copy()

    def stack(self, g: Any, array: Any) -> Any:
        return F.stack([g, chainer.Variable(array)])

    def product_of_others(self, pieces: Any, rank: int) -> Any:
        return F.prod(F.concat([pieces[:rank], pieces[rank + 1 :]], 0), 0)

    def equal(self, x: Any, y: Any) -> Any:
        return (x == y).astype(y.dtype)
