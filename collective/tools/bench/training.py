"""Measurements of training steps: computing, syncing, their overlap, and the speed-up by ranks.

For each contestant, four things are measured in turns. ``T_step`` is a step with the gradients
averaged over the ranks; ``T_comp`` is a step without averaging; ``T_sync`` is the all-reduce of as
many bytes by itself; ``T_1`` is a step of one rank alone. Every rank has a batch of the same size.
So for ``n`` ranks the speed-up is ``n · T_1 / T_step``, and the efficiency is ``T_1 / T_step``. The
share of syncing that is hidden behind computing is ``1 - (T_step - T_comp) / T_sync``, where the
difference is the median of the differences of neighbouring turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from collective.tools.show import print_table

from .alternate import median_excess
from .arena import Arena, ArenaError
from .contestants import ALONE, Contestant, named
from .measure import Gap, Pace, Turns, take_turns

__all__ = ["FRAMEWORKS", "MODELS", "Training", "measure", "show"]

FRAMEWORKS = ("torch", "chainer")
MODELS = ("mlp", "lenet", "resnet")
# Turns of steps are longer than those of calls: a step of a larger model takes 0.2 s.
_LONGER = 4


@dataclass(frozen=True)
class Training:
    """Result of one model's steps on one side.

    Attributes:
        framework, model, ranks, side: the model, the number of ranks, and the side.
        step, compute, sync, alone: ``T_step``, ``T_comp``, ``T_sync``, ``T_1``: medians of the
            turns, in seconds.
        added: time that a step takes longer than computing: the median of the differences of
            turns that follow each other.
        differing: number of parameters that are not the same on all ranks afterwards.
    """

    framework: str
    model: str
    ranks: int
    side: str
    step: float
    compute: float
    sync: float
    alone: float
    added: float
    differing: int

    @property
    def hidden(self) -> float:
        """The share of syncing that overlaps with computing.

        All other costs that a step adds lower the figure. It is below zero if a step takes longer
        than computing and then syncing.
        """
        return 1 - self.added / self.sync

    @property
    def efficiency(self) -> float:
        """A step's time of one rank alone, divided by the step's time of all ranks."""
        return self.alone / self.step

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and the figures that follow from them."""
        speedup = self.ranks * self.efficiency
        more = {"hidden": self.hidden, "efficiency": self.efficiency, "speedup": speedup}
        return {**asdict(self), **more}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Training:
        """Return the result of which :meth:`as_json` made ``found``."""
        return Training(**{field.name: found[field.name] for field in fields(Training)})


def measure(
    names: Sequence[str],
    environments: Mapping[str, Path],
    ranks: int,
    framework: str,
    models: Sequence[str],
    pace: Pace,
) -> Iterator[Training | Gap]:
    """Measure steps of models in one framework, with one number of ranks.

    Args:
        names: names of our transports and of peers; peers of another framework are skipped.
        environments: interpreters that have an MPI library.
        ranks: number of ranks.
        framework: one of :data:`FRAMEWORKS`.
        models: some of :data:`MODELS`.
        pace: duration for calls; turns of steps are longer.
    """
    of = {"torch": "torch", "chainermn": "chainer", "mpi4py": "", "memcpy": ""}
    chosen = [name for name in names if of.get(name.partition("/")[0], framework) == framework]
    able, missing = named(chosen, environments, ranks, ("ordinary",))
    with Arena([Contestant(ALONE, 1), *able]) as arena:
        for model in models:
            missing |= {name: error.brief for name, error in arena.failed.items()}
            yield from _measure(arena, framework, model, ranks, pace)
            for name, reason in missing.items():
                yield Gap(model, 0, framework, ranks, name, reason)


def _measure(
    arena: Arena, framework: str, model: str, ranks: int, pace: Pace
) -> Iterator[Training | Gap]:
    parts: dict[str, dict[str, Turns]] = {}
    gaps: dict[str, tuple[str, bool]] = {}
    for name in [contestant.name for contestant in arena.contestants]:
        try:
            answers = arena.ask(name, "prepare_steps", framework=framework, model=model)
        except ArenaError as error:
            gaps[name] = error.brief, True
            continue
        if isinstance(answers, str):
            gaps[name] = answers, False
            continue
        parts[name] = {part: Turns(arena, name, part) for part in answers[0]["parts"]}
    every = [turns for of in parts.values() for turns in of.values()]
    take_turns(every, "bandwidth", pace.rounds, _LONGER * pace.turn)
    differing = {name: _finish(arena, name, of) for name, of in parts.items()}
    for name, of in parts.items():
        broken = next((turns.broken for turns in of.values() if turns.broken), None)
        if broken is not None:
            gaps[name] = broken.brief, True
    for name, (reason, failed) in gaps.items():
        yield Gap(model, 0, framework, ranks, name, reason, failed)
    if ALONE in gaps:
        return
    alone = _median(parts[ALONE]["compute"])
    for name, of in parts.items():
        if name not in gaps and name != ALONE:
            medians = {part: _median(turns) for part, turns in of.items()}
            step, compute = (of[part].middles("bandwidth") for part in ("step", "compute"))
            added = median_excess(step, compute)
            yield Training(
                framework, model, ranks, name, **medians, alone=alone, added=added,
                differing=differing[name],
            )  # fmt: skip


def _finish(arena: Arena, name: str, of: Mapping[str, Turns]) -> int:
    """Return the number of parameters that differ between the ranks, and drop the models."""

    def compare() -> int:
        digests = arena.ask(name, "digest")
        assert not isinstance(digests, str)
        for part in of:
            arena.ask(name, "release", side=part)
        return sum(len(set(digest)) > 1 for digest in zip(*(one["digests"] for one in digests)))

    found: list[int] = []
    next(iter(of.values())).run(lambda: found.append(compare()))
    return sum(found)


def _median(turns: Turns) -> float:
    return statistics.median(turns.middles("bandwidth"))


def show(found: Sequence[Training], gaps: Sequence[Gap], markdown: bool = False) -> None:
    """Print a table for each framework and number of ranks."""
    header = ["model", "side", "T_step ms", "T_comp ms", "added ms", "T_sync ms", "hidden %"]
    header += ["T_1 ms", "speed-up", "efficiency %", "#differing"]
    kinds = [(t.framework, t.ranks) for t in found] + [(g.dtype, g.ranks) for g in gaps]
    for framework, ranks in dict.fromkeys(kinds):
        rows = []
        for t in found:
            if (t.framework, t.ranks) == (framework, ranks):
                times = [f"{1e3 * seconds:.3g}" for seconds in (t.step, t.compute, t.added, t.sync)]
                # Noise can give any figure if there is little to hide, so clip it.
                hidden = f"{100 * min(1.0, max(0.0, t.hidden)):.0f}"
                pays = [f"{1e3 * t.alone:.3g}", f"{ranks * t.efficiency:.2f}"]
                pays.append(f"{100 * t.efficiency:.0f}")
                rows.append([t.model, t.side, *times, hidden, *pays, str(t.differing)])
        absent = [g for g in gaps if (g.dtype, g.ranks) == (framework, ranks)]
        rows += [[g.operation, g.side, *"–" * (len(header) - 2), g.reason] for g in absent]
        columns = [*header, "why not"] if absent else header
        rows = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
        print_table(f"a training step, {framework}, {ranks} ranks", columns, rows, markdown)
