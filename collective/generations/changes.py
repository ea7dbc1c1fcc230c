"""Changes of a communicator's ranks: shrinking after a loss, and growing by processes that join.

The rules are in ``docs/reference/failures.md``. The functions here work on a communicator, of
which they use the members of :class:`Parent`. :func:`shrink` and :func:`grow` return the transport
and the lineage of the next generation. The communicator makes its successor from these.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from collective.contract.backend import Backend, Capabilities
from collective.contract.decision import Decision
from collective.contract.failure import Failure
from collective.deadline import Deadline
from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    InvalidArgumentError,
    RankError,
    RendezvousError,
    UnsupportedError,
)

from .arrivals import Arrivals
from .lineage import Lineage
from .next_generation import NextGeneration
from .succession import Succession

# Interval at which a rank that waits in agree() checks whether another rank has given up.
_GIVEN_UP_LOOK_S = 0.05


class ParentInner(Protocol):
    """Inner members of a communicator that the elastic protocol uses."""

    @property
    def transport(self) -> Backend:
        """Transport that connects the ranks."""

    @property
    def on_host(self) -> Any:
        """Calls of the communicator on CPU arrays."""

    @property
    def succession(self) -> Succession:
        """Data about the communicator's generations."""

    def fail(self, cause: BaseException | Failure) -> None:
        """Break the communicator for all ranks."""


class Parent(Protocol):
    """Communicator as the elastic protocol uses it."""

    rank: int
    size: int
    backend: str
    capabilities: Capabilities

    @property
    def closed(self) -> bool:
        """Whether the communicator is closed."""

    @property
    def inner(self) -> ParentInner:
        """Its members for the library's own rooms."""


def shrink(
    parent: Parent, exclude: Sequence[int], min_ranks: int | None, deadline: Deadline
) -> tuple[Backend, Lineage]:
    """Break ``parent``, and connect the surviving ranks; see ``Communicator.shrink``.

    Args:
        parent: the communicator.
        exclude: ranks to leave out, alive or not.
        min_ranks: minimum number of ranks to continue with; None for the lineage's number.
        deadline: deadline of the whole operation.

    Returns:
        The transport of the next generation, and its lineage.
    """
    lineage = _lineage_of(parent, "shrink")
    if parent.rank in exclude:
        raise RankError(
            f"shrink: exclude {list(exclude)} names this rank; a rank that wants to leave closes "
            f"the communicator {_who(parent)}."
        )
    floor = lineage.min_ranks if min_ranks is None else min_ranks
    if isinstance(floor, bool) or not isinstance(floor, int) or floor < 1:
        raise InvalidArgumentError(f"shrink: min_ranks {floor!r}; expected a positive integer.")
    # Break the communicator first. Ranks that are in one of its calls then raise an error, which
    # asks them to call shrink().
    text = f"rank {parent.rank} shrinks the communicator; call shrink() too, to go on with it"
    parent.inner.fail(Failure("shrink", parent.rank, text))
    with _kept_if_failed(parent):
        return NextGeneration(
            lineage, parent.inner.transport, deadline, exclude=exclude, min_ranks=floor,
            announce=parent.inner.succession.announce,
        ).run()  # fmt: skip


def grow(parent: Parent, deadline: Deadline) -> tuple[Backend, Lineage]:
    """Connect the ranks and all processes that wait to join; see ``Communicator.grow``.

    Args:
        parent: the communicator; for a process that waits to join, its communicator of one rank.
        deadline: deadline of the whole operation.

    Returns:
        The transport of the next generation, and its lineage.
    """
    joiner = parent.inner.succession.joiner
    if joiner is not None and not parent.closed:
        return joiner.run(parent.inner.transport, deadline)
    lineage, arrivals = _lineage_and_arrivals_of(parent, "grow")
    try:
        with _kept_if_failed(parent):
            return NextGeneration(
                lineage, parent.inner.transport, deadline, arrivals=arrivals,
                announce=arrivals.announce,
            ).run()  # fmt: skip
    except CollectiveTimeoutError as error:
        # The other ranks may still decide on a generation with this rank, which has given up. So
        # break the communicator.
        text = f"rank {parent.rank} gave up: {error}"
        parent.inner.fail(Failure("aborted", parent.rank, text))
        raise


@contextlib.contextmanager
def _kept_if_failed(parent: Parent) -> Iterator[None]:
    """Leave the announcement of this rank in place if the body fails: others may continue."""
    try:
        yield
    except BaseException:
        parent.inner.succession.keep_announcement()
        raise


