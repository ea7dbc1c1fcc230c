"""Subsets of the public suite's checks, for more runs of a transport with other ranks.

A transport that folds by itself runs all checks with two and three ranks. If a library or another
transport makes the folds, as few ranks as suffice run all checks. Runs with more or other ranks
need only these subsets: checks of the kind of array, of arguments or of the order of events would
repeat.
"""

from __future__ import annotations

from collective.testing import all_checks

__all__ = ["BY_PLACE", "BY_SIZE", "COMPARED", "OF_TWO", "SHRINKING", "all_but"]

#: Checks that depend on the number of ranks.
BY_SIZE = tuple(
    f"check_{name}"
    for name in """
    all_gather all_reduce_in_place all_reduce_large all_to_all any_source async barrier dup empty
    groups_side_by_side killed_in_the_middle mismatch order_rank reduce_large reduce_scatter_counts
    repeated scan sendrecv split tags user_op_order
""".split()
)
#: Checks that depend on the hosts of ranks: also calls with a root, and a rank that dies in a call.
BY_PLACE = tuple(
    f"check_{name}"
    for name in """
    all_gather all_reduce all_reduce_in_place all_reduce_large all_to_all barrier bools_folded
    broadcast empty gather groups_side_by_side killed_peer mismatch order_rank reduce reduce_large
    reduce_scatter_counts scan scatter sendrecv shards shards_large shards_user_op split tags
    user_op_order
""".split()
)
#: Checks of calls whose results the ranks may compare (``COLLECTIVE_CHECK=results``).
COMPARED = (
    *(name for name in BY_PLACE if name not in ("check_barrier", "check_killed_peer")),
    "check_async_many", "check_grow", "check_objects", "check_send_recv", "check_send_structures",
)  # fmt: skip
#: Checks for two ranks after all checks have run with three: some test each call only with two.
OF_TWO = (
    *(name for name in BY_SIZE if name != "check_killed_in_the_middle"),
    "check_broken_by_abort",
    "check_broken_by_a_late_receiver",
    "check_late_peer",
)
#: Checks of continuing after a loss. The decision is the same on any transport, and with processes
#: each death needs a new process.
SHRINKING = tuple(n for n in all_checks() if n.startswith(("check_shrink", "check_agree")))


def all_but(*names: str) -> list[str]:
    """Return the names of all checks except ``names``."""
    return [name for name in all_checks() if name not in names]
