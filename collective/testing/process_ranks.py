"""Ranks of a pool as processes, kept from job to job."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from . import worker
from .failed import Outcome, RankDiedError, RankHungError
from .seat import Job

__all__ = ["Member", "ProcessRanks", "preload"]

# How long a process may take to leave by itself, or to tell where it hangs.
_LEAVE_S = 5.0
# How long processes may take to start and to import what a job needs.
_START_S = 60.0
_NO = b"no"
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
    multiprocessing.set_forkserver_preload(["collective.testing.worker", *modules])
    _preloaded[:] = modules


def _forks() -> bool:
    return bool(_preloaded) and len(tempfile.gettempdir()) <= _LONGEST


class Member:
    """One rank's process, whoever started it, and the pipes to it.

    Attributes:
        jobs, control: this end of what :func:`worker.serve` listens to.
    """

    def __init__(self, jobs: Connection, control: Connection) -> None:
        self.jobs = jobs
        self.control = control

    def stacks(self) -> str:
        """Return where the process's threads are, or an empty text if it does not say."""
        try:
            self.control.send_bytes(worker.STACKS)
            return self.control.recv_bytes().decode() if self.control.poll(_STACKS_S) else ""
        except (EOFError, OSError):
            return ""

    def ended(self) -> int | None:
        """Wait for the end of a process that no longer answers; return its exit code if known."""
        return None

    def kill(self) -> None:
        """End the process, dead or alive, and forget it."""
        self.jobs.close()
        self.control.close()

    def leave(self) -> None:
        """Let the process, whose jobs are over, end by itself, or end it."""
        self.kill()


class _Started(Member):
    """A process that this one started."""

    def __init__(self, rank: int) -> None:
        # Not forked from here: a copy of this process would have its locks but not its threads.
        # The server of preload() has none.
        context: ForkServerContext | SpawnContext
        context = ForkServerContext() if _forks() else SpawnContext()
        mine, jobs = context.Pipe()
        mine_too, control = context.Pipe()
        super().__init__(mine, mine_too)
        self.process = context.Process(
            target=worker.serve_as,
            # A server has the variables of when it started.
            args=(dict(os.environ), rank, jobs, control),
            name=f"rank-{rank}",
            daemon=True,
        )
        self.process.start()
        # Only the child may hold its ends, or its end would never be noticed.
        jobs.close()
        control.close()

    def ended(self) -> int | None:
        self.process.join(_LEAVE_S)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        super().kill()

    def leave(self) -> None:
        self.process.join(_LEAVE_S)
        self.kill()


class ProcessRanks:
    """Runs jobs in a process a rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: dict[int, Member] = {}

    def run(self, job: Job, timeout: float) -> dict[int, Outcome]:
        """Run ``job`` on every rank and return how it ended for each.

        Raises:
            TypeError: the function or an argument cannot be pickled.
        """
        try:
            payload = pickle.dumps(job)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"run: {job.function!r} and its arguments must be picklable for ranks that are "
                f"processes: {error}. Define the function at the top of a module, or use "
                "backend='threads'."
            ) from error
        message = pickle.dumps((list(sys.path), payload))
        self._fill()
        outcomes: dict[int, Outcome] = {}
        self._send(range(self.size), message, outcomes)
        # Whoever starts its processes or imports its modules first waits for the last.
        self._collect(_START_S, outcomes)
        if not outcomes:
            self._send(range(self.size), worker.GO, outcomes)
            self._collect(timeout, outcomes)
        else:
            # To whom it waits for: a rank that could not load the job waits for the next.
            self._send(set(self._members) - set(outcomes), _NO, {})
        return outcomes

    def _fill(self) -> None:
        """Start the ranks that are not there."""
        for rank in range(self.size):
            if rank not in self._members:
                self._members[rank] = _Started(rank)

    def _send(self, ranks: Iterable[int], message: bytes, outcomes: dict[int, Outcome]) -> None:
        for rank in list(ranks):
            try:
                self._members[rank].jobs.send_bytes(message)
            except OSError:
                outcomes[rank] = self._died(rank)

    def _collect(self, timeout: float, outcomes: dict[int, Outcome]) -> None:
        """Wait until every rank has loaded its job, or has ended it."""
        deadline = time.monotonic() + timeout
        pending = {rank for rank in range(self.size) if rank not in outcomes}
        while pending:
            pipes: dict[Any, int] = {self._members[rank].jobs: rank for rank in pending}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update(self._hung(sorted(pending), timeout))
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                pending.discard(rank)
                outcome = self._outcome(rank, pipe)
                if outcome is not None:
                    outcomes[rank] = outcome

    def _outcome(self, rank: int, pipe: Connection) -> Outcome | None:
        """Return what ``rank`` says: its outcome, or None if it has loaded its job."""
        try:
            said = pipe.recv_bytes()
        except (EOFError, OSError):
            return self._died(rank)
        if said == worker.LOADED:
            return None
        outcome = pickle.loads(said)
        assert isinstance(outcome, Outcome)
        return outcome

    def _died(self, rank: int) -> Outcome:
        member = self._members.pop(rank)
        code = member.ended()
        member.kill()
        how = "has ended" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code}"
        return Outcome(error=RankDiedError(f"rank {rank}: its process {how}", code))

    def _hung(self, ranks: list[int], timeout: float) -> dict[int, Outcome]:
        stacks = {rank: self._members[rank].stacks() for rank in ranks}
        hung = {}
        for rank, stack in stacks.items():
            self._members.pop(rank).kill()
            text = f"rank {rank}: no result after {timeout:g} s; its process was killed"
            hung[rank] = Outcome(error=RankHungError(text, stack))
        return hung

    def close(self) -> None:
        """End all processes."""
        members, self._members = self._members, {}
        for member in members.values():
            # All at once, then one by one: they leave side by side.
            member.jobs.close()
        for member in members.values():
            member.leave()
