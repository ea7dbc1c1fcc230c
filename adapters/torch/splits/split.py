"""``Split``: a module whose tensors are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collective.adapters.torch.splits.cut import names
from collective.adapters.torch.splits.parallel import OverRanks, TensorExchanges
from collective.adapters.torch.splits.serial import InTurn
from collective.adapters.torch.splits.session import Session
from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.training.splits.chained import Chained
from collective.training.splits.layered import Grid, Layered

__all__ = ["Split"]


class Split(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Computes a module in pieces: of the batch, the channels, the data axes."""

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        batch: int = 1,
        channels: int = 1,
        data: Sequence[int] = (1,),
        comm: Communicator | None = None,
        recompute: bool = True,
        halo: str = "layer",
        join: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self._batch, self._channels, self._data = batch, channels, tuple(data)
        self._recompute, self._join, self._halo = recompute, join, halo
        self._grid = None if comm is None else Grid(comm, batch, channels, self._data)
        self.joined: tuple[str, ...] = ()
        for name, layer in module.named_modules():
            kind = type(layer).__name__
            layer.register_forward_pre_hook(_Enter(f"{name} ({kind})" if name else kind))
            layer.register_forward_hook(_leave, always_call=True)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            raise InvalidArgumentError(
                f"Split: {type(x).__name__} as input; a tensor (batch, channels, ...)."
            )
        axes = x.dim() - 2
        data = (*self._data, *(1,) * axes)[: max(axes, len(self._data))]
        executor: Any
        if self._grid is None:
            executor = InTurn((self._batch, *data), self._channels, self._recompute)
        else:
            grid = self._grid.reaching(axes)
            arrays = TensorExchanges()
            how: Layered | Chained
            if self._halo == "layer":
                how = Layered(arrays, grid)
            else:
                how = Chained(arrays, grid, self._recompute)
            executor = OverRanks(grid, how, list(self.module.parameters()), self._join)
        session = Session(executor, x)
        found = session.leave(self.module(session.enter(x), *args, **kwargs))
        self.joined = tuple(session.joined)
        return found


class _Enter:
    """Says which layer is running."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        names.stack.append(self._name)


def _leave(module: torch.nn.Module, args: Any, result: Any) -> None:
    names.stack.pop()
