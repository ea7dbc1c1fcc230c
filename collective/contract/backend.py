"""The contract that a transport fulfils.

A transport connects ``size`` ranks and moves contiguous memory between them. Two point-to-point
methods, :meth:`Backend.send` and :meth:`Backend.recv`, are enough for all operations: every
other operation has a default in :mod:`collective.algorithms` that calls only those two. A
transport overrides an operation that it can do faster. It overrides either the operation's method,
or :meth:`Backend.plan`, which prepares a request for one or more calls.
``docs/writing-a-backend.md`` is the guide, and ``python -m collective.testing NAME`` runs the
conformance tests.

Rules for every method:

* Buffers are contiguous and aligned, and stay alive until the method returns. ``src`` and
  ``dst`` of one call are the same memory or do not overlap. A transport never writes
  to a ``src`` that is not also the ``dst``.
* The communicator has validated ranks, counts, dtypes and operators. A transport
  does not check them again.
* A method returns when the operation is over for this rank: ``dst`` is complete and
  ``src`` may be changed. There is one exception: if the transport has asynchronous requests of its
  own, a collective method may return a ``Work`` before the operation is over.
* All ranks call the collective methods in the same order, and each rank calls them from one thread
  at a time. Meanwhile ``send`` and ``recv`` may run in other threads. Their messages never
  mix with the messages of a collective.
* ``deadline`` is the :class:`~collective.deadline.Deadline` of the call; all steps of the call
  share it. A method that waits looks at least once whether its peers have come, even if the
  deadline has passed already. If they have not come by the deadline, the method raises
  ``CollectiveTimeoutError``. The text of the error says "timed out" and names the missing ranks
  (:meth:`Failure.timed_out`). After a timeout the transport is broken on every rank, because no
  rank can know what the missing ranks will still send. Later calls raise
  ``CommunicatorAbortedError``.
* A call that needs a lost peer raises ``PeerLostError``. After a peer has aborted, calls raise
  the error that the peer's :class:`Failure` describes. No call may wait forever.
* The library underneath may raise any exception. The transport converts it to an error of
  :mod:`collective.errors`, with ``raise ... from`` the original. No other layer does that.

After a loss the remaining ranks may go on: ``shrink()``, for transports with
``Capabilities.shrinks``. These ranks decide on the new members through one key of ``World.store``,
without the transport. The transport has only two duties: :meth:`Backend.lost` names the lost ranks,
and :meth:`Backend.reconnect` connects the new members. The rules are in
``docs/reference/failures.md``.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from collective import native
from collective.algorithms import agreement, moves, reductions
from collective.algorithms.messages import COLLECTIVE_TAG, Messages, sendrecv
from collective.deadline import Deadline
from collective.errors import AllocationError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.ops import NAMES

if TYPE_CHECKING:
    from collective.control.store import Store
    from collective.cuda import Device, Event, Stream
    from collective.memory.device_array import DeviceArray
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp
    from collective.request import Request

    from .failure import Failure
    from .mail import Engine as MailEngine
    from .recorder import Recorder
    from .work import Work
    from .world import World

__all__ = [
    "ALL_OPS", "ANY_SOURCE", "COLLECTIVE_TAG", "FOLDED", "Backend", "Capabilities", "Group", "Note",
    "Plan", "SpecialRank", "Turns",
]  # fmt: skip

#: Note of a rank about the call in which it waits. The keys are:
#:
#: - ``name``: the name of the communicator;
#: - ``number``: the number of the call on that communicator;
#: - ``begun``: for each communicator of this rank, by name, how many calls have begun;
#: - ``header``: the contents of ``Request.header``;
#: - ``made``: the place in the program where the communicator was made;
#: - ``beat``: a counter that grows from note to note;
#: - ``needs``: None, or the number in the family of the rank whose message the call waits for;
#:   then name and number belong to this call of this rank alone;
#: - ``delivered``: whether the peers see all messages that this rank has sent;
#: - ``found``: None, or the circle of waiting calls that this rank has found: the calls, each a
#:   name and a number, and the text that describes the circle.
Note = Mapping[str, Any]

#: Function that carries out one request; :meth:`Backend.plan` returns it. Its arguments are the
#: input, the output and a deadline. A plan that returns only when the operation is over may also
#: have a method ``plain``, which takes NumPy arrays in place of the buffers. These arrays are
#: contiguous and aligned, and have the request's dtype and shape. They do not overlap, or they are
#: the same memory where the operation allows that. The native core calls ``plain`` for plain calls,
#: and then makes no buffers.
#:
#: A plan of ``all_reduce`` may have a method ``summed``, for results that the ranks compare. It
#: takes the plan's arguments, makes the call and returns a tuple of four: the two sums that make up
#: the checksum of what it copied to the result, the number of bytes that they are of, and the sums
#: that the ranks have announced to each other, or None. ``collective/native/_core.pyi`` has the
#: format.
Plan = Callable[[Any, Any, Deadline], "Work[Any] | None"]

#: Every reduction, for transports that fold in Python.
ALL_OPS = frozenset((*NAMES, "premul_sum", "user"))
#: The element types that Python code can fold.
FOLDED = frozenset(name for name in BY_NAME if not name.startswith("float8"))


class SpecialRank(int):
    """Number in place of a rank; its ``repr`` is the name that programs write for it."""

    _name: str

    def __new__(cls, number: int, name: str) -> Self:
        special = super().__new__(cls, number)
        special._name = name
        return special

    def __repr__(self) -> str:
        return f"collective.{self._name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return SpecialRank, (int(self), self._name)


#: Value of ``src`` with which a receive takes the message of any rank.
ANY_SOURCE: int = SpecialRank(-1, "ANY_SOURCE")
# Number of tags, modulo this number, whose last sources are remembered; as in messages.h.
_TURNS = 64


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Abilities of a transport.

    Three things follow from this value: the choice of a transport, the texts of refusals, and the
    selection of conformance checks. So each fact about a transport is written down once.

    Attributes:
        devices: device kinds its buffers may be on (``"cpu"``, ``"cuda"``). Where ``"cuda"``
            is missing, the communicator copies GPU arrays through host memory.
        dtypes: names of the element types that the transport can reduce; it can move any type.
        ops: names of the reductions (:data:`collective.ops.NAMES`, ``"premul_sum"``,
            ``"user"``).
        across_hosts: whether ranks may be on different hosts.
        in_process: whether the ranks are threads of one process.
        checks_calls: whether every collective call compares the ranks' requests without an extra
            message. If False, the communicator compares requests by messages: of ``broadcast``,
            ``scatter``, ``all_to_all``, and of ``gather`` and ``all_gather`` without ``counts``
            always, of other calls with ``COLLECTIVE_CHECK=always``.
        symmetric_memory: whether :meth:`Backend.empty` returns memory that reduces
            without copies.
        any_source: whether ``recv`` takes ``ANY_SOURCE``.
        posts: whether messages can be posted: :attr:`Backend.mail`.
        detects_lost_peers: whether a peer's death ends the calls that wait for that peer.
        shrinks: whether the remaining ranks can connect anew after a loss, by
            :meth:`Backend.reconnect`; :meth:`Backend.lost` then names the lost ranks.
        grows: whether new processes can join the ranks. The new processes call
            :meth:`Backend.connect` while the old ranks call ``reconnect``, with the same world.
            Requires ``shrinks``.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[str] = FOLDED
    ops: frozenset[str] = ALL_OPS
    across_hosts: bool = False
    in_process: bool = False
    checks_calls: bool = False
    symmetric_memory: bool = False
    any_source: bool = False
    posts: bool = False
    detects_lost_peers: bool = False
    shrinks: bool = False
    grows: bool = False


class Turns:
    """Order in which a receive from :data:`ANY_SOURCE` looks for a message.

    The sources of a tag take turns: the search begins after the rank that was served last. A search
    that always began at the same rank would never reach a later rank while earlier ranks keep
    sending.
    """

    def __init__(self) -> None:
        self._served = [-1] * _TURNS

    def of(self, sources: Collection[int], tag: int) -> list[int]:
        """Return the sources in the order of the search."""
        last = self._served[tag % _TURNS]
        return sorted(sources, key=lambda rank: (rank <= last, rank))

    def serve(self, sources: Collection[int], source: int, tag: int) -> None:
        """Note which of ``sources`` a message was received from.

        A receive from a named rank changes no turn.
        """
        if len(sources) > 1:
            self._served[tag % _TURNS] = source


class Backend(ABC):
    """One rank's end of a connected transport.

    Attributes:
        name: the registered name.
        launcher: the program that has to start the ranks (``"mpiexec"``), or empty.
        why_not_shrink: for error texts, the reason why the ranks cannot go on after a loss; empty
            if there is nothing to say.
        capabilities: the abilities of this transport.
        rank: this rank.
        size: number of ranks.
        meeting: a text that all ranks of this connection share, and that is new for each
            connection. Where the text is empty and ``capabilities.shrinks`` is set, rank 0 makes
            one and sends it to the other ranks.
        exchange: function that sends and receives plain arrays, each behind a head; None if the
            transport has no such function. Over ``shm`` the function is in C, over ``mpi`` in
            Python. See :func:`collective.native.messages`.
        mail: posted messages of this rank; None if the transport has none.
        payload_tag: what the second message of a long array adds to its tag, so that no receive of
            a first message takes it. Where each receive names its source, it may be 0.
    """

    name: ClassVar[str]
    launcher: ClassVar[str] = ""
    why_not_shrink: ClassVar[str] = ""
    capabilities: Capabilities
    rank: int
    size: int
    meeting: str = ""
    exchange: native.Exchange | None = None
    mail: MailEngine | None = None
    payload_tag: ClassVar[int] = 0

    # -- required -----------------------------------------------------------------

    @classmethod
    @abstractmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Join the other ranks of ``world`` and return the connected transport.

        Only this method opens resources; constructors open none. A failed ``connect`` leaves
        nothing behind: no file, no socket, no thread.

        Raises:
            BackendUnavailableError: a library is missing; the text has the install command.
            RendezvousError: ranks did not arrive before the deadline; the text names them.
        """

    @abstractmethod
    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        """Send ``src`` to rank ``dst``; return when ``src`` may be changed.

        Messages from one rank to another with the same tag arrive in the order in which they were
        sent. The method may wait for the matching :meth:`recv`, or return before. ``dst`` is
        never this rank. ``tag`` is any integer of 64 bits.
        """

    @abstractmethod
    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        """Receive exactly ``dst.nbytes`` bytes from rank ``src``; return the rank of the sender.

        The sender's message has the same length; higher layers ensure that. ``src`` may
        be :data:`ANY_SOURCE` if ``capabilities.any_source`` is set; then the sources take turns.
        """

    @abstractmethod
    def abort(self, failure: Failure) -> None:
        """Break the communicator for every rank: all running and later calls raise.

        May be called from any thread, and more than once: the first failure counts. Returns
        without waiting for any other rank.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the communicator. Peers that still wait for this rank get ``PeerLostError``.

        A call in which another thread of this rank waits raises ``CommunicatorClosedError`` (see
        :meth:`Failure.closed`). If a peer could still read or write the arrays of that call, the
        transport first breaks the communicator.

        Returns without waiting for any other rank. A second close does nothing. Arrays from
        :meth:`empty` stay valid until the program drops them.
        """

    def refuse_broken(self, where: object) -> None:  # noqa: B027  an offer, not a duty
        """Raise the error that broke the communicator, if this transport knows of one.

        Sends nothing. It is called for operations without a message of their own, which would not
        notice the failure. By default the method raises nothing. Then a rank knows only about the
        failures of its own earlier calls, which the communicator remembers.
        """

    def lost(self) -> Set[int]:
        """Return the ranks that are certainly lost: their process has ended, or they have left.

        May be called from any thread until :meth:`close`, also while the transport is broken. It
        does not wait and sends nothing. If the set lacks a lost rank, the other ranks wait for that
        rank during the grace time of ``shrink()``. If the set names a live rank, that rank is
        excluded from the next generation.
        """
        return frozenset()

    def lasting(self, store: Store) -> Store:
        """Return ``store`` in a form that outlives the loss of ranks.

        This is called once, with the store of the world that the transport was connected with. The
        ranks make their decisions after a loss in the returned store. The caller closes the
        returned store instead of ``store``. By default the method returns ``store``.
        """
        return store

    def reconnect(self, world: World, deadline: Deadline) -> Backend:
        """Return a new transport of this kind among the ranks of ``world``.

        All ranks of ``world`` call this; they have new numbers there. The new transport shares
        nothing with this one, the old transport. The old transport is still open at that time.
        After a loss it is broken, and one of its ranks may only be stopped and resume later. So the
        new transport must use segments, addresses and keys that such a rank does not know. While
        the method waits for the other ranks, it calls ``world.store.check()`` now and then, which
        raises when one of them has died meanwhile.

        Raises:
            RendezvousError: as :meth:`connect`.
        """
        return type(self).connect(world, deadline)

    def observe(self, recorder: Recorder) -> None:  # noqa: B027  an offer, not a duty
        """Take the recorder in which the communicator over this transport records its calls.

        A transport that does not compare the ranks' calls by itself can have the records compared
        when a call stalls. By default the method ignores the recorder.
        """

    def delivered(self) -> bool:
        """Tell whether the peers see all messages that this rank has sent, as soon as they look.

        By default the answer is no, since nobody knows. Then deadlocks of messages are not found
        before their deadline.
        """
        return False

    def post(self, note: Note, rank: int) -> Mapping[int, Note]:
        """Publish this rank's note; return the last notes of other ranks, by rank.

        A note describes the call in which a rank waits. :mod:`collective.contract.stalls` calls
        this method, and a transport calls ``stalls.look`` about once a second while it waits. By
        default the note is dropped. A transport that looks for circles itself breaks the
        communicators in a circle, and returns an empty mapping.

        Args:
            note: the note of this rank; each rank of a family of communicators posts its own.
            rank: number of this rank in the family.
        """
        return {}

    # -- operations with a default over send and recv ----------------------------------

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        """Send ``src`` to rank ``to`` and receive ``dst`` from rank ``source``, at once.

        Neither half waits for the other. A rank may exchange with itself. A peer may match the
        two halves with a plain ``recv`` and a plain ``send`` as well.
        """
        sendrecv(self, src, to, dst, source, tag, deadline)

    def agree(self, request: Request, deadline: Deadline) -> None:
        """Check that all ranks make the same ``request``.

        Raises:
            Disagreement: the digests differ; raised on every rank, with all headers.
        """
        agreement.agree(Messages(self, deadline), request)

    def lacking(self, lacks: bool, request: Request, deadline: Deadline) -> list[int]:
        """Tell all ranks whether this one lacks memory for ``request``; return the ranks that do.

        The result is the same on every rank. The method uses the transport's ``all_gather``, which
        also compares the calls if the transport's collectives do.
        """
        mine = Buffer(np.array([lacks], np.uint8), BY_NAME["uint8"])
        every = Buffer.empty(self.size, BY_NAME["uint8"])
        collecting = self.plan(request.step(-1, "all_gather", elements=[1] * self.size))
        work = collecting(mine, every, deadline)
        if work is not None:
            work.wait()
        return [rank for rank, lacks in enumerate(every.array) if lacks]

    def plan(self, request: Request) -> Plan:
        """Return the function that carries out ``request``, given two buffers and a deadline.

        The communicator remembers the functions of most requests, at most 1,024, and calls them
        again for equal requests. So the transport should do here all work that depends only on the
        request. For some calls the communicator asks for a new function each time: for those whose
        lengths the ranks first exchange (``scatter``; ``gather``, ``all_gather`` and
        ``all_to_all`` of uneven arrays), and for broadcasts of structures or to ranks that passed
        None.

        By default the function is the method that has the operation's name; these methods follow
        below. Callers of a transport call ``plan``, and not these methods.
        """
        return functools.partial(getattr(self, request.operation), request)

    def barrier(
        self, request: Request, src: None, dst: None, deadline: Deadline
    ) -> Work[Any] | None:
        """Wait until every rank has called this method."""
        agreement.barrier(Messages(self, deadline))
        return None

    def broadcast(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Copy ``src`` of ``request.root`` into ``dst`` of every other rank.

        On each rank ``src`` and ``dst`` are the same buffer.
        """
        moves.broadcast(Messages(self, deadline), dst, request.root)
        return None

    def reduce(
        self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold the ranks' ``src`` into ``dst`` of ``request.root``; ``dst`` is None elsewhere."""
        messages, ordered = Messages(self, deadline), request.ordered
        reductions.reduce(messages, src, dst, request.op, request.root, ordered)
        return None

    def all_reduce(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold the ranks' ``src`` into every rank's ``dst``."""
        messages = Messages(self, deadline)
        reductions.all_reduce(messages, src, dst, request.op, request.ordered)
        return None

    def reduce_scatter(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold the ranks' ``src``; leave this rank's piece of the result in ``dst``.

        Rank r's piece has ``request.elements[r]`` elements. ``src`` has the pieces for all ranks,
        rank 0's piece first.
        """
        messages, ordered = Messages(self, deadline), request.ordered
        reductions.reduce_scatter(messages, src, dst, request.elements, request.op, ordered)
        return None

    def scan(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Fold ``src`` of ranks 0 to this one (inclusive), in rank order, into ``dst``."""
        reductions.scan(Messages(self, deadline), src, dst, request.op)
        return None

    def scatter(
        self, request: Request, src: Buffer | None, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Cut ``src`` of ``request.root`` into pieces; receive this rank's piece in ``dst``.

        Rank r's piece has ``request.elements[r]`` elements. ``src`` is None except at the root.
        """
        moves.scatter(Messages(self, deadline), src, dst, request.elements, request.root)
        return None

    def gather(
        self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline
    ) -> Work[Any] | None:
        """Concatenate the ranks' ``src``, in rank order, in ``dst`` of ``request.root``.

        Rank r's ``src`` has ``request.elements[r]`` elements. ``dst`` is None except at the root.
        """
        moves.gather(Messages(self, deadline), src, dst, request.elements, request.root)
        return None

    def all_gather(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Concatenate the ranks' ``src``, in rank order, in every rank's ``dst``.

        Rank r's ``src`` has ``request.elements[r]`` elements. The call may be in place: ``src`` may
        be this rank's piece of ``dst``.
        """
        moves.all_gather(Messages(self, deadline), src, dst, request.elements)
        return None

    def all_to_all(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> Work[Any] | None:
        """Send piece ``j`` of ``src`` to rank ``j``; concatenate the received pieces in ``dst``.

        Piece j of ``src`` has ``request.elements[j]`` elements, and the piece from rank j has
        ``request.incoming[j]``. ``src`` and ``dst`` do not overlap. ``request`` has a shape only if
        all ranks have arrays of that shape and cut them alike.
        """
        messages = Messages(self, deadline)
        moves.all_to_all(messages, src, dst, request.elements, request.incoming)
        return None

    def group(self, ranks: Sequence[int], deadline: Deadline) -> Backend:
        """Return a transport among ``ranks``, which become 0, 1, … in that order.

        All of these ranks call this, and no other rank does; they have agreed on it before.
        ``self.rank`` is one of them.
        """
        self.refuse_broken("group")
        return Group(self, ranks)

    def descriptors(self, ranks: Sequence[int]) -> int:
        """Return how many file descriptors a group among ``ranks`` takes in this process."""
        return 0

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> np.ndarray[Any, Any]:
        """Return ``nbytes`` uninitialised bytes (uint8), allocated by all ranks together.

        The memory is aligned to at least 64 bytes. It is symmetric if
        ``capabilities.symmetric_memory`` is set.

        Raises:
            AllocationError: some rank has too little memory; raised on every rank. The communicator
                stays usable.
        """
        self.refuse_broken(request)
        raw, problem = np.empty(0, np.uint8), None
        try:
            raw = np.empty(nbytes + 63, np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: beyond the address space
            problem = error
        if ranks := self.lacking(problem is not None, request, deadline):
            raise AllocationError(
                f"empty: {nbytes} bytes on each of {self.size} ranks: not enough memory on rank "
                f"{', '.join(map(str, ranks))} [rank {self.rank}]"
            ) from problem
        start = -raw.__array_interface__["data"][0] % 64
        return raw[start : start + nbytes]

    def adopt(
        self, nbytes: int, move: Callable[[], int], request: Request, deadline: Deadline
    ) -> np.ndarray[Any, Any] | None:
        """Make existing memory of the caller symmetric; None if the transport cannot do that.

        All ranks call this together. ``move`` moves the memory into POSIX shared memory and returns
        its file descriptor. The returned array (uint8) is a second mapping of the same memory.
        """
        self.refuse_broken(request)
        return None

    # -- GPUs ---------------------------------------------------------------------------
    # For transports whose capabilities name "cuda". The methods above then get buffers in GPU
    # memory, too. A transport that enqueues returns when the operation is enqueued on the buffers'
    # stream, and also has the methods below. A transport that does not enqueue waits for that
    # stream on the host.

    #: Whether operations on GPU memory are enqueued on a stream.
    enqueues: ClassVar[bool] = False
    #: Whether an operation can be enqueued without waiting for the peers. False until the peers
    #: are connected.
    ready: bool = True
    #: The GPU that must hold this rank's buffers; None for any GPU.
    device: Device | None = None

    def supports(self, what: str, op: ReduceOp, dtype: DType, ordered: bool) -> bool:
        """Tell whether the transport can do reduction ``what`` in GPU memory.

        The communicator does the other reductions through host memory. So all ranks must return
        the same answer.
        """
        return False

    def side_stream(self, device: Device, lane: Hashable = None) -> Stream:
        """Return the stream for asynchronous operations of a lane, apart from the callers'."""
        raise NotImplementedError

    def synchronize_event(self, event: Event, what: str, deadline: Deadline) -> None:
        """Wait on the host for an event recorded after an operation; raise the operation's error.

        Raises:
            CollectiveTimeoutError: ``deadline`` has passed. The communicator stays usable.
        """
        raise NotImplementedError

    def keep_until(self, event: Event, things: object) -> None:
        """Keep a reference to ``things``, which hold memory in use, until ``event`` occurs."""
        raise NotImplementedError

    def batch(self) -> AbstractContextManager[object]:
        """Return a context manager whose operations on GPU memory are started together."""
        return nullcontext()

    def empty_device(self, nbytes: int, request: Request, deadline: Deadline) -> DeviceArray:
        """Return ``nbytes`` bytes on the GPU, allocated by all ranks together, as :meth:`empty`."""
        raise NotImplementedError


class Group(Backend):
    """Transport among some ranks of another transport, by translation of ranks and tags."""

    def __init__(self, parent: Backend, ranks: Sequence[int]) -> None:
        self._parent: Backend = parent
        self._ranks: Sequence[int] = range(parent.size)
        # Other transports have the name as a class attribute. A group has its parent's name.
        self.name = parent.name  # type: ignore[misc]
        self.capabilities = parent.capabilities
        self.rank = list(ranks).index(parent.rank)
        self.size = len(ranks)
        self.meeting = parent.meeting
        self._context = _context(parent, tuple(ranks))
        # A group of a group sends over the outermost transport, not over its parent group: the tag
        # offsets of the two groups must not be added.
        if isinstance(parent, Group):
            self._parent, self._ranks = parent._parent, parent._ranks
        self._ranks = tuple(self._ranks[rank] for rank in ranks)

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Raise TypeError: only :meth:`Backend.group` makes groups."""
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
        # The group's messages use the parent's connections, so the group cannot be broken alone.
        self._parent.abort(failure)

    def close(self) -> None:
        """Do nothing: the connections belong to the parent."""


def _context(parent: Backend, ranks: tuple[int, ...]) -> int:
    """Return the tag offset of a new group, equal on its members and different for each group.

    All members count the groups of the same ranks alike, so they agree on the offset without a
    message. The offset is a hash of that count, the ranks and the parent's offset, shifted up by 32
    bits.
    """
    counts: dict[tuple[int, ...], int] = parent.__dict__.setdefault("_groups_made", {})
    counts[ranks] = nth = counts.get(ranks, 0) + 1
    outer = getattr(parent, "_context", 0)
    digest = hashlib.blake2b(repr((outer, ranks, nth)).encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 1 or 1) << 32
