"""Measurements of our calls and other libraries in turns, each with its own ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import peers

from collective.tools.bench.arena import Arena, ArenaError
from collective.tools.bench.contestants import Contestant, named
from collective.tools.bench.measure import Pace, Task, compare
from collective.tools.bench.run import Results
from collective.tools.show import Progress, add_outputs, size_name

__all__ = ["Sittings", "add_options", "exit_code", "show_contestants"]

# From this size on, a call is so long that a common start and a running start make no difference.
_BACK_TO_BACK = 1 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of :class:`Sittings`, and those for the output of the figures."""
    peers.add_rivals(parser)
    parser.add_argument("--quick", action="store_true", help="fewer measurements, shorter turns")
    parser.add_argument(
        "--cores", type=int, default=2, metavar="N", help="cores to use (default: 2)"
    )
    add_outputs(parser, earlier=True)


class Sittings:
    """Figures and failures of measurements with one set of ranks after another.

    Args:
        options: options of :func:`add_options`. From now on, this process uses only
            ``options.cores`` cores.

    Attributes:
        missing: names of measurements that are missing, with the reasons.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        # All ranks inherit the affinity.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
        self.missing: dict[str, str] = {}
        self._options = options
        self._results, self._progress = Results(), Progress()
        self._failures: list[str] = []

    def sit(
        self,
        ranks: int,
        tasks: Iterable[Task],
        pace: Pace,
        *,
        memories: Sequence[str],
        framework: str,
        without: Sequence[str] = (),
    ) -> None:
        """Measure tasks of ``shm`` and the rivals in turns, with ``ranks`` ranks each.

        Long calls run back to back; so do all of more ranks than cores, which cannot start at once.

        Args:
            memories, framework: kinds of memory, and framework of the arrays, for our calls.
            without: rivals that do not take part.
        """
        rivals = [rival for rival in peers.rivals(self._options) if rival not in without]
        environments = peers.environments(self._options.mpi_envs)
        able, absent = named(["shm", *rivals], environments, ranks, memories, [framework])
        self.missing |= absent
        self.play(able, tasks, pace, running=1 if ranks > self._options.cores else _BACK_TO_BACK)

    def play(
        self,
        contestants: Sequence[Contestant],
        tasks: Iterable[Task],
        pace: Pace,
        inspect: Callable[[Arena], object] = lambda arena: None,
        running: int = _BACK_TO_BACK,
    ) -> None:
        """Measure tasks of contestants in turns, from ``running`` bytes on back to back.

        Args:
            inspect: check of the started contestants. If it raises ArenaError, nothing is measured.
        """
        with self.noting_failures(), Arena(contestants) as arena:
            self._results.versions.update(arena.versions)
            inspect(arena)
            for task in tasks:
                what = f"{task.operation}, {task.dtype}, {size_name(task.nbytes)}"
                self._progress.show(f"{what}, {contestants[0].ranks} ranks")
                method = "latency" if task.nbytes < running else "bandwidth"
                self._results.add(compare(arena, task, pace, [method]))
            self._progress.clear()
            self.missing |= {name: error.brief for name, error in arena.failed.items()}

    @contextlib.contextmanager
    def noting_failures(self) -> Iterator[None]:
        """Record a failure that ends a part of the measurements; earlier figures stay valid."""
        try:
            yield
        except ArenaError as error:
            self._progress.clear()
            self._failures.append(str(error))

    def as_json(self) -> dict[str, Any]:
        """Return figures, missing measurements and failures, as data for the JSON file."""
        failures = [*self._failures, *self._results.failures]
        return {**asdict(self._results), "missing": self.missing, "failures": failures}


def show_contestants(run: dict[str, Any]) -> None:
    """Print the contestants of a run with their versions, and those that are missing."""
    for name, version in run["versions"].items():
        print(f"{name}: {version}")
    for name, reason in run["missing"].items():
        print(f"{name}: not measured: {reason}")


def exit_code(command: str, run: dict[str, Any]) -> int:
    """Print the failures of a run; return 1 if there are any, else 0."""
    failures = run.get("failures", [])
    for failure in failures:
        print(f"{command}: {failure}", file=sys.stderr)
    return 1 if failures else 0
