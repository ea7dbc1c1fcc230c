"""Backward passes of virtual shards: one after the other, then one reduction for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from collective.shards import ShardFold, Shards

from .buckets import Bucket
from .gradients import copied

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.contract.work import Work

__all__ = ["ShardPasses", "StateFold"]


class ShardPasses:
    """Function that reduces buckets of gradients over the shards of all ranks.

    Each backward pass computes the gradients of one shard. The function adds a full bucket to a
    :class:`~collective.shards.ShardFold`. In the pass of this rank's last shard it also starts the
    reduction of the bucket over the ranks, while later buckets are still computed.

    Args:
        total: number of shards.
        comm: communicator that connects the ranks.

    Attributes:
        comm, shards: the communicator, and the division of the shards among its ranks.
        is_last: whether the present pass is that of this rank's last shard. A rank without shards
            has only such passes.
        running: whether the passes of a step are under way.
    """

    def __init__(self, total: int, comm: Communicator) -> None:
        self._total = total
        self.rebind(comm)

    def rebind(self, comm: Communicator) -> None:
        """Divide the shards anew, among the ranks of another communicator."""
        self.comm = comm
        self.shards = Shards(self._total, comm)
        self._folds: dict[tuple[int, int, str], ShardFold] = {}
        self.begin()

    def begin(self) -> None:
        """Begin the passes of a step, and forget those of a step that was abandoned."""
        for fold in self._folds.values():
            fold.clear()
        self.is_last = True
        self.running = False

    def __iter__(self) -> Iterator[int]:
        """Yield the shards of this rank, and set ``is_last`` before each of them."""
        self.begin()
        self.running = True
        try:
            for shard in self.shards.mine:
                self.is_last = shard == self.shards.mine[-1]
                yield shard
        finally:
            self.running = False

    def __call__(self, bucket: Bucket) -> Work[Any] | None:
        """Add a bucket to its fold; in the last pass also start its reduction."""
        # The buckets are laid out again after the first step.
        key = bucket.index, len(bucket.array), str(bucket.array.dtype)
        fold = self._folds.get(key)
        if fold is None:
            fold = self._folds[key] = ShardFold(self.shards, "avg", like=bucket.array)
        if self.shards.mine:
            fold.add(bucket.array)
        if not self.is_last:
            return None
        # The caller waits for the last bucket anyway: see Gradients.average.
        work: Work[Any] = self.comm.all_reduce(
            fold, op="avg", order=self.shards, out=bucket.array, async_op=not bucket.is_last
        )
        return None if bucket.is_last else work


class StateFold:
    """Arrays that the forward passes change, such as the running statistics of batch normalisation.

    The forward pass of every shard begins with the values from before the step. After the step
    floating-point arrays are the average over all shards, and integers the maximum. So they do not
    depend on which rank computed a shard, nor on how many shards a rank computed.

    Args:
        passes: passes of the shards.
        arrays: the arrays of one framework; they are changed in place.
        stack: function of the framework that joins arrays of one shape along a new first axis.
    """

    def __init__(
        self, passes: ShardPasses, arrays: Sequence[Any], stack: Callable[[list[Any]], Any]
    ) -> None:
        self._passes = passes
        self._arrays = arrays
        self._stack = stack
        self._before = [copied(array) for array in arrays]
        self._after: list[list[Any]] = [[] for _ in arrays]

    def restore(self) -> None:
        """Set the arrays to their values from before the step."""
        for array, before in zip(self._arrays, self._before):
            array[...] = before

    def add(self) -> None:
        """Keep the arrays as the forward pass of a shard has left them."""
        for array, after in zip(self._arrays, self._after):
            after.append(copied(array))

    def reduce(self) -> None:
        """Set the arrays to their fold over all shards. Collective."""
        averaged = ["float" in str(a.dtype) or "complex" in str(a.dtype) for a in self._arrays]
        for op, members in (("avg", averaged), ("max", [not floating for floating in averaged])):
            chosen = [nth for nth, member in enumerate(members) if member]
            if not chosen:
                continue
            # A rank without shards passes tables without rows.
            tables = [
                self._stack([*self._after[n], self._before[n]])[: len(self._after[n])]
                for n in chosen
            ]
            folded = self._passes.comm.all_reduce(tables, op=op, order=self._passes.shards)
            for nth, value in zip(chosen, folded):
                self._arrays[nth][...] = value
