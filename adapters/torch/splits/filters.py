"""A PyTorch module of which each rank has its own filters alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.memory import nested
from collective.training.splits.filters import FilterLayer, Filters, Share, all_names

__all__ = ["ModuleFilters", "Watching"]

_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_KINDS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *_TRANSPOSED


class ModuleFilters(Filters):
    """Cuts a module's layers, and has their state whole.

    Args:
        group: the ranks that share the channels.
        module: loses what other ranks keep; None: nothing is cut.

    Raises:
        InvalidArgumentError: a layer has no weights yet.
        UnsupportedError: a weight that has to be cut belongs to two layers.
    """

    def __init__(self, group: Communicator, module: nn.Module | None = None) -> None:
        super().__init__(group)
        if module is None:
            return
        owners = {}
        for name, layer in module.named_modules():
            weight = dict(layer.named_parameters(recurse=False)).get("weight")
            if isinstance(layer, _KINDS) and weight is not None:
                owners[id(weight)] = layer, _described(name or type(layer).__name__, layer)
        names = all_names(module.named_parameters(remove_duplicate=False), _memory)
        for found in self.take([each for _, each in owners.values()], names, _cut):
            cut: Any = owners[id(found.weight)][0]
            # Not methods: PyTorch notes something at a hook, which methods cannot have.
            cut.register_forward_pre_hook(functools.partial(_check, self, found.name))
            cut.register_state_dict_post_hook(functools.partial(_save, self))
            cut.register_load_state_dict_pre_hook(functools.partial(_load, self))

    def whole_parameter(self, share: Share) -> nn.Parameter:
        whole = self.join(share.parameter.detach(), share)
        return nn.Parameter(whole, share.parameter.requires_grad)


def _memory(parameter: torch.Tensor) -> int:
    has_none = isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta
    return id(parameter) if has_none or not parameter.numel() else parameter.data_ptr()


def _described(name: str, layer: Any) -> FilterLayer:
    weight, bias = layer.weight, layer.bias
    if any(isinstance(each, nn.parameter.UninitializedParameter) for each in (weight, bias)):
        raise InvalidArgumentError(
            f"Split: filters='own': {name} has no weights yet. Call the module once before."
        )
    return FilterLayer(
        name, weight, bias, getattr(layer, "groups", 1), isinstance(layer, _TRANSPOSED)
    )


def _cut(parameter: torch.Tensor, dimension: int, rows: range) -> None:
    """Keep some rows; the parameter is the same object, which an optimizer may know already."""

    def mine(x: torch.Tensor) -> torch.Tensor:
        part = x.detach().narrow(dimension, rows.start, len(rows))
        return part.clone(memory_format=torch.contiguous_format)

    gradient, parameter.grad = parameter.grad, None
    parameter.data = mine(parameter)
    if gradient is not None:
        parameter.grad = mine(gradient)


# -- hooks of layers -------------------------------------------------------------------------


def _check(filters: ModuleFilters, name: str, layer: Any, args: Any) -> None:
    filters.check_running(name, layer.weight)


def _shares(filters: ModuleFilters, layer: nn.Module, prefix: str) -> dict[str, Share]:
    known = {name: filters.share(each) for name, each in layer.named_parameters(recurse=False)}
    return {f"{prefix}{name}": share for name, share in known.items() if share is not None}


def _save(filters: ModuleFilters, layer: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    """Put whole tensors into the state.

    Collective: every rank of the group.
    """
    for name, share in _shares(filters, layer, prefix).items():
        state[name] = filters.join(state[name].detach(), share)


def _load(filters: ModuleFilters, layer: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
    """Take pieces out of the state."""
    for name, share in _shares(filters, layer, prefix).items():
        if name in state:
            filters.check_whole(name, state[name].shape, share)
            mine = filters.mine(share)
            state[name] = state[name].narrow(share.dimension, mine.start, len(mine))


class Watching(TorchFunctionMode):
    """Gives a function that gets a parameter of which this rank has a piece to a forward pass.

    A layer's own function knows what to do with it. Any other, wherever a forward calls it, would
    take the piece for the whole.

    Args:
        filters: which parameters these are.
        call: is called with the function and its arguments, instead of it.
    """

    def __init__(self, filters: Filters, call: Callable[..., Any]) -> None:
        super().__init__()
        self._filters = filters
        self._call = call

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = kwargs or {}
        if any(self._filters.share(leaf) for leaf in nested.flatten([list(args), known])):
            return self._call(function, tuple(args), dict(known))
        return function(*args, **known)
