"""An optimizer whose state is spread over the ranks: stage 1 of ZeRO.

Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory optimizations toward training trillion parameter
models", SC 2020: gradients and parameters stay whole on each rank, and each updates a share of
the parameters, of which alone it keeps the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from collective.errors import InvalidArgumentError, MismatchError
from collective.training import shards

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["ShardedOptimizer"]

_Base: Any = torch.optim.Optimizer


class ShardedOptimizer(_Base):  # type: ignore[misc]  # torch's is not typed
    """An optimizer of which each rank keeps and does its share.

    Gradients have to be the same on all ranks when :meth:`step` is called, as
    :class:`DistributedDataParallel` leaves them; the parameters are the same afterwards. It is
    for optimizers that treat each parameter by itself: SGD, Adam, Adagrad, …, not LBFGS.

    Args:
        parameters: as for any optimizer: parameters or groups of them, the same on all ranks.
        optimizer: the class of what is spread.
        comm: connects the ranks.
        defaults: what the class takes besides.

    Raises:
        MismatchError: the ranks' parameters differ.

    See Also:
        torch.distributed.optim.ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer],
        comm: Communicator,
        **defaults: Any,
    ) -> None:
        self._comm = comm
        self._local: torch.optim.Optimizer | None = None
        self._owners: dict[Any, int] = {}
        self._loads = [0] * comm.size  # elements of each rank's share
        super().__init__(list(parameters), dict(defaults))
        self._agree()
        shares = [self._shared(group) for group in self.param_groups]
        # A class that wants at least one parameter gets one that it never sees a gradient of.
        self._nothing = torch.zeros(0, requires_grad=True)
        if not any(share["params"] for share in shares):
            shares[0]["params"] = [self._nothing]
        self._local = optimizer(shares, **defaults)
        for group, local in zip(self.param_groups, self._local.param_groups):
            for key, value in local.items():
                group.setdefault(key, value)

    def _agree(self) -> None:
        """Refuse parameters that are not the same on all ranks."""
        mine = [
            [[list(p.shape), str(p.dtype)] for p in group["params"]] for group in self.param_groups
        ]
        every = self._comm.all_gather_object(mine)
        for rank, theirs in enumerate(every):
            if theirs != every[0]:
                raise MismatchError(
                    f"ShardedOptimizer: rank {rank} has other parameters than rank 0 "
                    f"[rank {self._comm.rank} of {self._comm.size}]. Pass the same on all ranks, "
                    "in the same order."
                )

    def _shared(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with this rank's share of its parameters, once all have owners."""
        every = group["params"]
        self._owners.update(zip(every, shards.owners([p.numel() for p in every], self._loads)))
        mine = [p for p in every if self._owners[p] == self._comm.rank]
        return {**group, "params": mine}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, on all ranks alike."""
        super().add_param_group(param_group)
        if self._local is not None:
            self._local.add_param_group(self._shared(self.param_groups[-1]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share of the parameters, and get the others' from their owners.

        Collective: every rank calls it.

        Args:
            closure: computes the loss anew and returns it; called once, before the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._local is not None
        for group, local in zip(self.param_groups, self._local.param_groups):
            # Schedulers write to ours.
            local.update({key: value for key, value in group.items() if key != "params"})
        self._local.step()
        self._exchange()
        return loss

    @torch.no_grad()
    def _exchange(self) -> None:
        """Give every rank the parameters that others have updated: one message a type."""
        every = [p for group in self.param_groups for p in group["params"]]
        for dtype in dict.fromkeys(p.dtype for p in every):
            owned: list[list[Any]] = [[] for _ in range(self._comm.size)]
            for parameter in every:
                if parameter.dtype is dtype and parameter.requires_grad:
                    owned[self._owners[parameter]].append(parameter)
            counts = [sum(p.numel() for p in share) for share in owned]
            mine = owned[self._comm.rank]
            nothing = every[0].new_empty(0, dtype=dtype)
            packed = torch.cat([nothing, *(p.detach().reshape(-1) for p in mine)])
            whole = self._comm.all_gather(packed, counts=counts)
            start = 0
            for owner, share in enumerate(owned):
                for parameter in share:
                    stop = start + parameter.numel()
                    if owner != self._comm.rank:
                        parameter.copy_(whole[start:stop].view_as(parameter))
                    start = stop

    # -- checkpoints ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the class itself would have it on one rank.

        Collective: every rank calls it, and gets all of it on the CPU.
        """
        assert self._local is not None
        numbers = self._numbers()
        mine = {
            numbers[parameter]: {key: _to_host(value) for key, value in state.items()}
            for parameter, state in self._local.state.items()
            if parameter in numbers
        }
        every = self._comm.all_gather_object(mine, pickle=True)
        state = {number: kept for part in every for number, kept in part.items()}
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [numbers[parameter] for parameter in group["params"]],
            }
            for group in self.param_groups
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a whole state, of this class or the one that is spread, on any ranks.

        Raises:
            InvalidArgumentError: its groups have other numbers of parameters.
        """
        assert self._local is not None
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        mine = [len(group["params"]) for group in self.param_groups]
        if given != mine:
            raise InvalidArgumentError(
                f"ShardedOptimizer: a state of groups of {given} parameters; these are of {mine}."
            )
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        numbers = {number: parameter for parameter, number in self._numbers().items()}
        of_name = {name: numbers[index] for index, name in enumerate(names)}
        for group, kept in zip(self.param_groups, state_dict["param_groups"]):
            group.update({key: value for key, value in kept.items() if key != "params"})
        local = self._local.state_dict()
        places: dict[Any, int] = {}
        for group, packed in zip(self._local.param_groups, local["param_groups"]):
            places.update(zip(group["params"], packed["params"]))
        local["state"] = {
            places[of_name[name]]: state
            for name, state in state_dict["state"].items()
            if of_name[name] in places
        }
        self._local.load_state_dict(local)

    def _numbers(self) -> dict[Any, int]:
        every = [p for group in self.param_groups for p in group["params"]]
        return {parameter: number for number, parameter in enumerate(every)}


def _to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
