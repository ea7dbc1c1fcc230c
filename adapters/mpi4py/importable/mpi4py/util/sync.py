"""Synchronisation of ranks. Only what messages suffice for: the rest needs one-sided access."""

from __future__ import annotations

from typing import Any

from collective.adapters.mpi4py.refusals import refusing

__all__ = ["Condition", "Counter", "Mutex", "Semaphore", "Sequential"]


class Sequential:
    """Block that the ranks of a communicator run one after the other.

    Args:
        comm: the communicator.
        tag: tag of its messages.
    """

    def __init__(self, comm: Any, tag: int = 0) -> None:
        self.comm = comm
        self.tag = int(tag)

    def __enter__(self) -> Sequential:
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        """Wait for the lower ranks."""
        if self.comm.rank:
            self.comm.recv(None, self.comm.rank - 1, self.tag)

    def end(self) -> None:
        """Let the next rank begin."""
        if self.comm.rank + 1 < self.comm.size:
            self.comm.send(None, self.comm.rank + 1, self.tag)


_WHY = "its engine has no one-sided access"
Counter = refusing("util.sync.Counter", _WHY, "Let one rank count, and ask it by messages.")
Mutex = refusing("util.sync.Mutex", _WHY, "Use fcntl.flock on a host, or a rank that decides.")
Condition = refusing("util.sync.Condition", _WHY, "Use messages.")
Semaphore = refusing("util.sync.Semaphore", _WHY, "Use messages.")
