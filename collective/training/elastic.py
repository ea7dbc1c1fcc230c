"""Training that goes on when ranks are lost, or join: one generation after the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    ExcludedError,
    InvalidArgumentError,
    RanksJoinError,
)
from collective.start.config import load

from .elastic_state import State

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["Generation", "generations"]

#: What says that ranks are lost, or that some other rank has found that they are.
_LOSSES = (CommunicatorAbortedError, CollectiveTimeoutError)


class Generation:
    """The ranks between two losses: a context manager around what they do together.

    Entered it is their communicator. An error in the body that says that ranks are lost, or want to
    join, ends the body, and nothing else; any other one passes, and aborts the peers.

    Attributes:
        comm: connects the ranks.
        error: what ended the body, if it was a loss.
        joining: whether it was ended by processes that want to join.
    """

    def __init__(self, comm: Communicator, timeout: float | None = None) -> None:
        self.comm = comm
        self._timeout = timeout
        self.error: CollectiveError | None = None
        self.joining = False
        self._entered = False

    def __enter__(self) -> Communicator:
        self._entered = True
        return self.comm

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, RanksJoinError):
            self.joining = True
            return True
        if (
            isinstance(error, _LOSSES)
            and not isinstance(error, ExcludedError)
            and self.comm.capabilities.shrinks
        ):
            self.error = error
            return True
        if error is not None and self.comm.generation:
            # The first one is the program's, which has a ``with`` of its own around it.
            self.comm.__exit__(kind, error, traceback)
        return False

    def survived(self) -> bool:
        """Return whether no rank has met a loss in the body; the same on all that live.

        Collective: every rank calls it after the body.
        """
        if not self._entered:
            raise InvalidArgumentError(
                "generations: the body has not entered the generation, so that nobody knows what "
                "becomes of it. Write `for generation in generations(...):` and in it "
                "`with generation as comm:`."
            )
        if self.error is not None:
            # Whoever waits in a call, for this rank or another, is to come here, too.
            with contextlib.suppress(CollectiveError):
                self.comm.abort(f"a rank was lost: {self.error}")
        if self.comm.size == 1 or not self.comm.capabilities.shrinks:
            return self.error is None
        try:
            return self.comm.agree(self.error is None, timeout=self._timeout)
        except _LOSSES as error:
            # A rank is silent, and the others go on without it.
            self.error = self.error or error
            return False


def generations(
    comm: Communicator,
    state: State,
    *,
    min_ranks: int | None = None,
    timeout: float | None = None,
    grow: bool | None = None,
) -> Iterator[Generation]:
    """Yield the ranks, and after each loss those that are left, with the state to go on from.

    ::

        for generation in elastic.generations(comm, state):
            with generation as comm:
                while state.step < steps:
                    ...                     # calls of comm, of a wrapped model
                    state.step += 1
                    state.commit()

    Before the body runs, each time, the ranks have the same state (:meth:`State.sync`): that of the
    last commit of whoever is furthest. The body ends by itself, on all ranks, and the loop with
    it; or with an error that says that ranks are lost (``CommunicatorAbortedError``,
    ``CollectiveTimeoutError``). Then the ranks that are left agree who they are
    (:meth:`Communicator.shrink`), and the body runs again: also for one that had got to its end.

    Where ranks may join (``grow``), each commit is the point at which they do: it ends the body by
    ``RanksJoinError`` on all ranks, when processes wait, and the body runs again with them
    (:meth:`Communicator.grow`). Such a process has the same program. Its ``init()`` has returned a
    communicator of itself alone, over which it makes its model and all else; here it joins, and
    gets the state. If the others are through, there is nothing left for it: its program
    ends here, with exit code 0.

    The communicator that was given is closed then; the last one stays open. On a transport that
    cannot shrink (``comm.capabilities.shrinks``) the body runs once, and a loss is its error.

    Collective: every rank calls it.

    Args:
        comm: connects the ranks.
        state: what they go on from.
        min_ranks: with fewer nobody goes on, by default ``COLLECTIVE_MIN_RANKS``, which
            ``collective run --min-ranks`` sets.
        timeout: seconds that ranks which live have to come to the end of the body when another
            has, or has met a loss; by default the communicator's. A rank that is silent for
            longer, and for ``COLLECTIVE_SHRINK_GRACE`` seconds more, is left behind. The others
            have as long to go on without it, or :attr:`Communicator.shrink_timeout` if that is
            longer.
        grow: whether processes may join, the same on all ranks; by default ``COLLECTIVE_GROW``,
            which ``collective run --replace`` sets. It costs a small broadcast each commit.

    Raises:
        PeerLostError: fewer ranks than that are left; on all of them, so that the launcher may
            start all again.
        ExcludedError: the others went on without this rank.
        CollectiveError: what ended the body, where nobody was lost and nothing was committed
            since it began: it would end so again.
        UnsupportedError: ``grow=True``, and nobody can join ``comm``.
        SystemExit: this process was to join, and the others are through.
    """
    if comm.joins:
        comm = _joined(comm)
    grows = comm.grows and load({}).grow == "on" if grow is None else grow
    comm = _synced(comm, state, min_ranks, grows, timeout)
    while True:
        generation, begun_at = Generation(comm, timeout), state.commits
        yield generation
        survived = generation.survived()
        if survived and not generation.joining:
            return
        if survived:
            comm = _synced(_grown(comm, min_ranks, timeout), state, min_ranks, grows, timeout)
            continue
        error = generation.error
        following = _shrunk(comm, min_ranks, timeout)
        lost = following.lost
        comm = _synced(following, state, min_ranks, grows, timeout)
        # After the sync, by which all ranks have as many commits: all of them raise, or none. A
        # body that always ends so, without a loss, would otherwise run for ever.
        if not lost and state.commits == begun_at:
            raise error or CommunicatorAbortedError(
                "generations: a peer's body ended with an error, and nobody was lost nor anything "
                f"committed since the body began [rank {comm.rank} of {comm.size}]. It would end "
                "so again; that rank's error says why it did."
            )


def _joined(comm: Communicator) -> Communicator:
    """Return the communicator of the others, with this process in it."""
    try:
        return comm.grow()
    except ExcludedError as error:
        print(f"collective: {error}", file=sys.stderr)
        raise SystemExit(0) from error


def _shrunk(comm: Communicator, min_ranks: int | None, timeout: float | None) -> Communicator:
    """Return the ranks that are left; ``timeout`` is as that of :func:`generations`."""
    seconds = None if timeout is None else max(timeout, comm.shrink_timeout)
    return comm.shrink(min_ranks=min_ranks, timeout=seconds)


def _grown(comm: Communicator, min_ranks: int | None, timeout: float | None) -> Communicator:
    try:
        return comm.grow()
    except CollectiveTimeoutError:
        # A rank that had got to the end of the body has stopped since.
        return _shrunk(comm, min_ranks, timeout)


def _synced(
    comm: Communicator, state: State, min_ranks: int | None, grows: bool, timeout: float | None
) -> Communicator:
    """Return the ranks that have got the state, of those of ``comm`` that are left."""
    while True:
        try:
            state.sync(comm, grows=grows)
        except _LOSSES as error:
            if isinstance(error, ExcludedError) or not comm.capabilities.shrinks:
                raise
        else:
            return comm
        comm = _shrunk(comm, min_ranks, timeout)
