"""Time operations of all contestants in turns, and sum up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from collective.memory.dtypes import BY_NAME
from collective.tools.doctor.host import shared_memory
from collective.tools.show import size_name

from .arena import Arena, ArenaError
from .contestants import Side
from .operations import ALL, lengths

__all__ = [
    "BACK_TO_BACK", "METHODS", "Gap", "Pace", "Record", "Task", "Turns", "compare", "method_of",
    "take_turns",
]  # fmt: skip

#: How calls are timed. ``"latency"``: each call by itself from a common start, the slowest
#: rank's time taken, as the OSU micro-benchmarks do. ``"bandwidth"``: calls back to back, the
#: slowest rank's mean taken, as nccl-tests do.
METHODS = ("latency", "bandwidth")
#: Where one method is to do, bandwidth does from here on: the difference between a common
#: start and a running start is lost in such a call's length.
BACK_TO_BACK = 1 << 20
_SHORT = {"operation": "op", "nbytes": "bytes", "contestant": "backend"}
# Of the memory that is free, this much may be taken.
_MEMORY = 0.8


def method_of(nbytes: int) -> str:
    """Return the method that tells more at this size."""
    return "latency" if nbytes < BACK_TO_BACK else "bandwidth"


@dataclass(frozen=True)
class Pace:
    """How long to measure.

    Attributes:
        rounds: turns that each contestant has.
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
    """What all contestants do: an operation on arrays of one size and dtype.

    Attributes:
        operation: one of :data:`~collective.tools.bench.operations.ALL`.
        nbytes: of the larger of a rank's two arrays, before it is rounded up to a whole
            number of elements for each rank.
        dtype: its name.
    """

    operation: str
    nbytes: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Record:
    """One operation of one side at one size, by one method.

    Attributes:
        operation, nbytes, dtype: as of :class:`Task`.
        ranks: how many.
        contestant, memory, framework: as of :class:`~collective.tools.bench.contestants.Side`.
        method: one of :data:`METHODS`.
        seconds: the median, of all calls for latency, of the turns' means for bandwidth; for
            ``send_recv`` of half a round trip.
        p90, p99: percentiles of all calls; None for bandwidth, where calls are not timed.
        low, high: the fastest and the slowest turn.
        algbw, busbw: bytes a second, as nccl-tests defines them; None for latency.
        calls: how many were timed.
        wrong: elements, of all ranks, that were not what they must be on fresh data afterwards.
        turns: each turn's median, in their order, so that sides can be held against each other
            turn by turn.
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
    turns: tuple[float, ...] = ()

    @property
    def side(self) -> str:
        """The contestant, with memory and framework where there is a choice."""
        return str(Side(self.contestant, self.memory, self.framework))

    def as_json(self) -> dict[str, Any]:
        """Return the fields, some of them by shorter names, as options have them."""
        return {_SHORT.get(name, name): value for name, value in asdict(self).items()}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Record:
        """Return what :meth:`as_json` was made of."""
        long = {short: name for name, short in _SHORT.items()}
        fields = {long.get(name, name): value for name, value in found.items()}
        return Record(**{**fields, "turns": tuple(fields.get("turns", ()))})


@dataclass(frozen=True)
class Gap:
    """Something that could not be measured, and why.

    Attributes:
        operation, nbytes, dtype, ranks: what.
        side: of whom.
        reason: why not.
        failed: whether a contestant broke, which takes no further part then.
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
    """Measure one operation at one size: A B C A B C …, then check each one's results.

    Args:
        arena: the contestants.
        task: what they do.
        pace: how long.
        methods: of :data:`METHODS`; a barrier moves nothing and has a latency only.
    """
    arrays = ALL[task.operation].x is not None
    sides = [side for contestant in arena.contestants for side in contestant.sides(arrays)]
    ranks = {contestant.name: contestant.ranks for contestant in arena.contestants}
    lacking = _lacking(task, [ranks[side.contestant] for side in sides])
    playing: list[_TaskTurns] = []
    for side in sides:
        one = _TaskTurns(arena, side, task, ranks[side.contestant])
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
        take_turns(playing, method, pace.rounds, pace.turn)
    for one in playing:
        one.run(one.finish)
        if one.broken:
            yield one.gap(one.broken.brief, failed=True)
        else:
            yield from one.records()


def _lacking(task: Task, ranks: Sequence[int]) -> str:
    """Return why there is not enough memory for all sides at a time, or nothing."""
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
        "free; name fewer, or smaller sizes"
    )


