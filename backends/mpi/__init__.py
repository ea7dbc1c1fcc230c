"""Ranks under ``mpiexec`` or Slurm: MPI's own operations through mpi4py.

MPI is fast and says nothing about peers: a rank that called something else, that is late
or that died lets the others wait for ever, or write over their memory. So every
collective call is two steps. First all ranks *arrive*: a non-blocking reduction of the
calls' digests, polled, so that a deadline, a dead or an aborting peer and a disagreement
are noticed while nothing has been moved yet (:mod:`.arrival`). Then comes MPI's own
operation, blocking, since everybody is there; in the background the non-blocking one,
polled too, which leaves the core to the program.

Nobody can call a thread back out of a blocking MPI call. If a peer dies meanwhile, a
watchdog ends the process with an explanation (:mod:`.watchdog`), as ``mpiexec`` does by
itself; Open MPI started with ``--with-ft ulfm`` returns an error instead.
"""

from .backend import MpiBackend
from .library import Library, describe
from .store import MpiStore

__all__ = ["Library", "MpiBackend", "MpiStore", "describe"]
