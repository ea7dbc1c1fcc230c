"""Which samples a rank takes, and batches on the device before they are needed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.training import shards

__all__ = ["PrefetchLoader", "ShardedSampler"]

_Sampler: Any = torch.utils.data.Sampler


class ShardedSampler(_Sampler):  # type: ignore[misc, unused-ignore]
    """Indices of this rank's samples, for a ``DataLoader``.

    As it is, each sample is some rank's, once. Lengths then differ by at most one, so the ranks may
    take unequal numbers of steps: wrap the loop in ``join()`` of ``DistributedDataParallel``, or
    evaluate without collectives in the loop. With ``padded=True`` samples at the start are
    repeated until the lengths are equal, exactly as ``torch.utils.data.DistributedSampler`` does;
    with ``drop_last=True`` some at the end are left out instead.

    Shuffling depends on seed and epoch alone, and not on the number of ranks.

    Args:
        dataset_or_length: what has a ``len()``, or that number.
        comm_or_rank_size: a communicator, of which rank and size are taken, or these two.
        shuffle: whether to permute the samples, anew for each epoch.
        seed: the same on all ranks.
        padded: whether to repeat samples.
        drop_last: whether to leave out samples.

    Attributes:
        epoch: as :meth:`set_epoch` was told.
        rank, size, seed, shuffle, padded, drop_last: as given.

    Raises:
        RankError: the rank is not one from 0 to ``size - 1``.
        InvalidArgumentError: the length is no integer, or negative.
    """

    def __init__(
        self,
        dataset_or_length: Sized | int,
        comm_or_rank_size: Communicator | tuple[int, int],
        shuffle: bool = True,
        seed: int = 0,
        padded: bool = False,
        drop_last: bool = False,
    ) -> None:
        rank, size = shards.rank_and_size("ShardedSampler", comm_or_rank_size)
        length = dataset_or_length
        if isinstance(length, Sized):
            length = len(length)
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise InvalidArgumentError(
                f"ShardedSampler: {dataset_or_length!r}; something with a len(), or a length. A "
                "dataset that is only iterable has to part its samples itself."
            )
        self.rank, self.size = rank, size
        self.shuffle, self.seed = shuffle, seed
        self.padded, self.drop_last = padded, drop_last
        self.epoch = 0
        self._length = length
        # In samples of all ranks: where the next iteration starts, where the last one did, and
        # how far that one is.
        self._next = self._start = self._taken = 0

    def __len__(self) -> int:
        """Return how many samples this rank has in a whole epoch."""
        return len(shards.turns(0, self._dealt(), self.rank, self.size))

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices: the rest of the epoch, if a state was loaded."""
        # Noted now, not with the first sample: loaders may take that one late.
        self._start = self._taken = self._next
        self._next = 0
        return self._indices(self._start)

    def _indices(self, start: int) -> Iterator[int]:
        order = self._order(start)
        for index in shards.turns(start, len(order), self.rank, self.size):
            # What is taken ends with a row of one sample a rank, or with the last sample.
            self._taken = min(self._taken + self.size, len(order))
            yield order[index]
        self._taken = max(self._taken, len(order))  # also where this rank had none of the last row

    def _order(self, start: int) -> list[int]:
        """Return the samples of all ranks; from ``start`` on they take them in turn."""
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order: list[int] = torch.randperm(self._length, generator=generator).tolist()
        else:
            order = list(range(self._length))
        total = start + self._dealt(start) if start < self._length else start
        return (order * -(-total // len(order)))[:total] if order else []

    def _dealt(self, start: int = 0) -> int:
        """Return how many samples all ranks have together from ``start`` to the epoch's end."""
        return shards.dealt(self._length - start, self.size, self.padded, self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of an epoch; call it before each, on all ranks.

        A position that was loaded stays if the epoch is that of the state.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self._next = self._start = self._taken = 0

    def state_dict(self, taken: int | None = None) -> dict[str, int]:
        """Return where this sampler is, to go on from there.

        Args:
            taken: how many samples of this iteration have been used on this rank. By default as
                many as were asked for, which is more where a ``DataLoader`` has workers: they
                work ahead. There, count ``batches * batch_size``.

        Returns:
            Plain numbers, the same on all ranks that have taken equally many: one rank's will do
            for all. Without padding, another number of ranks can go on from it as well.
        """
        done = self._taken if taken is None else self._start + taken * self.size
        return {"epoch": self.epoch, "seed": self.seed, "length": self._length, "taken": done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a sampler was: the next iteration is the rest of its epoch.

        Args:
            state: of :meth:`state_dict`; the epoch and the seed are taken from it.

        Raises:
            InvalidArgumentError: it is of a dataset of another length; nothing is changed.
        """
        if state["length"] != self._length:
            raise InvalidArgumentError(
                f"load_state_dict: the state of {state['length']} samples; this sampler has "
                f"{self._length}. Positions among others mean nothing."
            )
        self.epoch, self.seed = state["epoch"], state["seed"]
        self._next = self._start = self._taken = state["taken"]

    def reshard(self, comm_or_rank_size: Communicator | tuple[int, int], consumed: int) -> None:
        """Share out the rest of the epoch anew: the next iteration is this rank's part of it.

        Each sample that is left is some rank's, once. With ``padded`` or ``drop_last`` the rest is
        made even as a whole epoch would be.

        Args:
            comm_or_rank_size: the ranks that are left, as when the sampler was made.
            consumed: how many samples of the epoch all ranks together have done with, the same
                on all of them.

        Raises:
            RankError: the rank is not one from 0 to ``size - 1``.
            InvalidArgumentError: ``consumed`` is negative.
        """
        rank, size = shards.rank_and_size("reshard", comm_or_rank_size)
        if consumed < 0:
            raise InvalidArgumentError(f"reshard: consumed {consumed}; 0 or more samples.")
        self.rank, self.size = rank, size
        self._next = self._start = self._taken = consumed

    def rebind(self, comm: Communicator) -> None:
        """Share out what is left from where this sampler is, after ``load_state_dict`` say."""
        self.reshard(comm, self._next)


class PrefetchLoader:
    """Batches of a loader on a device, the next one on its way while one is used.

    A thread takes batches from the loader. For a GPU it pins those that are not, and copies them
    on a stream of its own; the consumer's current stream waits for that copy alone. On
    ``"cpu"`` it only takes them early.

    Tensors are found in any nesting of lists, tuples, named tuples and mappings; other objects pass
    as they are. An error of the loader is raised after the batches before it. Leaving an iteration
    early ends its thread, as soon as the batch in progress is there.

    The loader's code runs in the thread. If it draws from this process's global random numbers
    (a ``DataLoader`` without workers, of random transforms), the order of draws is no longer
    certain: give it a generator of its own.

    Args:
        loader: a ``DataLoader``, or any iterable.
        device: where batches are to be.
        ahead: how many batches wait there at most; each takes memory of the device.

    Attributes:
        loader, device, ahead: as given.

    Raises:
        InvalidArgumentError: ``ahead`` is less than 1.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device | str | int = "cpu", ahead: int = 1
    ) -> None:
        if ahead < 1:
            raise InvalidArgumentError(f"PrefetchLoader: ahead {ahead}; 1 or more.")
        self.loader = loader
        self.device = torch.device(device)
        self.ahead = ahead

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # its TypeError is the right one

    def __iter__(self) -> Iterator[Any]:
        copies = _DeviceCopies(self.device) if self.device.type == "cuda" else None
        prepare: Callable[[Any], Any] = copies.start if copies else self._moved
        # Here, so that what it draws for its workers' seeds is drawn in the caller's order.
        feed = _Feed(iter(self.loader), prepare, self.ahead)
        try:
            for batch in feed:
                yield copies.finish(batch) if copies else batch
                # Not kept while the next one is waited for.
                del batch
        finally:
            feed.close()

    def _moved(self, batch: Any) -> Any:
        return _mapped(batch, lambda x: x.to(self.device))


class _Feed:
    """A thread that takes items from an iterator, some ahead of whoever iterates over this."""

    def __init__(self, source: Iterator[Any], prepare: Callable[[Any], Any], ahead: int) -> None:
        self._source, self._prepare = source, prepare
        self._items: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead)
        self._stop = threading.Event()
        # An interpreter that exits is not held up by a loader that waits for ever.
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        """Take items until there are none, or :meth:`close`; tell the end, or the error, last."""
        error: BaseException | None = None
        try:
            while True:
                self._room.acquire()
                if self._stop.is_set():
                    break
                self._items.put((True, self._prepare(next(self._source))))
        except StopIteration:
            pass
        except BaseException as failure:  # raised where it belongs in the order
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
                    del item  # which has this frame in its traceback
            self._room.release()
            yield item
            del item

    def close(self) -> None:
        """End the thread, which may be in the middle of an item."""
        self._stop.set()
        self._room.release()
        self._thread.join()


class _DeviceCopies:
    """Copies to a GPU, on a stream beside the consumer's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Any = torch.cuda.Stream
        self._stream = stream(device)

    def start(self, batch: Any) -> Any:
        """Start the copies of a batch; return it with the event that they are over."""
        made_on = torch.cuda.current_stream(self._stream.device)

        def copy(x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda:  # else not: that may be the consumer's stream, at work
                self._stream.wait_stream(made_on)
            elif x.device.type == "cpu" and x.layout is torch.strided and not x.is_pinned():
                # Torch's allocator of pinned memory knows how long the copy needs it.
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
            x.record_stream(current)  # allocated on the other stream, which may reuse it else
            return x

        return _mapped(batch, used)


def _mapped(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with ``function`` of each of its tensors in their place."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        found = {key: _mapped(value, function) for key, value in batch.items()}
        return found if type(batch) is dict else _like(batch, found)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, (list, tuple)):
        values = [_mapped(value, function) for value in batch]
        return values if type(batch) is list else _like(batch, values)
    return batch


def _like(batch: Any, found: Any) -> Any:
    """Return ``found`` as the type of ``batch``, if that can be made of it; torch does the same."""
    try:
        return type(batch)(found)
    except TypeError:
        return found
