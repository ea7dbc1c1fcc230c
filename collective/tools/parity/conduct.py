"""Conduct that is not about numbers but must be the same on all transports: checks of the kit."""

from __future__ import annotations

from collections.abc import Sequence

from collective.testing import Check, RankFactory
from collective.testing.checks import Case
from collective.testing.checks_agreement import check_gather_mismatch, check_mismatch_by_itself
from collective.testing.checks_data import check_sender_may_overwrite
from collective.testing.checks_failure import check_left_peer
from collective.testing.checks_groups import check_split
from collective.testing.checks_memory import check_empty_views
from collective.testing.checks_move import check_barrier
from collective.testing.checks_operators import check_failed_operator
from collective.testing.checks_p2p import (
    check_message_order,
    check_messages_among_collectives,
    check_tags,
)

__all__ = ["hold"]

# Name of a conduct -> the checks of it, and their cases; an empty list means all cases.
_CHECKS: dict[str, Sequence[tuple[Check, Sequence[Case]]]] = {
    "barrier": [(check_barrier, [])],
    "messages": [
        (check_message_order, []), (check_tags, []), (check_messages_among_collectives, []),
    ],
    "reuse": [(check_sender_may_overwrite, [])],
    "groups": [(check_split, [])],
    "symmetric": [(check_empty_views, [])],
    "mismatch": [(check_mismatch_by_itself, [{"what": "op"}]), (check_gather_mismatch, [])],
    "failing": [(check_failed_operator, [{"call": "scan"}])],
    "leaving": [(check_left_peer, [])],
}  # fmt: skip


def hold(factory: RankFactory, size: int, name: str) -> str:
    """Check that ``size`` ranks of a transport can rely on a conduct.

    Returns:
        Why no check applies to the transport; empty if one does.

    Raises:
        AssertionError: the ranks cannot rely on it.
    """
    reasons = []
    for check, cases in _CHECKS[name] if size > 1 else ():
        reason = check.skip_reason(factory.capabilities, size)
        reasons.append(reason)
        if reason is None:
            for case in cases or check.cases(size):
                check(factory, size, **case)
    return "; ".join(filter(None, reasons)) if None not in reasons else ""
