"""A run of ``collective bench``: what is asked, measured on one number of ranks after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collective.tools.bench.machine import Observer
from collective.tools.show import Progress, size_name

from .arena import Arena
from .contestants import named
from .measure import Gap, Pace, Record, Task, compare
from .training import Training
from .training import measure as measure_steps

__all__ = ["Benchmark", "Results", "measure"]


@dataclass(frozen=True)
class Benchmark:
    """What is asked.

    Attributes:
        operations, sizes, dtypes, ranks: all combinations of them.
        names: our transports, and peers.
        memories, frameworks: what ours are measured with.
        methods: of :data:`~collective.tools.bench.measure.METHODS`.
        environments: interpreters that have an MPI library.
        pace: how long.
        models: whose training steps are measured, in place of operations.
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
    models: Sequence[str] = ()

    @property
    def tasks(self) -> Iterator[Task]:
        """What each number of ranks does."""
        for operation in self.operations:
            if operation == "barrier":
                yield Task(operation, 0)
                continue
            for dtype in self.dtypes:
                for nbytes in self.sizes:
                    yield Task(operation, nbytes, dtype)


@dataclass
class Results:
    """What has come of it so far.

    Attributes:
        records, gaps: what was measured and what was not.
        trainings: steps that were measured.
        versions: what each contestant says it is.
        interrupted: whether it is not all.
        machine: where; empty before the end.
    """

    records: list[Record] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    machine: dict[str, Any] = field(default_factory=dict)

    def add(self, found: Iterable[Record | Training | Gap]) -> None:
        """Take what has been measured, one by one."""
        for each in found:
            if isinstance(each, Record):
                self.records.append(each)
            elif isinstance(each, Training):
                self.trainings.append(each)
            else:
                self.gaps.append(each)

    @property
    def failures(self) -> list[str]:
        """What went wrong while it was measured."""
        broken = [f"{g.side}, {g.operation}, {size_name(g.nbytes)}, {g.ranks} ranks: {g.reason}"
                  for g in self.gaps if g.failed]  # fmt: skip
        wrong = [
            f"{r.side}, {r.operation}, {r.dtype}, {size_name(r.nbytes)}, {r.ranks} ranks: "
            f"{r.wrong} elements are wrong"
            for r in self.records
            if r.wrong
        ]
        wrong += [
            f"{t.side}, {t.framework}, {t.model}, {t.ranks} ranks: {t.differing} parameters differ "
            "between the ranks"
            for t in self.trainings
            if t.differing
        ]
        return list(dict.fromkeys([*broken, *wrong]))

    def as_json(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            **asdict(self),
            "records": [record.as_json() for record in self.records],
            "trainings": [training.as_json() for training in self.trainings],
        }

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Results:
        """Return what :meth:`as_json` was made of."""
        return Results(
            [Record.from_json(each) for each in found["records"]],
            [Gap(**each) for each in found["gaps"]],
            [Training.from_json(each) for each in found["trainings"]],
            found["versions"],
            found["interrupted"],
            found["machine"],
        )


def measure(plan: Benchmark, progress: Progress) -> Results:
    """Measure all that is asked; an interrupt ends it with what has been measured.

    Args:
        plan: what is asked.
        progress: shows what is going on, and how much of all has been done.
    """
    results, observer = Results(), Observer()
    each = len(plan.frameworks) * len(plan.models) if plan.models else len(list(plan.tasks))
    progress.begin("", len(plan.ranks) * each)
    try:
        for ranks in plan.ranks:
            (_train if plan.models else _measure)(plan, ranks, results, progress)
    except KeyboardInterrupt:
        results.interrupted = True
    results.machine = observer.machine()
    return results


def _measure(plan: Benchmark, ranks: int, results: Results, progress: Progress) -> None:
    able, missing = named(plan.names, plan.environments, ranks, plan.memories, plan.frameworks)
    progress.show(f"starting {ranks} ranks of {', '.join(contestant.name for contestant in able)}")
    with Arena(able) as arena:
        results.versions.update(arena.versions)
        for task in plan.tasks:
            # Those too that have broken at an earlier task.
            missing |= {name: error.brief for name, error in arena.failed.items()}
            progress.show(
                f"{task.operation}, {task.dtype}, {size_name(task.nbytes)}, {ranks} ranks"
            )
            results.add(compare(arena, task, plan.pace, plan.methods))
            results.gaps += [
                Gap(task.operation, task.nbytes, task.dtype, ranks, name, reason)
                for name, reason in missing.items()
            ]
            progress.step()


def _train(plan: Benchmark, ranks: int, results: Results, progress: Progress) -> None:
    for framework in plan.frameworks:
        progress.show(f"training steps, {framework}, {ranks} ranks")
        done: set[str] = set()  # each has its results at once
        for found in measure_steps(
            plan.names, plan.environments, ranks, framework, plan.models, plan.pace
        ):
            model = found.model if isinstance(found, Training) else found.operation
            if model not in done:
                done.add(model)
                progress.step()
            results.add([found])
