"""PyTorch module of which each rank has only its own filters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from collective import Communicator, InvalidArgumentError
from collective.inner import nested
from collective.training.splits.filters import FilterLayer, Filters, Share, all_names

_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_KINDS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, *_TRANSPOSED


class ModuleFilters(Filters):
    """Filters of a PyTorch module: they cut its layers, and join their weights in states.

    Args:
        group: ranks that share the channels.
        module: module whose layers keep only this rank's filters; None: nothing is cut.

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
        for cut in self.take([described for _, described in owners.values()], names, _cut):
            owner: Any = owners[id(cut.weight)][0]
            # The hooks are no methods, because PyTorch sets an attribute of a hook, which a method
            # does not allow.
            owner.register_forward_pre_hook(functools.partial(_check, self, cut.name))
            owner.register_state_dict_post_hook(functools.partial(_save, self))
            owner.register_load_state_dict_pre_hook(functools.partial(_load, self))

    def whole_parameter(self, share: Share) -> nn.Parameter:
        whole = self.join(share.parameter.detach(), share)
        return nn.Parameter(whole, share.parameter.requires_grad)


def _memory(parameter: torch.Tensor) -> int:
    has_none = isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta
    return id(parameter) if has_none or not parameter.numel() else parameter.data_ptr()


def _described(name: str, layer: Any) -> FilterLayer:
    weight, bias = layer.weight, layer.bias
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in (weight, bias)):
        raise InvalidArgumentError(
            f"Split: filters='own': {name} has no weights yet. Call the module once before you "
            "split it."
        )
    return FilterLayer(
        name, weight, bias, getattr(layer, "groups", 1), isinstance(layer, _TRANSPOSED)
    )


def _cut(parameter: torch.Tensor, dimension: int, rows: range) -> None:
    """Keep some rows in the same parameter object, which an optimizer may hold already."""

    def piece(x: torch.Tensor) -> torch.Tensor:
        part = x.detach().narrow(dimension, rows.start, len(rows))
        return part.clone(memory_format=torch.contiguous_format)

    gradient, parameter.grad = parameter.grad, None
    parameter.data = piece(parameter)
    if gradient is not None:
        parameter.grad = piece(gradient)


# -- hooks of layers -------------------------------------------------------------------------


def _check(filters: ModuleFilters, name: str, layer: Any, args: Any) -> None:
    filters.check_running(name, layer.weight)


def _shares(filters: ModuleFilters, layer: nn.Module, prefix: str) -> dict[str, Share]:
    shares = {name: filters.share(p) for name, p in layer.named_parameters(recurse=False)}
    return {f"{prefix}{name}": share for name, share in shares.items() if share is not None}


def _save(filters: ModuleFilters, layer: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    """Replace the pieces in the state by whole tensors.

    Collective: every rank of the group calls it.
    """
    for name, share in _shares(filters, layer, prefix).items():
        state[name] = filters.join(state[name].detach(), share)


def _load(filters: ModuleFilters, layer: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
    """Replace the whole tensors in the state by this rank's pieces."""
    for name, share in _shares(filters, layer, prefix).items():
        if name in state:
            filters.check_whole(name, state[name].shape, share)
            mine = filters.mine(share)
            state[name] = state[name].narrow(share.dimension, mine.start, len(mine))


class Watching(TorchFunctionMode):
    """Context that intercepts functions whose arguments contain a parameter that is cut.

    This rank has only a piece of such a parameter. The function of the parameter's own layer
    handles the piece. Any other function in a forward method would use the piece as the whole
    parameter.

    Args:
        filters: record of the parameters that are cut.
        call: function that is called with an intercepted function and its arguments, in its place.
    """

    def __init__(self, filters: Filters, call: Callable[..., Any]) -> None:
        super().__init__()
        self._filters = filters
        self._call = call

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if any(self._filters.share(leaf) for leaf in nested.flatten([list(args), named])):
            return self._call(function, tuple(args), dict(named))
        return function(*args, **named)
