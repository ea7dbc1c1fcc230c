"""Backward passes of virtual shards: one after the other, then one reduction for all of them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective.errors import UnsupportedError
from collective.ops import Op
from collective.shards import ShardFold, Shards

from .gradients import Bucket, copied

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.contract.work import Work


class Generator(NamedTuple):
    """Functions of a global generator of random numbers.

    Attributes:
        origin: function that returns an integer which follows from the program's own seed.
        seed: function that seeds the generator with an integer of 32 bits.
        save, restore: functions that return and take the generator's state.
    """

    origin: Callable[[], int]
    seed: Callable[[int], object]
    save: Callable[[], Any]
    restore: Callable[[Any], object]


def of_numpy(generator: Any) -> Generator:
    """Return the functions of ``numpy.random`` itself, or of a ``RandomState``."""

    def save() -> Any:
        return generator.get_state(legacy=False)

    def origin() -> int:
        state = save()["state"]
        # The first word is a constant after most ways to seed.
        return int(state["key"][1] if "key" in state else next(iter(state.values())) % 2**32)

    def seed(number: int) -> None:
        # The program may have chosen another kind than NumPy's default, which cannot be reseeded.
        kind: Any = getattr(np.random, save()["bit_generator"])
        generator.set_state(np.random.RandomState(kind(number)).get_state(legacy=False))

    return Generator(origin, seed, save, generator.set_state)


_OF_PYTHON = Generator(
    lambda: random.getstate()[1][1], random.seed, random.getstate, random.setstate
)
_OF_NUMPY = of_numpy(np.random)

# Ranks that are threads share the generators.
_one_thread = threading.Lock()


@contextlib.contextmanager
def seeded(seed: int, generators: Sequence[Generator] = ()) -> Iterator[None]:
    """Seed the generators for the body, and let them continue afterwards as before it.

    Args:
        seed: integer of 32 bits.
        generators: generators of the framework; those of Python and NumPy are added.
    """
    every = [_OF_PYTHON, _OF_NUMPY, *generators]
    with _one_thread:
        states = [generator.save() for generator in every]
        try:
            for generator in every:
                generator.seed(seed)
            yield
        finally:
            for generator, state in zip(every, states):
                generator.restore(state)


class ShardPasses:
    """Function that reduces buckets of gradients over the shards of all ranks.

    Each backward pass computes the gradients of one shard. The function adds a full bucket to a
    :class:`~collective.shards.ShardFold`. In the pass of this rank's last shard it also starts the
    reduction of the bucket over the ranks, while later buckets are still computed.

    Before each pass the global generators get a seed that depends on the shard and on the number of
    the step, so that numbers which a layer or a hook draws do not depend on the rank. A program may
    seed them once more. After the passes of a step the generators continue as if no pass had drawn
    from them: otherwise the ranks would draw different numbers in the step of the optimizer.

    Args:
        total: number of shards.
        comm: communicator that connects the ranks.
        generators: generators of the framework; those of Python and NumPy are added.

    Attributes:
        comm, shards: the communicator, and the division of the shards among its ranks.
        is_last: whether the present pass is that of this rank's last shard. A rank without shards
            has only such passes.
        running: whether the passes of a step are under way.
        step: number of the next step. A caller that counts steps itself, also after a loss of
            ranks, sets it before each step.
    """

    def __init__(
        self, total: int, comm: Communicator, generators: Sequence[Generator] = ()
    ) -> None:
        self._total = total
        self._generators = [_OF_PYTHON, _OF_NUMPY, *generators]
        self._states: list[Any] | None = None  # from before the loop that runs
        self._loop: object = None
        self._origins: list[int] | None = None  # those of rank 0, from its first step on
        self.step = 0
        self.rebind(comm)

    def rebind(self, comm: Communicator) -> None:
        """Divide the shards anew, among the ranks of another communicator."""
        self.comm = comm
        self.shards = Shards(self._total, comm)
        self._folds: dict[tuple[int, int, str], ShardFold] = {}
        self._agreed = False  # a rank that has joined does not know the step and the origins
        self.begin()

    def begin(self) -> None:
        """Begin the passes of a step, and forget those of a step that was abandoned."""
        for fold in self._folds.values():
            fold.clear()
        self.is_last = True
        self.running = False

    def __iter__(self) -> Iterator[int]:
        """Yield the shards of this rank, and set ``is_last`` before each of them. Collective."""
        self.begin()
        if not self._agreed:
            origins = self._origins or [generator.origin() for generator in self._generators]
            agreed: Any = self.comm.broadcast_object([self.step, origins])
            self.step, self._origins = agreed
            self._agreed = True
        assert self._origins is not None
        step, self.step = self.step, self.step + 1
        if self._states is None:  # else a loop was abandoned
            self._states = [generator.save() for generator in self._generators]
        self.running = True
        loop = self._loop = object()
        try:
            for shard in self.shards.mine:
                self.is_last = shard == self.shards.mine[-1]
                for generator, origin in zip(self._generators, self._origins):
                    generator.seed(self.shards.seed(shard, step, origin))
                yield shard
        finally:
            # A traceback may keep an abandoned loop alive until the next one has begun.
            if self._loop is loop:
                self.running = False
                states, self._states = self._states, None
                for generator, state in zip(self._generators, states):
                    generator.restore(state)

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


def refuse_joined(call: str, parts: Iterable[tuple[str, Any]], norm: type, split: type) -> None:
    """Refuse a model whose forward pass communicates: the ranks make different numbers of passes.

    Args:
        call: operation, for the error.
        parts: parts of the model, by name.
        norm: class of the adapter that normalises over the ranks' batches.
        split: class of the adapter whose pieces are on several ranks.

    Raises:
        UnsupportedError: a part is of one of the two classes.
    """
    for name, part in parts:
        if isinstance(part, split):
            raise UnsupportedError(
                f"{call}: {name or 'the model'} is a Split, whose pieces are on several ranks, "
                "with shards. These ranks could hold different numbers of shards, and would wait "
                "for each other. Leave one of them out."
            )
        if isinstance(part, norm):
            raise UnsupportedError(
                f"{call}: {name or 'the model'} is a {norm.__name__}, which joins the ranks' "
                "batches, with shards. Use the framework's own batch normalisation, whose "
                "statistics are then those of each shard."
            )


class StateFold:
    """State that the forward passes change, such as the running statistics of batch normalisation.

    The forward pass of every shard begins with the values from before the step. After the step
    floating-point values are the average over all shards, and integers the maximum. So they do not
    depend on which rank computed a shard, nor on how many shards a rank computed. An array or
    number that no pass has changed stays as it was: an average could round it, or overflow.

    Args:
        passes: passes of the shards.
        arrays: the arrays of one framework; they are changed in place.
        stack: function of the framework that joins arrays of one shape along a new first axis.
        numbers: Python's numbers that are state, too; the caller sets and reads them.
    """

    def __init__(
        self, passes: ShardPasses, arrays: Sequence[Any], stack: Callable[[list[Any]], Any],
        numbers: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self._passes = passes
        self._arrays = arrays
        self._stack = stack
        self._before = [copied(array) for array in arrays]
        self._after: list[list[Any]] = [[] for _ in arrays]
        self.numbers = list(numbers)
        self._numbers_after: list[list[Any]] = []

    def restore(self) -> None:
        """Set the arrays to their values from before the step."""
        for array, before in zip(self._arrays, self._before):
            array[...] = before

    def add(self, arrays: Sequence[Any] | None = None, numbers: Sequence[Any] = ()) -> None:
        """Keep the state as the forward pass of a shard has left it.

        Args:
            arrays: arrays of the same shapes and dtypes that have taken the place of those of the
                constructor, if the pass has replaced some.
            numbers: present values of the numbers.
        """
        for array, after in zip(self._arrays if arrays is None else arrays, self._after):
            after.append(copied(array))
        self._numbers_after.append(list(numbers))

    def reduce(self) -> None:
        """Set the arrays to their fold over all shards, and :attr:`numbers` to theirs. Collective.

        Raises:
            MismatchError: the ranks have different numbers of arrays.
        """
        flags = [any(bool((a != b).any()) for a in after)
                 for after, b in zip(self._after, self._before)]  # fmt: skip
        flags.append(any(numbers != self.numbers for numbers in self._numbers_after))
        comm = self._passes.comm
        *changed, counted = comm.inner.on_host.all_gather(np.array([flags], np.uint8)).any(axis=0)
        self.restore()
        self._reduce_arrays([nth for nth, flag in enumerate(changed) if flag])
        if counted:
            # The ranks hold the shards in rank order.
            rows = [row for rows in comm.all_gather_object(self._numbers_after) for row in rows]
            self.numbers = [_folded(*column) for column in zip(self.numbers, zip(*rows))]

    def _reduce_arrays(self, chosen: Sequence[int]) -> None:
        averaged = ["float" in str(a.dtype) or "complex" in str(a.dtype) for a in self._arrays]
        kinds: list[tuple[Op, bool]] = [("avg", True), ("max", False)]
        for op, floating in kinds:
            members = [nth for nth in chosen if averaged[nth] == floating]
            if not members:
                continue
            # A rank without shards passes tables without rows.
            tables = [
                self._stack([*self._after[n], self._before[n]])[: len(self._after[n])]
                for n in members
            ]
            folded = self._passes.comm.all_reduce(tables, op=op, order=self._passes.shards)
            for nth, value in zip(members, folded):
                self._arrays[nth][...] = value


def _folded(before: Any, values: Sequence[Any]) -> Any:
    """Return the average of floating-point numbers, or the maximum of integers."""
    if all(value == before for value in values):
        return before
    if any(isinstance(value, float) for value in values):
        return sum(values) / len(values)
    return max(values)
