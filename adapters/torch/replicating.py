"""Modules copied to several devices, their tensors in few messages.

The backward pass of the copies adds up their gradients, which travel the same way.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collective.errors import InvalidArgumentError, UnsupportedError

from .coalescing import broadcast_coalesced, copied, refuse_several_devices
from .scattering import as_devices

__all__ = ["check_replicable", "replicate"]

# A module's own dicts and sets, which every copy has for itself: one that registers or removes
# something while it runs does so for itself alone.
_OWN = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]
_CONTAINERS = (list, tuple, dict, OrderedDict)
# Longer lists are taken for data, as vocabularies: to search them would outlast a forward pass.
_LONGEST = 1000
_DEEPEST = 3


def replicate(module: nn.Module, devices: Sequence[Any], detach: bool = False) -> list[nn.Module]:
    """Return a copy of a module for each device.

    The copies' parameters are no leaves: their gradients flow back into the module's. Submodules,
    parameters and buffers that are shared stay shared within a copy; plain attributes are
    shared with the module, save for those that refer to its parts.

    Args:
        module: any module, its parameters and buffers on one device.
        devices: a device a copy; one may come more than once.
        detach: whether the copies are cut off the graph, as they are in no_grad mode.

    Returns:
        The copies. Parameters share the module's memory where they are on its device. The first
        copy there has the module's buffers themselves, so that running statistics that are
        updated in place are kept; those of the others are copies, and go with them.

    Raises:
        UnsupportedError: a part of it is a ScriptModule, or compiled.
        InvalidArgumentError: a parameter is not initialized yet.
        DeviceError: its tensors are on several devices, or ``devices`` are no list of them.
    """
    check_replicable(module)
    places = as_devices(devices)
    graph = torch.is_grad_enabled() and not detach
    buffers = list(module.buffers())
    own = [buffer for buffer in buffers if not (graph and buffer.requires_grad)]
    shared = [*module.parameters(), *(b for b in buffers if graph and b.requires_grad)]
    refuse_several_devices("replicate", [*shared, *own])
    rows = broadcast_coalesced(shared if graph else [t.detach() for t in shared], places)
    keys = [id(tensor) for tensor in [*shared, *own]]
    known = [
        dict(zip(keys, [*row, *own_row])) for row, own_row in zip(rows, _own_rows(own, places))
    ]
    return _copies_of(module, known)


def check_replicable(module: nn.Module) -> None:
    """Refuse a module that cannot be copied.

    Raises:
        UnsupportedError, InvalidArgumentError: as in :func:`replicate`.
    """
    for name, part in module.named_modules():
        where = f"{type(part).__name__} ({name or 'the module itself'})"
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"replicate: {where} is a ScriptModule, whose parts are fixed; allowed are "
                "modules of Python. Wrap the module before it is scripted or traced."
            )
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None):
            raise UnsupportedError(
                f"replicate: {where} is compiled for its own parameters; allowed are modules "
                "that are not. Wrap the module without torch.compile."
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"replicate: {name!r} is not initialized; allowed are modules that know their "
                "shapes. Call the module once with a batch before it is wrapped."
            )


def _own_rows(buffers: list[Tensor], places: list[torch.device]) -> list[list[Tensor]]:
    """Return the buffers themselves for the first place that is theirs, and copies elsewhere."""
    home = buffers[0].device if buffers else None
    first = places.index(home) if home in places else -1
    return [
        buffers if index == first else copied(buffers, device)
        for index, device in enumerate(places)
    ]


def _copies_of(module: nn.Module, known: list[dict[int, Any]]) -> list[nn.Module]:
    """Return copies of a module, each with the tensors that stand for its own by their ids."""
    parts = list(module.modules())
    for found in known:
        found.update((id(part), object.__new__(type(part))) for part in parts)
    for part in parts:
        attributes = vars(part)
        own = {name: attributes[name] for name in _OWN if name in attributes}
        # Looked for once, not for each copy.
        live = {
            name: value
            for name, value in attributes.items()
            if name not in own and _refers(value, known[0], _DEEPEST)
        }
        for found in known:
            copied = vars(found[id(part)])
            copied.update(attributes)
            for name, value in own.items():
                keep = not value or isinstance(value, set)
                copied[name] = value.copy() if keep else _mapped(value, found)
            for name, value in live.items():
                copied[name] = _mapped(value, found)
    return [found[id(module)] for found in known]


def _refers(value: Any, found: Mapping[int, Any], depth: int) -> bool:
    """Tell whether an attribute refers to parts of the module, as an RNN's list of weights."""
    if id(value) in found:
        return True
    if isinstance(value, types.MethodType):
        return id(value.__self__) in found
    if type(value) not in _CONTAINERS or len(value) > _LONGEST or not depth:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_refers(item, found, depth - 1) for item in items)


def _mapped(value: Any, found: Mapping[int, Any], depth: int = _DEEPEST) -> Any:
    """Return an attribute with a copy's parts in place of the module's."""
    if id(value) in found:
        return found[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in found:
        return types.MethodType(value.__func__, found[id(value.__self__)])
    if type(value) not in _CONTAINERS or not depth:
        return value
    if isinstance(value, dict):
        items = ((key, _mapped(item, found, depth - 1)) for key, item in value.items())
        return type(value)(items)
    return type(value)(_mapped(item, found, depth - 1) for item in value)
