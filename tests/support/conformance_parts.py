"""Which of the public suite's checks say something new with other ranks, on the same transport.

All checks are run with two and three ranks where a transport folds by itself, and with as few as
show the rest where a library or another transport does. With more, or with others, what depends on
the kind of array, on arguments or on the order of events is the same once more.
"""

from __future__ import annotations

from collective.testing import all_checks

__all__ = ["BY_PLACE", "BY_SIZE", "OF_TWO", "SHRINKING", "all_but"]

#: What depends on the number of ranks.
BY_SIZE = tuple(
    f"check_{name}"
    for name in """
    all_gather all_reduce_in_place all_reduce_large all_to_all any_source async barrier dup empty
    groups_side_by_side killed_in_the_middle mismatch order_rank reduce_large reduce_scatter_counts
    repeated scan sendrecv split tags user_op_order
""".split()
)
#: What depends on who is where: beside that, what has a root, and a rank that dies in a call.
BY_PLACE = tuple(
    f"check_{name}"
    for name in """
    all_gather all_reduce all_reduce_in_place all_reduce_large all_to_all barrier bools_folded
    broadcast empty gather groups_side_by_side killed_peer mismatch order_rank reduce reduce_large
    reduce_scatter_counts scan scatter sendrecv split tags user_op_order
""".split()
)
#: For two ranks where all checks are run with three: some look at every call with two alone.
OF_TWO = (
    *(name for name in BY_SIZE if name != "check_killed_in_the_middle"),
    "check_broken_by_abort",
    "check_broken_by_a_late_receiver",
    "check_late_peer",
)
#: All about going on after a loss: the decision is the same on any transport, and with processes
#: each death is a new one.
SHRINKING = tuple(n for n in all_checks() if n.startswith(("check_shrink", "check_agree")))


def all_but(*names: str) -> list[str]:
    """Return the names of all checks but some."""
    return [name for name in all_checks() if name not in names]
