"""A wrapped module: the parameters that are trained, and names in states."""

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
        InvalidArgumentError: there are none, or the module's are on several devices.
    """
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not named:
        raise InvalidArgumentError(
            "DistributedDataParallel: no parameter of the module requires a gradient; there is "
            "nothing to reduce. Use the module as it is."
        )
    devices = sorted({str(p.device) for p in module.parameters()})
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"DistributedDataParallel: parameters on {', '.join(devices)}; all must be on one "
            "device. Move the module there, or give each part a wrapper of its own."
        )
    # Gradients mostly arrive in the reverse of the order in which modules were made.
    named.reverse()
    sparse = {each.weight for each in module.modules() if getattr(each, "sparse", False) is True}
    dense = [(name, parameter) for name, parameter in named if parameter not in sparse]
    return dense, [parameter for _, parameter in named if parameter in sparse]


def without_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Name what is in a state as the bare module does."""
    inner = prefix + _PREFIX
    for name in [name for name in state if name.startswith(inner)]:
        state[prefix + name[len(inner) :]] = state.pop(name)


def with_prefix(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Name what is in a state as the wrapper does, if it is not."""
    inner = prefix + _PREFIX
    bare = {prefix + name for name, _ in module.module.named_parameters()}
    if not any(name in bare for name in state):
        return
    for name in [name for name in state if name.startswith(prefix)]:
        state[inner + name[len(prefix) :]] = state.pop(name)
