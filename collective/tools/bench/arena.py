"""Arena in which the contestants wait for their turns.

Several MPI libraries cannot live in one process, nor under one launcher. So each contestant has its
own ranks (:class:`collective.launch.ranks.Ranks`), which are started once. The contestant whose
turn it is gets a call, makes it, and answers. Meanwhile all others are blocked in a read and take
no processor time.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from collective import CollectiveError
from collective.inner import RankDiedError, RankHungError, Ranks, RanksFailedError
from collective.launch.command_starter import CommandStarter

from .contestants import Contestant
from .worker import StartLine, WorkerCall

_START_S = 90.0
# Seconds that an answer may take: a library may leave some ranks waiting for a rank that refuses.
_ANSWER_S = {"attempt": 60.0}
_LONGEST_S = 300.0
# Seconds for the other ranks once one rank has failed. Their answers are not used any more.
_GRACE_S = 1.0
_RANK, _ERROR = re.compile(r"^\[\d+\] "), re.compile(r"[\w.]*Error\b")


class ArenaError(Exception):
    """A contestant did not start, or failed.

    Args:
        name: name of the contestant.
        what: what happened to the contestant.
        output: end of the contestant's output.
    """

    def __init__(self, name: str, what: str, output: str = "") -> None:
        super().__init__(f"{name}: {what}" + (f"; its output:\n{output}" if output else ""))
        self._what, self._output = what, output

    @property
    def brief(self) -> str:
        """The failure in one line, with the most telling line of the output: that of an error."""
        what, *traceback = self._what.splitlines()
        output = [_RANK.sub("", line).strip() for line in self._output.splitlines()] + traceback
        output = [line for line in output if line]
        errors = [line for line in output if _ERROR.match(line)]
        return ": ".join([what.removesuffix(":"), *(errors or output)[-1:]])


class _Entrant:
    """Contestant whose ranks the arena starts."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        folder.mkdir()
        StartLine.create(folder / "startline", contestant.ranks)
        self.version = ""
        self._name = contestant.name
        self.starter = CommandStarter(
            contestant.ranks, partial(contestant.commands, folder), _START_S
        )
        self.ranks = Ranks(contestant.ranks, self.starter)

    def ask(self, do: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Call a method of the worker on all ranks; return their answers in rank order.

        Raises:
            ArenaError: a rank failed.
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
    """Started ranks of all contestants. A context manager that ends them.

    Args:
        contestants: the contestants to start.

    Attributes:
        failed: contestants that did not start or failed later, with their errors. They take no
            further part.
    """

    def __init__(self, contestants: Sequence[Contestant]) -> None:
        self.failed: dict[str, ArenaError] = {}
        self._all = list(contestants)
        self._running: dict[str, _Entrant] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        try:
            for number, contestant in enumerate(self._all):
                # Start one after the other: at the same time they would slow each other down.
                self._start(contestant, Path(self._folder.name) / str(number))
        except BaseException:
            self.close()
            raise

    def _start(self, contestant: Contestant, folder: Path) -> None:
        name = contestant.name
        entrant = self._running[name] = _Entrant(contestant, folder)
        try:
            entrant.ranks.start()
            entrant.version = str(entrant.ask("describe", {})[0]["version"])
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
        """The contestants that have started and not failed."""
        return [contestant for contestant in self._all if contestant.name in self._running]

    @property
    def versions(self) -> dict[str, str]:
        """Name and version of each contestant's library, as the contestant reports it."""
        return {name: running.version for name, running in self._running.items()}

    def ask(self, name: str, do: str, **arguments: Any) -> list[dict[str, Any]] | str:
        """Call a method of ``worker.Worker`` on all ranks of a contestant.

        Returns:
            The answers in rank order; or, as a text, why the library cannot do it.

        Raises:
            ArenaError: a rank raised, ended or took too long, now or earlier. The contestant takes
                no further part.
        """
        if name in self.failed:
            raise self.failed[name]
        try:
            answers = self._running[name].ask(do, arguments)
        except ArenaError as error:
            self._drop(name, error)
            raise
        return next((str(one["unsupported"]) for one in answers if "unsupported" in one), answers)
