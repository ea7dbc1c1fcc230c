"""Where the contestants wait for their turns.

MPI libraries cannot live in one process, nor under one launcher. So each contestant has ranks of
its own (:class:`collective.launch.ranks.Ranks`), started once. Whose turn it is gets a call,
makes it, and answers; all others are blocked in a read meanwhile and take no processor time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from collective.errors import CollectiveError
from collective.launch.command_starter import CommandStarter
from collective.launch.outcome import RankDiedError, RankHungError, RanksFailedError
from collective.launch.ranks import Ranks

from .contestants import Contestant
from .startline import StartLine
from .worker import WorkerCall

__all__ = ["Arena", "ArenaError"]

_START_S = 90.0
# How long an answer may take: a library may leave some ranks waiting for one that refuses.
_ANSWER_S = {"attempt": 60.0}
_LONGEST_S = 300.0
# And what the others have left once one has failed, since nothing they say is of use.
_GRACE_S = 1.0
_RANK, _ERROR = re.compile(r"^\[\d+\] "), re.compile(r"[\w.]*Error\b")


class ArenaError(Exception):
    """A contestant did not start, or failed.

    Args:
        name: whose.
        what: what happened to it.
        output: the end of what it has written.
    """

    def __init__(self, name: str, what: str, output: str = "") -> None:
        super().__init__(f"{name}: {what}" + (f"; its output:\n{output}" if output else ""))
        self._what, self._output = what, output

    @property
    def brief(self) -> str:
        """What happened in a line, with the line of the output that tells most: an error's."""
        what, *traceback = self._what.splitlines()
        output = [_RANK.sub("", line).strip() for line in self._output.splitlines()] + traceback
        output = [line for line in output if line]
        errors = [line for line in output if _ERROR.match(line)]
        return ": ".join([what.removesuffix(":"), *(errors or output)[-1:]])


class _Entrant:
    """A contestant that has been started."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        folder.mkdir()
        StartLine.create(folder / "startline", contestant.ranks)
        self.version = ""
        self._name = contestant.name
        self.starter = CommandStarter(
            contestant.ranks, partial(contestant.commands, folder), _START_S
        )
        self.ranks = Ranks(contestant.ranks, self.starter)

    def start(self) -> None:
        """Start the ranks.

        Raises:
            ArenaError, CollectiveError: they do not.
        """
        self.ranks.start()
        (first, *_) = self.ask("describe", {})
        self.version = str(first["version"])

    def ask(self, do: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Have all ranks do something; return their answers in rank order.

        Raises:
            ArenaError: one has failed.
        """
        timeout = _ANSWER_S.get(do, _LONGEST_S)
        outcomes = self.ranks.run(WorkerCall(do, arguments), timeout, grace=_GRACE_S)
        failure = RanksFailedError.of(outcomes, self.ranks.size)
        if failure is not None:
            rank, error = next(iter(failure.errors.items()))
            what = f"rank {rank} failed:\n{failure.tracebacks[rank]}"
            if isinstance(error, RankDiedError):
                what = f"rank {rank} has ended"
            elif isinstance(error, RankHungError):
                what = f"no answer within {timeout:g} s"
            raise ArenaError(self._name, f"{do}: {what}", self.starter.output())
        return [outcomes[rank].value for rank in range(self.ranks.size)]


class Arena:
    """All contestants' ranks, started. A context manager that ends them.

    Args:
        contestants: who takes part.

    Attributes:
        failed: those that did not start or that have failed since, and why. They take no
            further part.
    """

    def __init__(self, contestants: Sequence[Contestant]) -> None:
        self.failed: dict[str, ArenaError] = {}
        self._all = list(contestants)
        self._running: dict[str, _Entrant] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        try:
            for number, contestant in enumerate(self._all):
                # One after the other: they would be in each other's way.
                self._start(contestant, Path(self._folder.name) / str(number))
        except BaseException:
            self.close()
            raise

    def _start(self, contestant: Contestant, folder: Path) -> None:
        name = contestant.name
        self._running[name] = _Entrant(contestant, folder)
        try:
            self._running[name].start()
        except ArenaError as error:
            self._drop(name, error)
        except (CollectiveError, OSError) as error:
            self._drop(name, ArenaError(name, str(error)))

    def _drop(self, name: str, error: ArenaError) -> None:
        self.failed[name] = error
        self._running.pop(name).ranks.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        for running in self._running.values():
            running.ranks.close()
        self._folder.cleanup()

    @property
    def contestants(self) -> list[Contestant]:
        """Those that are there."""
        return [contestant for contestant in self._all if contestant.name in self._running]

    @property
    def versions(self) -> dict[str, str]:
        """What each contestant says it is."""
        return {name: running.version for name, running in self._running.items()}

    def ask(self, name: str, do: str, **arguments: Any) -> list[dict[str, Any]] | str:
        """Have all ranks of a contestant do something: a method of ``worker.Worker``.

        Returns:
            The answers in rank order; or why the library cannot.

        Raises:
            ArenaError: a rank raised, or has ended, or takes too long; or did so before. The
                contestant takes no further part.
        """
        if name in self.failed:
            raise self.failed[name]
        try:
            answers = self._running[name].ask(do, arguments)
        except ArenaError as error:
            self._drop(name, error)
            raise
        return next((str(one["unsupported"]) for one in answers if "unsupported" in one), answers)
