"""A run of ``collective bench``: the measurements for one number of ranks after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collective.tools.bench.machine import Observer
from collective.tools.show import Progress, size_name

from .arena import Arena
from .contestants import named
from .measure import Gap, Pace, Record, Task, compare


@dataclass(frozen=True)
class Benchmark:
    """The measurements of a run.

    Attributes:
        operations, sizes, dtypes, ranks: all combinations are measured.
        names: names of our transports and of peers.
        memories, frameworks: kinds of memory and frameworks to measure our transports with.
        methods: some of :data:`~collective.tools.bench.measure.METHODS`.
        environments: interpreters that have an MPI library.
        pace: duration.
    """

    operations: Sequence[str]
    sizes: Sequence[int]
    dtypes: Sequence[str]
    ranks: Sequence[int]
    names: Sequence[str]
    memories: Sequence[str]
    frameworks: Sequence[str]
    methods: Sequence[str]
    environments: Mapping[str, Path]
    pace: Pace

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks for each number of ranks."""
        for operation in self.operations:
            if operation == "barrier":
                yield Task(operation, 0)
                continue
            for dtype in self.dtypes:
                for nbytes in self.sizes:
                    yield Task(operation, nbytes, dtype)


@dataclass
class Results:
    """Results of a run, as far as there are any.

    Attributes:
        records, gaps: results, and missing results.
        versions: name and version of each contestant's library, as the contestant reports it.
        interrupted: whether the run was interrupted, so that results are incomplete.
        machine: the machine; empty before the end.
    """

    records: list[Record] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    machine: dict[str, Any] = field(default_factory=dict)

    def add(self, found: Iterable[Record | Gap]) -> None:
        """Add results, one by one as they come."""
        for result in found:
            if isinstance(result, Record):
                self.records.append(result)
            else:
                self.gaps.append(result)

    @property
    def failures(self) -> list[str]:
        """Contestants that failed and results that are wrong, each as a line of text."""
        broken = [f"{g.side}, {g.operation}, {size_name(g.nbytes)}, {g.ranks} ranks: {g.reason}"
                  for g in self.gaps if g.failed]  # fmt: skip
        wrong = [
            f"{r.side}, {r.operation}, {r.dtype}, {size_name(r.nbytes)}, {r.ranks} ranks: "
            f"{r.wrong} elements are wrong"
            for r in self.records
            if r.wrong
        ]
        return list(dict.fromkeys([*broken, *wrong]))

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Results:
        """Return the results of which ``asdict`` made ``found``."""
        return Results(
            [Record(**record) for record in found["records"]],
            [Gap(**gap) for gap in found["gaps"]],
            found["versions"],
            found["interrupted"],
            found["machine"],
        )


def measure(plan: Benchmark, progress: Progress) -> Results:
    """Make all measurements of a run; an interrupt ends the run with the results so far.

    Args:
        plan: the measurements.
        progress: display of the current measurement and of the share that is done.
    """
    results, observer = Results(), Observer()
    progress.begin("", len(plan.ranks) * len(list(plan.tasks())))
    try:
        for ranks in plan.ranks:
            _measure(plan, ranks, results, progress)
    except KeyboardInterrupt:
        results.interrupted = True
    results.machine = observer.machine()
    return results


def _measure(plan: Benchmark, ranks: int, results: Results, progress: Progress) -> None:
    """Measure all tasks on some ranks."""
    able, missing = named(plan.names, plan.environments, ranks, plan.memories, plan.frameworks)
    progress.show(f"starting {ranks} ranks of {', '.join(contestant.name for contestant in able)}")
    with Arena(able) as arena:
        results.versions.update(arena.versions)
        for task in plan.tasks():
            # Contestants that failed at an earlier task are missing, too.
            missing |= {name: error.brief for name, error in arena.failed.items()}
            size = size_name(task.nbytes)
            progress.show(f"{task.operation}, {task.dtype}, {size}, {ranks} ranks")
            results.add(compare(arena, task, plan.pace, plan.methods))
            results.gaps += [task.gap(ranks, name, reason) for name, reason in missing.items()]
            progress.step()
