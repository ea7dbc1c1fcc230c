"""Optimizer whose state is spread over the ranks: stage 1 of ZeRO.

Each rank keeps all gradients and parameters whole. It updates only its share of the parameters,
and keeps only that share's optimizer state. Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory
optimizations toward training trillion parameter models", SC 2020.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from collective import InvalidArgumentError, StateLostError, UnsupportedError
from collective.inner import (
    NotCopied,
    StateEntry,
    comm_or_current,
    refuse_differences,
    refuses,
    shares,
)
from collective.training.elastic_copies import copied, mapped
from collective.training.elastic_state import register
from collective.training.replicas import few

from .wrapped import announce

if TYPE_CHECKING:
    from collective import Communicator

_Base: Any = torch.optim.Optimizer
# After a step of one of these, the other ranks' parameters are still to be received.
_SHARES: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: Arguments of PyTorch's ZeroRedundancyOptimizer, and what to write instead.
_TORCHS = {
    "optimizer_class": "use optimizer=",
    "overlap_with_ddp": "leave it out: call step() after the backward pass",
    "parameters_as_bucket_view": "leave it out: parameters stay where they are",
    "params": "use parameters=",
    "process_group": "use comm=",
}


class ShardedOptimizer(NotCopied, _Base):  # type: ignore[misc]  # torch's is not typed
    """Optimizer whose state and updates are divided among the ranks.

    Gradients have to be the same on all ranks when :meth:`step` is called, as after a backward pass
    of :class:`DistributedDataParallel`. After the step the parameters are the same on all ranks.
    The wrapped optimizer must treat each parameter by itself: SGD, Adam, Adagrad, …, not LBFGS. The
    constructor tries this with parameters of its own.

    Args:
        parameters: parameters, or groups of parameters, as for any optimizer; the same on all
            ranks.
        optimizer: class of the optimizer whose state is divided.
        comm: communicator that connects the ranks; None: the current communicator.
        copies: number of ranks that hold each share of the state after a
            :meth:`collective.elastic.State.commit`: the share's own rank and the ranks after it.
            With 1, the share of a lost rank is lost.
        defaults: further arguments of the optimizer's class.

    Raises:
        MismatchError: the ranks' parameters differ.
        UnsupportedError: the optimizer needs a closure, or the update of a parameter depends on the
            gradients of others, such as their norm.

    See Also:
        torch.distributed.optim.ZeroRedundancyOptimizer.
    """

    instead = (
        "Call its state_dict() on all ranks, and load the result into a ShardedOptimizer of the "
        "other parameters."
    )

    @refuses(_TORCHS)
    def __init__(
        self,
        parameters: Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer],
        comm: Communicator | None = None,
        *,
        copies: int = 1,
        **defaults: Any,
    ) -> None:
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
            raise InvalidArgumentError(
                f"ShardedOptimizer: copies is {copies!r} (expected an integer of at least 1)."
            )
        self._comm = comm_or_current(comm, "ShardedOptimizer")
        self._copies = copies
        self._made = functools.partial(optimizer, **defaults)
        self._has_state = False  # on any rank
        self._local: torch.optim.Optimizer | None = None
        super().__init__(list(parameters), dict(defaults))
        _refuse_mixing(self._made, self.param_groups[0])
        self._agree()
        self._share_out()
        self._layout = self._present_layout()

    def _share_out(self) -> None:
        """Assign each parameter to a rank, and make the optimizer of this rank's share."""
        self._owners: dict[Any, int] = {}
        self._loads = [0] * self._comm.size  # elements of each rank's share
        shares = [self._shared(group) for group in self.param_groups]
        # Optimizer classes need at least one parameter. A rank without a share passes an empty
        # one, which never gets a gradient. Some classes require two dimensions.
        axes = max(1, next(iter(self._owners)).dim())
        self._nothing = torch.zeros([0] * axes, device="cpu", requires_grad=True)
        if not any(share["params"] for share in shares):
            shares[0]["params"] = [self._nothing]
        self._local = self._made(shares)
        _SHARES.add(self._local)
        # Schedulers and states read only this optimizer's defaults and groups.
        self.defaults.update(self._local.defaults)
        _take_options(self.param_groups, self._local.param_groups)

    def _agree(self) -> None:
        """Check that the ranks have parameters of the same shapes and types."""
        layout = [
            StateEntry(f"parameter {number} of group {at}", p).layout
            for at, group in enumerate(self.param_groups)
            for number, p in enumerate(group["params"])
        ]
        every = self._comm.all_gather_object(layout)
        remedy = "Pass the same parameters on all ranks, in the same order."
        refuse_differences("ShardedOptimizer", "parameters", every, self._comm, remedy)

    def _shared(self, group: dict[str, Any]) -> dict[str, Any]:
        """Assign the parameters of a group to ranks; return the group with this rank's share."""
        parameters = group["params"]
        self._owners.update(
            zip(parameters, shares.owners([p.numel() for p in parameters], self._loads))
        )
        share = [p for p in parameters if self._owners[p] == self._comm.rank]
        return {**group, "params": share}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; every rank adds the same group."""
        super().add_param_group(param_group)
        if self._local is not None:
            self._local.add_param_group(self._shared(self.param_groups[-1]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share of the parameters, and receive the other ranks' shares.

        Collective: every rank calls it.

        Args:
            closure: function that recomputes the loss and returns it. It is called once, before the
                update.

        Raises:
            MismatchError: the parameters of a rank have changed; every rank raises it, with the
                name or number of a parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._compare_layout()
        assert self._local is not None
        # Schedulers change the options in this optimizer's groups, and a step may count in its own.
        _take_options(self._local.param_groups, self.param_groups)
        self._local.step()
        _take_options(self.param_groups, self._local.param_groups)
        self._has_state = True
        self._exchange()
        return loss

    def _present_layout(self) -> list[tuple[bool, torch.dtype, torch.Size]]:
        """Return what the ranks must have in common about each parameter."""
        return [(_is_updated(p), p.dtype, p.shape) for p in self._numbers()]

    def _compare_layout(self) -> None:
        """Check that all ranks have changed their parameters alike since the last step."""
        before, self._layout = self._layout, self._present_layout()
        changes = [
            f"{self._name(number)} is {'' if now[0] else 'not '}updated and of {now[1]}"
            for number, now in enumerate(self._layout)
            if number >= len(before) or before[number] != now
        ]
        changes += [
            f"{self._name(number)} was replaced in param_groups"
            for parameter, number in self._numbers().items()
            if parameter not in self._owners
        ]
        if changes:
            announce(self._comm, "ShardedOptimizer", changes)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Send each rank's updated parameters to all ranks, in one message for each dtype."""
        parameters = list(self._numbers())
        for dtype in dict.fromkeys(p.dtype for p in parameters):
            owned: list[list[Any]] = [[] for _ in range(self._comm.size)]
            for parameter in parameters:
                if parameter.dtype is dtype and _is_updated(parameter):
                    owned[self._owners[parameter]].append(parameter)
            counts = [sum(p.numel() for p in share) for share in owned]
            own_share = owned[self._comm.rank]
            nothing = parameters[0].new_empty(0, dtype=dtype)  # torch.cat refuses an empty list
            packed = torch.cat([nothing, *(p.detach().reshape(-1) for p in own_share)])
            joined = self._comm.all_gather(packed, counts=counts)
            start = 0
            for owner, share in enumerate(owned):
                for parameter in share:
                    stop = start + parameter.numel()
                    if owner != self._comm.rank:
                        parameter.copy_(joined[start:stop].view_as(parameter))
                    start = stop

    # -- checkpoints ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, in the form of the wrapped class's state on a single rank.

        Collective: every rank calls it, and gets the whole state, on the CPU.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        share = mapped(self._share(), lambda _, x: x.detach().cpu() if torch.is_tensor(x) else x)
        shares = self._comm.all_gather_object(share, pickle=True)
        state = {number: kept for part in shares for number, kept in part.items()}
        result = {"state": dict(sorted(state.items())), "param_groups": self._groups()}
        whole: dict[str, Any] = self._passed_to(self._optimizer_state_dict_post_hooks, result)
        return whole

    def _passed_to(self, hooks: dict[int, Callable[..., Any]], state: Any) -> Any:
        """Return a state, or that by which hooks of PyTorch's base class replace it."""
        for hook in hooks.values():
            replacement = hook(self, state)
            state = state if replacement is None else replacement
        return state

    def _share(self) -> dict[int, dict[str, Any]]:
        """Return this rank's part of the state, by the parameters' numbers."""
        assert self._local is not None
        numbers = self._numbers()
        return {
            numbers[parameter]: state
            for parameter, state in self._local.state.items()
            if parameter in numbers
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, from this class or the wrapped class, from any number of ranks.

        Raises:
            InvalidArgumentError: the numbers of parameters in the state's groups differ from this
                optimizer's.
        """
        hooks = self._optimizer_load_state_dict_pre_hooks
        self._load_whole(self._passed_to(hooks, state_dict.copy()))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load_whole(self, state_dict: dict[str, Any]) -> None:
        assert self._local is not None
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        own_sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != own_sizes:
            raise InvalidArgumentError(
                f"ShardedOptimizer: the state has groups of {sizes} parameters (expected "
                f"{own_sizes}, as in this optimizer). Load a state of the same model."
            )
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        numbers = {number: parameter for parameter, number in self._numbers().items()}
        of_name = {name: numbers[index] for index, name in enumerate(names)}
        # Options may be tensors, which schedulers and optimizers change in place.
        _take_options(self.param_groups, copy.deepcopy(state_dict["param_groups"]))
        local = self._local.state_dict()
        places: dict[Any, int] = {}
        for group, packed in zip(self._local.param_groups, local["param_groups"]):
            places.update(zip(group["params"], packed["params"]))
        local["state"] = {
            places[of_name[name]]: state
            for name, state in state_dict["state"].items()
            if of_name[name] in places
        }
        load_optimizer(self._local, local)
        self._has_state = bool(state_dict["state"])

    # -- losses of ranks ------------------------------------------------------------------

    def keep_shards(self) -> dict[str, Any]:
        """Return this rank's share of the state, and copies of other ranks' shares.

        The result shares no memory with the optimizer.

        Collective: every rank calls it, as :meth:`collective.elastic.State.commit` does.
        """
        return {
            "held": shares.with_copies(self._comm, copied(self._share()), self._copies),
            "rank": self._comm.rank,
            "size": self._comm.size,
            "owners": [self._owners[parameter] for parameter in self._numbers()],
            "groups": copied(self._groups()),
            "has_state": self._has_state,
        }

    def restore_shards(self, kept: dict[str, Any]) -> None:
        """Restore this rank's share of the state from a result of :meth:`keep_shards`."""
        self._load(kept["held"][kept["rank"]], kept)

    def regain_shards(self, comm: Communicator, kept: dict[str, Any] | None) -> None:
        """Divide the state among the ranks of another communicator, from the shares they hold.

        Collective: every rank of ``comm`` calls it, as :meth:`collective.elastic.State.sync` does.

        Args:
            comm: communicator that connects the ranks from now on.
            kept: result of :meth:`keep_shards`; None on a rank that holds no shares.

        Raises:
            StateLostError: no remaining rank has the share of a lost rank. The text names the
                share's parameters.
        """
        summary = kept and {name: value for name, value in kept.items() if name != "held"}
        summaries = comm.all_gather_object(summary)
        if kept is None:
            kept = {**next(entry for entry in summaries if entry is not None), "held": {}}
        giver = shares.givers(comm, kept["held"])
        lost = [number for number, owner in enumerate(kept["owners"]) if owner not in giver]
        if lost and kept["has_state"]:
            names = [self._name(number) for number in lost]
            gone = sorted(set(range(kept["size"])) - set(giver))
            raise StateLostError(
                f"ShardedOptimizer: the state of {few(names)} was only on ranks {gone}, which are "
                f"lost [rank {comm.rank} of {comm.size}]. Start all ranks again, from a "
                f"checkpoint. Pass copies={len(gone) + 1} or more to survive such a loss."
            )
        self._comm = comm
        self._share_out()
        owners = [self._owners[parameter] for parameter in self._numbers()]
        self._load(shares.shared_out(comm, kept["held"], giver, owners), kept)

    def _load(self, states: Mapping[int, Any], kept: dict[str, Any]) -> None:
        # An optimizer changes the tensors of a loaded state in place, and the shares in `kept` may
        # have to be restored once more. So it gets copies.
        self._load_whole({"state": copied(dict(states)), "param_groups": kept["groups"]})
        self._has_state = kept["has_state"]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups in the form of a state, with numbers in place of parameters."""
        numbers = self._numbers()
        return [
            {**_options(group), "params": [numbers[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]

    def _name(self, number: int) -> str:
        """Return a parameter's name, or its number and shape if the parameters have no names."""
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if len(names) == len(self._owners):
            return str(names[number])
        parameter = list(self._numbers())[number]
        return f"parameter {number} {list(parameter.shape)}"

    def _numbers(self) -> dict[Any, int]:
        parameters = [p for group in self.param_groups for p in group["params"]]
        return {parameter: number for number, parameter in enumerate(parameters)}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Any:
    """Load a state, and give its tensors the strides of their parameters.

    Fused optimizers go through a parameter and its state by address, and an array that another rank
    has sent comes in C order.
    """
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == parameter.shape
                and value.layout is torch.strided
                and value.stride() != parameter.stride()
            ):
                room = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                entries[name] = room.detach().copy_(value)
    return optimizer


