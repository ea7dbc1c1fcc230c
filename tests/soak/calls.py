"""Random calls, the same on all ranks; each result is compared with NumPy's."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import collective
from collective.communicator import Communicator
from collective.memory import dtypes
from collective.testing import samples

__all__ = ["soak"]

# Lengths in bytes at which transports change their algorithm. They limit the payloads that fit a
# message's head, are folded whole, are read from the peer's memory, fit a slot, or are copied by
# the kernel.
_THRESHOLDS = (256, 1 << 10, 4 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)
_LARGEST = 1200 << 10
# Upper bound of the offset of a call's inputs in the numbers that are made beforehand.
_OFFSETS = 997
# Upper bound of the number of calls in the background.
_IN_FLIGHT = 6


@dataclass
class _Among:
    """Communicator, and the world ranks of its members in the communicator's order."""

    comm: Communicator
    ranks: list[int]


class _Numbers:
    """Contributions of the ranks, made once; each call uses a slice of them."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self._size = size
        self._made: dict[tuple[str, str, int], Any] = {}

    def of(self, rank: int, dtype: str, op: str, offset: int, count: int) -> Any:
        """Return the contribution of ``rank`` to a call: numbers whose folds are exact."""
        kind = op if op in ("prod", "avg") else "sum"
        numbers = self._made.get((dtype, kind, rank))
        if numbers is None:
            length = _LARGEST // dtypes.BY_NAME[dtype].itemsize + 2 * _OFFSETS
            numbers = samples.values(dtype, length, rank, self._seed, kind)
            if kind == "avg":
                numbers = numbers * numbers.dtype.type(2 * self._size)
            elif numbers.dtype.kind in "iu" and kind == "sum":
                # Use all bits: sums and products wrap around, as in NumPy.
                limits = np.iinfo(numbers.dtype)
                random = np.random.default_rng([self._seed, rank])
                numbers = random.integers(
                    limits.min, limits.max, length, numbers.dtype, endpoint=True
                )
            numbers.flags.writeable = False
            self._made[dtype, kind, rank] = numbers
        return numbers[offset : offset + count]


@dataclass
class _Turn:
    """Parameters of one turn; all ranks draw the same ones."""

    among: _Among
    operation: str
    dtype: str
    op: str
    count: int
    offset: int
    root: int
    ordered: bool
    background: bool
    where: str
    in_flight: int

    def __str__(self) -> str:
        return (
            ", ".join(f"{name}={value}" for name, value in vars(self).items() if name != "among")
            + f", among {self.among.ranks}"
        )


def soak(comm: Communicator, seed: int, turns: int, seconds: float) -> dict[str, int]:
    """Make random calls; return the number of correct calls for each operation.

    Args:
        comm: communicator of all ranks; some calls use groups made of it.
        seed: seed of all random choices.
        turns: number of calls.
        seconds: time limit; the ranks agree on when it is reached.

    Raises:
        AssertionError: A result differs from NumPy's. The text has the turn; the seed repeats it.
    """
    return _Soak(comm, seed).run(turns, seconds)


class _Soak:
    def __init__(self, comm: Communicator, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._numbers = _Numbers(seed, comm.size)
        self._rank = comm.rank
        all_ranks = list(range(comm.size))
        parity = [rank for rank in all_ranks if rank % 2 == comm.rank % 2]
        half = comm.split(comm.rank % 2)
        assert half is not None
        self._world = _Among(comm, all_ranks)
        self._all = [
            self._world,
            _Among(comm.dup(), all_ranks),
            _Among(comm.group(all_ranks[::-1]), all_ranks[::-1]),
            _Among(half, parity),
        ]
        self._symmetric = [among.comm.empty(_LARGEST, "uint8") for among in self._all]
        self._huge = np.zeros(8 << 20, np.uint8)  # NumPy asks the kernel for huge pages
        self._pending: deque[tuple[Any, Callable[[Any], None]]] = deque()
        self._dice: list[list[float]] = []
        self._done: Counter[str] = Counter()
        # Only NumPy's own dtypes: the conformance suite tests bfloat16.
        able = comm.capabilities.dtypes - {"bfloat16"}
        self._dtypes = samples.dtypes_of(frozenset(able))

    def run(self, turns: int, seconds: float) -> dict[str, int]:
        end = time.monotonic() + seconds
        for number in range(turns):
            turn = self._draw()
            try:
                self._make(turn)
                while len(self._pending) > turn.in_flight:
                    self._settle()
            except Exception as error:
                raise AssertionError(f"turn {number} ({turn}): {error!r}") from error
            self._done[turn.operation] += 1
            if number % 1000 == 999:
                late = np.array([time.monotonic() > end])
                if self._world.comm.all_reduce(late, op="max")[0]:
                    break
        while self._pending:
            self._settle()
        for among in self._all[1:]:
            among.comm.close()
        return dict(self._done)

    # -- drawing turns -----------------------------------------------------------------------

    def _draw(self) -> _Turn:
        if not self._dice:
            # Draw many turns' numbers at once: drawn singly, they cost more than a short call.
            self._dice = self._random.random((4096, _DICE)).tolist()
        dice = iter(self._dice.pop())
        among = self._all[max(0, int(14 * next(dice)) - 10)]
        operation = _NAMES[bisect.bisect(_SUMS, next(dice) * _SUMS[-1])]
        dtype = _pick(self._dtypes, next(dice))
        kind, itemsize = dtypes.BY_NAME[dtype].kind, dtypes.BY_NAME[dtype].itemsize
        return _Turn(
            among=among,
            operation=operation,
            dtype=dtype,
            op=_pick(_OPS[kind], next(dice)),
            count=_length(next(dice), next(dice), next(dice)) // itemsize + int(3 * next(dice)),
            offset=int(_OFFSETS * next(dice)),
            root=int(12 * next(dice)),
            ordered=next(dice) < 0.2,
            background=next(dice) < 0.25,
            where=_pick(_WHERE, next(dice)),
            in_flight=int(_IN_FLIGHT * next(dice)),
        )

    # -- making calls --------------------------------------------------------------------------

    def _make(self, turn: _Turn) -> None:
        if turn.operation == "barrier":
            turn.among.comm.barrier()
            return
        _OPERATIONS[turn.operation][1](self, turn)

    def inputs(self, turn: _Turn, longer: bool = False) -> list[Any]:
        """Return the inputs of the ranks in the communicator's order."""
        return [
            self._numbers.of(
                rank, turn.dtype, turn.op, turn.offset, turn.count + (rank if longer else 0)
            )
            for rank in turn.among.ranks
        ]

    def hold(self, turn: _Turn, call: Callable[..., Any], wanted: Any, **options: Any) -> None:
        """Make ``call`` and check its result, now or when the background call is settled."""

        def check(result: Any) -> None:
            if wanted is None:
                assert result is None, f"{turn}: got {result!r} instead of None"
            else:
                samples.assert_same(result, wanted, str(turn))

        if turn.background:
            self._pending.append((call(async_op=True, **options), check))
        else:
            check(call(**options))

    def mine(self, turn: _Turn, inputs: list[Any]) -> Any:
        """Return this rank's input in the memory that the turn demands."""
        x = inputs[turn.among.comm.rank]
        if turn.where == "strided":
            return samples.laid_out("strided", x)
        if turn.where in ("symmetric", "huge pages") and not turn.background:
            symmetric = self._symmetric[self._all.index(turn.among)]
            room = symmetric if turn.where == "symmetric" else self._huge[4 << 20 :]
            y = room[: x.nbytes].view(x.dtype)
            y[:] = x
            return y
        return x

    def _settle(self) -> None:
        work, check = self._pending.popleft()
        check(work.wait())


