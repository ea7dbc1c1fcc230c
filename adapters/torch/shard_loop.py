"""Loop over a rank's virtual shards: one forward and one backward pass for each."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from collective import GradientError, UnsupportedError
from collective.inner import Gradients, ShardPasses
from collective.training.elastic_copies import digest_of
from collective.training.shard_passes import Generator, StateFold, refuse_joined

from .batch_norm import SyncBatchNorm
from .wrapped import announce

_REMEDY = (
    "Each shard's pass has to begin with the same state. Register state as a buffer in the "
    "constructor of the module, or compute it before the loop; change parameters between loops."
)
# Number of elements of a parameter that are compared, about.
_SAMPLE = 64
# Generators that a module may have for itself.
_GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
# Attributes of every module: its tables and hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def refuse_with_shards(module: nn.Module, **chosen: bool) -> None:
    """Refuse what cannot be combined with virtual shards.

    Args:
        module: module that is wrapped.
        chosen: arguments of the wrapper, and whether the caller passed them.
    """
    for name in (name for name, passed in chosen.items() if passed):
        raise UnsupportedError(
            f"DistributedDataParallel: {name} with shards. Leave one of them out: the passes of "
            "shards always use all parameters, and their average is that over the shards."
        )
    # Imported here, so that programs without shards run no code of it.
    from .splits.split import Split

    refuse_joined("DistributedDataParallel", module.named_modules(), SyncBatchNorm, Split)
    for name, inner in module.named_modules():
        if getattr(inner, "sparse", False) is True:
            raise UnsupportedError(
                f"DistributedDataParallel: {name} has sparse gradients, with shards. Make it with "
                "sparse=False."
            )


def generators_of(module: nn.Module) -> list[Generator]:
    """Return PyTorch's global generators from which the passes of a module may draw."""
    chosen = [torch.default_generator]
    for device in dict.fromkeys(p.device for p in module.parameters()):
        if device.type == "cuda":
            chosen.append(torch.cuda.default_generators[device.index or 0])
    return [_generator(each) for each in chosen]


def _generator(torchs: torch.Generator) -> Generator:
    def origin() -> int:
        return torchs.initial_seed() % 2**32

    return Generator(origin, torchs.manual_seed, torchs.get_state, torchs.set_state)


class ShardLoop:
    """Loop over the shards of this rank, for a wrapper of a module.

    Args:
        module: wrapped module.
        parameters: parameters in the order of the engine.
        gradients: engine that reduces the gradients by ``passes``.
        passes: passes of the shards.
        check: whether to compare digests of the parameters before and after each pass, and not only
            their version counters, which do not count writes to ``parameter.data``.

    Attributes:
        passes: as the argument.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], gradients: Gradients,
        passes: ShardPasses, check: bool = False,
    ) -> None:  # fmt: skip
        self._check = check
        self._module = module
        self._parameters = parameters
        self._gradients = gradients
        self.passes = passes
        self._finished = False
        self._buffers: dict[str, str] | None = None  # layout in the last loop
        self._left: list[Any] = []  # versions after the last loop

    def __iter__(self) -> Iterator[int]:
        passes = self.passes
        state = _ModuleState(self._module, passes, self._check)
        self._compare_buffers(state.layout())
        earlier = self._earlier_gradients()
        self._forget_gradients()
        for shard in passes:
            state.begin_pass()
            self._finished = False
            yield shard
            if not self._finished:
                raise GradientError(
                    f"DistributedDataParallel: the body of shard {shard} made no backward pass "
                    f"[rank {passes.comm.rank} of {passes.comm.size}]. Make one forward and "
                    "one backward pass for each shard of each_shard()."
                )
            change = state.end_pass()
            if change is not None:
                self.refuse(f"{change} in the pass of shard {shard}")
            if not passes.is_last:
                self._forget_gradients()
        if not passes.shards.mine:
            self._gradients.shadow()
            for parameter, view in zip(self._parameters, self._gradients.views):
                parameter.grad = view
        state.reduce()
        for parameter, gradient in zip(self._parameters, earlier):
            assert parameter.grad is not None
            parameter.grad.add_(gradient)
        self._left = self._versions()

    @property
    def running(self) -> bool:
        """Whether the program is in the body of the loop."""
        return self.passes.running

    def finish_pass(self) -> bool:
        """Note the end of a backward pass; return whether further passes of this rank follow."""
        if self._finished:
            raise GradientError(
                "DistributedDataParallel: a second backward pass for one shard "
                f"[rank {self.passes.comm.rank} of {self.passes.comm.size}]. Make one backward "
                "pass for each shard, of the sum of its losses."
            )
        self._finished = True
        return not self.passes.is_last

    def refuse(self, what: str) -> NoReturn:
        """Raise an error at all ranks: the others wait for the gradients of this one."""
        comm = self.passes.comm
        error = UnsupportedError(
            f"DistributedDataParallel: {what}, with shards [rank {comm.rank} of {comm.size}]. "
            f"{_REMEDY}"
        )
        comm.inner.fail(error)
        raise error

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _versions(self) -> list[Any]:
        """Return values that change if a program writes to a parameter or to its gradient.

        The version counters do not count writes to ``parameter.data``, so a sample of the elements
        is compared as well.
        """
        versions: list[Any] = []
        for parameter in self._parameters:
            gradient = parameter.grad
            counts = None if gradient is None else (id(gradient), gradient._version)
            versions.append((parameter._version, counts))
            flat = parameter.detach().reshape(-1)
            versions.append(flat[:: max(1, len(flat) // _SAMPLE)].tolist())
        return versions

    def _earlier_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of earlier loops of this step, to which those of this loop add up.

        They are of an earlier step, and so forgotten, if the program has written to the parameters
        or to the gradients since the last loop.
        """
        if not self._left or self._versions() != self._left:
            return []
        gradients = [p.grad for p in self._parameters]
        return [gradient.clone() for gradient in gradients if gradient is not None]

    def _compare_buffers(self, layout: dict[str, str]) -> None:
        """Check that all ranks have changed the set of buffers alike since the last loop."""
        before, self._buffers = self._buffers, layout
        if before is None or before == layout:
            return
        changed = [name for name in {**before, **layout} if before.get(name) != layout.get(name)]
        clauses = [f"buffer {name} was {_done(name, before, layout)}" for name in changed]
        announce(self.passes.comm, "DistributedDataParallel", clauses)


