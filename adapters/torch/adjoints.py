"""What the differentiable collectives are made of: nodes of autograd's graph that call others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collective.communicator import Communicator
from collective.errors import DtypeError, InvalidArgumentError
from collective.training.adjoints import Step, check_op

__all__ = [
    "Fold",
    "Lengths",
    "Like",
    "Linear",
    "check",
    "record",
]


class Like:
    """What a tensor looks like, without its memory."""

    def __init__(self, x: torch.Tensor, shape: Sequence[int] | None = None) -> None:
        self.shape = tuple(x.shape if shape is None else shape)
        self.dtype, self.device = x.dtype, x.device

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Lengths:
    """The ranks' lengths along an axis, exchanged when they are first needed."""

    def __init__(
        self, x: torch.Tensor, comm: Communicator, axis: int, known: Sequence[int] | None
    ) -> None:
        self._mine, self._device, self._comm = (x.shape or (1,)), x.device, comm
        self._axis = axis
        self._known = None if known is None else list(known)

    def __call__(self) -> list[int]:
        if self._known is None:
            mine = torch.tensor([self._mine[self._axis]], device=self._device)
            self._known = self._comm.all_gather(mine, counts=[1] * self._comm.size).tolist()
        return self._known


class Linear(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A collective that is linear in the ranks' tensors: nothing has to be kept for backward."""

    @staticmethod
    def forward(ctx: Any, step: Step, x: Any, token: Any) -> Any:
        ctx.step, ctx.x = step, None if x is None else Like(x)
        return _or_delegate(step.forward(x), x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        found = ctx.step.backward(g)
        if ctx.x is None:
            return None, None, None
        if not ctx.step.linked:  # zero, and tied to the collective that backward was
            found = found.to(ctx.x.device, ctx.x.dtype).expand(ctx.x.shape)
        return None, found.reshape(ctx.x.shape), None


class Fold(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A collective whose derivative depends on the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, step: Step, x: Any, token: Any) -> Any:
        y = _or_delegate(step.forward(x), x)
        ctx.step = step
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return None, ctx.step.backward(g, x, y.detach()).reshape(x.shape), None


def record(function: Any, step: Step, x: torch.Tensor | None) -> torch.Tensor:
    """Run a step as a node of the graph, wherever gradients are enabled."""
    # The token makes it one even if x requires no gradient: other ranks' tensors may.
    token = torch.zeros((), requires_grad=torch.is_grad_enabled())
    found: torch.Tensor = function.apply(step, x, token)
    return found


def _or_delegate(found: Any, x: torch.Tensor) -> Any:
    return x.new_zeros(()) if found is None else found


def check(what: str, x: Any, op: str = "sum") -> None:
    """Refuse what is no tensor, or not differentiated.

    Raises:
        InvalidArgumentError: ``x`` is no tensor, or ``op`` another one.
        DtypeError: an average of integers.
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(
            f"{what}: {type(x).__name__}; a single tensor. The communicator's own calls take "
            "structures and other frameworks' arrays, without gradients."
        )
    check_op(what, op)
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise DtypeError(f"{what}: op avg of {x.dtype}; floating point or complex.")
