"""Time operations of all contestants in turns, and sum up."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from arena import Arena
from peers import VENDORS

__all__ = ["OPERATIONS", "Pace", "Record", "compare", "fastest_mpi", "find"]

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)
#: From here on calls are made back to back and their mean is taken: the difference
#: between a common start and a running start is lost in such a call's length.
BACK_TO_BACK = 1 << 20


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
class Record:
    """One operation of one contestant at one size.

    Attributes:
        operation, contestant, memory: what was measured.
        ranks: how many.
        nbytes: of the larger of a rank's two arrays, before it is rounded up to a whole
            number of elements for each rank.
        method: ``"latency"`` (each call timed from a common start, the slowest rank's
            time taken) or ``"back to back"`` (the slowest rank's mean over a turn).
        seconds: median over the turns; for ``send_recv`` of half a round trip.
        low, high: the fastest and the slowest turn.
        algbw, busbw: bytes a second, as nccl-tests defines them.
        calls: how many were timed.
    """

    operation: str
    contestant: str
    memory: str
    ranks: int
    nbytes: int
    method: str
    seconds: float
    low: float
    high: float
    algbw: float
    busbw: float
    calls: int

    @property
    def side(self) -> str:
        """The contestant, with the memory where there is a choice."""
        return f"{self.contestant} {self.memory}" if self.contestant == "shm" else self.contestant

    def as_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def compare(
    arena: Arena, operation: str, nbytes: int, pace: Pace, missing: Callable[[str, str], None]
) -> Iterator[Record]:
    """Measure one operation at one size: A B C A B C …, then check each one's results.

    Args:
        arena: the contestants.
        operation: one of :data:`OPERATIONS`.
        nbytes: size of the larger array.
        pace: how long.
        missing: told contestant and reason, where a library lacks the operation.

    Raises:
        ArenaError: a contestant failed or computed wrong results.
    """
    latency = nbytes < BACK_TO_BACK
    turns = [
        _Turns(arena, contestant.name, memory, operation, latency)
        for contestant in arena.contestants
        for memory in contestant.memories
    ]
    able = []
    for one in turns:
        reason = one.prepare(nbytes)
        if reason is None:
            one.calibrate(pace.turn)
            able.append(one)
        else:
            missing(one.contestant, reason)
    for _ in range(pace.rounds):
        for one in able:
            one.take()
    for one in able:
        one.finish()
        yield one.record()


class _Turns:
    """One side's turns at one operation and size."""

    def __init__(
        self, arena: Arena, contestant: str, memory: str, operation: str, latency: bool
    ) -> None:
        self._arena = arena
        self.contestant = contestant
        self._memory = memory
        self._operation = operation
        self._latency = latency
        self._asked = self._nbytes = 0
        self._iterations = 0
        self._warmup = 1
        self._blocks: list[float] = []

    def prepare(self, nbytes: int) -> str | None:
        """Allocate; return why the library cannot, or None."""
        operation = "copy" if self.contestant == "memcpy" else self._operation
        answers = self._arena.ask(
            self.contestant, "prepare", operation=operation, nbytes=nbytes, memory=self._memory
        )
        if isinstance(answers, str):
            return answers
        self._asked, self._nbytes = nbytes, answers[0]["nbytes"]
        return None

    def calibrate(self, turn: float) -> None:
        """Find out how many calls fill a turn; the first ones warm up."""
        self._iterations, self._warmup = (20, 20) if self._latency else (2, 2)
        seconds = max(1e-7, self._time())
        self._iterations = min(5000, max(3, int(turn / seconds)))
        self._warmup = min(50, max(1, self._iterations // 10))

    def take(self) -> None:
        """Have a turn."""
        self._blocks.append(self._time())

    def _time(self) -> float:
        answers = self._arena.ask(
            self.contestant,
            "measure",
            memory=self._memory,
            iterations=self._iterations,
            warmup=self._warmup,
            each=self._latency,
        )
        assert not isinstance(answers, str)
        slowest: list[float] = [
            max(times) for times in zip(*(answer["seconds"] for answer in answers))
        ]
        return statistics.median(slowest)

    def finish(self) -> None:
        """Check the results on fresh data and drop the arrays."""
        self._arena.ask(self.contestant, "check", memory=self._memory)
        self._arena.ask(self.contestant, "release", memory=self._memory)

    def record(self) -> Record:
        """Return the sum of it."""
        half = 0.5 if self._operation == "send_recv" and self.contestant != "memcpy" else 1.0
        seconds = half * statistics.median(self._blocks)
        algbw = self._nbytes / seconds
        size = self._arena.size
        shares = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0, "send_recv": 1.0}
        return Record(
            self._operation,
            self.contestant,
            self._memory,
            size,
            self._asked,
            "latency" if self._latency else "back to back",
            seconds,
            half * min(self._blocks),
            half * max(self._blocks),
            algbw,
            algbw * shares.get(self._operation, (size - 1) / size),
            self._iterations * len(self._blocks),
        )


def find(
    records: Sequence[Record], operation: str, ranks: int, nbytes: int, side: str
) -> Record | None:
    """Return the record of a side, if there is one."""
    for record in records:
        key = (record.operation, record.ranks, record.nbytes, record.side)
        if key == (operation, ranks, nbytes, side):
            return record
    return None


def fastest_mpi(
    records: Sequence[Record], operation: str, ranks: int, nbytes: int
) -> Record | None:
    """Return the record of the fastest MPI library, if there is one."""
    found = [
        record
        for vendor in VENDORS
        if (record := find(records, operation, ranks, nbytes, vendor)) is not None
    ]
    return min(found, key=lambda record: record.seconds, default=None)
