"""Samples of each rank: shards of a dataset, and an iterator over the whole dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective import InvalidArgumentError, MismatchError
from collective.inner import comm_or_current, refuses, shares

if TYPE_CHECKING:
    from collective import Communicator

_Iterator: Any = chainer.dataset.Iterator
#: Arguments of ChainerMN's scatter_dataset, and what to write instead.
_CHAINERMNS = {
    "force_equal_length": "use padded=",
    "max_buf_len": "leave it out: no samples are sent",
    "root": "leave it out: every rank passes the dataset",
}


@refuses(_CHAINERMNS)
def scatter_dataset(
    dataset: Any,
    comm: Communicator | None = None,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    padded: bool = False,
) -> Any:
    """Return this rank's shard of a dataset that every rank has.

    No sample is sent: the ranks agree on a seed, and each rank takes its indices. Orders and shards
    are those of ``chainermn.scatter_dataset`` with the same seed.

    By default each sample is in one shard, once. The first shards may be longer by one, so that
    their epochs end in other steps than those of the other shards. With ``padded=True``
    neighbouring shards share samples until all are equally long, which is ChainerMN's default.

    For training, a :class:`ShardedIterator` over the whole dataset is exact, and all ranks stay in
    step.

    Collective: every rank calls it.

    Args:
        dataset: object with a length, and samples by index; the same on every rank.
        comm: ranks that take part; None: those of the current communicator.
        shuffle: whether to permute the samples before they are divided.
        seed: seed of the permutation, below 2**32; rank 0's seed is used. None: a new seed for each
            call.
        padded: whether to repeat samples.

    Returns:
        A ``chainer.datasets.SubDataset``.

    Raises:
        MismatchError: the ranks' datasets differ in length, their options differ, or a rank has no
            dataset.
    """
    comm = comm_or_current(comm, "scatter_dataset")
    length = None if dataset is None else len(dataset)
    drawn = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    every = comm.all_gather_object([length, bool(shuffle), bool(padded), drawn])
    for rank, theirs in enumerate(every):
        if theirs[:3] != every[0][:3] or theirs[0] is None:
            lengths = ["no dataset" if n is None else f"{n} samples" for n, *_ in every]
            raise MismatchError(
                f"scatter_dataset: the ranks' datasets or options differ: rank {rank} has "
                f"{lengths[rank]}, shuffle={theirs[1]}, padded={theirs[2]}, but rank 0 has "
                f"{lengths[0]}, shuffle={every[0][1]}, padded={every[0][2]} [rank {comm.rank} of "
                f"{comm.size}]. Open the same dataset on every rank, because only indices are "
                "shared out."
            )
    assert length is not None
    order = np.random.RandomState(every[0][3]).permutation(length) if shuffle else None
    mine = shares.block(length, comm.rank, comm.size, padded)
    return chainer.datasets.SubDataset(dataset, mine.start, mine.stop, order)


class ShardedIterator(_Iterator):  # type: ignore[misc, unused-ignore]
    """Iterator over the batches of all ranks together; each rank loads its part of a batch.

    The ranks go through the whole dataset in the same order, in steps of ``size × batch_size``
    samples. Rank r takes every size-th of a step's samples, starting with sample r. Each sample
    comes once in an epoch. Epochs begin and end in the same step on all ranks, whatever the length
    of the dataset. As with ``SerialIterator``, a batch at the end of an epoch is filled from the
    next epoch if ``repeat`` is true, and is short otherwise. A rank without a sample in a short
    batch ends one step earlier.

    The order depends only on seed and epoch. So the state is the same on all ranks, and is valid
    for any number of ranks. Training that resumes with more ranks continues with the remaining
    samples of the epoch.

    Args:
        dataset: object with a length, and samples by index; the same on every rank.
        batch_size: number of samples in a batch of one rank.
        comm_or_rank_size: communicator, or a tuple of rank and size; None: the current
            communicator.
        repeat: whether to continue after the first epoch.
        shuffle: whether to permute the samples, in a new order for each epoch.
        seed: seed of the permutations, the same on all ranks.

    Attributes:
        dataset, batch_size, repeat, shuffle, seed: arguments of the constructor.
        epoch: number of complete epochs.
        is_new_epoch: whether the last batch has completed an epoch.
        current_position: number of samples of the epoch that all ranks together have taken.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        comm_or_rank_size: Communicator | tuple[int, int] | None = None,
        *,
        repeat: bool = True,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        rank, size = shares.rank_and_size("ShardedIterator", comm_or_rank_size)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InvalidArgumentError(
                f"ShardedIterator: batch_size is {batch_size!r} (expected a positive integer)."
            )
        if repeat and not len(dataset):
            raise InvalidArgumentError(
                "ShardedIterator: an empty dataset needs repeat=False, as no batch could be filled."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.repeat = repeat
        self.shuffle = shuffle
        self.seed = seed
        self._rank, self._size = rank, size
        self._known: tuple[int, Any] = -1, None  # an epoch, and the order of its samples
        self.reset()

    def reset(self) -> None:
        """Start again with the first epoch."""
        self.epoch = 0
        self.is_new_epoch = False
        self.current_position = 0
        self._previous_epoch_detail = -1.0

    def reshard(self, comm_or_rank_size: Communicator | tuple[int, int], consumed: int) -> None:
        """Divide the rest of the current epoch among other ranks, from the next batch on.

        Args:
            comm_or_rank_size: new ranks, in the form that the constructor takes.
            consumed: number of samples of the epoch that all ranks together have used, the same on
                all of them.

        Raises:
            RankError: the rank is not from 0 to ``size - 1``.
            InvalidArgumentError: ``consumed`` is negative, or an epoch has fewer samples.
        """
        rank, size = shares.rank_and_size("reshard", comm_or_rank_size)
        if not 0 <= consumed <= max(0, len(self.dataset) - 1):
            raise InvalidArgumentError(
                f"reshard: consumed is {consumed} (expected 0 to {max(0, len(self.dataset) - 1)}). "
                "Pass the number of samples that the ranks have used of the current epoch."
            )
        self._rank, self._size = rank, size
        self.current_position = consumed

    def rebind(self, comm: Communicator) -> None:
        """Continue at the current position, among other ranks."""
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
            turns = shares.turns(self.current_position, stop, self._rank, self._size, taken)
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
        """Number of epochs, including the finished part of the current one."""
        return self.epoch + self.current_position / max(len(self.dataset), 1)

    @property
    def previous_epoch_detail(self) -> float | None:
        """Value of ``epoch_detail`` before the last batch; None before the first batch."""
        return None if self._previous_epoch_detail < 0 else self._previous_epoch_detail

    def serialize(self, serializer: Any) -> None:
        """Write or read the position of this iterator.

        Raises:
            InvalidArgumentError: the state to read belongs to another dataset or another order. The
                iterator is unchanged.
        """
        names = "length", "seed", "shuffle"
        mine = (len(self.dataset), self.seed, self.shuffle)
        read = tuple(int(serializer(name, int(value))) for name, value in zip(names, mine))
        if read != tuple(map(int, mine)):
            listed = ", ".join(f"{n} {a}" for n, a in zip(names, read))
            raise InvalidArgumentError(
                f"ShardedIterator: a state with {listed} does not fit this iterator, which has "
                f"{', '.join(f'{n} {int(a)}' for n, a in zip(names, mine))}. A position in another "
                "order is meaningless: use the same dataset, seed and shuffle."
            )
        self.current_position = int(serializer("current_position", self.current_position))
        self.epoch = int(serializer("epoch", self.epoch))
        self.is_new_epoch = bool(serializer("is_new_epoch", self.is_new_epoch))
        self._previous_epoch_detail = float(
            serializer("previous_epoch_detail", self._previous_epoch_detail)
        )
