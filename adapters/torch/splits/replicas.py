"""State of a split module that all ranks have in common, and its broadcast from rank 0."""

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
    """Return a module's parameters and buffers, each once, including those that are not saved.

    Args:
        module: module that is split.
        filters: record of the parameters of which this rank has a piece; None: there are none.
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
    """Send rank 0's parameters and buffers to every rank.

    Collective: every rank of ``comm`` calls it, with the same module.
    """
    entries = state_of(module)
    broadcast_tensors({e.name: e.value for e in entries if e.value is not None}, comm)


def follow_root(module: nn.Module, comm: Communicator) -> None:
    """Make layers that are not initialised yet take rank 0's values when they are initialised.

    Collective: every rank calls it. All ranks then make the first calls of the layers in the same
    order.
    """
    for layer in module.modules():
        lazy = [name for name, tensor in _own_tensors(layer) if nn.parameter.is_lazy(tensor)]
        if lazy:
            layer.register_forward_pre_hook(_FollowRoot(lazy, comm))


class _FollowRoot:
    """Hook that gives a layer's tensors rank 0's values once, before the layer's first call.

    PyTorch registers its own hook, which initialises the layer, when the layer is made. So
    PyTorch's hook runs before this one. In a copy of the layer, the hook has no effect, because
    the copy is no replica of a layer on other ranks.
    """

    def __init__(self, names: Sequence[str], comm: Communicator | None) -> None:
        self._names = names
        self._comm = comm

    def __call__(self, layer: nn.Module, args: Any) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            broadcast_tensors({n: getattr(layer, n).detach() for n in self._names}, comm)

    def __deepcopy__(self, memo: Any) -> _FollowRoot:
        return _FollowRoot((), None)


def _own_tensors(layer: nn.Module) -> list[tuple[str, Any]]:
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
