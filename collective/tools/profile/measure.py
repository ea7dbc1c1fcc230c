"""The cost of the calls of a traced program, and whether its ranks pay.

With R ranks, each with its own mini-batches, an epoch takes ``N / (R B) (T_comp + T_sync)``. On one
rank it takes ``N / B T_comp``. So R ranks are faster if ``T_sync / T_comp < R - 1`` (A. Das, "Deep
Learning at scale: The torch.distributed API", 2018, equation 5).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collective.tools.bench.operations import ALL

from .events import IN_CALLS, RankTrace, Slice
from .steps import MEMORY, find

Vector = np.ndarray[Any, np.dtype[np.float64]]

# Calls in which all ranks wait for the root only, in which only the root waits, and messages.
_FROM_ROOT = {"broadcast", "scatter"}
_TO_ROOT = {"reduce", "gather"}
_MESSAGES = {"send", "recv", "sendrecv"}
# Measurements of a step, by their names in StepTimes.
_PARTS = ("step", "comp", "sync", "waiting", "background", "hidden")


class Intervals:
    """Union of intervals of time.

    Args:
        parts: starts and ends of the intervals, in any order; they may overlap.
    """

    def __init__(self, parts: Iterable[tuple[float, float]]) -> None:
        pairs = np.array(sorted(parts), float).reshape(-1, 2)
        ends = np.maximum.accumulate(pairs[:, 1]) if len(pairs) else pairs[:, 1]
        # A new interval begins where all earlier intervals have ended.
        first = np.concatenate(([True], pairs[1:, 0] > ends[:-1]))[: len(pairs)]
        self.starts: Vector = pairs[first, 0]
        self.ends: Vector = ends[np.concatenate((first[1:], [True]))[: len(pairs)]]
        self._before = np.concatenate(([0.0], np.cumsum(self.ends - self.starts)))

    def __or__(self, other: Intervals) -> Intervals:
        starts = np.concatenate((self.starts, other.starts))
        return Intervals(zip(starts, np.concatenate((self.ends, other.ends))))

    def until(self, moments: Any) -> Vector:
        """Return the length of the union before each of ``moments``."""
        at = np.asarray(moments, float)
        index = np.searchsorted(self.starts, at, side="right") - 1
        whole = self._before[np.maximum(index, 0)]
        if not len(self.starts):
            return np.zeros_like(at)
        inside = np.minimum(at, self.ends[index]) - self.starts[index]
        return np.where(index < 0, 0.0, whole + inside)

    def within(self, start: Any, end: Any) -> Vector:
        """Return the length of the union between ``start`` and ``end``."""
        return self.until(end) - self.until(start)


@dataclass
class OperationCost:
    """Cost of all calls of one operation.

    Attributes:
        name: name of the operation.
        calls: number of calls; for messages, of all ranks.
        nbytes: bytes of all calls; if pieces are gathered or scattered, of all pieces.
        bus_bytes: bytes over the busiest link, as nccl-tests counts them.
        seconds: sum over the calls of the slowest rank's time; for messages, the largest sum of a
            rank.
        waiting: the part of these seconds before the other ranks had come; mean of the ranks.
        moving: the rest of these seconds, on the slowest rank.
        late: rank -> number of calls to which it came last.
        background: seconds of calls in the background; mean of the ranks.
        hidden: the part of ``background`` during which the program computed.
        failed: number of calls that raised, or did not end.
    """

    name: str
    calls: int = 0
    nbytes: int = 0
    bus_bytes: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    moving: float = 0.0
    late: Counter[int] = field(default_factory=Counter)
    background: float = 0.0
    hidden: float = 0.0
    failed: int = 0

    @property
    def algbw(self) -> float | None:
        """Bytes a second, from the time when all ranks had come."""
        return self.nbytes / self.moving if self.moving > 0 and self.nbytes else None

    @property
    def busbw(self) -> float | None:
        """``bus_bytes`` a second, from the time when all ranks had come."""
        return self.bus_bytes / self.moving if self.moving > 0 and self.bus_bytes else None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Typical training step, in seconds: medians over the steps, means over the ranks.

    Attributes:
        how: what marks the steps.
        count: number of steps; the first step does not count.
        step: time from end to end.
        comp: T_comp, time outside of calls.
        sync: T_sync, time in calls.
        waiting: the part of ``sync`` during which some rank had not come.
        background: time of calls beside the program.
        hidden: the part of ``background`` during which the program computed.
        comp_by_rank: T_comp of each rank.
    """

    how: str
    count: int
    step: float
    comp: float
    sync: float
    waiting: float
    background: float
    hidden: float
    comp_by_rank: list[float]


@dataclass(frozen=True, slots=True)
class Profile:
    """Profile of a program: its calls and steps.

    Attributes:
        about: head of rank 0's trace.
        ranks: number of traced ranks.
        seconds: time from the first event to the last.
        operations: costs, the largest first.
        steps: the typical step; None if no steps were found.
        clock_error: possible difference of the ranks' clocks, in seconds.
    """

    about: dict[str, Any]
    ranks: int
    seconds: float
    operations: list[OperationCost]
    steps: StepTimes | None
    clock_error: float


def profile(traces: Sequence[RankTrace]) -> Profile:
    """Return the costs of the traced calls."""
    blocked = {
        t.rank: Intervals(
            (s.start, s.end) for s in t.slices if s.category in IN_CALLS and not s.background
        )
        for t in traces
    }
    matched = _matched(traces)
    operations: dict[str, OperationCost] = {}
    waits: dict[int, list[tuple[float, float]]] = {t.rank: [] for t in traces}
    for (_, _, name), made in matched.items():
        operation = operations.setdefault(name, OperationCost(name))
        _add(operation, made, waits, blocked)
    for messages in _messages(traces):
        operations[messages.name] = messages
    every = [s for t in traces for s in t.slices]
    return Profile(
        traces[0].about,
        len(traces),
        max((s.end for s in every), default=0.0) - min((s.start for s in every), default=0.0),
        sorted(operations.values(), key=lambda cost: -cost.seconds),
        _steps(traces, blocked, {rank: Intervals(spans) for rank, spans in waits.items()}),
        2e-6 * max(float(t.about.get("clock_error_us", 0.0)) for t in traces),
    )