def _reduction(name: str) -> Callable[[_Soak, _Turn], None]:
    def make(soak: _Soak, turn: _Turn) -> None:
        comm, inputs = turn.among.comm, soak.inputs(turn)
        wanted: Any = samples.expected(turn.op, inputs)
        options: dict[str, Any] = {"op": turn.op}
        if turn.ordered:
            options["order"] = "rank"
        x = soak.mine(turn, inputs)
        if name == "reduce":
            root = options["root"] = turn.root % comm.size
            wanted = wanted if comm.rank == root else None
        elif name == "scan":
            # A scan has no average, because the prefixes have different numbers of ranks.
            op = "sum" if turn.op == "avg" else turn.op
            options = {"op": op}
            wanted = samples.expected(op, inputs[: comm.rank + 1])
        elif name == "reduce_scatter":
            wanted = wanted[list(samples.regions(turn.count, comm.size))[comm.rank]]
        if name == "all_reduce" and turn.where == "in place":
            x = options["out"] = x.copy()
        elif name == "all_reduce" and turn.where == "out":
            options["out"] = np.empty_like(x)
        soak.hold(turn, lambda **more: getattr(comm, name)(x, **options, **more), wanted)

    return make


def _movement(name: str) -> Callable[[_Soak, _Turn], None]:
    def make(soak: _Soak, turn: _Turn) -> None:
        comm = turn.among.comm
        inputs = soak.inputs(turn, longer=turn.ordered and name in ("gather", "all_gather"))
        x: Any = soak.mine(turn, inputs)
        root = turn.root % comm.size
        options = {} if name.startswith("all_") else {"root": root}
        mine = list(samples.regions(turn.count, comm.size))[comm.rank]
        wanted: Any = inputs[root]
        if name == "broadcast" and turn.where == "out":
            options["out"] = np.empty_like(inputs[0])
        elif name == "scatter":
            x, wanted = x if comm.rank == root else None, wanted[mine]
        elif name == "all_to_all":
            wanted = np.concatenate([x[mine] for x in inputs])
        elif name in ("gather", "all_gather"):
            gets = name == "all_gather" or comm.rank == root
            wanted = np.concatenate(inputs) if gets else None
        soak.hold(turn, lambda **more: getattr(comm, name)(x, **options, **more), wanted)

    return make


