"""Random calls, all ranks alike, each result held against NumPy's."""

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

# Lengths in bytes around which transports change their way: what fits a head, is folded whole,
# goes to Gloo's own operations, is read from the peer's memory, or fits a slot.
_THRESHOLDS = (256, 1 << 10, 4 << 10, 8 << 10, 32 << 10, 64 << 10, 256 << 10)
_LARGEST = 600 << 10
# How far the ranks' inputs may be moved along the numbers that were made beforehand.
_OFFSETS = 997
# Calls in the background that are under way at once.
_IN_FLIGHT = 6


@dataclass
class _Among:
    """A communicator, and which ranks of the world are in it, in its order."""

    comm: Communicator
    ranks: list[int]


class _Numbers:
    """What the ranks contribute, made once: a call takes a stretch of it."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self._size = size
        self._made: dict[tuple[str, str, int], Any] = {}

    def of(self, rank: int, dtype: str, op: str, offset: int, count: int) -> Any:
        """Return what ``rank`` contributes to a call: numbers of which every fold is exact."""
        kind = op if op in ("prod", "avg") else "sum"
        known = self._made.get((dtype, kind, rank))
        if known is None:
            length = _LARGEST // dtypes.BY_NAME[dtype].itemsize + 2 * _OFFSETS
            known = samples.values(dtype, length, rank, self._seed, kind)
            if kind == "avg":
                known = known * known.dtype.type(2 * self._size)
            elif known.dtype.kind in "iu" and kind == "sum":
                # All bits: sums and products wrap around, as NumPy's do.
                limits = np.iinfo(known.dtype)
                random = np.random.default_rng([self._seed, rank])
                known = random.integers(limits.min, limits.max, length, known.dtype, endpoint=True)
            known.flags.writeable = False
            self._made[dtype, kind, rank] = known
        return known[offset : offset + count]


@dataclass
class _Turn:
    """What one turn is to do, drawn alike by all ranks."""

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
    """Make random calls; return how many of each operation were made and were right.

    Args:
        comm: of all ranks; the same calls are made on groups of it.
        seed: decides all that is drawn.
        turns: how many calls.
        seconds: after which no more are made; the ranks agree on it.

    Raises:
        AssertionError: a result is not NumPy's; tells the turn, which the seed repeats.
    """
    return _Soak(comm, seed).run(turns, seconds)


class _Soak:
    def __init__(self, comm: Communicator, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._numbers = _Numbers(seed, comm.size)
        self._rank = comm.rank
        everybody = list(range(comm.size))
        parity = [rank for rank in everybody if rank % 2 == comm.rank % 2]
        half = comm.split(comm.rank % 2)
        assert half is not None
        self._world = _Among(comm, everybody)
        self._all = [
            self._world,
            _Among(comm.dup(), everybody),
            _Among(comm.group(everybody[::-1]), everybody[::-1]),
            _Among(half, parity),
        ]
        self._symmetric = [among.comm.empty(_LARGEST, "uint8") for among in self._all]
        self._pending: deque[tuple[Any, Callable[[Any], None]]] = deque()
        self._dice: list[list[float]] = []
        self._done: Counter[str] = Counter()
        # What NumPy has: bfloat16 is the conformance suite's.
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

    # -- what is drawn -----------------------------------------------------------------------

    def _draw(self) -> _Turn:
        if not self._dice:
            # Many at once: one at a time they cost more than a short call.
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

    # -- what is made --------------------------------------------------------------------------

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
        """Make ``call`` and hold its result, now or when it is waited for."""

        def check(found: Any) -> None:
            if wanted is None:
                assert found is None, f"{turn}: got {found!r} instead of None"
            else:
                samples.assert_same(found, wanted, str(turn))

        if turn.background:
            self._pending.append((call(async_op=True, **options), check))
        else:
            check(call(**options))

    def mine(self, turn: _Turn, inputs: list[Any]) -> Any:
        """Return this rank's input, where the turn says that it is."""
        x = inputs[turn.among.comm.rank]
        if turn.where == "strided":
            return samples.laid_out("strided", x)
        if turn.where == "symmetric" and not turn.background:
            room = self._symmetric[self._all.index(turn.among)]
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
            # Of an average there is none: of how many ranks would it be?
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
    found = comm.sendrecv(x, to, source, tag=turn.offset, out=out)
    samples.assert_same(found, inputs[source], str(turn))


def _message(soak: _Soak, turn: _Turn) -> None:
    comm, inputs = turn.among.comm, soak.inputs(turn)
    if comm.size == 1:
        return
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    work = comm.send(soak.mine(turn, inputs), to, tag=turn.offset, async_op=True)
    anybody = comm.size == 2 and turn.ordered and comm.capabilities.any_source
    origin = collective.ANY_SOURCE if anybody else source
    samples.assert_same(comm.recv(None, origin, tag=turn.offset), inputs[source], str(turn))
    work.wait()


def _objects(soak: _Soak, turn: _Turn) -> None:
    comm = turn.among.comm
    mine = {"rank": comm.rank, "numbers": list(range(turn.root)), "text": "é" * turn.offset}
    found = comm.all_gather_object(mine)
    assert found == [{**mine, "rank": rank} for rank in range(comm.size)], f"{turn}: {found}"


def _pick(things: list[str], dice: float) -> str:
    return things[int(len(things) * dice)]


def _length(kind: float, which: float, many: float) -> int:
    """Return how many bytes: mostly few, sometimes about a threshold, now and then many."""
    if kind < 0.85:
        return int(70 * many) * 4
    if kind < 0.98:
        # Up to two elements are added: once it is below, once at, once above.
        return max(0, _THRESHOLDS[int((len(_THRESHOLDS) - 1) * which)] - 8)
    return int(_LARGEST * many * 0.9) if kind < 0.99 else _THRESHOLDS[-1] - 8


_Made = Callable[[_Soak, _Turn], None]
# How often each operation is drawn, and how it is made.
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
_WHERE = ["new", "out", "in place", "symmetric", "strided"]
# How many random numbers a turn takes.
_DICE = 14
