"""An optimizer whose state is spread over the ranks: stage 1 of ZeRO.

Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory optimizations toward training trillion parameter
models", SC 2020: gradients and parameters stay whole on each rank, and each updates a share of
the parameters, of which alone it keeps the optimizer's state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from collective.contract.copying import NotCopied
from collective.errors import InvalidArgumentError, MismatchError, StateLostError
from collective.training import shards

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["ShardedOptimizer"]

_Base: Any = torch.optim.Optimizer


class ShardedOptimizer(NotCopied, _Base):  # type: ignore[misc]  # torch's is not typed
    """An optimizer of which each rank keeps and does its share.

    Gradients have to be the same on all ranks when :meth:`step` is called, as
    :class:`DistributedDataParallel` leaves them; the parameters are the same afterwards. It is
    for optimizers that treat each parameter by itself: SGD, Adam, Adagrad, …, not LBFGS.

    Args:
        parameters: as for any optimizer: parameters or groups of them, the same on all ranks.
        optimizer: the class of what is spread.
        comm: connects the ranks.
        copies: how many ranks have each share of the state at a
            :meth:`collective.elastic.State.commit`: its own and those after it. With 1 a lost
            rank's share is lost.
        defaults: what the class takes besides.

    Raises:
        MismatchError: the ranks' parameters differ.

    See Also:
        torch.distributed.optim.ZeroRedundancyOptimizer.
    """

    instead = "Take its state_dict(), on all ranks, and load it into one for the other parameters."

    def __init__(
        self,
        parameters: Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer],
        comm: Communicator,
        *,
        copies: int = 1,
        **defaults: Any,
    ) -> None:
        if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
            raise InvalidArgumentError(f"ShardedOptimizer: copies {copies!r}; 1 or more.")
        self._comm = comm
        self._copies = copies
        self._made = functools.partial(optimizer, **defaults)
        self._has_state = False  # on any rank
        self._local: torch.optim.Optimizer | None = None
        super().__init__(list(parameters), dict(defaults))
        self._agree()
        self._share_out()

    def _share_out(self) -> None:
        """Give each parameter an owner, and make the optimizer of this rank's share."""
        self._owners: dict[Any, int] = {}
        self._loads = [0] * self._comm.size  # elements of each rank's share
        shares = [self._shared(group) for group in self.param_groups]
        # A class that wants at least one parameter gets one that it never sees a gradient of.
        self._nothing = torch.zeros(0, requires_grad=True)
        if not any(share["params"] for share in shares):
            shares[0]["params"] = [self._nothing]
        self._local = self._made(shares)
        # The class's own defaults, too: a scheduler sees these groups alone.
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
            local.update(_options(group))
        self._local.step()
        self._has_state = True
        self._exchange()
        return loss

    @torch.no_grad()
    def _exchange(self) -> None:
        """Give every rank the parameters that others have updated: one message a type."""
        every = list(self._numbers())
        for dtype in dict.fromkeys(p.dtype for p in every):
            owned: list[list[Any]] = [[] for _ in range(self._comm.size)]
            for parameter in every:
                if parameter.dtype is dtype and parameter.requires_grad:
                    owned[self._owners[parameter]].append(parameter)
            counts = [sum(p.numel() for p in share) for share in owned]
            mine = owned[self._comm.rank]
            nothing = every[0].new_empty(0, dtype=dtype)  # torch.cat takes no empty list
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
        every = self._comm.all_gather_object(self._share(_to_host), pickle=True)
        state = {number: kept for part in every for number, kept in part.items()}
        return {"state": dict(sorted(state.items())), "param_groups": self._groups()}

    def _share(self, copied: Callable[[Any], Any]) -> dict[int, dict[str, Any]]:
        """Return copies of what this rank has of the state, by the parameters' numbers."""
        assert self._local is not None
        numbers = self._numbers()
        return {
            numbers[parameter]: {key: copied(value) for key, value in state.items()}
            for parameter, state in self._local.state.items()
            if parameter in numbers
        }

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
            group.update(_options(kept))
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
        self._has_state = bool(state_dict["state"])

    # -- losses of ranks ------------------------------------------------------------------

    def keep_shards(self) -> dict[str, Any]:
        """Return this rank's share of the state and copies of others'; nobody's memory.

        Collective: every rank calls it, as :meth:`collective.elastic.State.commit` does.
        """
        return {
            "held": shards.with_copies(self._comm, self._share(_copy), self._copies),
            "rank": self._comm.rank,
            "size": self._comm.size,
            "owners": [self._owners[parameter] for parameter in self._numbers()],
            "groups": self._groups(),
            "has_state": self._has_state,
        }

    def restore_shards(self, kept: dict[str, Any]) -> None:
        """Make this rank's share of the state what it was when it was kept."""
        self._load(kept["held"][kept["rank"]], kept)

    def regain_shards(self, comm: Communicator, kept: dict[str, Any] | None) -> None:
        """Share out what the ranks of another communicator hold of the state.

        Collective: every rank of ``comm`` calls it, as :meth:`collective.elastic.State.sync` does.

        Args:
            comm: the ranks.
            kept: what :meth:`keep_shards` has returned; None of a rank that holds nothing.

        Raises:
            StateLostError: the share of a lost rank is on no other; names its parameters.
        """
        known = kept and {name: value for name, value in kept.items() if name != "held"}
        every = comm.all_gather_object(known)
        if kept is None:
            kept = {**next(each for each in every if each is not None), "held": {}}
        giver = shards.givers(comm, kept["held"])
        lost = [number for number, owner in enumerate(kept["owners"]) if owner not in giver]
        if lost and kept["has_state"]:
            names = [self._name(number) for number in lost]
            listed = ", ".join(names[:10]) + f" and {len(names) - 10} more" * (len(names) > 10)
            gone = sorted(set(range(kept["size"])) - set(giver))
            raise StateLostError(
                f"ShardedOptimizer: the state of {listed} was on ranks {gone} alone, which are "
                f"lost [rank {comm.rank} of {comm.size}]. Pass copies={len(gone) + 1} or more to "
                "outlive such a loss; now start all ranks again, from a checkpoint."
            )
        self._comm = comm
        self._share_out()
        owners = [self._owners[parameter] for parameter in self._numbers()]
        self._load(shards.shared_out(comm, kept["held"], giver, owners), kept)

    def _load(self, states: Mapping[int, Any], kept: dict[str, Any]) -> None:
        # An optimizer takes the tensors of a state as its own and changes them in place, and what
        # was kept may have to be gone back to once more.
        own = {
            number: {key: _copy(value) for key, value in state.items()}
            for number, state in states.items()
        }
        self.load_state_dict({"state": own, "param_groups": kept["groups"]})
        self._has_state = kept["has_state"]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups as a state has them: parameters by their numbers."""
        numbers = self._numbers()
        return [
            {**_options(group), "params": [numbers[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]

    def _name(self, number: int) -> str:
        """Return a parameter's name, where the optimizer was given names, or what tells it."""
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if len(names) == len(self._owners):
            return str(names[number])
        parameter = list(self._numbers())[number]
        return f"parameter {number} {list(parameter.shape)}"

    def _numbers(self) -> dict[Any, int]:
        every = [p for group in self.param_groups for p in group["params"]]
        return {parameter: number for number, parameter in enumerate(every)}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _to_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
