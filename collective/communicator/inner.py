"""What the library's own rooms and adapters need of a communicator, and its end.

Communicators and the groups made from them form a tree. Breaking or closing a communicator also
breaks or closes all groups below it.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.mail import use
from collective.contract.process import forked_from
from collective.contract.stalls import FamilyMember
from collective.contract.work import deliver
from collective.deadline import Deadline
from collective.errors import CommunicatorClosedError, PeerFailedError, UnsupportedError
from collective.generations.lineage import Lineage
from collective.generations.succession import Succession
from collective.request import Request

from .calls.allocation import Adopt
from .host_calls import HostCalls
from .listener import Listener
from .mail import Mail
from .path import Path

# Every communicator of this process. A forked child must disable them all.
_alive: weakref.WeakSet[Inner] = weakref.WeakSet()
# Error text for a communicator that the program itself has closed.
_CLOSED = "this communicator is closed. Make another with collective.init()."


class Closed:
    """Stand-in for the transport of a closed communicator: every use raises an error."""

    exchange = mail = None

    def __init__(self, backend: Backend, why: str) -> None:
        self.name = backend.name
        self._why = why
        # In a forked child, keep the transport alive: closing it would also affect the parent.
        self._kept = backend if why is not _CLOSED else None

    def refuse_broken(self, where: object) -> NoReturn:
        """Raise ``CommunicatorClosedError`` with the reason why no call can be made."""
        raise CommunicatorClosedError(f"{where}: {self._why}")

    def plan(self, request: Request) -> NoReturn:
        """Raise the same error for a call that is only planned."""
        self.refuse_broken(request.operation)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise CommunicatorClosedError(f"{attribute}: {self._why}")


class Inner:
    """Members of a communicator for adapters, tools and the library itself, as ``comm.inner``.

    A program needs none of them. An adapter of an interface, a tool or a test may use those that
    have a docstring.

    Args:
        path: path of the communicator's calls.
        lineage: store in which the ranks met, and the surviving ranks; None if it is unknown.
        open_to_others: whether ranks of several hosts have connected without a secret, so that
            strangers may have joined.

    Attributes:
        succession: data about this communicator's generations, for code that starts or joins ranks.
        foreign: in a forked child, the reason why the child may not use the communicator; else
            empty.
        family: membership in the family of all communicators made from the same one.
        children: the groups that were made from this communicator.
        open_to_others: as passed.
    """

    def __init__(self, path: Path, lineage: Lineage | None, open_to_others: bool) -> None:
        self._path = path
        self.succession = Succession(lineage)
        self.foreign = ""
        self.family = FamilyMember(path)
        self.children: weakref.WeakSet[Inner] = weakref.WeakSet()
        self.open_to_others = open_to_others
        _alive.add(self)

    @property
    def transport(self) -> Backend:
        """Transport under this communicator, for tools and tests.

        A direct call of the transport is not recorded, and is not ordered with the communicator's
        calls. Once the communicator is closed, every use raises ``CommunicatorClosedError``.
        """
        return self._path.backend

    @functools.cached_property
    def mail(self) -> Mail:
        """Posted messages of bytes, for adapters of interfaces with requests of their own.

        Raises:
            UnsupportedError: the transport has none.
        """
        engine = self._path.backend.mail
        if engine is None:
            raise UnsupportedError(
                f"mail: not supported by backend {self._path.backend.name!r} {self._path.who}. Use "
                "'shm', 'tcp', 'threads', 'mpi' or 'hierarchical'."
            )
        return Mail(self._path, use(engine))

    @property
    def on_host(self) -> HostCalls:
        """Calls on the library's own CPU arrays, which also work on GPU-only transports."""
        return HostCalls(self._path)

    @property
    def enqueues(self) -> bool:
        """Whether calls on GPU arrays return once they are enqueued on the arrays' streams."""
        return self._path.enqueues

    @property
    def check(self) -> str:
        """Facts that the ranks compare: "auto", "always", "never", "results" or "results:N".

        See ``COLLECTIVE_CHECK``.
        """
        return self._path.check

    @property
    def expects(self) -> Sequence[int] | None:
        """Lengths that this rank expects from each rank in ``gather``, ``all_to_all``, ``scatter``.

        For adapters of interfaces in which receivers state lengths, too, as in torch.distributed.
        An adapter sets it on all ranks during a call on flat arrays: to a list, or to an empty one
        on a rank that receives nothing, and in ``scatter``, where ``out`` states the length. If a
        sender passes another length, the call raises ``MismatchError``, and nothing is written.
        If the lengths are not all those that this rank itself sends, pass a ``timeout``: calls
        that C makes do not state them. None, the default: receivers accept any length.
        """
        return self._path.expects

    @expects.setter
    def expects(self, lengths: Sequence[int] | None) -> None:
        self._path.expects = lengths

    def listen(self, listener: Listener) -> None:
        """Notify ``listener`` of every call from now on, after the listeners added before.

        A listener that has its own lanes (background threads) must be added while no call of this
        communicator is in flight.

        Args:
            listener: object to notify; for plain functions use ``comm.hook``.
        """
        self._path.listen(listener)

    def adopt(
        self, nbytes: int, move: Callable[[], int]
    ) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """Make memory that a framework allocated symmetric, as if ``comm.empty`` had made it.

        Symmetric memory is memory that every rank can access, so that a collective on it moves
        each byte once.

        Collective: every rank calls it, with one length.

        Args:
            nbytes: length of the memory on the host, in bytes.
            move: function that moves the memory into POSIX shared memory and returns its file
                descriptor, which must stay open until ``adopt`` returns. It is called once all
                ranks have made this call and there is room for the memory.

        Returns:
            The bytes of the memory, mapped a second time: collectives on views of this array move
            each byte once. None on every rank if the transport has no symmetric memory, or if
            some rank could not make its memory symmetric. Then the memory can be used as before.

        Raises:
            MismatchError: lengths differ.
        """
        adopted: np.ndarray[tuple[int], np.dtype[np.uint8]] | None
        adopted = self._path.make(Adopt(self._path, nbytes, move), None, False)
        return adopted

    def fail(self, cause: BaseException | Failure) -> None:
        """Break this communicator and the groups made from it, and send the cause to the peers.

        If the cause is an exception, the peers' calls raise ``PeerFailedError`` with its traceback.
        A ``with`` block that an exception leaves calls this method. Any thread may call it.

        Args:
            cause: exception or failure that stopped this rank. A ``PeerFailedError`` is ignored:
                the peers already know of that failure.
        """
        if not isinstance(cause, PeerFailedError):
            rank = self._path.rank
            self._abort(cause if isinstance(cause, Failure) else Failure.caused_by(rank, cause))

    def _abort(self, failure: Failure) -> None:
        for child in list(self.children):
            child._abort(failure)
        self.succession.keep_announcement()
        if not self._path.closed:
            self._path.backend.abort(failure)

    def close(self, deadline: Deadline) -> None:
        """Close the communicator and the groups made from it; see ``Communicator.close``.

        Args:
            deadline: deadline for the wait for background calls.
        """
        path = self._path
        if path.closed:
            return
        for child in list(self.children):
            child.close(deadline)
        path.close(deadline)
        try:
            for listener in path.listeners.all:
                listener.close()
        finally:
            backend = path.backend
            path.backend = Closed(backend, _CLOSED)  # type: ignore[assignment]
            if path.__dict__.get("mail") is not None:
                path.mail = path.backend  # the engine would keep the memory of the transport
            backend.close()
            self.succession.close()

    def leave(self, deadline: Deadline | None = None) -> None:
        """Close the transports of this communicator and its groups, without waiting for a rank.

        It is for the end of a process, or of a thread that is a rank. Programs call ``comm.close``.

        Args:
            deadline: if given, first wait until this moment for the calls in the background that
                other ranks need.
        """
        for child in list(self.children):
            child.leave(deadline)
        path = self._path
        if not path.closed:
            if deadline is not None:
                deliver((path.lane, *path.lanes.values()), deadline)
                path.deliver(deadline)
            if path.drain is not None:
                path.drain()
            self.succession.end_arrivals()
            path.backend.close()

    def disown(self) -> None:
        """Refuse every call from now on, in a forked child, so that it cannot reach peers."""
        path = self._path
        if path.closed:
            return
        self.foreign = forked_from(f"rank {path.rank} of {path.size}")
        path.shut()
        path.backend = Closed(path.backend, self.foreign)  # type: ignore[assignment]


def _disown_all() -> None:
    for inner in list(_alive):
        inner.disown()


os.register_at_fork(after_in_child=_disown_all)
