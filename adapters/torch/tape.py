"""PyTorch's part of the differentiable collectives: nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from collective import DtypeError, InvalidArgumentError
from collective.inner import Op, differentiable


class _Linear(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Collective that is linear in the ranks' tensors, so backward needs no saved tensors."""

    @staticmethod
    def forward(ctx: Any, step: differentiable.CollectiveStep, x: Any, token: Any) -> Any:
        ctx.step = step
        ctx.like = None if x is None else (x.shape, x.device, x.dtype)
        return _or_delegate(step.forward(x), x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        gradient = ctx.step.backward(g)
        if ctx.like is None:
            return None, None, None
        shape, device, dtype = ctx.like
        # No rank's result depends on this tensor, so `gradient` is a delegate: a zero that depends
        # on the backward collective.
        if not ctx.step.linked:
            gradient = gradient.to(device, dtype).expand(shape)
        return None, gradient.reshape(shape), None


class _Nonlinear(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Collective whose derivative depends on the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, step: differentiable.CollectiveStep, x: Any, token: Any) -> Any:
        y = _or_delegate(step.forward(x), x)
        ctx.step = step
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, y = ctx.saved_tensors
        return None, ctx.step.backward(g, x, y.detach()).reshape(x.shape), None


def _or_delegate(result: Any, x: torch.Tensor) -> Any:
    return x.new_zeros(()) if result is None else result


class Tape(differentiable.Differentiable[torch.Tensor]):
    """Differentiable collectives of PyTorch: their operations on autograd's graph."""

    like = "torch"

    def record(
        self, step: differentiable.CollectiveStep, x: torch.Tensor | None, near: Any = None
    ) -> torch.Tensor:
        """Run a step, as a node of the graph if gradients are enabled."""
        # With the token, the step is a node even if ``x`` requires no gradient: other ranks'
        # tensors may require one.
        token = torch.zeros((), device="cpu", requires_grad=torch.is_grad_enabled())
        node: Any = _Nonlinear if step.keeps else _Linear
        y: torch.Tensor = node.apply(step, x, token)
        return y

    def check(self, what: str, x: Any, op: Op = "sum") -> None:
        """Check that ``x`` is a tensor and that ``op`` can be differentiated for it.

        Raises:
            InvalidArgumentError: ``x`` is no tensor, or ``op`` is unknown.
            DtypeError: ``op`` is an average, and ``x`` has integers.
        """
        if not isinstance(x, torch.Tensor):
            raise InvalidArgumentError(
                f"{what}: got a {type(x).__name__} (expected a single tensor). For structures or "
                "other frameworks' arrays, use the communicator's own calls, without gradients."
            )
        differentiable.check_op(what, op)
        if op == "avg" and not (x.is_floating_point() or x.is_complex()):
            raise DtypeError(
                f"{what}: op 'avg' of {x.dtype} (expected floating point or complex numbers)."
            )

    def bare(self, x: Any) -> Any:
        return x.detach() if isinstance(x, torch.Tensor) else x

    def room(self, x: torch.Tensor, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        return partial(torch.empty, tuple(shape), dtype=x.dtype, device=x.device)

    def integers(self, x: torch.Tensor) -> Callable[[Sequence[int]], torch.Tensor]:
        return partial(torch.tensor, device=x.device)

    def copy(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()

    def stack(self, g: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
        return torch.stack([g, array])

    def product_of_others(self, pieces: torch.Tensor, rank: int) -> torch.Tensor:
        return torch.cat([pieces[:rank], pieces[rank + 1 :]]).prod(0).conj()

    def equal(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x == y).to(y.dtype)
