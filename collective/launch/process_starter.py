"""Ranks as processes that this one starts: forked from a server, or each with a new Python."""

from __future__ import annotations

import builtins
import contextlib
import io
import multiprocessing
import os
import pickle
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from types import FunctionType
from typing import Any

from collective.inner import Deadline

from . import rank_line
from .outcome import Outcome, RankDiedError
from .ranks import LEAVE_S, Job, RankHandle, Starter

_STACKS_S = 2.0
# Modules of the fork server; empty if ranks are not forked. A list, since preload() changes it.
_preloaded: list[str] = []
# The longest name of a directory for the server's socket: socket addresses have 108 bytes, and
# multiprocessing appends 33.
_LONGEST = 70


def preload(modules: Sequence[str]) -> None:
    """Fork ranks that are processes from a server that has imported ``modules``.

    Otherwise each rank starts Python anew, which costs nearly two seconds of processor time if it
    needs PyTorch. Call this function before the first rank starts, for example in
    ``conftest.py``::

        collective.testing.preload(["torch"])

    The server is the fork server of :mod:`multiprocessing`, so other users of it get the modules,
    too. The ranks have the environment of the moment when they start. But a module that read a
    variable at its import has the value of that time. All ranks have the same seed for the hashes
    of strings.

    Args:
        modules: names of modules; a module that cannot be imported is skipped.
    """
    multiprocessing.set_forkserver_preload([rank_line.__name__, *modules])
    _preloaded[:] = modules


def _forks() -> bool:
    return bool(_preloaded) and len(tempfile.gettempdir()) <= _LONGEST


class _Pickler(pickle.Pickler):
    """Pickler that notes the first function or class of the main module.

    Attributes:
        of_main: this function or class; None if there was none.
    """

    of_main: Any = None

    def reducer_override(self, obj: Any) -> Any:
        is_global = isinstance(obj, (type, FunctionType))
        if self.of_main is None and is_global and obj.__module__ == "__main__":
            self.of_main = obj
        return NotImplemented


def _main_has_source() -> bool:
    """Return whether another process can import the main module of this one."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)  # of python -m
    file = getattr(main, "__file__", None)
    return name is not None or (file is not None and os.path.exists(file))


def _place_of_main(function: Any) -> str:
    """Return where a function or class of the main module is defined, for an error text."""
    if _main_has_source():
        return "the program that was started"
    if "get_ipython" in dir(builtins):
        return "a notebook or an interactive session"
    code = getattr(function, "__code__", None)
    return "<stdin>" if code is None else str(code.co_filename)


@contextlib.contextmanager
def _importable_main() -> Iterator[None]:
    """Hide the name of a file that is none from :mod:`multiprocessing`.

    The main module of a program from standard input has the file ``<stdin>``. A new process would
    fail to execute it before it runs anything else.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or _main_has_source():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


class ProcessHandle(RankHandle):
    """Handle of a rank that is a process, started here or by a command.

    Args:
        rank: number of the rank.
        line: this end of the rank's control line.
        death: object that :func:`multiprocessing.connection.wait` reports as ready when the
            process ends.
    """

    def __init__(self, rank: int, line: Connection, death: int) -> None:
        self.rank = rank
        self.line = line
        self.death = death

    def load(self, job: bytes) -> None:
        self.line.send_bytes(job)

    def go(self) -> None:
        self.line.send_bytes(rank_line.GO)

    def answer(self) -> Outcome | None:
        """Read the answer of the rank; call this when there is an answer, or the rank has ended."""
        try:
            # The rank may have answered and then ended, so read its answer first.
            message = self.line.recv_bytes() if self.line.poll() else b""
        except (EOFError, OSError):
            message = b""
        if not message:
            return self.died()
        return None if message == rank_line.LOADED else rank_line.outcome_of(message)

    def died(self) -> Outcome:
        self.gone = True
        code = self._exit_code()
        how = "has ended" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        return Outcome(error=RankDiedError(f"rank {self.rank}: its process {how}", code))

    @abstractmethod
    def _exit_code(self) -> int | None:
        """Wait until a process that is ending has ended; return its exit code, None if unknown."""

    def stacks(self) -> str:
        try:
            self.line.send_bytes(rank_line.STACKS)
            deadline = Deadline(_STACKS_S)
            while self.line.poll(deadline.left()):
                message = self.line.recv_bytes()
                if message.startswith(rank_line.STACKS):  # skip an outcome that comes too late
                    return message.removeprefix(rank_line.STACKS).decode()
        except (EOFError, OSError):
            pass
        return ""

    def dismiss(self) -> None:
        self.line.close()


class _Started(ProcessHandle):
    """Process that this one started."""

    def __init__(self, rank: int) -> None:
        # Do not fork this process: the copy would have its locks without the threads that hold
        # them. The server of preload() has no other threads.
        context: ForkServerContext | SpawnContext
        context = ForkServerContext() if _forks() else SpawnContext()
        line, child_line = context.Pipe()
        self._process = context.Process(
            target=rank_line.serve_as,
            # Pass the variables, since the server still has those of its start.
            args=(dict(os.environ), rank, child_line),
            name=f"rank-{rank}",
            daemon=True,
        )
        with _importable_main():
            self._process.start()
        # Only the child may have this end open. Otherwise there is no end of file when it dies.
        child_line.close()
        super().__init__(rank, line, self._process.sentinel)

    def _exit_code(self) -> int | None:
        self._process.join(LEAVE_S)
        return self._process.exitcode

    def end(self, deadline: Deadline) -> None:
        self._process.join(deadline.left())
        self._process.kill()
        self._process.join(LEAVE_S)
        # A process that waits for a disk survives even this, and is given up.
        if not self._process.is_alive():
            self._process.close()
        self.line.close()


class ProcessStarter(Starter):
    """Starter of ranks that are processes of :mod:`multiprocessing`; see :func:`preload`.

    Attributes:
        shares_main: whether the processes import this program's main module, if it has a file.
    """

    shares_main = True

    def encode(self, job: Job) -> bytes:
        """Return ``job`` as bytes, together with the path of its modules.

        Raises:
            TypeError: the job cannot be pickled, or the processes cannot import one of its
                functions.
        """
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"run: {job} cannot be pickled, which ranks that are processes need: {error}. "
                "Define the function at the top of a module, or use backend='threads'."
            ) from error
        if pickler.of_main is not None and not (self.shares_main and _main_has_source()):
            raise TypeError(
                f"run: functions for ranks that are processes must live in a module that can be "
                f"imported; {pickler.of_main.__qualname__} is defined in "
                f"{_place_of_main(pickler.of_main)}. Save it in a .py file, and import it from "
                "there; or use backend='threads'."
            )
        return pickle.dumps((sys.version_info[:2], list(sys.path), buffer.getvalue()))

    def start(self, ranks: Sequence[int]) -> dict[int, RankHandle]:
        return {rank: _Started(rank) for rank in ranks}

    def wait(self, handles: Mapping[int, Any], deadline: Deadline) -> dict[int, Outcome | None]:
        ranks: dict[Any, int] = {}
        for rank, handle in handles.items():
            ranks[handle.line] = ranks[handle.death] = rank
        ready = wait(list(ranks), deadline.left())
        return {rank: handles[rank].answer() for rank in {ranks[source] for source in ready}}
