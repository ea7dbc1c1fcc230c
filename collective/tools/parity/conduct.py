"""What is not about numbers and has to be the same on every transport.

Each function is called on every rank, and raises AssertionError, or lets through what the library
raises, where the transport does not do as it should. Some are checks of the conformance kit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import (
    CollectiveTimeoutError,
    PeerFailedError,
    PeerLostError,
)
from collective.ops import user_op
from collective.testing import (
    checks_agreement,
    checks_data,
    checks_groups,
    checks_memory,
    checks_p2p,
)

__all__ = ["run"]

Array = np.ndarray[Any, Any]

# How late one rank comes to a barrier.
_LATE_S = 0.03


def run(comm: Communicator, what: str) -> bool:
    """Hold that the ranks of ``comm`` can rely on ``what``.

    Returns:
        Whether the communicator can be used afterwards.

    Raises:
        AssertionError: they cannot.
    """
    if comm.size > 1:
        for hold in _CONDUCT[what]:
            hold(comm)
    return what not in ("failing", "leaving") or comm.size == 1


def _barrier(comm: Communicator) -> None:
    """Nobody leaves a barrier before the last has come."""
    times = []
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(_LATE_S)
        arrived = time.monotonic()
        comm.barrier()
        times.append([arrived, time.monotonic()])
    # One clock on one host.
    table = comm.all_gather(np.array([times]))
    early = table[:, :, 1] < table[:, :, 0].max(axis=0)
    assert not early.any(), (
        f"barrier: rank {int(np.argwhere(early)[0, 0])} left before the last had come"
    )


def _mismatch(comm: Communicator) -> None:
    """Ranks that do not agree are told so, all of them, and can go on."""
    # Arrays that are gathered may differ in length, and so are compared on any transport.
    by_any = ["dtype of a gather"]
    for what in ["op", *by_any] if comm.capabilities.checks_calls else by_any:
        checks_agreement.check_mismatch.part(comm, what)


def _failing(comm: Communicator) -> None:
    """An operator that raises on one rank is an error on all of them, of the same call."""
    last = comm.size - 1

    def add(a: Array, b: Array) -> Array:
        if comm.rank == last:
            raise ArithmeticError("no such sum")
        return a + b

    raised: Exception
    try:
        found = comm.scan(np.array([comm.rank]), op=user_op(add))
    except (ArithmeticError, PeerFailedError) as error:
        raised = error
    else:
        raise AssertionError(
            f"failing: rank {comm.rank} was not told of an operator that raised, and got {found}"
        )
    own = isinstance(raised, ArithmeticError)
    assert own == (comm.rank == last), f"failing: rank {comm.rank} got {raised!r}"


def _leaving(comm: Communicator) -> None:
    """A rank that leaves while others need it is missed, and by its name."""
    comm.barrier()
    last = comm.size - 1
    if comm.rank == last:
        comm.close()
        return
    since = time.monotonic()
    try:
        comm.barrier()
    except PeerLostError as error:
        missed = error.ranks
    except CollectiveTimeoutError:
        missed = () if comm.capabilities.detects_lost_peers else (last,)
    else:
        raise AssertionError(f"leaving: a barrier without rank {last}, which had left")
    seconds = time.monotonic() - since
    assert last in missed, f"leaving: rank {last} was not missed, after {seconds:.1f} s"


_CONDUCT: dict[str, Sequence[Callable[[Communicator], None]]] = {
    "barrier": [_barrier],
    "messages": [
        checks_p2p.check_message_order.part,
        checks_p2p.check_tags.part,
        checks_p2p.check_messages_among_collectives.part,
    ],
    "reuse": [checks_data.check_sender_may_overwrite.part],
    "groups": [checks_groups.check_split.part],
    "symmetric": [checks_memory.check_empty_views.part],
    "mismatch": [_mismatch],
    "failing": [_failing],
    "leaving": [_leaving],
}
