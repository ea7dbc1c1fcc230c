"""Backward passes of virtual shards: one after the other, then one reduction for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collective.shards import ShardFold, Shards

from .buckets import Bucket

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.contract.work import Work

__all__ = ["ShardPasses"]


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
