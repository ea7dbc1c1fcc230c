"""Ranks that are processes of one host: NumPy over a shared mapping.

One control segment a communicator holds a line of words, two slots, two areas and some notes for
each rank, and a ring for each ordered pair. A rank arrives at a step by writing the
step's number to its line and waits until every line shows it: no locks, no system
calls; words are aligned and eight bytes long, so a store is one instruction.

How contents travel without the native core, by size: up to 256 KiB through the slots, written
before the arrival, so that one wait does it all (two sets of slots in turn: a set is written again
two steps later, when everybody is known to have read it). Above that the ranks publish
where their buffers are. Buffers in symmetric memory (``comm.empty()``) are mapped by
everybody; ordinary ones are read with process_vm_readv(2), one copy. Where the system
forbids that call, the algorithms over send and recv take over. Where all ranks have the native core
calls are made in C, up to some MiB: through the areas below 24 KiB, then in symmetric memory where
it is, or staged through the areas (``docs/shm.md``).
"""

from .transport import ShmBackend

__all__ = ["ShmBackend"]
