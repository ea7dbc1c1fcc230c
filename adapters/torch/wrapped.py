"""Trained parameters of a wrapped module, and names in its ``state_dict``."""

from __future__ import annotations

from typing import Any

from torch import nn

from collective.errors import InvalidArgumentError

__all__ = ["trained_parameters", "with_prefix", "without_prefix"]

_PREFIX = "module."


def trained_parameters(
    module: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], list[nn.Parameter]]:
    """Return the parameters with a dense gradient, by name, and those with a sparse one.

    Raises:
        InvalidArgumentError: no parameter requires a gradient, or the module's parameters are on
            several devices.
    """
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise InvalidArgumentError(
            "DistributedDataParallel: no parameter of the module requires a gradient, so there is "
            "nothing to reduce. Use the module without the wrapper."
        )
    devices = sorted({str(p.device) for p in module.parameters()})
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"DistributedDataParallel: the parameters are on {', '.join(devices)} (expected a "
            "single device). Move the module to one device, or wrap each part by itself."
        )
    # Gradients usually arrive in the reverse of the order in which modules were created.
    named.reverse()
    sparse = {each.weight for each in module.modules() if getattr(each, "sparse", False) is True}
    dense = [(name, parameter) for name, parameter in named if parameter not in sparse]
    return dense, [parameter for _, parameter in named if parameter in sparse]


def without_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Rename the entries of a state to the names of the bare module."""
    inner = prefix + _PREFIX
    for name in [name for name in state if name.startswith(inner)]:
        state[prefix + name[len(inner) :]] = state.pop(name)


def with_prefix(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of a state to the wrapper's names, if they are the bare module's."""
    inner = prefix + _PREFIX
    bare = {prefix + name for name, _ in module.module.named_parameters()}
    if not any(name in bare for name in state):
        return
    for name in [name for name in state if name.startswith(prefix)]:
        state[inner + name[len(prefix) :]] = state.pop(name)
