"""Ranks as processes that this one starts: forked from a server, or each a Python of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from collective.deadline import Deadline

from . import control
from .outcome import Outcome, RankDiedError
from .ranks import LEAVE_S, Handle, Job, Starter

__all__ = ["ProcessHandle", "ProcessStarter", "encoded", "preload", "wait_for_answers"]

_STACKS_S = 2.0
# Whether ranks are forked from a server. A list, as it is changed by preload().
_preloaded: list[str] = []
# The longest name of a directory in which the server's socket can have one: socket addresses
# have 108 bytes, and multiprocessing adds 33.
_LONGEST = 70


def preload(modules: Sequence[str]) -> None:
    """Fork ranks that are processes from a server that has imported ``modules``.

    Instead of starting Python for each, which costs nearly two seconds of a processor where
    PyTorch is needed. To be called before the first of them starts, as in ``conftest.py``::

        collective.testing.preload(["torch"])

    It is the fork server of :mod:`multiprocessing`, whose other users get the modules, too. The
    ranks have the environment of when they start, but for what a module has read when it was
    imported, and the same seed for the hashes of texts.

    Args:
        modules: names; one that cannot be imported is left out.
    """
    multiprocessing.set_forkserver_preload([control.__name__, *modules])
    _preloaded[:] = modules


def _forks() -> bool:
    return bool(_preloaded) and len(tempfile.gettempdir()) <= _LONGEST


def encoded(job: Job) -> bytes:
    """Return ``job`` as it goes to processes, and where its modules are found.

    Raises:
        TypeError: the job cannot be pickled.
    """
    try:
        payload = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run: {job} must be picklable for ranks that are processes: {error}. Define the "
            "function at the top of a module, or use backend='threads'."
        ) from error
    return pickle.dumps((sys.version_info[:2], list(sys.path), payload))


class ProcessHandle(Handle):
    """A rank that is a process, whoever has started it.

    Args:
        rank: which.
        line: this end of its control line.
        death: what :func:`multiprocessing.connection.wait` finds ready when the process ends.
    """

    def __init__(self, rank: int, line: Connection, death: int) -> None:
        self.rank = rank
        self.line = line
        self.death = death

    def load(self, job: bytes) -> None:
        self.line.send_bytes(job)

    def go(self) -> None:
        self.line.send_bytes(control.GO)

    def skip(self) -> None:
        try:
            self.line.send_bytes(control.SKIP)
        except OSError:
            self.gone = True

    def answer(self) -> Outcome | None:
        """Read what it answers, when there is something, or it has ended."""
        try:
            # It may have answered, and ended then: so first what it wrote.
            message = self.line.recv_bytes() if self.line.poll() else b""
        except (EOFError, OSError):
            message = b""
        if not message:
            return self.died()
        return None if message == control.LOADED else control.outcome_of(message)

    def died(self) -> Outcome:
        self.gone = True
        code = self._exit_code()
        how = "has ended" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        return Outcome(error=RankDiedError(f"rank {self.rank}: its process {how}", code))

    @abstractmethod
    def _exit_code(self) -> int | None:
        """Wait for the end of a process that is ending; return its exit code if that is known."""

    def stacks(self) -> str:
        try:
            self.line.send_bytes(control.STACKS)
            deadline = Deadline(_STACKS_S)
            while self.line.poll(deadline.left()):
                message = self.line.recv_bytes()
                if message.startswith(control.STACKS):  # and no outcome that comes too late
                    return message.removeprefix(control.STACKS).decode()
        except (EOFError, OSError):
            pass
        return ""

    def dismiss(self) -> None:
        self.line.close()


def wait_for_answers(
    handles: Mapping[int, ProcessHandle], deadline: Deadline
) -> dict[int, Outcome | None]:
    """Wait until some rank answers or ends; as :meth:`Starter.wait`."""
    ranks: dict[Any, int] = {}
    for rank, handle in handles.items():
        ranks[handle.line] = ranks[handle.death] = rank
    ready = wait(list(ranks), deadline.left())
    return {rank: handles[rank].answer() for rank in {ranks[each] for each in ready}}


class _Started(ProcessHandle):
    """A process that this one started."""

    def __init__(self, rank: int) -> None:
        # Not forked from here: a copy of this process would have its locks but not its threads.
        # The server of preload() has none.
        context: ForkServerContext | SpawnContext
        context = ForkServerContext() if _forks() else SpawnContext()
        line, theirs = context.Pipe()
        self._process = context.Process(
            target=control.serve_as,
            # A server has the variables of when it started.
            args=(dict(os.environ), rank, theirs),
            name=f"rank-{rank}",
            daemon=True,
        )
        self._process.start()
        # Only the child may hold its end, or its end would never be noticed.
        theirs.close()
        super().__init__(rank, line, self._process.sentinel)

    def _exit_code(self) -> int | None:
        self._process.join(LEAVE_S)
        return self._process.exitcode

    def end(self, deadline: Deadline) -> None:
        self._process.join(deadline.left())
        self._process.kill()
        self._process.join()
        self._process.close()
        self.line.close()


class ProcessStarter(Starter):
    """Makes ranks that are processes of :mod:`multiprocessing`; see :func:`preload`."""

    def encode(self, job: Job) -> bytes:
        return encoded(job)

    def start(self, ranks: Sequence[int]) -> dict[int, Handle]:
        return {rank: _Started(rank) for rank in ranks}

    def wait(self, handles: Mapping[int, Any], deadline: Deadline) -> dict[int, Outcome | None]:
        return wait_for_answers(handles, deadline)
