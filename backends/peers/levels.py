"""What transports that are made of others have in common: one failure breaks all of them."""

from __future__ import annotations

from collections.abc import Sequence

from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    MismatchError,
)
from collective.request import Disagreement

from .channel import Channel

__all__ = ["OF_LEVELS", "explained"]

#: What a level raises in its own terms.
OF_LEVELS = (
    BackendError, CollectiveTimeoutError, CommunicatorAbortedError, Disagreement, MismatchError,
)  # fmt: skip


def explained(
    channel: Channel,
    error: BaseException,
    where: object,
    deadline: Deadline,
    awaited: Sequence[int] | None = None,
) -> Exception | None:
    """Return what the monitor says where a level failed, and break the whole.

    Args:
        channel: the whole's.
        error: what the level raised, with its own numbers of ranks and its own deadline.
        where, deadline: the call's.
        awaited: the ranks of the whole that were waited for; None for any.

    Returns:
        What to raise instead; None if ``error`` is none of a level's.
    """
    if not isinstance(error, OF_LEVELS):
        return None
    if isinstance(error, (CollectiveTimeoutError, Disagreement, MismatchError)):
        # The deadline of the whole has passed, too, or might as well have: its end asks
        # all ranks what they are doing, and finds who is late, or who does otherwise.
        try:
            channel.check(where, awaited)
            channel.give_up(where, deadline, awaited)
        except Exception as known:
            return known
    return channel.explain(where, error, awaited)
