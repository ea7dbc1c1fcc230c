"""Division of samples among ranks, and batches that are on the device before they are needed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch

from collective import Communicator, InvalidArgumentError
from collective.inner import refuses, shares

_Sampler: Any = torch.utils.data.Sampler
#: Arguments of PyTorch's DistributedSampler, and what to write instead.
_TORCHS = {
    "dataset": "use dataset_or_length=",
    "num_replicas": "use comm_or_rank_size=(rank, num_replicas)",
    "rank": "use comm_or_rank_size=(rank, num_replicas)",
}


class ShardedSampler(_Sampler):  # type: ignore[misc, unused-ignore]
    """Indices of this rank's samples, for a ``DataLoader``.

    By default each sample belongs to exactly one rank. The ranks' lengths then differ by at most
    one, so the ranks may make different numbers of steps. Wrap such a training loop in ``join()``
    of ``DistributedDataParallel``; an evaluation loop should contain no collectives. With
    ``padded=True`` samples from the start are repeated until the lengths are equal, exactly as
    ``torch.utils.data.DistributedSampler`` does. With ``drop_last=True`` some samples at the end
    are dropped instead.

    Shuffling depends only on the seed and the epoch, not on the number of ranks.

    Args:
        dataset_or_length: dataset with a ``len()``, or the number of samples.
        comm_or_rank_size: communicator, whose rank and size are used, or a tuple of the two; None:
            the current communicator.
        shuffle: if true, each epoch has a new permutation of the samples.
        seed: seed of the permutations; the same on all ranks.
        padded: if true, samples are repeated until the ranks' lengths are equal.
        drop_last: if true, samples are dropped until the ranks' lengths are equal.

    Attributes:
        epoch: epoch from the last call of :meth:`set_epoch`, or from a loaded state.
        rank, size, seed, shuffle, padded, drop_last: values of the arguments.

    Raises:
        RankError: the rank is not from 0 to ``size - 1``.
        InvalidArgumentError: the length is no integer, or negative.
    """

    @refuses(_TORCHS)
    def __init__(
        self,
        dataset_or_length: Sized | int,
        comm_or_rank_size: Communicator | tuple[int, int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        padded: bool = False,
        drop_last: bool = False,
    ) -> None:
        rank, size = shares.rank_and_size("ShardedSampler", comm_or_rank_size)
        length = dataset_or_length
        if isinstance(length, Sized):
            length = len(length)
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InvalidArgumentError(
                f"ShardedSampler: {dataset_or_length!r} (expected a dataset with a len(), or a "
                "length). An iterable dataset has to divide its samples among the ranks itself."
            )
        self.rank, self.size = rank, size
        self.shuffle, self.seed = shuffle, seed
        self.padded, self.drop_last = padded, drop_last
        self.epoch = 0
        self._length = length
        # Positions in the samples of all ranks: the start of the next iteration, the start of the
        # current iteration, and the current iteration's progress.
        self._next = self._start = self._taken = 0

    def __len__(self) -> int:
        """Return the number of samples that this rank has in a whole epoch."""
        return len(shares.turns(0, self._dealt(), self.rank, self.size))

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's indices: the rest of the epoch after a load."""
        # The positions change here, not with the first sample, which loaders may take late.
        self._start = self._taken = self._next
        self._next = 0
        return self._indices(self._start)

    def _indices(self, start: int) -> Iterator[int]:
        order = self._order(start)
        for index in shares.turns(start, len(order), self.rank, self.size):
            # Samples are taken in rows of one sample per rank; the last row may be shorter.
            self._taken = min(self._taken + self.size, len(order))
            yield order[index]
        # The last row counts even if it had no sample for this rank.
        self._taken = max(self._taken, len(order))

    def _order(self, start: int) -> list[int]:
        """Return the samples of all ranks; from ``start`` on, the ranks take them in turn."""
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(
                self._length, generator=generator, device="cpu"
            ).tolist()
        else:
            order = list(range(self._length))
        total = start + self._dealt(start) if start < self._length else start
        return (order * -(-total // len(order)))[:total] if order else []

    def _dealt(self, start: int = 0) -> int:
        """Return the number of samples of all ranks from ``start`` to the end of the epoch."""
        return shares.dealt(self._length - start, self.size, self.padded, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which selects the permutation; call it before each epoch, on all ranks.

        A loaded position stays valid if ``epoch`` is the epoch of the loaded state.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._next = self._start = self._taken = 0

    def state_dict(self, taken: int | None = None) -> dict[str, int]:
        """Return the position of this sampler, from which a sampler can continue.

        Args:
            taken: number of samples of this iteration that this rank has used. By default the
                number that the sampler has yielded. With a ``DataLoader`` whose workers prefetch,
                that number is too large: pass ``batches * batch_size``.

        Returns:
            Plain numbers, the same on all ranks that have taken the same number of samples, so one
            rank's state is enough for all ranks. Without padding, another number of ranks can
            continue from the state as well.
        """
        done = self._taken if taken is None else self._start + taken * self.size
        return {"epoch": self.epoch, "seed": self.seed, "length": self._length, "taken": done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of a sampler: the next iteration is the rest of its epoch.

        Args:
            state: result of :meth:`state_dict`; it also sets the epoch and the seed.

        Raises:
            InvalidArgumentError: the state belongs to a dataset of another length; this sampler
                is not changed.
        """
        if state["length"] != self._length:
            raise InvalidArgumentError(
                f"load_state_dict: the state is for {state['length']} samples (expected "
                f"{self._length} samples, as in this sampler). Load a state of the same dataset."
            )
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._next = self._start = self._taken = state["taken"]

    def reshard(self, comm_or_rank_size: Communicator | tuple[int, int], consumed: int) -> None:
        """Divide the rest of the epoch again: the next iteration is this rank's part of the rest.

        Each remaining sample belongs to exactly one rank. With ``padded`` or ``drop_last`` the
        ranks' parts of the rest are made equally long, like those of a whole epoch.

        Args:
            comm_or_rank_size: the remaining ranks, in the form of the constructor's argument.
            consumed: number of samples of the epoch that all ranks together have used; the same on
                all ranks.

        Raises:
            RankError: the rank is not from 0 to ``size - 1``.
            InvalidArgumentError: ``consumed`` is negative.
        """
        rank, size = shares.rank_and_size("reshard", comm_or_rank_size)
        if consumed < 0:
            raise InvalidArgumentError(
                f"reshard: consumed is {consumed} (expected a number of samples of at least 0)."
            )
        self.rank, self.size = rank, size
        self._next = self._start = self._taken = consumed

    def rebind(self, comm: Communicator) -> None:
        """Divide the rest of the epoch from the next iteration's start, as after a load."""
        self.reshard(comm, self._next)


class PrefetchLoader:
    """Loader that copies the next batches to a device while the program uses one batch.

    A thread takes batches from the loader. For a GPU, the thread pins tensors that are not pinned
    yet, and copies them on its own stream. The consumer's current stream waits only for the copy of
    its batch. For ``"cpu"`` the thread only takes the batches early.

    Tensors may be in any nesting of lists, tuples, named tuples and mappings; other objects are
    passed on unchanged. If the loader raises an error, it is raised after the earlier batches. If
    the consumer leaves an iteration early, the thread ends when its current batch is complete.

    The loader's code runs in the thread. If it uses the global random number generator of the
    process, the order of draws is undefined. A ``DataLoader`` without workers, with random
    transforms, is such a loader: give it its own generator.

    Args:
        loader: ``DataLoader``, or any iterable.
        device: device for the batches.
        ahead: largest number of batches that wait on the device; each uses the device's memory.

    Attributes:
        loader, device, ahead: values of the arguments.

    Raises:
        InvalidArgumentError: ``ahead`` is less than 1.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device | str | int = "cpu", ahead: int = 1
    ) -> None:
        if ahead < 1:
            raise InvalidArgumentError(f"PrefetchLoader: ahead is {ahead} (expected at least 1).")
        self.loader = loader
        self.device = torch.device(device)
        self.ahead = ahead

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # its TypeError is the right error

    def __iter__(self) -> Iterator[Any]:
        copies = _DeviceCopies(self.device) if self.device.type == "cuda" else None
        prepare: Callable[[Any], Any] = copies.start if copies else self._moved
        # The iterator is created in this thread, so that a loader draws its workers' seeds in the
        # order of the caller's draws.
        feed = _Feed(iter(self.loader), prepare, self.ahead)
        try:
            for batch in feed:
                yield copies.finish(batch) if copies else batch
                # Release the batch before waiting for the next one.
                del batch
        finally:
            feed.close()

    def _moved(self, batch: Any) -> Any:
        return _mapped(batch, lambda x: x.to(self.device))


class _Feed:
    """Thread that takes items from an iterator before the consumer asks for them."""

    def __init__(self, source: Iterator[Any], prepare: Callable[[Any], Any], ahead: int) -> None:
        self._source, self._prepare = source, prepare
        self._items: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._stop = threading.Event()
        # A daemon thread: a loader that never returns does not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        """Take items until there are no more, or until :meth:`close`.

        The last entry of the queue is the end of the items, or the loader's error.
        """
        error: BaseException | None = None
        try:
            while True:
                self._room.acquire()
                if self._stop.is_set():
                    break
                self._items.put((True, self._prepare(next(self._source))))
        except StopIteration:
            pass
        except BaseException as failure:  # the consumer raises it after the earlier items
            error = failure
        self._items.put((False, error))

    def __iter__(self) -> Iterator[Any]:
        while True:
            good, item = self._items.get()
            if not good:
                if item is None:
                    return
                try:
                    raise item
                finally:
                    del item  # break the cycle exception → traceback → frame → exception
            self._room.release()
            yield item
            del item

    def close(self) -> None:
        """End the thread, and wait until it has finished its current item."""
        self._stop.set()
        self._room.release()
        self._thread.join()


class _DeviceCopies:
    """Copies to a GPU, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)

    def start(self, batch: Any) -> Any:
        """Start the copies of a batch; return the copies and the event of their completion."""
        made_on = torch.cuda.current_stream(self._stream.device)

        def copy(x: torch.Tensor) -> torch.Tensor:
            # Only tensors that are on a GPU need the wait. Other tensors must not wait for
            # `made_on`: it may be the consumer's stream, which is busy.
            if x.is_cuda:
                self._stream.wait_stream(made_on)
            elif x.device.type == "cpu" and x.layout is torch.strided and not x.is_pinned():
                # Torch's allocator keeps the pinned memory until the copy has completed.
                x = x.pin_memory()
            return x.to(self._device, non_blocking=True)

        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            return _mapped(batch, copy), self._stream.record_event()

    def finish(self, started: Any) -> Any:
        """Make the consumer's stream wait for the copies; return the batch."""
        batch, copied = started
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(copied)

        def used(x: torch.Tensor) -> torch.Tensor:
            # The memory belongs to the copy stream, which could otherwise reuse it while the
            # consumer's stream still reads it.
            x.record_stream(current)
            return x

        return _mapped(batch, used)


def _mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with each tensor replaced by the result of ``function``."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: _mapped(value, function) for key, value in batch.items()}
        return items if type(batch) is dict else _like(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        values = [_mapped(value, function) for value in batch]
        return values if type(batch) is list else _like(batch, values)
    return batch


def _like(batch: Any, items: Any) -> Any:
    """Convert ``items`` to the type of ``batch``, if possible; torch does the same."""
    try:
        return type(batch)(items)
    except TypeError:
        return items
