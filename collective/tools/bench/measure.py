"""Time operations of all contestants in turns, and sum up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from collective.inner import BY_NAME
from collective.tools.doctor.host import shared_memory
from collective.tools.show import size_name

from .arena import Arena, ArenaError
from .contestants import Side
from .operations import ALL, lengths

T = TypeVar("T")

#: Methods of timing. ``"latency"``: each call by itself from a common start; the figure is the
#: slowest rank's time, as in the OSU micro-benchmarks. ``"bandwidth"``: calls back to back; the
#: figure is the slowest rank's mean, as in nccl-tests.
METHODS = ("latency", "bandwidth")
# The share of the free memory that the arrays may take.
_MEMORY = 0.8


@dataclass(frozen=True)
class Pace:
    """Duration of a measurement.

    Attributes:
        rounds: number of turns of each contestant.
        turn: seconds that a turn should take.
    """

    rounds: int
    turn: float

    @staticmethod
    def of(quick: bool) -> Pace:
        """Return the usual pace, or the quick one."""
        return Pace(3, 0.03) if quick else Pace(9, 0.1)


@dataclass(frozen=True)
class Task:
    """Task of all contestants: an operation on arrays of one size and dtype.

    Attributes:
        operation: one of :data:`~collective.tools.bench.operations.ALL`.
        nbytes: size of the larger of a rank's two arrays, before it is rounded up to a whole
            number of elements for each rank.
        dtype: name of the dtype.
    """

    operation: str
    nbytes: int
    dtype: str = "float32"

    def gap(self, ranks: int, side: str, reason: str, failed: bool = False) -> Gap:
        """Return the :class:`Gap` of a side that has no result for this task."""
        return Gap(self.operation, self.nbytes, self.dtype, ranks, side, reason, failed)


@dataclass(frozen=True)
class Record:
    """Result of one side for one operation at one size, by one method.

    Attributes:
        operation, nbytes, dtype: as in :class:`Task`.
        ranks: number of ranks.
        contestant, memory, framework: as in :class:`~collective.tools.bench.contestants.Side`.
        method: one of :data:`METHODS`.
        seconds: median of all calls for latency, and of the turns' means for bandwidth; for
            ``send_recv`` half a round trip.
        p90, p99: percentiles of all calls; None for bandwidth, where calls are not timed singly.
        low, high: medians of the fastest and of the slowest turn.
        algbw, busbw: bytes a second, as nccl-tests defines them; None for latency.
        calls: number of timed calls.
        wrong: number of wrong elements, over all ranks, in a call on fresh data afterwards.
        turns: median of each turn, in order, so that sides can be compared turn by turn.
    """

    operation: str
    nbytes: int
    dtype: str
    ranks: int
    contestant: str
    memory: str
    framework: str | None
    method: str
    seconds: float
    p90: float | None
    p99: float | None
    low: float
    high: float
    algbw: float | None
    busbw: float | None
    calls: int
    wrong: int
    turns: Sequence[float] = ()

    @property
    def side(self) -> str:
        """Name of the contestant, with memory and framework where there is a choice."""
        return str(Side(self.contestant, self.memory, self.framework))


@dataclass(frozen=True)
class Gap:
    """Missing result, and the reason.

    Attributes:
        operation, nbytes, dtype, ranks: what was not measured.
        side: name of the side.
        reason: why there is no result.
        failed: whether a contestant failed; it takes no further part.
    """

    operation: str
    nbytes: int
    dtype: str
    ranks: int
    side: str
    reason: str
    failed: bool = False


def compare(
    arena: Arena, task: Task, pace: Pace, methods: Sequence[str] = METHODS
) -> Iterator[Record | Gap]:
    """Measure one operation at one size in turns, A B C A B C …, then check each side's result.

    Args:
        arena: the contestants.
        task: operation, size and dtype.
        pace: duration.
        methods: some of :data:`METHODS`; a barrier moves no data and has only a latency.
    """
    arrays = ALL[task.operation].x is not None
    sides = [side for contestant in arena.contestants for side in contestant.sides(arrays)]
    ranks = {contestant.name: contestant.ranks for contestant in arena.contestants}
    lacking = _lacking(task, [ranks[side.contestant] for side in sides])
    playing: list[_SideTurns] = []
    for side in sides:
        one = _SideTurns(arena, side, task, ranks[side.contestant])
        reason = lacking or one.run(one.prepare)
        if one.broken:
            yield one.gap(one.broken.brief, failed=True)
        elif reason:
            yield one.gap(reason)
        else:
            playing.append(one)
    for method in methods:
        if method == "bandwidth" and not arrays:
            continue
        for one in playing:
            one.run(partial(one.calibrate, method, pace.turn))
        for _ in range(pace.rounds):
            for one in playing:
                one.run(one.take)
    for one in playing:
        one.run(one.finish)
        if one.broken:
            yield one.gap(one.broken.brief, failed=True)
        else:
            yield from one.records()


def _lacking(task: Task, ranks: Sequence[int]) -> str:
    """Return why there is not enough memory for all sides at once, or ""."""
    itemsize = BY_NAME[task.dtype].itemsize
    needed = 0
    for size in ranks:
        counts = lengths(task.operation, task.nbytes, itemsize, size)[:2]
        needed += size * sum(count or 0 for count in counts) * itemsize
    here = shared_memory()
    free = [amount for amount in (here["available"], here["left"]) if amount is not None]
    if not free or needed <= _MEMORY * min(free):
        return ""
    return (
        f"no memory: {len(ranks)} sides take {size_name(needed)}, and {size_name(min(free))} is "
        "free; name fewer sides or smaller sizes"
    )


class _SideTurns:
    """The turns of one side at one task.

    Args:
        arena: the arena of the contestant.
        side, task: the side and the task.
        ranks: number of ranks.

    Attributes:
        broken: error of the contestant, if it failed; there are no further turns then.
    """

    def __init__(self, arena: Arena, side: Side, task: Task, ranks: int) -> None:
        self._arena = arena
        self._side = side
        self._task = task
        self._ranks = ranks
        self._operation = "copy" if side.contestant == "memcpy" else task.operation
        self.broken: ArenaError | None = None
        # Method -> times of each turn, of the slowest rank.
        self._turns: dict[str, list[list[float]]] = {}
        self._iterations: dict[str, int] = {}
        self._warmup = 0
        self._method = ""
        self._nbytes = self._wrong = 0

    def run(self, what: Callable[[], T]) -> T | None:
        """Call ``what`` unless the contestant has failed; remember an error of the contestant."""
        if self.broken is None:
            try:
                return what()
            except ArenaError as error:
                self.broken = error
        return None

    def _ask(self, do: str, **request: Any) -> list[dict[str, Any]] | str:
        """Call a method of the worker for the prepared call; see :meth:`Arena.ask`."""
        return self._arena.ask(self._side.contestant, do, side=str(self._side), **request)

    def calibrate(self, method: str, turn: float) -> None:
        """Measure how many calls fill a turn; the first calls are a warm-up."""
        self._method, self._turns[method] = method, []
        self._iterations[method], self._warmup = (10, 10) if method == "latency" else (2, 2)
        seconds = max(1e-7, statistics.median(self._time()))
        self._iterations[method] = min(5000, max(3, int(turn / seconds)))
        self._warmup = min(50, max(1, self._iterations[method] // 10))

    def take(self) -> None:
        """Take one turn."""
        self._turns[self._method].append(self._time())

    def _time(self) -> list[float]:
        """Return the seconds of each call, or one mean; of the slowest rank."""
        answers = self._ask(
            "measure",
            iterations=self._iterations[self._method],
            warmup=self._warmup,
            each=self._method == "latency",
        )
        assert not isinstance(answers, str)
        slowest = map(max, zip(*(answer["seconds"] for answer in answers)))
        return [ALL[self._operation].share * seconds for seconds in slowest]

    def prepare(self) -> str:
        """Allocate the arrays and make one call; return why the library cannot do it, or ""."""
        answers = self._ask(
            "prepare",
            operation=self._operation,
            nbytes=self._task.nbytes,
            dtype=self._task.dtype,
            memory=self._side.memory,
            framework=self._side.framework,
        )
        tried = answers if isinstance(answers, str) else self._ask("attempt")
        if isinstance(answers, str) or isinstance(tried, str):
            self._ask("release")
            return str(tried).strip().splitlines()[-1]
        self._nbytes = answers[0]["nbytes"]
        return ""

    def finish(self) -> None:
        """Check the result on fresh data and drop the arrays."""
        answers = self._ask("check")
        assert not isinstance(answers, str)
        self._wrong = sum(answer["wrong"] for answer in answers)
        self._ask("release")

    def gap(self, reason: str, failed: bool = False) -> Gap:
        """Return the :class:`Gap` of this side and task."""
        return self._task.gap(self._ranks, str(self._side), reason, failed)

    def records(self) -> Iterator[Record]:
        """Return a record for each method."""
        for method, turns in self._turns.items():
            middles = [statistics.median(times) for times in turns]
            every = np.concatenate(turns)
            seconds = float(np.median(every))
            timed_each = method == "latency"
            p90, p99 = np.percentile(every, (90, 99)).tolist() if timed_each else (None, None)
            algbw = None if timed_each else self._nbytes / seconds
            busbw = None if algbw is None else algbw * ALL[self._task.operation].busbw(self._ranks)
            yield Record(
                **vars(self._task),
                ranks=self._ranks,
                **vars(self._side),
                method=method,
                seconds=seconds,
                p90=p90,
                p99=p99,
                low=min(middles),
                high=max(middles),
                algbw=algbw,
                busbw=busbw,
                calls=len(every) * (1 if timed_each else self._iterations[method]),
                wrong=self._wrong,
                turns=middles,
            )
