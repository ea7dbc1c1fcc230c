"""Virtual shards: reductions whose result does not depend on the number of ranks.

Floating-point addition is not associative, so a sum over three ranks differs from a sum over four
in its last bits. Here the program divides its work into a fixed number of shards, 8 for example,
and each rank computes some consecutive shards. The shards are folded along one binary tree
(:mod:`collective.algorithms.trees`), whoever computes them. So the result has the same bits on any
number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np

from collective.algorithms import arithmetic, pieces
from collective.algorithms.folds import Folding
from collective.algorithms.trees import Leaves, Merging, nodes
from collective.errors import DtypeError, InvalidArgumentError, ShapeError
from collective.memory.arrays import Adapter, adapter_of
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.ops import ReduceOp, as_op
from collective.request import name_ranks

#: The largest number of shards.
MOST = 4096


class _Position(Protocol):
    """Part of a communicator that :class:`Shards` needs."""

    rank: int
    size: int


class Shards:
    """Division of a fixed number of shards among the ranks of a communicator.

    Passed as ``order`` to a reduction, it makes the result independent of the number of ranks::

        shards = collective.Shards(8, comm)
        x = np.stack([gradient(shard) for shard in shards.mine])
        mean = comm.all_reduce(x, op="avg", order=shards)   # has the shape of one gradient

    The input's first axis is this rank's shards, in order. ``avg`` divides by the number of shards.
    All ranks must pass an equal division.

    Args:
        total: number of shards, 1 to 4096. It belongs to the program, and not to the ranks that
            happen to run it.
        comm: communicator among whose ranks the shards are divided.
        held: the consecutive shards of each rank, as one ``range`` for each rank. Every shard
            belongs to exactly one rank. By default each rank has about as many shards as the
            others, and the shards are in rank order.

    Attributes:
        total: number of shards.
        size: number of ranks.
        mine: shards of this rank, a ``range``; it may be empty.

    Raises:
        InvalidArgumentError: ``total`` is not an integer from 1 to 4096, or ``held`` leaves a shard
            out or has one twice; the text names the ranks and shards.
    """

    __slots__ = ("_held", "_rank", "size", "total")

    def __init__(self, total: int, comm: _Position, *, held: Sequence[range] | None = None) -> None:
        if isinstance(total, bool) or not isinstance(total, (int, np.integer)):
            raise InvalidArgumentError(f"Shards: total {total!r}; expected an integer.")
        if not 1 <= total <= MOST:
            raise InvalidArgumentError(f"Shards: total {total}; expected 1 to {MOST} shards.")
        self.total = int(total)
        self._rank = comm.rank
        self.size = comm.size
        if held is None:
            limits = pieces.limits(pieces.even(self.total, self.size))
            held = [range(start, stop) for start, stop in pairwise(limits)]
        self._held = self._checked(held)

    def _checked(self, held: Sequence[range]) -> tuple[range, ...]:
        """Check that each shard belongs to one rank."""
        total, size = self.total, self.size
        if len(held) != size or not all(isinstance(part, range) for part in held):
            raise InvalidArgumentError(
                f"Shards: held {held!r}; expected one range for each of {size} ranks."
            )
        owner: dict[int, int] = {}
        for rank, part in enumerate(held):
            if part.step != 1 or (part and not 0 <= part[0] <= part[-1] < total):
                raise InvalidArgumentError(
                    f"Shards: rank {rank} holds {part}; expected consecutive shards of 0 to "
                    f"{total - 1}."
                )
            for shard in part:
                if shard in owner:
                    raise InvalidArgumentError(
                        f"Shards: {name_ranks([owner[shard], rank])} hold shard {shard}; each "
                        "shard must belong to one rank."
                    )
                owner[shard] = rank
        if missing := [shard for shard in range(total) if shard not in owner]:
            names = name_ranks(missing).replace("rank", "shard")
            raise InvalidArgumentError(
                f"Shards: no rank holds {names}; each shard must belong to one rank."
            )
        # Two empty ranges are equal, wherever they begin.
        return tuple(part if part else range(0) for part in held)

    @property
    def mine(self) -> range:
        """Shards of this rank, in order; it may be empty."""
        return self._held[self._rank]

    def held_by(self, rank: int) -> range:
        """Return the shards of a rank, in order; it may be empty."""
        return self._held[rank]

    def seed(self, shard: int, *place: int) -> int:
        """Return a seed of 32 bits for the random numbers of one shard.

        It is the same on every rank that may hold the shard. Seed the generators with it before the
        shard's forward pass, so that dropout does not depend on the rank. Generators of PyTorch,
        NumPy and Python take it (``numpy.random.seed`` takes no longer one).

        Args:
            shard: number of the shard.
            place: further integers, such as the run's seed and the step.
        """
        text = repr((self.total, shard, *place))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")

    def nodes_of(self, rank: int) -> list[Leaves]:
        """Return the nodes of the tree that a rank can fold by itself, in order.

        There is one node if the rank's shards begin at a multiple of their number, which is a
        power of two; and at most ``2 log2(total)`` nodes otherwise.
        """
        part = self._held[rank]
        return nodes(part.start, part.stop, self.total)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shards):
            return NotImplemented
        return (self.total, self._held) == (other.total, other._held)

    def __hash__(self) -> int:
        return hash((self.total, self._held))

    def __str__(self) -> str:
        """Return the division as error texts show it."""
        parts = [f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}" if part else "none"
                 for part in self._held]  # fmt: skip
        return f"{self.total} shards ({', '.join(parts)})"

    def __repr__(self) -> str:
        return f"<Shards: {self}; rank {self._rank} holds {list(self.mine)}>"


class ShardFold:
    """Fold of this rank's shards one by one; it keeps some ``log2(total)`` arrays, not all.

    ::

        fold = collective.ShardFold(shards, op="avg")
        for shard in shards.mine:
            fold.add(gradient(shard))
        mean = comm.all_reduce(fold, op="avg", order=shards)

    The result has the same bits as that of a call with all shards at once.

    Args:
        shards: division of the shards.
        op: operator of the reduction; the call must name the same one.
        like: array with the dtype and shape of a shard. A rank without shards must pass it, because
            it adds nothing from which these could be read.

    Attributes:
        shards, op: as the arguments.
        added: number of shards that were added.
    """

    def __init__(self, shards: Shards, op: str | ReduceOp = "sum", *, like: Any = None) -> None:
        self.shards = shards
        self.op = as_op(op)
        self.adapter: Adapter | None = None
        self.dtype: DType | None = None
        self.shape: tuple[int, ...] = ()
        self._folding: Folding | None = None
        self._rooms: list[Buffer] = []
        self.clear()
        if like is not None:
            self._view(like)

    def clear(self) -> Self:
        """Forget the shards that were added, but keep the memory for the next ones."""
        self.added = 0
        self._merging = Merging(self.shards.total, first=0)
        return self

    def add(self, x: Any) -> None:
        """Add the array of this rank's next shard; the array may be changed afterwards.

        Args:
            x: array of any framework; all shards have one dtype and shape.

        Raises:
            InvalidArgumentError: all shards of this rank were added already.
            DtypeError, ShapeError: another dtype or shape than the first shard's, or the op is not
                defined for the dtype.
        """
        mine = self.shards.mine
        if self.added == len(mine):
            raise InvalidArgumentError(
                f"ShardFold.add: all {len(mine)} shards of this rank were added already. Call "
                "clear() before the next reduction."
            )
        leaf = self._leaf(x)
        assert self._folding is not None
        span = Leaves(mine[self.added], mine[self.added] + 1)
        merging, folding = self._merging, self._folding
        # A shard that does not merge at once is copied, since the caller may change its array.
        with np.errstate(all="ignore"):
            if folding.scales or not merging.merges(span):
                slot = merging.room()
                room = self._room(slot, leaf)
                pieces.copy(folding.enter(leaf, room), room)
                steps = merging.push(span, slot, owned=True)
            else:
                steps = merging.push(span, -1)
            for left, right, out in steps:
                assert right is not None
                operand = leaf if right < 0 else self._rooms[right]
                folding.join(self._rooms[left], operand, self._rooms[out])
        self.added += 1

    def _room(self, slot: int, like: Buffer) -> Buffer:
        while slot >= len(self._rooms):
            self._rooms.append(Buffer.empty(like.count, like.dtype))
        return self._rooms[slot]

    def _leaf(self, x: Any) -> Buffer:
        """Return the elements of a shard, in host memory."""
        seen: Any = self._view(x)
        host = seen if isinstance(seen, np.ndarray) else seen.to_host()
        assert self.dtype is not None
        return Buffer(host.ravel(), self.dtype)

    def _view(self, x: Any) -> Any:
        """Return the view of a shard's array, after a check of its dtype and shape."""
        adapter = adapter_of(x, "ShardFold.add")
        seen, dtype = adapter.view(x)
        shape = tuple(seen.shape)
        if self.dtype is None:
            arithmetic.check(self.op, dtype)
            self.adapter, self.dtype, self.shape = adapter, dtype, shape
            self._folding = Folding(self.op, dtype, self.shards.total)
        elif dtype is not self.dtype:
            raise DtypeError(
                f"ShardFold.add: dtype {dtype}; the first shard has {self.dtype}. All shards must "
                "have one dtype."
            )
        elif shape != self.shape:
            raise ShapeError(
                f"ShardFold.add: shape {shape}; the first shard has {self.shape}. All shards must "
                "have one shape."
            )
        return seen

    def folded(self) -> Iterable[Buffer]:
        """Return the folded nodes of :meth:`Shards.nodes_of`, in order."""
        return [self._rooms[entry.slot] for entry in self._merging.stack]


