"""Process of one rank of a contestant: makes the calls that the arena asks for.

:mod:`.arena` starts this module in the environment of the library that is measured, with the
library's name, the folder of its start line and the address of its control line. While another
contestant has its turn, the process is blocked in a read.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collective.launch import control
from collective.launch.ranks import Job, Participant

from .libraries import Array, BenchLibrary, Call, Unsupported
from .prepared import Prepared
from .rivals import open_library
from .startline import StartLine

__all__ = ["Worker", "WorkerCall", "main"]


class Worker:
    """The methods that the arena can call on a rank.

    Args:
        library: the library, connected.
        folder: folder of the start line.
    """

    def __init__(self, library: BenchLibrary, folder: Path) -> None:
        self._library = library
        self._line = StartLine(folder / "startline", library.rank, library.size)
        self._prepared: dict[str, Prepared] = {}  # by side
        self._steps: dict[str, Call] = {}  # the parts of a training step
        self._parameters: list[Array] = []  # those of the model that is trained

    def close(self) -> None:
        """Drop the arrays, and end the library."""
        self._prepared.clear()
        self._steps.clear()
        self._library.close()

    def abort(self, reason: str) -> None:
        """Do nothing: a rank that hangs is a process, and the launcher ends it."""

    # -- requests of the arena -----------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the library's ``version``."""
        return {"version": self._library.version}

    def prepare(
        self,
        side: str,
        operation: str,
        nbytes: int,
        memory: str,
        dtype: str = "float32",
        framework: str | None = None,
    ) -> dict[str, Any]:
        """Allocate arrays for an operation: see :class:`~collective.tools.bench.prepared.Prepared`.

        Args:
            side: name for further calls.
            operation, nbytes, memory, dtype: as in the class.
            framework: framework of the arrays; None for the library's own.

        Returns:
            ``nbytes``: size of the larger array.
        """
        if framework is not None:
            self._library.use(framework)
        prepared = Prepared(self._library, operation, nbytes, memory, dtype)
        self._prepared[side] = prepared
        return {"nbytes": prepared.nbytes}

    def attempt(self, side: str) -> dict[str, Any]:
        """Make a prepared call for the first time, which shows whether the library can do it."""
        try:
            self._prepared[side].call()
        except self._library.refusals as error:
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        return {}

    def release(self, side: str) -> dict[str, Any]:
        """Drop the arrays of a side, if there are any."""
        self._prepared.pop(side, None)
        self._steps.pop(side, None)
        return {}

    def measure(self, side: str, iterations: int, warmup: int, each: bool) -> dict[str, Any]:
        """Time a prepared call.

        Args:
            side: name of the prepared call.
            iterations: number of timed calls.
            warmup: number of untimed calls before them.
            each: if true, time each call by itself, from a common start; else all calls, back
                to back.

        Returns:
            ``seconds``: times of the calls, or one mean.
        """
        call = self._steps.get(side) or self._prepared[side].call
        done = self._library.synchronize if self._library.framework.on_gpu else None
        for _ in range(warmup):
            call()
        return {"seconds": self._line.seconds_of(call, iterations, each=each, done=done)}

    def check(self, side: str) -> dict[str, Any]:
        """Make a prepared call on data for which every element of the result can be computed.

        Returns:
            ``wrong``: number of wrong elements in this rank's result. For a barrier: number of
            ranks that had not come to it when it returned.
        """
        prepared = self._prepared[side]
        if prepared.x is None:
            self._line.step()
            prepared.call()
            return {"wrong": self._line.absent()}
        return {"wrong": prepared.count_wrong(self._line.wait)}

    def prepare_steps(self, framework: str, model: str) -> dict[str, Any]:
        """Make the parts of a training step; further calls use a part's name as ``side``.

        Returns:
            ``parts``: names of the parts.
        """
        self._library.use(framework)
        module = importlib.import_module(f"collective.tools.models.{framework}")
        calls, self._parameters = module.steps(self._library, model)
        # Call each part once: that lays out the buckets and broadcasts the weights of rank 0.
        for part in sorted(calls):
            calls[part]()
            self._steps[part] = calls[part]
        return {"parts": sorted(calls)}

    def digest(self) -> dict[str, Any]:
        """Return ``digests`` of the parameters that the last steps have updated."""
        parameters, self._parameters = self._parameters, []
        return {"digests": [hashlib.sha256(array.tobytes()).hexdigest() for array in parameters]}


@dataclass(frozen=True)
class WorkerCall(Job):
    """Call of a method of :class:`Worker` on all ranks of a contestant.

    Attributes:
        do: name of the method.
        arguments: arguments of the method.
    """

    do: str
    arguments: Mapping[str, Any]

    def run(self, participant: Participant) -> dict[str, Any]:
        """Return the method's result, or ``unsupported``: why the library cannot do it."""
        try:
            answer: dict[str, Any] = getattr(participant.kept["worker"], self.do)(**self.arguments)
        except Unsupported as error:
            return {"unsupported": str(error)}
        except MemoryError as error:
            return {"unsupported": f"no memory: {error}"}
        return answer


def main() -> None:
    """Serve as the rank that the launcher names, until the arena closes the connection."""
    name, where, address = sys.argv[1:]
    folder = Path(where)
    library = open_library(name, folder)
    participant = Participant(library.rank, {"worker": Worker(library, folder)})
    control.serve(participant, control.call_back(address, library.rank), foreign=True)


if __name__ == "__main__":
    main()
