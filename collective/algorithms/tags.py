"""The tag that keeps the algorithms' messages apart from a user's."""

from __future__ import annotations

__all__ = ["COLLECTIVE_TAG", "GROUP_TAG"]

# Tags below 0 are the package's own, and one is used for one purpose only, as transports are made
# of others: -2 is of groups over shm, -3 of hierarchical, -4, -5 and all from -16 down of nccl.

#: The tag of the default algorithms' messages; a user's tags are 0 to 2**31 - 1.
COLLECTIVE_TAG = -1
#: The tag by which the members of a new group meet.
GROUP_TAG = -6
