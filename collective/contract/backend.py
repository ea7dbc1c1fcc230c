"""The contract that a transport fulfils.

A transport connects ``size`` ranks and moves contiguous memory between them. Two
methods, :meth:`Backend.send` and :meth:`Backend.recv`, make a complete one: every
other operation has a default over those two, in :mod:`collective.algorithms`, and a
transport overrides what it does faster: the operation's method, or :meth:`Backend.plan`, which
finds out about a request once. ``docs/writing-a-backend.md`` is the guide,
``python -m collective.testing NAME`` the judge.

Rules for every method:

* Buffers are contiguous, aligned and alive until the method returns. ``src`` and
  ``dst`` of one call are the same memory or do not overlap. A transport never writes
  to a ``src`` that is not also the ``dst``.
* The communicator has validated ranks, counts, dtypes and operators; a transport
  does not check them again.
* A method returns when the operation is over for this rank: ``dst`` is complete and
  ``src`` may be changed. (One that has requests of its own may return a ``Work``.)
* Collective methods are called in one order on all ranks, by one thread at a time.
  ``send`` and ``recv`` may run in other threads meanwhile, and never get mixed up with
  the messages of a collective.
* ``deadline`` is the call's :class:`~collective.deadline.Deadline`, which all its steps share. A
  method that waits first looks once whether what it waits for is there, also after the
  deadline. Then it raises ``CollectiveTimeoutError``, which says "timed out" and names the
  ranks that did not come (:meth:`Failure.timed_out`). The transport is broken from then on for
  every rank, since nobody can know what those ranks will still send: later calls raise
  ``CommunicatorAbortedError``.
* A peer that is gone raises ``PeerLostError``; a peer that aborted, the error that
  its :class:`Failure` asks for. Nothing waits for ever.
* The library underneath may raise what it likes: it is turned into one of ours here
  and nowhere else, ``from`` the original.

Ranks that go on after a loss (``shrink()``, where ``Capabilities.shrinks``) decide who they are by
one key of ``World.store``; a transport has no say in that. It answers :meth:`Backend.lost`, and
:meth:`Backend.reconnect` makes one anew. The rules are in ``docs/failures.md``.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from collective import native
from collective.algorithms import (
    agreement,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    sendrecv,
)
from collective.algorithms.messages import COLLECTIVE_TAG
from collective.deadline import Deadline
from collective.errors import AllocationError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.cuda import Device, Event, Stream
    from collective.memory.device_array import DeviceArray
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp
    from collective.request import Request

    from .capabilities import Capabilities
    from .failure import Failure
    from .recorder import Recorder
    from .store import Store
    from .work import Work
    from .world import World

__all__ = ["ANY_SOURCE", "COLLECTIVE_TAG", "Backend", "Group", "Note", "Plan"]

#: What a rank notes: ``name`` of the communicator and ``number`` of the call there, ``begun`` calls
#: of each communicator by name, ``header`` as of ``Request.header``, ``made``: where the
#: communicator was, ``beat``, which grows from note to note, and what this rank has ``found``: the
#: calls of a circle, each a name and a number, and the text that tells of it; or None.
Note = Mapping[str, Any]

#: What makes a request: takes its input, where the result goes, and a deadline; see
#: :meth:`Backend.plan`. One that returns when all is done may have a method ``plain`` as well, of
#: NumPy's arrays in the place of buffers, contiguous and aligned, of the request's dtype and shape:
#: with it the native core makes plain calls, for which no buffers are made then. The arrays are
#: apart, or the same memory, as the operation allows it.
Plan = Callable[[Any, Any, Deadline], "Work[Any] | None"]

#: As ``src`` of a receive: whoever sends first.
ANY_SOURCE = -1


class Backend(ABC):
    """One transport, connected, as one rank sees it.

    Attributes:
        name: the registered name.
        launcher: the program that has to start its ranks (``"mpiexec"``), or empty.
        why_not_shrink: why its ranks cannot go on after a loss, for error texts; empty if there is
            nothing to say.
        capabilities: what it can do.
        rank: this rank.
        size: how many ranks there are.
        meeting: a text that the ranks of this connection have in common, drawn anew whenever ranks
            connect. Empty if there is none: then rank 0 sends one, where they may go on after a
            loss.
        exchange: sends and receives plain arrays in C, behind their heads; None if that is not
            possible. See :func:`collective.native.messages`.
    """

    name: ClassVar[str]
    launcher: ClassVar[str] = ""
    why_not_shrink: ClassVar[str] = ""
    capabilities: Capabilities
    rank: int
    size: int
    meeting: str = ""
    exchange: native.Exchange | None = None

    # -- required -----------------------------------------------------------------

    @classmethod
    @abstractmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Join the other ranks of ``world`` and return the connected transport.

        Constructors open nothing; this does. On failure it leaves nothing behind: no
        file, no socket, no thread.

        Raises:
            BackendUnavailableError: a library is missing; with the install command.
            RendezvousError: ranks did not arrive before the deadline; names them.
        """

    @abstractmethod
    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        """Send ``src`` to rank ``dst``; return when ``src`` may be changed.

        Messages between two ranks with one tag arrive in the order they were sent. It
        may wait until the receiver has asked for the message, or not. ``dst`` is
        another rank. ``tag`` is any integer of 64 bits.
        """

    @abstractmethod
    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        """Receive exactly ``dst.nbytes`` bytes from rank ``src``; return the source's rank.

        The sender's message has the same length: higher layers see to that. ``src`` may
        be :data:`ANY_SOURCE` if the capabilities say so.
        """

    @abstractmethod
    def abort(self, failure: Failure) -> None:
        """Break the communicator for every rank: all calls, running and later, raise.

        May be called from any thread and more than once (the first failure counts), and
        does not wait for anybody.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. Peers that still wait for this rank get ``PeerLostError``.

        Waits for nobody; a second close does nothing. Arrays from :meth:`empty` stay
        valid until they are dropped.
        """

    def refuse_broken(self, where: object) -> None:  # noqa: B027  an offer, not a duty
        """Raise why the communicator is broken, if it is known to be; sends nothing.

        For what has no message that would find out. By default nothing is known, beyond
        what the communicator remembers of its own calls.
        """

    def lost(self) -> Set[int]:
        """Return the ranks that are known not to come any more; asked of a broken transport, too.

        Those whose process has ended, or that have left. It waits for nobody, sends nothing, and
        may be asked from any thread until :meth:`close`. Not to know of one costs the others the
        time of grace of ``shrink()``; to name one that lives costs that one its part.
        """
        return frozenset()

    def lasting(self, store: Store) -> Store:
        """Return ``store``, of the world it was connected with, such that it outlives ranks.

        Asked once, for what is decided after a loss; whoever asks closes what is returned in place
        of ``store``. By default it is ``store``.
        """
        return store

    def reconnect(self, world: World, deadline: Deadline) -> Backend:
        """Return a transport of this kind among the ranks that are left, with nothing of this one.

        Called by all of ``world``, where they are numbered anew, while this one is still open: it
        is broken, and maybe one of its ranks is stopped, and goes on later. What the new one makes
        must not be what that rank knows: segments, addresses and keys are its own. While
        it waits for the others it asks ``world.store.check()`` now and then, which raises when
        one of them has died meanwhile.

        Raises:
            RendezvousError: as :meth:`connect`.
        """
        return type(self).connect(world, deadline)

    def observe(self, recorder: Recorder) -> None:  # noqa: B027  an offer, not a duty
        """Be told where the communicator over this transport records its calls.

        A transport that does not compare the ranks' calls can have the records compared
        when one stalls. By default nothing is done with it.
        """

    def post(self, note: Note, rank: int) -> Mapping[int, Note]:
        """Let other ranks know what this one waits in, and return what they have said last.

        For :mod:`collective.contract.stalls`, from which a transport's waits call ``look`` once a
        second. By default nobody hears of it. A transport that looks for circles itself
        breaks the communicators in them, and returns nothing.

        Args:
            note: sent by all ranks of a family of communicators, each for itself.
            rank: this one's number in the family.
        """
        return {}

    # -- over send and recv, unless overridden ---------------------------------------

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        """Send ``src`` to rank ``to`` and receive ``dst`` from rank ``source``, at once.

        Neither waits for the other; a rank may exchange with itself. What it sends may
        also meet a plain ``recv``, and the other way round.
        """
        sendrecv.sendrecv(self, src, to, dst, source, tag, deadline)

    def agree(self, request: Request, deadline: Deadline) -> None:
        """Compare ``request`` with the other ranks'.

        Raises:
            Disagreement: the digests differ; on every rank, with all headers.
        """
        agreement.agree(self, request, deadline)

    def lacking(self, lacks: bool, request: Request, deadline: Deadline) -> list[int]:
        """Tell all ranks whether this one lacks memory for ``request``; return those that do.

        The same on every rank. An ``all_gather`` carries it, and compares the calls where it does.
        """
        mine = Buffer(np.array([lacks], np.uint8), BY_NAME["uint8"])
        every = Buffer.empty(self.size, BY_NAME["uint8"])
        collecting = self.plan(request.step(-1, "all_gather", elements=[1] * self.size))
        work = collecting(mine, every, deadline)
        if work is not None:
            work.wait()
        return [rank for rank, lacks in enumerate(every.array) if lacks]

    def plan(self, request: Request) -> Plan:
        """Return what makes ``request``: a function of two buffers and a deadline.

        It is kept and called again whenever the same is asked for, so what can be found out
        about a call is found out here. By default it is the method of that name, which follow.
        Who calls a transport calls this.
        """
        return functools.partial(getattr(self, request.operation), request)

    def barrier(
        self, request: Request, src: None, dst: None, deadline: Deadline
    ) -> Work[Any] | None:
        """Return when every rank has called it."""
        barrier.barrier(self, deadline)
        return None

    def broadcast(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Copy ``src`` of ``request.root`` into ``dst`` of every other rank.

        On each rank the two are one buffer.
        """
        broadcast.broadcast(self, dst, request.root, deadline)
        return None

    def reduce(
        self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold the ranks' ``src`` into ``dst`` of ``request.root``; ``dst`` is None elsewhere."""
        reduce.reduce(self, src, dst, request.op, request.root, request.ordered, deadline)
        return None

    def all_reduce(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold the ranks' ``src`` into every rank's ``dst``."""
        all_reduce.all_reduce(self, src, dst, request.op, request.ordered, deadline)
        return None

    def reduce_scatter(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold the ranks' ``src`` and leave ``request.elements[rank]`` elements of it in ``dst``.

        ``src`` holds all of them, rank 0's piece first.
        """
        counts, ordered = request.elements, request.ordered
        reduce_scatter.reduce_scatter(self, src, dst, counts, request.op, ordered, deadline)
        return None

    def scan(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold ``src`` of ranks 0 to this one, in rank order, into ``dst`` (inclusive)."""
        scan.scan(self, src, dst, request.op, deadline)
        return None

    def scatter(
        self, request: Request, src: Buffer | None, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Cut ``src`` of ``request.root`` into ``request.elements``; piece ``rank`` is ``dst``."""
        scatter.scatter(self, src, dst, request.elements, request.root, deadline)
        return None

    def gather(
        self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline
    ) -> Work[Any] | None:
        """Concatenate the ranks' ``src``, of ``request.elements``, in ``dst`` of the root."""
        gather.gather(self, src, dst, request.elements, request.root, deadline)
        return None

    def all_gather(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Concatenate the ranks' ``src``, of ``request.elements``, in every ``dst``.

        In place: ``src`` may be its own piece of ``dst``.
        """
        all_gather.all_gather(self, src, dst, request.elements, deadline)
        return None

    def all_to_all(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Send piece ``j`` of ``src`` to rank ``j``; concatenate what arrives in ``dst``.

        The pieces are of ``request.elements`` and ``request.incoming``; ``src`` and ``dst`` do not
        overlap. ``request`` has a shape only if all ranks have arrays of that shape and cut them
        alike.
        """
        all_to_all.all_to_all(self, src, dst, request.elements, request.incoming, deadline)
        return None

    def group(self, ranks: Sequence[int], deadline: Deadline) -> Backend:
        """Return a transport among ``ranks``, which become 0, 1, … in that order.

        Called by those ranks only, all of them, which have agreed on it; ``self.rank`` is one
        of them.
        """
        self.refuse_broken("group")
        return Group(self, ranks)

    def descriptors(self, ranks: Sequence[int]) -> int:
        """Return how many file descriptors of this process a group among ``ranks`` takes."""
        return 0

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> np.ndarray[Any, Any]:
        """Return ``nbytes`` uninitialised bytes (uint8), allocated by all ranks together.

        Aligned to 64 bytes at least, and symmetric where the capabilities say so.

        Raises:
            AllocationError: some rank has not that much; on every rank, and nothing is broken.
        """
        self.refuse_broken(request)
        raw, problem = np.empty(0, np.uint8), None
        try:
            raw = np.empty(nbytes + 63, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than can be addressed
            problem = error
        if ranks := self.lacking(problem is not None, request, deadline):
            raise AllocationError(
                f"empty: {nbytes} bytes on each of {self.size} ranks: there is not enough on rank "
                f"{', '.join(map(str, ranks))} [rank {self.rank}]"
            ) from problem
        start = -raw.__array_interface__["data"][0] % 64
        return raw[start : start + nbytes]

    def adopt(
        self, nbytes: int, move: Callable[[], int], request: Request, deadline: Deadline
    ) -> np.ndarray[Any, Any] | None:
        """Make memory of the caller's symmetric, by all ranks together; None if that cannot be.

        ``move`` puts it into POSIX shared memory and returns a descriptor of that. What is
        returned is the same memory (uint8), mapped once more.
        """
        self.refuse_broken(request)
        return None

    # -- GPUs ---------------------------------------------------------------------------
    # For transports whose capabilities name "cuda". Buffers in the memory of a GPU are given to
    # the methods above as others are. One that enqueues returns when the operation is enqueued
    # on the buffers' stream, and has the methods that follow; another waits for that stream.

    #: Whether operations on the memory of a GPU are enqueued on a stream.
    enqueues: ClassVar[bool] = False
    #: Whether it enqueues without waiting for the peers: not before they are connected.
    ready: bool = True
    #: The GPU that this rank's buffers have to be on, None for any.
    device: Device | None = None

    def supports(self, what: str, op: ReduceOp, dtype: DType, ordered: bool) -> bool:
        """Tell whether reduction ``what`` can be made in the memory of a GPU.

        The communicator takes the others through host memory.
        """
        return False

    def side_stream(self, device: Device, lane: Hashable = None) -> Stream:
        """Return a stream beside the callers' for what is asynchronous, one for each lane."""
        raise NotImplementedError

    def synchronize_event(self, event: Event, what: str, deadline: Deadline) -> None:
        """Wait on the host for an event after an operation; raise what went wrong with that.

        Raises:
            CollectiveTimeoutError: ``deadline`` has passed, which breaks nothing.
        """
        raise NotImplementedError

    def keep_until(self, event: Event, things: object) -> None:
        """Keep a reference to ``things``, memory that is in use, until ``event`` has come."""
        raise NotImplementedError

    def batch(self) -> AbstractContextManager[object]:
        """Return a context in which operations on the memory of a GPU are started together."""
        return nullcontext()

    def empty_device(self, nbytes: int, request: Request, deadline: Deadline) -> DeviceArray:
        """Return ``nbytes`` bytes on the GPU, allocated by all ranks together; as :meth:`empty`."""
        raise NotImplementedError


class Group(Backend):
    """Some ranks of another transport, by translation of ranks and tags."""

    def __init__(self, parent: Backend, ranks: Sequence[int]) -> None:
        self._parent: Backend = parent
        self._ranks: Sequence[int] = range(parent.size)
        # A class attribute elsewhere; here it follows the transport underneath.
        self.name = parent.name  # type: ignore[misc]
        self.capabilities = parent.capabilities
        self.rank = list(ranks).index(parent.rank)
        self.size = len(ranks)
        self.meeting = parent.meeting
        self._context = _context(parent, tuple(ranks))
        # A group of a group sends over the transport itself: contexts must not add up.
        if isinstance(parent, Group):
            self._parent, self._ranks = parent._parent, parent._ranks
        self._ranks = tuple(self._ranks[rank] for rank in ranks)

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Refuse: a group is made by :meth:`Backend.group`."""
        raise TypeError("a Group is made by Backend.group(ranks)")

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._parent.send(src, self._ranks[dst], self._context + tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        source = ANY_SOURCE if src == ANY_SOURCE else self._ranks[src]
        return self._ranks.index(self._parent.recv(dst, source, self._context + tag, deadline))

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        self._parent.sendrecv(
            src, self._ranks[to], dst, self._ranks[source], self._context + tag, deadline
        )

    def refuse_broken(self, where: object) -> None:
        self._parent.refuse_broken(where)

    def lost(self) -> Set[int]:
        lost = self._parent.lost()
        return {rank for rank, outer in enumerate(self._ranks) if outer in lost}

    def reconnect(self, world: World, deadline: Deadline) -> Backend:
        return self._parent.reconnect(world, deadline)

    def abort(self, failure: Failure) -> None:
        # Its messages share the parent's connections, so there is no breaking one alone.
        self._parent.abort(failure)

    def close(self) -> None:
        """Do nothing: the connections are the parent's."""


def _context(parent: Backend, ranks: tuple[int, ...]) -> int:
    """Return the tag offset of a new group: equal on its members, and its own.

    The n-th group of the same members is the n-th on each of them, so they agree on it
    without a message; a group's tags start at a hash of that, 32 bits up.
    """
    made: dict[tuple[int, ...], int] = parent.__dict__.setdefault("_groups_made", {})
    made[ranks] = nth = made.get(ranks, 0) + 1
    outer = getattr(parent, "_context", 0)
    digest = hashlib.blake2b(repr((outer, ranks, nth)).encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 1 or 1) << 32
