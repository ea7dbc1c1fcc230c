"""A wrapper's states under the names of the module inside, and read under either."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["with_prefix", "without_prefix"]

_PREFIX = "module."


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
