"""Ranks of a pool as processes, kept from job to job."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from collective.testing import worker
from collective.testing.failed import Outcome, RankDiedError, RankHungError
from collective.testing.seat import Job

__all__ = ["ProcessRanks"]

# How long a process may take to leave by itself, or to tell where it hangs.
_LEAVE_S = 5.0
_STACKS_S = 2.0


class _Member:
    """One process and the pipes to it."""

    def __init__(self, rank: int) -> None:
        # Not forked: a copy of this process would have its locks but not its threads.
        context = multiprocessing.get_context("spawn")
        self.jobs, jobs = context.Pipe()
        self.control, control = context.Pipe()
        self.process = context.Process(
            target=worker.serve, args=(rank, jobs, control), name=f"rank-{rank}", daemon=True
        )
        self.process.start()
        # Only the child may hold its ends, or its end would never be noticed.
        jobs.close()
        control.close()

    def stacks(self) -> str:
        """Return where the process's threads are, or an empty text if it does not say."""
        try:
            self.control.send_bytes(worker.STACKS)
            return self.control.recv_bytes().decode() if self.control.poll(_STACKS_S) else ""
        except (EOFError, OSError):
            return ""

    def kill(self) -> None:
        """End the process, dead or alive, and forget it."""
        self.process.kill()
        self._forget()

    def leave(self) -> None:
        """Let the process end by itself, or end it."""
        self.jobs.close()
        self.process.join(_LEAVE_S)
        self.kill()

    def _forget(self) -> None:
        self.process.join()
        self.process.close()
        self.jobs.close()
        self.control.close()


class ProcessRanks:
    """Runs jobs in a process a rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: dict[int, _Member] = {}

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
        for rank in range(self.size):
            if rank not in self._members:
                self._members[rank] = _Member(rank)
        outcomes: dict[int, Outcome] = {}
        for rank, member in self._members.items():
            try:
                member.jobs.send_bytes(message)
            except OSError:
                outcomes[rank] = self._died(rank)
        deadline = time.monotonic() + timeout
        while pending := [r for r in range(self.size) if r not in outcomes]:
            pipes: dict[Any, int] = {self._members[rank].jobs: rank for rank in pending}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update(self._hung(pending, timeout))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                outcomes[pipes[pipe]] = self._outcome(pipes[pipe], pipe)
        return outcomes

    def _outcome(self, rank: int, pipe: Connection) -> Outcome:
        try:
            outcome = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return self._died(rank)
        assert isinstance(outcome, Outcome)
        return outcome

    def _died(self, rank: int) -> Outcome:
        member = self._members.pop(rank)
        member.process.join(_LEAVE_S)
        code = member.process.exitcode
        member.kill()
        how = f"was killed by signal {-code}" if code and code < 0 else f"exited with code {code}"
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
