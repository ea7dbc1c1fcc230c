"""Transport for ranks that are processes of one host: NumPy over a shared mapping.

Each communicator has one control segment. The segment holds a line of words, two slots, two areas
and some texts for each rank, and a ring for each ordered pair of ranks. A rank arrives at a step by
writing the number of the step to its line. Then it waits until every line shows the step. This
takes no locks and no system calls: the words are aligned and eight bytes long, so a store is one
instruction.

Without the native core, the size of an array decides how it travels. Arrays up to 256 KiB go
through the slots. A rank writes its slot before it arrives, so one wait is enough. Two sets of
slots take turns: a rank writes to a set again two steps later, when all ranks have read it. For
longer arrays the ranks publish the places of their buffers. All ranks have buffers in symmetric
memory (``comm.empty()``) mapped. They read other buffers with process_vm_readv(2), in one copy. If
the system forbids that call, the algorithms over send and recv are used instead. Messages go
through the rings.

If all ranks have the native core, they make calls up to some MiB in C. Calls below 24 KiB go
through the areas. Longer calls work in place in symmetric memory, or are staged through the areas
(``docs/shm.md``). Python makes the calls that C does not make, such as those with a user's
operator, so slots are needed beside areas. Messages in C go through the same rings, by another
protocol.

When the ranks connect, they vote once: whether all of them can read each other's memory, and
whether all of them have the core.
"""

from .transport import ShmBackend

__all__ = ["ShmBackend"]
