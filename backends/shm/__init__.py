"""Ranks that are processes of one host: NumPy over a shared mapping.

One control segment a communicator holds a line of words, two slots, two areas and some notes for
each rank, and a ring for each ordered pair. A rank arrives at a step by writing the
step's number to its line and waits until every line shows it: no locks, no system
calls; words are aligned and eight bytes long, so a store is one instruction.

How arrays travel without the native core depends on their size. Up to 256 KiB they go through the
slots. A rank writes its slot before it arrives, so that one wait is all. There are two sets of
slots in turn: a rank writes to a set again two steps later, when all ranks have read it. Above that
the ranks publish where their buffers are. All ranks map those in symmetric memory
(``comm.empty()``), and read others with process_vm_readv(2), one copy. Where the system forbids
that call, the algorithms over send and recv take over. Messages go through the rings.

Where all ranks have the native core, they make calls in C, up to some MiB: through the areas below
24 KiB, then in symmetric memory where it is, or staged through the areas (``docs/shm.md``). Calls
that C does not make, such as those with a user's operator, go the way of Python: that is why slots
are in use beside areas. Messages in C go through the same rings, by another protocol.

The ranks vote once, when they connect: whether all of them can read each other's memory, and
whether all of them have the core.
"""

from .transport import ShmBackend

__all__ = ["ShmBackend"]
