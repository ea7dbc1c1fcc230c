"""Ranks under ``mpiexec`` or Slurm: MPI's own operations through mpi4py.

MPI is fast, but reports nothing about peers. If a rank makes another call, is late or has died, the
other ranks wait without end, or their memory is overwritten. So every collective call has two
steps. First all ranks *arrive*: they reduce the digests of their calls with a non-blocking
operation, which is polled. So a deadline, a dead or aborting peer, or a disagreement is noticed
before anything has been moved (:class:`.carrying.Arrival`). Then comes MPI's own operation. It is
blocking, since all ranks are there. In the background it is the non-blocking one, which is polled
as well and leaves the core to the program.

A thread cannot be called back out of a blocking MPI call. If a peer dies during the call, a
watchdog ends the process with an explanation (:mod:`.watchdog`), as ``mpiexec`` does by itself.
Open MPI that was started with ``--with-ft ulfm`` returns an error instead.
"""

from __future__ import annotations

from .library import Library, describe
from .store import MpiStore
from .transport import MpiBackend

__all__ = ["Library", "MpiBackend", "MpiStore", "describe"]
