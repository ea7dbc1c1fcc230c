"""Errors of transports that are made of other transports (levels): one failure breaks them all."""

from __future__ import annotations

from collections.abc import Sequence

from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    MismatchError,
)
from collective.request import Disagreement

from .channel import Channel

__all__ = ["OF_LEVELS", "explained"]

#: Errors that a level raises in its own terms, such as its own numbers of ranks.
OF_LEVELS = (
    BackendError, CollectiveTimeoutError, CommunicatorAbortedError, CommunicatorClosedError,
    Disagreement, MismatchError,
)  # fmt: skip


def explained(
    channel: Channel,
    error: BaseException,
    where: object,
    deadline: Deadline,
    awaited: Sequence[int] | None = None,
) -> Exception | None:
    """Return the monitor's explanation of a level's failure, and break the whole communicator.

    Args:
        channel: channel of the whole communicator.
        error: error that the level raised, with the level's own numbers of ranks and deadline.
        where, deadline: operation and deadline of the call.
        awaited: ranks of the whole communicator that the call waited for; None for any.

    Returns:
        The exception to raise instead of ``error``; None if ``error`` is not of a level's types.
    """
    if not isinstance(error, OF_LEVELS):
        return None
    if isinstance(error, (CollectiveTimeoutError, Disagreement, MismatchError)):
        # The deadline of the whole call has passed, too, or might as well have passed. Giving up
        # asks all ranks for their calls, and finds the ranks that are late or make another call.
        try:
            channel.check(where, awaited)
            channel.give_up(where, deadline, awaited)
        except Exception as known:
            return known
    return channel.explain(where, error, awaited)