class Turns:
    """The turns of one call that a contestant's ranks have prepared.

    Args:
        arena: where the contestant is.
        contestant: its name.
        prepared: by which name the ranks know the call.
        share: of the time of a call that is taken: 1/2 for what is there and back.

    Attributes:
        turns: by method, of each turn the times, of the slowest rank.
        broken: what went wrong, if something did; there are no further turns then.
    """

    def __init__(self, arena: Arena, contestant: str, prepared: str, share: float = 1.0) -> None:
        self._arena = arena
        self._contestant, self._prepared, self._share = contestant, prepared, share
        self.turns: dict[str, list[list[float]]] = {}
        self.broken: ArenaError | None = None
        self.iterations: dict[str, int] = {}
        self._warmup = 0
        self._method = ""

    def run(self, what: Callable[[], str | None]) -> str | None:
        """Do something unless the contestant has broken, and note if it does."""
        if self.broken is None:
            try:
                return what()
            except ArenaError as error:
                self.broken = error
        return None

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]] | str:
        """Ask all ranks for something that has to do with the call; see :meth:`Arena.ask`."""
        return self._arena.ask(self._contestant, do, side=self._prepared, **request)

    def calibrate(self, method: str, turn: float) -> None:
        """Find out how many calls fill a turn; the first ones warm up."""
        self._method, self.turns[method] = method, []
        self.iterations[method], self._warmup = (10, 10) if method == "latency" else (2, 2)
        seconds = max(1e-7, statistics.median(self._time()))
        self.iterations[method] = min(5000, max(3, int(turn / seconds)))
        self._warmup = min(50, max(1, self.iterations[method] // 10))

    def take(self) -> None:
        """Have a turn."""
        self.turns[self._method].append(self._time())

    def middles(self, method: str) -> list[float]:
        """Return the median of each turn, in their order."""
        return [statistics.median(times) for times in self.turns[method]]

    def _time(self) -> list[float]:
        """Return seconds of each call, or one mean: the slowest rank's."""
        answers = self.ask(
            "measure",
            iterations=self.iterations[self._method],
            warmup=self._warmup,
            each=self._method == "latency",
        )
        assert not isinstance(answers, str)
        slowest = map(max, zip(*(answer["seconds"] for answer in answers)))
        return [self._share * seconds for seconds in slowest]


def take_turns(sides: Sequence[Turns], method: str, rounds: int, turn: float) -> None:
    """Have so many turns of all sides, A B C A B C …, of about ``turn`` seconds each."""
    for side in sides:
        side.run(partial(side.calibrate, method, turn))
    for _ in range(rounds):
        for side in sides:
            side.run(side.take)


class _TaskTurns(Turns):
    """One side's turns at one task."""

    def __init__(self, arena: Arena, side: Side, task: Task, ranks: int) -> None:
        self._operation = "copy" if side.contestant == "memcpy" else task.operation
        super().__init__(arena, side.contestant, str(side), ALL[self._operation].share)
        self._side = side
        self._task = task
        self._ranks = ranks
        self._nbytes = self._wrong = 0

    def prepare(self) -> str | None:
        """Allocate and try; return why the library cannot, or None."""
        answers = self.ask(
            "prepare",
            operation=self._operation,
            nbytes=self._task.nbytes,
            dtype=self._task.dtype,
            memory=self._side.memory,
            framework=self._side.framework,
        )
        tried = answers if isinstance(answers, str) else self.ask("attempt")
        if isinstance(answers, str) or isinstance(tried, str):
            self.ask("release")
            return str(tried).strip().splitlines()[-1]
        self._nbytes = answers[0]["nbytes"]
        return None

    def finish(self) -> None:
        """Check the results on fresh data and drop the arrays."""
        answers = self.ask("check")
        assert not isinstance(answers, str)
        self._wrong = sum(answer["wrong"] for answer in answers)
        self.ask("release")

    def gap(self, reason: str, failed: bool = False) -> Gap:
        """Return that there is no figure, and why."""
        task = self._task
        return Gap(
            task.operation, task.nbytes, task.dtype, self._ranks, str(self._side), reason, failed
        )

    def records(self) -> Iterator[Record]:
        """Return the sum of it, a record a method."""
        for method, turns in self.turns.items():
            middles = self.middles(method)
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
                calls=len(every) * (1 if timed_each else self.iterations[method]),
                wrong=self._wrong,
                turns=tuple(middles),
            )