def _sendrecv(soak: _Soak, turn: _Turn) -> None:
    comm, inputs = turn.among.comm, soak.inputs(turn)
    step = turn.root % comm.size
    to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
    x = soak.mine(turn, inputs)
    out = np.empty_like(inputs[0])
    received = comm.sendrecv(x, to, source, tag=turn.offset, out=out)
    samples.assert_same(received, inputs[source], str(turn))


def _message(soak: _Soak, turn: _Turn) -> None:
    comm, inputs = turn.among.comm, soak.inputs(turn)
    if comm.size == 1:
        return
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    work = comm.send(soak.mine(turn, inputs), to, tag=turn.offset, async_op=True)
    from_any = comm.size == 2 and turn.ordered and comm.capabilities.any_source
    origin = collective.ANY_SOURCE if from_any else source
    samples.assert_same(comm.recv(None, origin, tag=turn.offset), inputs[source], str(turn))
    work.wait()


def _objects(soak: _Soak, turn: _Turn) -> None:
    comm = turn.among.comm
    mine = {"rank": comm.rank, "numbers": list(range(turn.root)), "text": "é" * turn.offset}
    gathered = comm.all_gather_object(mine)
    assert gathered == [{**mine, "rank": rank} for rank in range(comm.size)], f"{turn}: {gathered}"


def _pick(things: list[str], dice: float) -> str:
    return things[int(len(things) * dice)]


def _length(kind: float, which: float, many: float) -> int:
    """Return a number of bytes: mostly small, sometimes near a threshold, rarely large."""
    if kind < 0.85:
        return int(70 * many) * 4
    if kind < 0.98:
        # The caller adds up to two elements, so the length is below, at or above the threshold.
        return max(0, _THRESHOLDS[int((len(_THRESHOLDS) - 1) * which)] - 8)
    return int(_LARGEST * many * 0.9) if kind < 0.99 else _THRESHOLDS[-1] - 8


_Made = Callable[[_Soak, _Turn], None]
# The weight of each operation in the draw, and the function that makes it.
_OPERATIONS: dict[str, tuple[float, _Made]] = {
    "all_reduce": (30, _reduction("all_reduce")),
    "reduce": (8, _reduction("reduce")),
    "reduce_scatter": (8, _reduction("reduce_scatter")),
    "scan": (6, _reduction("scan")),
    "broadcast": (10, _movement("broadcast")),
    "gather": (6, _movement("gather")),
    "all_gather": (8, _movement("all_gather")),
    "scatter": (6, _movement("scatter")),
    "all_to_all": (6, _movement("all_to_all")),
    "sendrecv": (4, _sendrecv),
    "message": (4, _message),
    "objects": (2, _objects),
    "barrier": (2, lambda soak, turn: None),
}
_NAMES = list(_OPERATIONS)
_SUMS = list(itertools.accumulate(weight for weight, _ in _OPERATIONS.values()))
_OPS = {kind: [name for name, kinds in samples.OPS.items() if kind in kinds] for kind in "biufc"}
_WHERE = ["new", "out", "in place", "symmetric", "huge pages", "strided"]
# Random numbers per turn.
_DICE = 14