register(torch.optim.Optimizer, lambda optimizer: optimizer.state_dict(), load_optimizer)


def is_share(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is the one of a rank's share in a :class:`ShardedOptimizer`."""
    return optimizer in _SHARES


def _is_updated(parameter: torch.Tensor) -> bool:
    """Return whether an optimizer may update a parameter: a gradient is enough for it."""
    return parameter.requires_grad or parameter.grad is not None


def _refuse_mixing(make: Callable[..., torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
    """Check that an optimizer needs no closure, and treats each parameter by itself.

    It makes two steps with a small parameter, with and without a second one whose gradient is
    large. An optimizer that refuses such parameters is not checked.
    """
    options = {key: value for key, value in _options(group).items() if key != "param_names"}
    updated, name = [], "The optimizer"
    for count in (1, 2):
        parameters = [torch.ones(2, 2, device="cpu", requires_grad=True) for _ in range(count)]
        try:
            optimizer = make([{**options, "params": parameters}])
            name = type(optimizer).__name__
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is closure.empty:
                raise TypeError("closure")
            with torch.random.fork_rng(devices=[]):
                for _ in range(2):
                    torch.default_generator.manual_seed(0)
                    for parameter, size in zip(parameters, (1.0, 1e6)):
                        parameter.grad = torch.full_like(parameter, size)
                    optimizer.step()
        except Exception as error:
            if "closure" not in str(error):
                return
            raise UnsupportedError(
                f"ShardedOptimizer: {name} needs a closure for its step, which evaluates the loss "
                "with parameters of other ranks. Use it without ShardedOptimizer."
            ) from None
        updated.append(parameters[0].detach())
    if not torch.allclose(updated[0], updated[1], rtol=1e-3):
        raise UnsupportedError(
            f"ShardedOptimizer: {name} updates a parameter by the gradients of other parameters, "
            "and each rank has only its share of them. Use it without ShardedOptimizer, or clip "
            "the gradients before step()."
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _take_options(groups: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for group, other in zip(groups, others):
        group.update(_options(other))