def _matched(traces: Sequence[RankTrace]) -> dict[Any, dict[int, Slice]]:
    """Return key of each call -> rank -> slice of the call on that rank."""
    matched: dict[Any, dict[int, Slice]] = {}
    for trace in traces:
        for call in trace.calls():
            matched.setdefault(call.key, {})[trace.rank] = call
    return matched


def _awaited(call: Slice, made: dict[int, Slice]) -> float:
    """Return when the last rank came that this rank's call had to wait for."""
    root = call.args.get("root_rank", -1)
    if call.name in _FROM_ROOT and root in made:
        return made[root].start
    if call.name in _TO_ROOT and made.get(root) is not call:
        return call.start
    return max(other.start for other in made.values())


def _add(
    operation: OperationCost,
    made: dict[int, Slice],
    waits: dict[int, list[tuple[float, float]]],
    blocked: Mapping[int, Intervals],
) -> None:
    """Add one call to the cost of its operation."""
    operation.calls += 1
    operation.failed += any(not call.over or "error" in call.args for call in made.values())
    nbytes = max(call.args.get("bytes", 0) for call in made.values())
    nbytes *= operation.name not in MEMORY
    ranks = max(call.args.get("ranks", len(made)) for call in made.values())
    operation.nbytes += nbytes
    factor = ALL[operation.name].busbw(ranks) if operation.name in ALL else 1.0
    operation.bus_bytes += nbytes * factor
    waited, moved = [], []
    for rank, call in made.items():
        took = call.end - call.start
        wait = min(took, max(0.0, _awaited(call, made) - call.start))
        waited.append(wait)
        moved.append(took - wait)
        waits[rank].append((call.start, call.start + wait))
        if call.background:
            operation.background += took / len(made)
            busy = float(blocked[rank].within(call.start, call.end))
            operation.hidden += (took - busy) / len(made)
    operation.seconds += max(call.end - call.start for call in made.values())
    operation.waiting += float(np.mean(waited))
    operation.moving += max(moved)
    if len(made) > 1:
        operation.late[max(made, key=lambda rank: made[rank].start)] += 1


def _messages(traces: Sequence[RankTrace]) -> Iterable[OperationCost]:
    """Return the costs of messages; for them, waiting cannot be separated from moving."""
    costs: dict[str, OperationCost] = {}
    taken: dict[str, Counter[int]] = {}
    for trace in traces:
        for call in trace.slices:
            if call.name not in _MESSAGES or call.category != "message":
                continue
            operation = costs.setdefault(call.name, OperationCost(call.name))
            operation.calls += 1
            operation.nbytes += call.args.get("bytes", 0)
            operation.failed += not call.over or "error" in call.args
            taken.setdefault(call.name, Counter())[trace.rank] += call.end - call.start  # type: ignore[assignment]
    for name, operation in costs.items():
        operation.seconds = float(max(taken[name].values()))
    return costs.values()


# -- steps --------------------------------------------------------------------------------------


def _steps(
    traces: Sequence[RankTrace], blocked: Mapping[int, Intervals], waits: Mapping[int, Intervals]
) -> StepTimes | None:
    steps = find(traces)
    if steps is None:
        return None
    rows = []
    for trace, starts, ends in zip(traces, steps.starts, steps.ends):
        busy, waiting = blocked[trace.rank], waits[trace.rank]
        # Leave out the first step, which includes work that is done only once.
        start, end = starts[1:], ends[1:]
        concurrent = Intervals((s.start, s.end) for s in trace.calls() if s.background)
        sync = busy.within(start, end)
        parts = [
            end - start,
            end - start - sync,
            sync,
            # A and B have in common: A + B - (A or B).
            sync + waiting.within(start, end) - (busy | waiting).within(start, end),
            concurrent.within(start, end),
            (concurrent | busy).within(start, end) - sync,
        ]
        rows.append([float(np.median(part)) for part in parts])
    times = dict(zip(_PARTS, np.mean(rows, axis=0).tolist()))
    return StepTimes(
        how=steps.how,
        count=len(steps.ends[0]),
        comp_by_rank=[row[1] for row in rows],
        **times,
    )


# -- the verdict --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Payoff:
    """Result of the criterion for the profiled ranks.

    Attributes:
        ranks: R.
        ratio: T_sync / T_comp; infinite if nothing is computed.
        pays: whether the ratio is below R - 1; False for one rank.
        speedup: R T_comp / (T_comp + T_sync), compared with one rank that computes a step in
            the same time.
        efficiency: speedup / R.
        doubled_limit: limit in seconds; 2 R ranks are faster than R if their T_sync is below it.
    """

    ranks: int
    ratio: float
    pays: bool
    speedup: float
    efficiency: float
    doubled_limit: float


def judge(steps: StepTimes, ranks: int) -> Payoff:
    """Return the criterion's result for a measured step."""
    comp, sync = steps.comp, steps.sync
    ratio = sync / comp if comp > 0 else float("inf")
    efficiency = comp / (comp + sync) if comp + sync > 0 else 1.0
    # 2R ranks are faster if (T_comp + T_sync(2R)) / 2R < (T_comp + T_sync(R)) / R.
    limit = comp + 2 * sync
    return Payoff(ranks, ratio, ratio < ranks - 1, ranks * efficiency, efficiency, limit)
