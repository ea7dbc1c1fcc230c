"""Updater for a Trainer in several processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import chainer

from collective.errors import InvalidArgumentError, MismatchError, UnsupportedError
from collective.start.session import comm_or_current

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["MultiNodeUpdater"]

_Updater: Any = chainer.training.updaters.StandardUpdater


class MultiNodeUpdater(_Updater):  # type: ignore[misc, unused-ignore]
    """``StandardUpdater`` on every rank, in step with the other ranks.

    Each rank makes a Trainer with the same extensions. Exceptions are extensions that only print or
    write (reports, plots, progress bars): these belong on rank 0 only, because they need no peer.
    Evaluators and snapshots of this package belong on all ranks, with the same triggers.

    Triggers by epoch have to fire in the same step on all ranks. Otherwise extensions would wait
    for peers that do not run them. So iterators over shards of different lengths are refused.

    Collective: every rank makes it, and calls ``update`` equally often.

    Args:
        iterator, options: those of ``StandardUpdater``.
        optimizer: result of :func:`create_multi_node_optimizer`, or a dictionary of such
            optimizers.
        comm: communicator that connects the ranks; None: the current one.
        mean_observations: if true, each number that a step reports is the mean over the ranks
            instead of this rank's own; this costs one message a step.

    Raises:
        InvalidArgumentError: an optimizer is not wrapped by :func:`create_multi_node_optimizer`.
        UnsupportedError: an optimizer has virtual shards.
        MismatchError: the ranks' iterators would not stay in step; every rank raises it.
    """

    def __init__(
        self,
        iterator: Any,
        optimizer: Any,
        comm: Communicator | None = None,
        *,
        mean_observations: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(iterator, optimizer, **options)
        self.comm = comm_or_current(comm, "MultiNodeUpdater")
        self.mean_observations = mean_observations
        for name, wrapped in self.get_all_optimizers().items():
            if isinstance(wrapped, chainer.Optimizer):
                raise InvalidArgumentError(
                    f"MultiNodeUpdater: optimizer {name!r} is a {type(wrapped).__name__} that "
                    "steps by itself, so the ranks' models would diverge. Wrap it by "
                    "create_multi_node_optimizer()."
                )
            if getattr(wrapped, "shards", None) is not None:
                raise UnsupportedError(
                    f"MultiNodeUpdater: optimizer {name!r} has shards, whose samples do not come "
                    "from an iterator on each rank. Call its update(lossfun) in a loop, with "
                    "collective.ShardBatches."
                )
        self._hold_in_step()

    def _hold_in_step(self) -> None:
        mine = {}
        for name, iterator in sorted(self._iterators.items()):
            dataset: Any = getattr(iterator, "dataset", None)
            length = len(dataset) if hasattr(dataset, "__len__") else None
            mine[name] = [length, getattr(iterator, "batch_size", None)]
        every = self.comm.all_gather_object(mine)
        for rank, theirs in enumerate(every):
            for name in sorted(theirs.keys() | every[0].keys()):
                here, there = theirs.get(name), every[0].get(name)
                if here == there:
                    continue
                described = [
                    "no such iterator"
                    if entry is None
                    else f"{entry[0]} samples, batches of {entry[1]}"
                    for entry in (here, there)
                ]
                raise MismatchError(
                    f"MultiNodeUpdater: iterator {name!r} of rank {rank}: {described[0]}; rank 0: "
                    f"{described[1]} [rank {self.comm.rank} of {self.comm.size}]. Their epochs "
                    "would end in different steps: use a ShardedIterator, or "
                    "scatter_dataset(padded=True)."
                )

    def rebind(self, comm: Communicator) -> None:
        """Continue among other ranks; iterators and optimizers are rebound separately."""
        self.comm = comm

    def update_core(self) -> None:
        """Make a step; every rank calls it."""
        super().update_core()
        if self.mean_observations:
            self._average()

    def _average(self) -> None:
        observation = chainer.reporter.get_current_reporter().observation
        mine = {}
        for name, value in observation.items():
            if isinstance(value, chainer.Variable):
                value = value.array
            if isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0:
                mine[name] = float(value)
        every = self.comm.all_gather_object(mine)
        for name in mine:
            # A rank may report nothing for a branch that it has not taken.
            values = [theirs[name] for theirs in every if name in theirs]
            observation[name] = math.fsum(values) / len(values)
