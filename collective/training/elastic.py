"""Training that continues after ranks are lost or join: one generation after the other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
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
from .preemption import PreemptedError

if TYPE_CHECKING:
    from collective.communicator import Communicator

#: Errors that report lost ranks, or that another rank has detected a loss.
_LOSSES = (CommunicatorAbortedError, CollectiveTimeoutError)


class Generation:
    """Ranks between two losses, as a context manager around what they do together.

    ``with`` returns the communicator of these ranks. If an error in the body reports that ranks
    are lost or want to join, it ends the body and goes no further. Any other error passes, and
    aborts the peers.

    Attributes:
        comm: communicator that connects the ranks.
        error: error that ended the body, if it was a loss.
        joining: whether processes that want to join ended the body.
    """

    def __init__(
        self,
        comm: Communicator,
        timeout: float | None = None,
        save: Callable[[], object] | None = None,
    ) -> None:
        self.comm = comm
        self._timeout = timeout
        self._save = save
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
        leaves = isinstance(error, PreemptedError)
        if leaves or (error is not None and self.comm.membership.generation):
            # The program has its own ``with`` around the first communicator, and closes it. But a
            # rank that leaves may first write a file, and the others go on meanwhile.
            self.comm.__exit__(kind, error, traceback)
        if leaves:
            self._keep_work()
        return False

    def _keep_work(self) -> None:
        """Save the last commit on rank 0, which leaves: perhaps all other ranks leave, too.

        If others go on, one of them is the next rank 0. If that one leaves as well, it saves a
        later commit. So the last commit of all is saved.
        """
        if self.comm.rank != 0:
            return
        if self._save is not None:
            self._save()
            return
        print(
            "collective: rank 0 leaves after SIGTERM. If all ranks leave, the work since the last "
            "file is lost: pass save= to elastic.generations, a function that writes a checkpoint.",
            file=sys.stderr,
        )

    def survived(self) -> bool:
        """Return whether no rank has met a loss in the body; the same on all live ranks.

        Collective: every rank calls it after the body. A rank can have got through its last call
        while another rank met the loss in the same call. If the first one ended here, the other
        would go on alone, to other weights.
        """
        if not self._entered:
            raise InvalidArgumentError(
                "generations: the body did not enter the generation, so its result is unknown. "
                "Write `for generation in generations(...):` and inside it "
                "`with generation as comm:`."
            )
        if self.error is not None:
            # Wake the peers that wait in a call for any rank, so that they come here, too.
            with contextlib.suppress(CollectiveError):
                self.comm.abort(f"a rank was lost: {self.error}")
        if self.comm.size == 1 or not self.comm.capabilities.shrinks:
            return self.error is None
        try:
            return self.comm.membership.agree(self.error is None, timeout=self._timeout)
        except _LOSSES as error:
            # A rank does not answer, and the other ranks continue without it.
            self.error = self.error or error
            return False


def generations(
    comm: Communicator,
    state: State,
    *,
    min_ranks: int | None = None,
    timeout: float | None = None,
    grow: bool | None = None,
    save: Callable[[], object] | None = None,
) -> Iterator[Generation]:
    """Yield the ranks, and after each loss the surviving ranks, with the state to continue from.

    ::

        for generation in elastic.generations(comm, state):
            with generation as comm:
                while state.step < steps:
                    ...                     # calls of comm, of a wrapped model
                    state.step += 1
                    state.commit()

    Before each run of the body, all ranks get the same state (:meth:`State.sync`): the last commit
    of the rank that is furthest. The body may end normally on all ranks, and then the loop ends.
    Or it ends with an error that reports lost ranks (``CommunicatorAbortedError``,
    ``CollectiveTimeoutError``). Then the surviving ranks agree on the group
    (:meth:`Communicator.shrink`), and all of them run the body again. This includes a rank that
    had already reached the end of its body.

    Where ranks may join (``grow``), they join at a commit. When processes wait, the commit ends the
    body by ``RanksJoinError`` on all ranks, and the body runs again with the new ranks
    (:meth:`Communicator.grow`). A joining process runs the same program. Its ``init()`` has
    returned a communicator with only this process, over which it makes its model and everything
    else. Here it joins, and receives the state. If the other ranks have finished, its program ends
    here, with exit code 0.

    At SIGTERM (preemption, ``scancel``, the end of a pod) this rank leaves after its next commit,
    with exit code 143 (``PreemptedError``), and the others continue from that commit. A second
    SIGTERM, more than a second later, ends the process at once. If the program handles the signal
    itself, nothing changes. All ranks may receive the signal, and all leave. So rank 0 calls
    ``save`` before it leaves, or prints a line if there is no ``save``.

    A communicator that ``shrink`` or ``grow`` replaces is closed; the last one stays open. On a
    transport that cannot shrink (``comm.capabilities.shrinks``) the body runs once, and a loss
    raises its error.

    Collective: every rank calls it.

    Args:
        comm: communicator that connects the ranks.
        state: state that the ranks continue from.
        min_ranks: least number of ranks that may continue, by default ``COLLECTIVE_MIN_RANKS``,
            which ``collective run --min-ranks`` sets.
        timeout: seconds that live ranks have to reach the end of the body after another rank has
            reached it, or has met a loss; by default the communicator's timeout. If a rank
            does not answer for longer, and for ``COLLECTIVE_SHRINK_GRACE`` seconds more, the other
            ranks exclude it. They have the same time to continue without it, or
            :attr:`Membership.shrink_timeout` if that is longer.
        grow: whether processes may join, the same on all ranks; by default whether
            ``collective run --replace`` started them. It costs a small broadcast each commit.
        save: function that writes the state to a file. Rank 0 calls it when it leaves after
            SIGTERM, right after a commit, and without the other ranks: its calls of ``comm`` fail.
            If a later rank 0 leaves as well, it saves a later commit.

    Raises:
        PeerLostError: fewer than ``min_ranks`` ranks survive. Every surviving rank raises it, so
            that the launcher may restart all ranks.
        ExcludedError: the other ranks continued without this rank.
        CollectiveError: error that ended the body although no rank was lost and nothing was
            committed since the body began. The body would end with the same error again.
        UnsupportedError: ``grow=True``, but no process can join ``comm``.
        SystemExit: this process should have joined, but the other ranks have finished. Or
            ``PreemptedError``: it has received SIGTERM.
    """
    with state.preemption.heeded():
        yield from _generations(comm, state, min_ranks, timeout, grow, save)


def _generations(
    comm: Communicator,
    state: State,
    min_ranks: int | None,
    timeout: float | None,
    grow: bool | None,
    save: Callable[[], object] | None,
) -> Iterator[Generation]:
    if comm.membership.joins:
        comm = _joined(comm)
    grows = comm.membership.grows and load({}).grow == "on" if grow is None else grow
    comm = _synced(comm, state, min_ranks, grows, timeout)
    while True:
        generation, begun_at = Generation(comm, timeout, save), state.commits
        yield generation
        survived = generation.survived()
        if survived and not generation.joining:
            return
        if survived:
            comm = _synced(_grown(comm, min_ranks, timeout), state, min_ranks, grows, timeout)
            continue
        error = generation.error
        following = _shrunk(comm, min_ranks, timeout)
        lost = following.membership.lost
        comm = _synced(following, state, min_ranks, grows, timeout)
        # The check comes after the sync, which gives all ranks the same number of commits, so all
        # ranks raise or none does. A body that always ends with an error, without a loss, would
        # otherwise run again and again without end.
        if not lost and state.commits == begun_at:
            raise error or CommunicatorAbortedError(
                "generations: the body ended with an error on another rank, but no rank was lost "
                "and nothing was committed since the body began "
                f"[rank {comm.rank} of {comm.size}]. The body would end the same way again. See "
                "the error on that rank for the cause."
            )


def _joined(comm: Communicator) -> Communicator:
    """Return the communicator of the other ranks, with this process in it."""
    try:
        return comm.grow()
    except ExcludedError as error:
        print(f"collective: {error}", file=sys.stderr)
        raise SystemExit(0) from error


def _shrunk(comm: Communicator, min_ranks: int | None, timeout: float | None) -> Communicator:
    """Return the surviving ranks; ``timeout`` is that of :func:`generations`."""
    seconds = None if timeout is None else max(timeout, comm.membership.shrink_timeout)
    return comm.shrink(min_ranks=min_ranks, timeout=seconds)


def _grown(comm: Communicator, min_ranks: int | None, timeout: float | None) -> Communicator:
    try:
        return comm.grow()
    except CollectiveTimeoutError:
        # A rank that had reached the end of the body has stopped since.
        return _shrunk(comm, min_ranks, timeout)


def _synced(
    comm: Communicator, state: State, min_ranks: int | None, grows: bool, timeout: float | None
) -> Communicator:
    """Return the ranks that have received the state, among the surviving ranks of ``comm``."""
    while True:
        try:
            state.sync(comm, grows=grows)
        except _LOSSES as error:
            if isinstance(error, ExcludedError) or not comm.capabilities.shrinks:
                raise
        else:
            return comm
        comm = _shrunk(comm, min_ranks, timeout)