def waiting(parent: Parent) -> int:
    """Return the number of processes that wait to join; see ``Membership.waiting``."""
    _, arrivals = _lineage_and_arrivals_of(parent, "waiting")
    count, problem = 0, None
    if parent.rank == 0:
        try:
            arrivals.announce()
            count = len(arrivals.waiting())
        except RendezvousError as error:
            count, problem = -1, error
    count = int(parent.inner.on_host.broadcast(np.array([count]), root=0)[0])
    if count < 0:
        raise RendezvousError(
            f"waiting: rank 0 cannot read the store in which the ranks met {_who(parent)}"
            f"{(problem and f': {problem}') or '; the error on rank 0 says why.'}"
        ) from problem
    return count


def agree(parent: Parent, flag: bool, deadline: Deadline) -> bool:
    """Return whether all living ranks vote yes, alike on all ranks; see ``Membership.agree``.

    The ranks vote through the store in which they met.

    Args:
        parent: the communicator.
        flag: vote of this rank.
        deadline: deadline of the vote.

    Raises:
        CollectiveTimeoutError: a rank did not vote, and was not detected as lost.
        CommunicatorAbortedError: another rank has given up this agreement, and shrinks.
        RendezvousError: the store is gone.
    """
    lineage, succession = _lineage_of(parent, "agree"), parent.inner.succession
    succession.agreements += 1
    if len(lineage.origin) == 1:
        return flag
    backend, number = parent.inner.transport, succession.agreements
    store, me = lineage.root.store, lineage.root.rank
    before, key = (f"{lineage.name}.{lineage.generation}.agree.{n}" for n in (number - 1, number))

    opened = f"{lineage.name}.{lineage.generation + 1}.open"
    looked_at = time.monotonic()

    def lost() -> set[int]:
        nonlocal looked_at
        if (now := time.monotonic()) >= looked_at + _GIVEN_UP_LOOK_S:
            looked_at = now
            # Read the verdict after `opened`: the rank that shrinks may have read the verdict first
            # and shrunk since. Then it has not given up this agreement.
            if store.try_get(opened) is not None and store.try_get(key) is None:
                raise CommunicatorAbortedError(
                    f"agree: another rank has given up waiting, and calls shrink(); call shrink() "
                    f"too, to continue with that rank [rank {lineage.origin.index(me)} of "
                    f"{len(lineage.origin)}]"
                )
        return {lineage.origin[rank] for rank in backend.lost()}

    decision = Decision(store, key, me, lineage.origin, lost, "agree", lineage.origin.index)
    verdict = decision.made(
        {"flag": flag},
        lambda notes, lost: all(note["flag"] for note in notes.values()),
        grace=None,
        deadline=deadline,
    )
    # Delete the keys of the previous agreement. Every rank that took part in this one has read the
    # previous verdict, and lost ranks do not come back to read it.
    store.delete(f"{before}.{me}")
    if me == lineage.origin[0]:
        store.delete(before)
    return bool(verdict)


def _lineage_of(parent: Parent, what: str) -> Lineage:
    """Return the lineage; refuse a communicator that cannot continue after a loss."""
    if parent.closed:
        parent.inner.transport.refuse_broken(what)
    if not parent.capabilities.shrinks:
        why = parent.inner.transport.why_not_shrink
        raise UnsupportedError(
            f"{what}: backend {parent.backend!r} cannot continue after the loss of a rank"
            f"{why and f': {why}'} {_who(parent)}. Use COLLECTIVE_BACKEND=shm on one host, tcp "
            "or hierarchical on several; or start all ranks again."
        )
    lineage = parent.inner.succession.lineage
    if lineage is None:
        raise UnsupportedError(
            f"{what}: this communicator was made directly from a transport, so the store in which "
            f"its ranks met is unknown {_who(parent)}. Use collective.init() or "
            "collective.connect()."
        )
    return lineage


def _lineage_and_arrivals_of(parent: Parent, what: str) -> tuple[Lineage, Arrivals]:
    """Return the lineage and the arrivals; refuse a communicator that processes cannot join."""
    lineage = _lineage_of(parent, what)
    if not (parent.capabilities.grows and lineage.founders):
        subject = f"backend {parent.backend!r}" if lineage.founders else "a group"
        raise UnsupportedError(
            f"{what}: processes cannot join {subject} {_who(parent)}. Let processes join the "
            "communicator that init() returned, over shm, tcp or hierarchical "
            "(COLLECTIVE_BACKEND=shm), and make groups of it."
        )
    return lineage, parent.inner.succession.arrivals(parent.backend)


def _who(parent: Parent) -> str:
    return f"[rank {parent.rank} of {parent.size}]"
