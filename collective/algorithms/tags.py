"""The tag that keeps the algorithms' messages apart from a user's."""

from __future__ import annotations

__all__ = ["COLLECTIVE_TAG", "GROUP_TAG"]

#: The tag of the default algorithms' messages; a user's tags are 0 to 2**31 - 1.
COLLECTIVE_TAG = -1
#: The tag by which the members of a new group meet.
GROUP_TAG = -6
