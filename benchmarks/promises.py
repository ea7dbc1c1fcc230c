"""Promised bounds, and the check whether measured figures keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memory import OPERATIONS, Footprint
from waiting import Wait

from collective.tools.bench.measure import Record
from collective.tools.show import size_name

__all__ = ["KIB", "MIB", "Bound", "Judged", "fastest", "hold", "judge"]

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Judged:
    """Promise with its bound, its further aim, the measured figures and the verdict."""

    what: str
    must: str
    aim: str
    measured: str
    verdict: str


@dataclass(frozen=True)
class Bound:
    """Bound of a figure that was measured under several conditions.

    Attributes:
        unit: unit of the figure.
        values: the figure by condition, such as a size.
        must, aim: the promised bound and the further aim; None without one.
        at_least: whether the bounds are minima; otherwise they are maxima.
    """

    unit: str
    values: dict[str, float]
    must: float | None = None
    aim: float | None = None
    at_least: bool = True

    @property
    def worst(self) -> tuple[float, str] | None:
        figures = [(value, at) for at, value in self.values.items()]
        if not figures:
            return None
        return min(figures) if self.at_least else max(figures)

    def keeps(self, bound: float | None) -> bool:
        if bound is None or self.worst is None:
            return True
        return self.worst[0] >= bound if self.at_least else self.worst[0] <= bound

    def __str__(self) -> str:
        if self.worst is None:
            return f"? {self.unit}"
        value, at = self.worst
        return f"{value:.3g} {self.unit} ({at})"


def hold(what: str, must: str, aim: str, bounds: Sequence[Bound]) -> Judged:
    """Return a promise with its verdict; the worst figure of each bound counts."""
    needed = [bound for bound in bounds if bound.must is not None]
    if any(bound.worst is not None and not bound.keeps(bound.must) for bound in needed):
        verdict = "missed"
    elif any(bound.worst is None for bound in needed):
        verdict = "not measured"
    elif aim and all(bound.worst is not None and bound.keeps(bound.aim) for bound in bounds):
        verdict = "kept, and the aim"
    else:
        verdict = "kept"
    return Judged(what, must, aim or "–", "; ".join(map(str, bounds)), verdict)


def fastest(records: Sequence[Record], nbytes: int, *libraries: str) -> Record | None:
    """Return the record of the fastest of some libraries at a size, or None without records."""
    candidates = [
        record
        for record in records
        if record.contestant.partition("/")[0] in libraries and record.nbytes == nbytes
    ]
    return min(candidates, key=lambda record: record.seconds, default=None)


class _Speeds:
    """Ratios by size: how many times as fast our calls are as those of rivals."""

    def __init__(self, records: Sequence[Record], operation: str, ranks: int, side: str) -> None:
        self._here = [r for r in records if (r.operation, r.ranks) == (operation, ranks)]
        self._ours = [record for record in self._here if record.side == side]

    def seconds(self, low: int, high: int) -> dict[str, float]:
        return {size_name(r.nbytes): r.seconds for r in self._ours if low <= r.nbytes <= high}

    def over(self, rival: str, low: int = 0, high: int = 1 << 62) -> dict[str, float]:
        """Return the ratios to the fastest library of ``rival``, for sizes between two bounds."""
        ratios = {}
        for ours in self._ours:
            other = fastest(self._here, ours.nbytes, rival)
            if other is not None and low <= ours.nbytes <= high:
                ratios[size_name(ours.nbytes)] = other.seconds / ours.seconds
        return ratios


def judge(
    records: Sequence[Record], waits: Sequence[Wait], footprints: Sequence[Footprint]
) -> list[Judged]:
    """Compare the figures of a run with the promises."""
    return [
        *_of_two_ranks(records),
        *_of_four_ranks(records),
        *_of_other_operations(records),
        _of_waiting(waits),
        _of_memory(footprints),
    ]


def _of_two_ranks(records: Sequence[Record]) -> list[Judged]:
    symmetric = _Speeds(records, "all_reduce", 2, "shm symmetric")
    ordinary = _Speeds(records, "all_reduce", 2, "shm ordinary")
    judged = [
        hold(
            "all_reduce, symmetric, 16 MiB up",
            "5 × MPI, 1 × memcpy",
            "8 × MPI",
            [
                Bound("× MPI", symmetric.over("mpi4py", 16 * MIB), 5, 8),
                Bound("× memcpy", symmetric.over("memcpy", 16 * MIB), 1),
            ],
        ),
        hold(
            "all_reduce, symmetric, 64 KiB to 1 MiB",
            "1 × MPI",
            "2 × MPI",
            [Bound("× MPI", symmetric.over("mpi4py", 64 * KIB, MIB), 1, 2)],
        ),
        hold(
            "all_reduce, ordinary, 16 MiB up",
            "1 × MPI, 2 × Gloo",
            "1/1.5 × memcpy",
            [
                Bound("× MPI", ordinary.over("mpi4py", 16 * MIB), 1),
                Bound("× Gloo", ordinary.over("torch", 16 * MIB), 2),
                Bound("× memcpy", ordinary.over("memcpy", 16 * MIB), aim=1 / 1.5),
            ],
        ),
    ]
    for memory, speeds in (("symmetric", symmetric), ("ordinary", ordinary)):
        times = {size: 1e6 * s for size, s in speeds.seconds(0, KIB).items()}
        bounds = [
            Bound("µs", times, 5, at_least=False),
            Bound("× Gloo", speeds.over("torch", 0, KIB), 20),
            Bound("× MPI", speeds.over("mpi4py", 0, KIB), aim=1),
        ]
        what = f"all_reduce, {memory}, 4 B to 1 KiB"
        judged.append(hold(what, "5 µs, 20 × Gloo", "1 × MPI", bounds))
    return judged


def _of_four_ranks(records: Sequence[Record]) -> list[Judged]:
    judged = []
    for memory in ("symmetric", "ordinary"):
        speeds = _Speeds(records, "all_reduce", 4, f"shm {memory}")
        bounds = [
            Bound("× Gloo", speeds.over("torch"), 3),
            Bound("× MPI", speeds.over("mpi4py", 64 * KIB + 1), 1),
        ]
        what = f"all_reduce, {memory}, 4 ranks"
        judged.append(hold(what, "3 × Gloo, above 64 KiB 1 × MPI", "", bounds))
    return judged


def _of_other_operations(records: Sequence[Record]) -> list[Judged]:
    judged = []
    for operation in OPERATIONS[1:]:
        for memory in ("symmetric", "ordinary"):
            speeds = _Speeds(records, operation, 2, f"shm {memory}")
            bound = Bound("× MPI", speeds.over("mpi4py", 64 * KIB), 1)
            judged.append(hold(f"{operation}, {memory}, 64 KiB up", "1 × MPI", "", [bound]))
    return judged


def _of_waiting(waits: Sequence[Wait]) -> Judged:
    shares = {wait.operation: 100 * wait.cores for wait in waits if wait.contestant == "shm"}
    bound = Bound("% of a core", shares, 10, at_least=False)
    return hold("waiting 1 s for a late peer", "10 % of a core", "", [bound])


def _of_memory(footprints: Sequence[Footprint]) -> Judged:
    small = min((f.nbytes for f in footprints), default=0)
    most: dict[str, float] = {}
    growth: dict[str, float] = {}
    for found in footprints:
        at = f"{found.ranks} ranks"
        most[at] = max(most.get(at, 0.0), found.mapped / MIB)
        for other in footprints:
            same = (found.ranks, found.operation) == (other.ranks, other.operation)
            if same and other.nbytes == small < found.nbytes:
                now = found.mapped + found.transient - other.mapped - other.transient
                where = f"{found.operation}, {at}, {size_name(found.nbytes)}"
                growth[where] = max(0.0, now / MIB)
    bounds = [
        Bound("MiB mapped", most, at_least=False),
        # The bound allows some chunks more for a larger message, but not a copy of the message.
        Bound("MiB more", growth, 4, at_least=False),
    ]
    return hold("memory per rank beside the arrays", "does not grow with size", "", bounds)
