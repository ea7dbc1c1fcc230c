"""What all ranks have alike of a module that is split, and how they come to have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from collective.adapters.torch.synchronous import broadcast_tensors
from collective.communicator import Communicator
from collective.training.splits.filters import Filters
from collective.training.splits.replicas import StateEntry

__all__ = ["follow_root", "give_root_state", "state_of"]


def state_of(module: nn.Module, filters: Filters | None = None) -> list[StateEntry]:
    """Return a module's parameters and buffers, each once, those that are not saved included.

    Args:
        module: the one that is split.
        filters: which parameters this rank has a piece of; None: none.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [
        StateEntry(
            name,
            None if nn.parameter.is_lazy(tensor) else tensor.detach(),
            tensor.requires_grad,
            None if filters is None else filters.piece(tensor),
        )
        for name, tensor in tensors
    ]


def give_root_state(module: nn.Module, comm: Communicator) -> None:
    """Give every rank rank 0's parameters and buffers.

    Collective: every rank of ``comm``, with the same module.
    """
    values = [entry.value for entry in state_of(module)]
    broadcast_tensors([value for value in values if value is not None], comm)


def follow_root(module: nn.Module, comm: Communicator) -> None:
    """Let layers that are not initialised yet get rank 0's values when they are.

    Collective: every rank calls it; and then calls the layers for the first time in the same order.
    """
    for layer in module.modules():
        lazy = [name for name, each in _own_tensors(layer) if nn.parameter.is_lazy(each)]
        if lazy:
            layer.register_forward_pre_hook(_FollowRoot(lazy, comm))


class _FollowRoot:
    """A hook by which a layer's tensors become rank 0's, once, before its first call.

    PyTorch's own hook, which initialises the layer, is there since the layer was made, and runs
    before this one. A copy of the layer is nobody's replica, and its hook does nothing.
    """

    def __init__(self, names: Sequence[str], comm: Communicator | None) -> None:
        self._names = names
        self._comm = comm

    def __call__(self, layer: nn.Module, args: Any) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            broadcast_tensors([getattr(layer, name).detach() for name in self._names], comm)

    def __deepcopy__(self, memo: Any) -> _FollowRoot:
        return _FollowRoot((), None)


def _own_tensors(layer: nn.Module) -> list[tuple[str, Any]]:
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