class ShardBatches:
    """Division of a data set into batches, and of each batch into virtual shards.

    Which samples a shard gets depends on the step alone, and not on the ranks. So a program may
    continue at any step on another number of ranks::

        batches = collective.ShardBatches(len(dataset), batch=256, total=8, seed=0)
        samples = [dataset[i] for i in batches.of(step, shard)]

    Each epoch has a new random order, and leaves out the samples that fill no batch.

    Args:
        length: number of samples in the data set.
        batch: number of samples of all shards together, a multiple of ``total``: the average over
            shards of different lengths would not be that over the samples.
        total: number of shards.
        seed: seed of the orders; the same on all ranks.
        shuffle: whether each epoch has a random order; if false, samples keep their order.

    Attributes:
        steps: number of steps in an epoch.

    Raises:
        InvalidArgumentError: ``batch`` is no multiple of ``total``, or ``length`` is below
            ``batch``.
    """

    def __init__(
        self, length: int, *, batch: int, total: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        if total < 1 or batch < 1 or batch % total:
            raise InvalidArgumentError(
                f"ShardBatches: batch {batch} for {total} shards; expected a multiple of the "
                "number of shards, so that all shards have the same number of samples."
            )
        if length < batch:
            raise InvalidArgumentError(
                f"ShardBatches: length {length}, batch {batch}; expected at least one full batch."
            )
        self.steps = length // batch
        self._length, self._batch, self._total = length, batch, total
        self._seed, self._shuffle = seed, shuffle
        self._order: tuple[int, np.ndarray[Any, Any]] = -1, np.empty(0, np.int64)

    def of(self, step: int, shard: int) -> list[int]:
        """Return the numbers of the samples that a shard gets in a step.

        Args:
            step: number of the step, from 0. Epoch n begins at step ``n * steps``.
            shard: number of the shard.
        """
        epoch, nth = divmod(step, self.steps)
        if self._order[0] != epoch:
            order = np.arange(self._length)
            if self._shuffle:
                order = np.random.default_rng([self._seed, epoch]).permutation(self._length)
            self._order = epoch, order
        size = self._batch // self._total
        start = nth * self._batch + shard * size
        return [int(index) for index in self._order[1][start : start + size]]