def _done(name: str, before: dict[str, str], layout: dict[str, str]) -> str:
    if name not in layout:
        return "removed"
    return f"{'replaced' if name in before else 'added'} ({layout[name]})"


class _ModuleState:
    """State of a module beside its gradients, around the passes of one loop.

    Buffers and numbers begin each pass with their values from before the loop, and end the loop
    with their fold over all shards, also if a pass puts a new tensor in place of a buffer. A tensor
    in a plain attribute that belongs to the graph of a pass, like an auxiliary loss, is forgotten
    before the next pass. Every other change could carry over to the next shard of this rank, which
    depends on the number of ranks: so it is refused. Lists, dicts and other objects are not seen.

    Args:
        module: wrapped module.
        passes: passes of the shards.
        check: as of the :class:`ShardLoop`.
    """

    def __init__(self, module: nn.Module, passes: ShardPasses, check: bool) -> None:
        self._check = check
        parts = list(module.named_modules())
        self._buffers = [(part._buffers, key, _joined(name, key), buffer)
                         for name, part in parts for key, buffer in part._buffers.items()
                         if buffer is not None]  # fmt: skip
        self._tables = [part._buffers for _, part in parts]
        self._parameters = [(name, p, self._mark(p)) for name, p in module.named_parameters()]
        own = {buffer.untyped_storage().data_ptr() for *_, buffer in self._buffers}
        self._attributes = [(name, vars(part), _attributes(part, own)) for name, part in parts]
        self._numbers = [(attributes, key) for _, attributes, before in self._attributes
                         for key, (value, _) in before.items() if _is_number(value)]  # fmt: skip
        self._fold = StateFold(
            passes, [buffer.detach() for *_, buffer in self._buffers], torch.stack,
            [attributes[key] for attributes, key in self._numbers],
        )  # fmt: skip

    def _mark(self, parameter: nn.Parameter) -> tuple[int, bytes | None]:
        digest = digest_of(parameter.detach()) if self._check else None
        return parameter._version, digest

    def layout(self) -> dict[str, str]:
        """Return dtype and shape of each buffer, by name."""
        return {name: f"{b.dtype} {list(b.shape)}" for _, _, name, b in self._buffers}

    def restore(self) -> None:
        """Set the state to that from before the loop, or to its fold."""
        for table, key, _, buffer in self._buffers:
            table[key] = buffer
        for (attributes, key), number in zip(self._numbers, self._fold.numbers):
            attributes[key] = number
        for _, attributes, before in self._attributes:
            for key in [k for k, v in attributes.items() if _is_tensor(v) and v.requires_grad]:
                if key in before:
                    attributes[key] = before[key][0]
                else:
                    del attributes[key]

    def begin_pass(self) -> None:
        """Set the state to that from before the loop."""
        self._fold.restore()
        self.restore()

    def end_pass(self) -> str | None:
        """Keep the state as a pass has left it; return a change that cannot be followed."""
        for name, parameter, mark in self._parameters:
            if self._mark(parameter) != mark:
                return f"parameter {name} was written"
        buffers = []
        for table, key, name, before in self._buffers:
            buffer = table.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (before.shape, before.dtype):
                return f"buffer {name} was removed, or took another shape or dtype"
            buffers.append(buffer.detach())
        if sum(b is not None for table in self._tables for b in table.values()) > len(buffers):
            return "a buffer was registered"
        for name, attributes, before in self._attributes:
            for key, value in attributes.items():
                if key not in _OF_MODULES and _carries(value, *before.get(key, (None, None))):
                    return f"the attribute {_joined(name, key)} was written"
        self._fold.add(buffers, [attributes.get(key) for attributes, key in self._numbers])
        return None

    def reduce(self) -> None:
        """Set the state to its fold over all shards. Collective."""
        self._fold.reduce()
        self.restore()


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, bool)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _state(generator: Any) -> bytes:
    """Return the state of a generator of random numbers."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist())
    return pickle.dumps(generator)


def _attributes(part: nn.Module, own: set[int]) -> dict[str, tuple[Any, Any]]:
    """Return the values of a module's plain attributes, with what tells whether they were written.

    Args:
        part: the module.
        own: addresses of the buffers, which attributes may also refer to.
    """
    values = {}
    for key, value in vars(part).items():
        mark: Any = None
        if key in _OF_MODULES:
            continue
        if isinstance(value, np.ndarray):
            mark = value.copy()
        elif isinstance(value, _GENERATORS):
            mark = _state(value)
        elif _is_tensor(value):
            is_buffer = value.layout is torch.strided and value.untyped_storage().data_ptr() in own
            mark = None if is_buffer else value._version
        values[key] = value, mark
    return values


def _carries(value: Any, before: Any, mark: Any) -> bool:
    """Return whether a pass has written a value that the next pass could read."""
    if value is before:
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, mark)
        if isinstance(value, _GENERATORS):
            return bool(_state(value) != mark)
        return _is_tensor(value) and mark is not None and bool(value._version != mark)
    if _is_number(value):
        return not _is_number(before)
    if _is_tensor(value):
        return not value.requires_grad
    return isinstance(value, (np.ndarray, np.generic))
