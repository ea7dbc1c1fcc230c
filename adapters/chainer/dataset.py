"""Which samples a rank takes: shards of a dataset, and an iterator over all of it together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective.errors import InvalidArgumentError, MismatchError
from collective.training import shards

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["ShardedIterator", "scatter_dataset"]

_Iterator: Any = chainer.dataset.Iterator


def scatter_dataset(
    dataset: Any,
    comm: Communicator,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    padded: bool = False,
) -> Any:
    """Return this rank's shard of a dataset that every rank has.

    No sample is sent: the ranks agree on a seed, and each takes its indices. Orders and shards
    are those of ``chainermn.scatter_dataset`` with the same seed.

    As it is, each sample is in one shard, once; the first ones may be longer by one, so that
    their epochs end in other steps than those of the rest. With ``padded=True`` neighbouring
    shards share samples until all are equally long, as ChainerMN has it by default.

    For training, a :class:`ShardedIterator` over the whole dataset is exact and in step.

    Collective: every rank calls it.

    Args:
        dataset: what has a length, and samples by index; the same on every rank.
        shuffle: whether to permute the samples before they are divided.
        seed: of the permutation, below 2**32; rank 0's counts. None for another one each time.
        padded: whether to repeat samples.

    Returns:
        A ``chainer.datasets.SubDataset``.

    Raises:
        InvalidArgumentError: there is no dataset; on this rank.
        MismatchError: the ranks' datasets differ in length, or their options do.
    """
    length = None if dataset is None else len(dataset)
    drawn = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    every = comm.all_gather_object([length, bool(shuffle), bool(padded), drawn])
    for rank, theirs in enumerate(every):
        if theirs[:3] != every[0][:3] or theirs[0] is None:
            lengths = ["no dataset" if n is None else f"{n} samples" for n, *_ in every]
            raise MismatchError(
                f"scatter_dataset: rank {rank} has {lengths[rank]}, shuffle={theirs[1]}, "
                f"padded={theirs[2]}; rank 0 {lengths[0]}, shuffle={every[0][1]}, "
                f"padded={every[0][2]} [rank {comm.rank} of {comm.size}]. Open the same dataset on "
                "every rank, as only indices are shared out."
            )
    assert length is not None
    order = np.random.RandomState(every[0][3]).permutation(length) if shuffle else None
    mine = shards.block(length, comm.rank, comm.size, padded)
    return chainer.datasets.SubDataset(dataset, mine.start, mine.stop, order)


class ShardedIterator(_Iterator):  # type: ignore[misc, unused-ignore]
    """Batches of all ranks together, of which each rank loads its part.

    The ranks go through one order of the whole dataset, in steps of ``size × batch_size``
    samples; rank r takes every size-th of a step's samples, from r on. Each sample comes once an
    epoch, and epochs begin and end in the same step on all ranks, whatever the length. As with
    ``SerialIterator``, a batch at the end of an epoch is filled from the next one if ``repeat``,
    and short otherwise; a rank that gets nothing of it is through one step earlier.

    The order depends on seed and epoch alone. So the state, which is the same on all ranks,
    holds for any number of them: training that is resumed with more ranks goes on with the
    samples that are left of the epoch.

    Args:
        dataset: what has a length, and samples by index; the same on every rank.
        batch_size: of one rank.
        comm_or_rank_size: a communicator, of which rank and size are taken, or these two.
        repeat: whether to go on after the first epoch.
        shuffle: whether to permute the samples, anew for each epoch.
        seed: of the permutations, the same on all ranks.

    Attributes:
        dataset, batch_size, repeat, shuffle, seed: as given.
        epoch: how many are complete.
        is_new_epoch: whether the last batch has completed one.
        current_position: how many samples of the epoch all ranks together have taken.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        comm_or_rank_size: Communicator | tuple[int, int],
        *,
        repeat: bool = True,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        rank, size = shards.rank_and_size("ShardedIterator", comm_or_rank_size)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgumentError(
                f"ShardedIterator: batch_size {batch_size!r}; a positive integer."
            )
        if repeat and not len(dataset):
            raise InvalidArgumentError(
                "ShardedIterator: an empty dataset; allowed is that with repeat=False."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.repeat = repeat
        self.shuffle = shuffle
        self.seed = seed
        self._rank, self._size = rank, size
        self._known: tuple[int, Any] = -1, None  # the order of an epoch
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the first epoch."""
        self.epoch = 0
        self.is_new_epoch = False
        self.current_position = 0
        self._previous_epoch_detail = -1.0

    def reshard(self, comm_or_rank_size: Communicator | tuple[int, int], consumed: int) -> None:
        """Share out the rest of the epoch under way anew, from the next batch on.

        Args:
            comm_or_rank_size: the ranks that are left, as when the iterator was made.
            consumed: how many samples of the epoch all ranks together have done with, the same
                on all of them.

        Raises:
            RankError: the rank is not one from 0 to ``size - 1``.
            InvalidArgumentError: an epoch has not so many samples.
        """
        rank, size = shards.rank_and_size("reshard", comm_or_rank_size)
        if not 0 <= consumed <= max(0, len(self.dataset) - 1):
            raise InvalidArgumentError(
                f"reshard: consumed {consumed}; from 0 to {max(0, len(self.dataset) - 1)} of the "
                "epoch under way."
            )
        self._rank, self._size = rank, size
        self.current_position = consumed

    def rebind(self, comm: Communicator) -> None:
        """Go on from where this iterator is among other ranks."""
        self.reshard(comm, self.current_position)

    def __next__(self) -> list[Any]:
        length = len(self.dataset)
        if not self.repeat and self.epoch > 0:
            raise StopIteration
        previous = self.epoch_detail
        mine, taken, wanted = [], 0, self.batch_size * self._size
        self.is_new_epoch = False
        while taken < wanted:
            step = min(wanted - taken, length - self.current_position)
            stop = self.current_position + step
            turns = shards.turns(self.current_position, stop, self._rank, self._size, taken)
            mine.extend(self._order()[turns.start : turns.stop : turns.step])
            taken += step
            self.current_position = stop
            if self.current_position < length:
                continue
            self.epoch += 1
            self.is_new_epoch = True
            self.current_position = 0
            if not self.repeat:
                break
        self._previous_epoch_detail = previous
        if not mine:
            raise StopIteration
        return [self.dataset[int(index)] for index in mine]

    next = __next__

    def _order(self) -> Any:
        if self._known[0] != self.epoch:
            order = np.arange(len(self.dataset))
            if self.shuffle:
                order = np.random.default_rng((self.seed, self.epoch)).permutation(order)
            self._known = self.epoch, order
        return self._known[1]

    @property
    def epoch_detail(self) -> float:
        """Epochs, with the part of the one under way."""
        return self.epoch + self.current_position / max(len(self.dataset), 1)

    @property
    def previous_epoch_detail(self) -> float | None:
        """The same before the last batch; None before the first."""
        return None if self._previous_epoch_detail < 0 else self._previous_epoch_detail

    def serialize(self, serializer: Any) -> None:
        """Write or read where this iterator is.

        Raises:
            InvalidArgumentError: the state read is of another dataset or another order; nothing
                is changed.
        """
        names = "length", "seed", "shuffle"
        mine = (len(self.dataset), self.seed, self.shuffle)
        read = tuple(int(serializer(name, int(value))) for name, value in zip(names, mine))
        if read != tuple(map(int, mine)):
            listed = ", ".join(f"{n} {a}" for n, a in zip(names, read))
            raise InvalidArgumentError(
                f"ShardedIterator: a state with {listed}; this one has "
                f"{', '.join(f'{n} {int(a)}' for n, a in zip(names, mine))}. A position in another "
                "order means nothing."
            )
        self.current_position = int(serializer("current_position", self.current_position))
        self.epoch = int(serializer("epoch", self.epoch))
        self.is_new_epoch = bool(serializer("is_new_epoch", self.is_new_epoch))
        self._previous_epoch_detail = float(
            serializer("previous_epoch_detail", self._previous_epoch_detail)
        )
