"""Promised bounds, and the check whether measured figures keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collective.tools.bench.measure import Record

__all__ = ["KIB", "MIB", "Bound", "Judged", "fastest", "hold"]

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
