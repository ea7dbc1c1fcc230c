"""Parameters of a wrapped module and changes of them, and names in its ``state_dict``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from collective import InvalidArgumentError, UnsupportedError

from .untraced import untraced

if TYPE_CHECKING:
    from collective import Communicator

_PREFIX = "module."
_VALUES = methodcaller("values")
_FACTS = attrgetter("requires_grad", "dtype", "device", "shape")
_STRIDES = torch.Tensor.stride
_END = object()
#: Number of changes that a text lists.
_LISTED = 3


@untraced
class Snapshot:
    """Parameters of a module at some moment, and their comparison with the present ones.

    ``differs`` runs in every forward pass, so it calls no function of Python for each parameter.

    Args:
        module: module whose parameters are initialised.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.take()

    def take(self) -> None:
        """Take the present parameters."""
        parts = self._module.modules()
        tables = [table for part in parts for table in (part._parameters, part._modules)]
        self._filled = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        # The references keep replaced objects alive, so that no new object gets their identity.
        self._entries = [*chain.from_iterable(map(_VALUES, self._filled)), _END]
        self._named = dict(self._module.named_parameters(remove_duplicate=False))
        self._parameters = list(dict.fromkeys(self._named.values()))
        self._facts = [*map(_FACTS, self._parameters)]
        self._matrices = [p for p in self._parameters if p.dim() > 1]
        self._strides = [*map(_STRIDES, self._matrices)]

    def differs(self) -> bool:
        """Return whether a parameter or a part of the module has changed in some way."""
        present = chain(chain.from_iterable(map(_VALUES, self._filled)), (_END,))
        return (
            any(self._empty)
            or not all(map(is_, present, self._entries))
            or [*map(_FACTS, self._parameters)] != self._facts
            or [*map(_STRIDES, self._matrices)] != self._strides
        )

    @property
    def replaced_for_a_call(self) -> bool:
        """Whether ``torch.func.functional_call`` has put other tensors in place of parameters."""
        present = self._module.named_parameters(remove_duplicate=False)
        return not all(isinstance(tensor, nn.Parameter) for _, tensor in present)

    @property
    def has_same_tensors(self) -> bool:
        """Whether no parameter was added, removed or replaced, or changed its dtype or layout."""
        facts = [*map(_FACTS, self._parameters)]
        return (
            set(self._module.parameters()) == set(self._parameters)
            and all(before[1:] == now[1:] for before, now in zip(self._facts, facts))
            and [*map(_STRIDES, self._matrices)] == self._strides
        )

    def changes(self) -> list[str]:
        """Return what has changed about parameters: a clause for each that names it.

        A parameter that is still in the module, under whatever name, has not changed.
        """
        present = dict(self._module.named_parameters(remove_duplicate=False))
        facts = dict(zip(self._parameters, self._facts))
        strides = dict(zip(self._matrices, self._strides))
        clauses = {}
        for name, parameter in present.items():
            if parameter not in facts:
                clauses[parameter] = f"{name} was {'replaced' if name in self._named else 'added'}"
            elif (now := _FACTS(parameter)) != (before := facts[parameter]):
                clauses[parameter] = f"{name} {_changed(before, now)}"
            elif (steps := parameter.stride()) != strides.get(parameter, steps):
                clauses[parameter] = f"{name} took the strides {steps} (had {strides[parameter]})"
        there = set(present.values())
        for name, parameter in self._named.items():
            if parameter not in there and name not in present:
                clauses[parameter] = f"{name} was removed"
        return list(clauses.values())


def _changed(before: Sequence[Any], now: Sequence[Any]) -> str:
    if before[1:] == now[1:]:
        return "now requires a gradient" if now[0] else "no longer requires a gradient"
    return f"became {_described(now)} (was {_described(before)})"


def _described(facts: Sequence[Any]) -> str:
    _, dtype, device, shape = facts
    return f"{str(dtype).rpartition('.')[2]}{list(shape)} on {device}"


def announce(comm: Communicator, call: str, changes: Sequence[str]) -> None:
    """Check that all ranks have changed their parameters in the same way.

    A rank that has changed nothing makes another call at this point of the program. The names of
    the changes are a part of this call, so the error that every rank gets contains them.

    Collective: every rank of ``comm`` calls it.

    Raises:
        MismatchError: the ranks' changes differ, or a rank has changed nothing.
    """
    listed = ", ".join(changes[:_LISTED])
    if len(changes) > _LISTED:
        listed += f" and {len(changes) - _LISTED} more"
    comm.inner.on_host.all_gather({f"{call}: {listed}": np.zeros(1, np.uint8)})


def memory_order(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return a parameter's axes in the order of its memory; empty: C order, or memory with gaps.

    Autograd gives gradients this order, too, and fused optimizers rely on it: they go through
    parameter, gradient and state by address.
    """
    if parameter.is_contiguous():
        return ()
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    stored = parameter.detach().permute(order)
    return tuple(order) if stored.is_contiguous() else ()


def trained_parameters(
    module: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], list[nn.Parameter]]:
    """Return the parameters with a dense gradient, by name, and those with a sparse one.

    Raises:
        InvalidArgumentError: no parameter requires a gradient, the module's parameters are on
            several devices, or one is not initialised.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"DistributedDataParallel: {name} is not initialised, so its shape is unknown. "
                "Call the module once with a batch before you wrap it."
            )
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


def refuse_max_norm(module: nn.Module) -> None:
    """Refuse layers whose forward pass writes the weights of the samples that it gets.

    Raises:
        UnsupportedError: the module has such a layer.
    """
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise UnsupportedError(
                f"DistributedDataParallel: {name or 'the module'} has max_norm={part.max_norm}, so "
                "its forward pass writes the rows that it reads, which are others on each rank, "
                "and the replicas would drift apart. Leave max_norm out, and limit all rows after "
                "each step of the optimizer: weight.data = weight.data.renorm(norm_type, 0, "
                "max_norm)."
            )


def without_prefix(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Rename the entries of a state to the names of the bare module."""
    inner = prefix + _PREFIX
    for name in [name for name in state if name.startswith(inner)]:
        state[prefix + name[len(inner) :]] = state.pop(name)
    # Parts find the version of their state by their name. The names in the wrapper stay, for the
    # wrapper itself.
    versions = getattr(state, "_metadata", {})
    versions.update(
        (f"{prefix}{name[len(inner) :]}".removesuffix("."), version)
        for name, version in list(versions.items())
        if f"{name}.".startswith(inner)
    )


def with_prefix(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of a state to the wrapper's names, if they are the bare module's."""
    inner = prefix + _PREFIX
    own = chain(
        module.module.named_parameters(remove_duplicate=False),
        module.module.named_buffers(remove_duplicate=False),
    )
    bare = {prefix + name for name, _ in own}
    if not any(name in bare for name in state):
        return
    for name in [name for name in state if name.startswith(prefix)]:
        state[inner + name[len(prefix) :]] = state.pop(name)
    # Only the outermost module gets the versions. `state` is a copy, but they are the caller's.
    versions = getattr(state, "_metadata", {})
    versions.update({f"{_PREFIX}{name}".removesuffix("."): v for name, v in versions.items()})
