"""``MPI.Comm`` and ``MPI.Intracomm``: messages and collectives over the engine for messages.

Every collective is one :class:`~.requests.Exchange`: each rank posts all its messages at once, to
the ranks that need them. So blocking, non-blocking and persistent calls share their code, and none
depends on another rank's coming back to an earlier call. Reductions, broadcasts and gathers of
arrays that the library itself knows run on its plans instead, when they are blocking.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

import collective
from collective.contract.mail import CANCELLED
from collective.inner import session

from . import pickling
from .attributes import Attributed, copy_attributes, delete_attributes
from .exceptions import CLASSES, ERRORS_RETURN, Handling, MPIError, refuse, translated
from .groups import CONGRUENT, IDENT, PROC_NULL, SIMILAR, UNDEFINED, UNEQUAL, Group, Members
from .handles import IN_PLACE, Handle, Inner
from .info import INFO_NULL, Info
from .memory import Bytes, bytes_of
from .messages import NOTHING, Piece, blocks_of, simple, vector, vector_of_types
from .operators import SUM, check_alike, fold
from .requests import (
    ANY_SOURCE,
    ANY_TAG,
    MESSAGE_NO_PROC,
    Exchange,
    Ledger,
    Message,
    Operation,
    Persistent,
    Prequest,
    Receive,
    Request,
    Status,
    await_posted,
    empty,
    flush,
    keep,
    outstanding,
)
from .requests import _Matched as Matched

__all__ = ["COMM_NULL", "Comm", "Context", "Intercomm", "Intracomm", "begin", "mail_of", "world"]

TAG_UB = 2**31 - 1
COMM_TYPE_SHARED, COMM_TYPE_HW_GUIDED, COMM_TYPE_HW_UNGUIDED, COMM_TYPE_RESOURCE_GUIDED = range(4)
ROOT = -3
# Keyvals of MPI itself.
KEYVALS = {"TAG_UB": 1, "IO": 2, "WTIME_IS_GLOBAL": 3, "UNIVERSE_SIZE": 4, "APPNUM": 5,
           "LASTUSEDCODE": 6}  # fmt: skip
# Character codes of the elements that the library's plans reduce, by its name of the operator.
_ORDERED = "bhilqBHILQfd"
_REDUCED = {"sum": _ORDERED + "FD", "prod": _ORDERED + "FD", "max": _ORDERED, "min": _ORDERED}
# A communicator of few ranks gets one of the library's own, with plans, after so many such calls.
_CALLS_WITHOUT_PLANS = 8
_CALL_TAGS = 2**30
# Character codes of arrays that travel as they are.
_PLAIN = "?bhilqBHILQefdgFDG"
# Seconds of a call without a deadline: a rank may work alone for as long as it needs.
_FOREVER = 1e9

_Plan = Callable[[Exchange], None]


class Context(Inner):
    """What a handle of a communicator names.

    Args:
        mail: messages of the world, from which those of the communicator are made.
        ranks: ranks of the members in the world.
        number: number that no other communicator of a member has.
        core: the library's communicator of the world.

    Attributes:
        rank, size: of this process in the communicator, and number of members.
        points, calls: messages of the program, and those of collective calls.
        ledger: count of the program's messages.
        kind: class of its handles.
        topology: dimensions or neighbours, or None.
    """

    def __init__(self, mail: Any, ranks: Sequence[int], number: int, core: Any) -> None:
        super().__init__()
        self.mail = mail
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(core.rank)
        self.size = len(self.ranks)
        self.points = mail.context(3 * number, self.ranks)
        self.calls = mail.context(3 * number + 1, self.ranks)
        self.ledger = Ledger(mail.context(3 * number + 2, self.ranks))
        self.world = core
        self.plans: Any = None
        self.errhandler = ERRORS_RETURN._inner
        self.kind: Any = Intracomm
        self.topology: Any = None
        self.hints: dict[str, str] = {}
        self.locks: dict[Any, threading.Lock] = {}
        self._tags = 0
        self._eligible = 0

    def next_tag(self) -> int:
        """Return the tag of the next collective call, the same on all members."""
        self._tags = (self._tags + 1) % _CALL_TAGS
        return self._tags

    def core(self) -> Any:
        """Return the library's communicator for this call of all members, or None."""
        if self.plans is None:
            self._eligible += 1
            if self.size > 1 and self._eligible > _CALLS_WITHOUT_PLANS:
                try:
                    self.plans = self.world.group(self.ranks)
                except collective.CollectiveError as error:
                    raise translated(error) from error
        return self.plans


class _Numbers:
    """Number of the next communicator; none of this process's has it."""

    following = 2


def _modes(prepare: Callable[..., _Plan]) -> tuple[Any, Any, Any]:
    """Return the blocking, the non-blocking and the persistent call of a collective.

    Args:
        prepare: method that reads the arguments, and returns a function that posts the messages.
    """
    name = prepare.__name__.removeprefix("_")

    def blocking(self: Any, *args: Any, **options: Any) -> None:
        self._run(prepare(self, *args, **options))

    def started(self: Any, *args: Any, **options: Any) -> Request:
        return Request._of(self._start(prepare(self, *args, **options)))  # type: ignore[no-any-return]

    def initialised(self: Any, *args: Any, **options: Any) -> Prequest:
        options.pop("info", None)
        if args and isinstance(args[-1], Info):
            args = args[:-1]
        plan = prepare(self, *args, **options)
        tag = self._live.next_tag()
        return Prequest._of(Persistent(lambda: self._start(plan, tag)))  # type: ignore[no-any-return]

    for function, title in (
        (blocking, name), (started, f"I{name.lower()}"), (initialised, f"{name}_init"),
    ):  # fmt: skip
        function.__name__ = title
        function.__doc__ = prepare.__doc__
    return blocking, started, initialised


class Comm(Handle, Attributed, Handling, kind=True):
    """Communicator."""

    __slots__ = ()
    null_error = CLASSES["ERR_COMM"]

    # -- members -----------------------------------------------------------------------------

    def Get_rank(self) -> int:
        """Return this process's rank."""
        return int(self._live.rank)

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return int(self._live.size)

    def Get_group(self) -> Group:
        """Return the members."""
        context = self._live
        return Group._of(Members(context.ranks, context.world.rank))  # type: ignore[no-any-return]

    rank = property(Get_rank)
    size = property(Get_size)
    group = property(Get_group)

    def Compare(self, comm: Comm) -> int:
        """Return ``IDENT``, ``CONGRUENT``, ``SIMILAR`` or ``UNEQUAL``."""
        ours, theirs = self._live, comm._live
        if ours is theirs:
            return IDENT
        if ours.ranks == theirs.ranks:
            return CONGRUENT
        return SIMILAR if set(ours.ranks) == set(theirs.ranks) else UNEQUAL

    def Is_inter(self) -> bool:
        """Return False: there are no intercommunicators."""
        self._live  # noqa: B018
        return False

    def Is_intra(self) -> bool:
        """Return True."""
        self._live  # noqa: B018
        return True

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Get_topology(self) -> int:
        """Return ``CART``, ``GRAPH``, ``DIST_GRAPH`` or ``UNDEFINED``."""
        topology = self._live.topology
        return UNDEFINED if topology is None else int(topology.kind)

    topology = property(Get_topology)
    is_topo = property(lambda self: self._inner is not None and self._inner.topology is not None)

    def Get_name(self) -> str:
        """Return the name."""
        return str(self._inner.name) if self else "MPI_COMM_NULL"

    def Set_name(self, name: str) -> None:
        """Set the name."""
        self._live.name = name

    name = property(Get_name, Set_name)

    def Get_info(self) -> Info:
        """Return the hints."""
        return Info.Create(self._live.hints)  # type: ignore[no-any-return]

    def Set_info(self, info: Info) -> None:
        """Set hints."""
        self._live.hints.update(info.items())

    info = property(Get_info, Set_info)

    def _fixed_attributes(self) -> dict[int, Any]:
        from .exceptions import last_used

        return {
            KEYVALS["TAG_UB"]: TAG_UB, KEYVALS["IO"]: ANY_SOURCE, KEYVALS["WTIME_IS_GLOBAL"]: False,
            KEYVALS["UNIVERSE_SIZE"]: world.size, KEYVALS["APPNUM"]: 0,
            KEYVALS["LASTUSEDCODE"]: last_used[0],
        }  # fmt: skip

    # -- making and freeing ------------------------------------------------------------------

    def _child(self, ranks: Sequence[int], number: int, kind: Any = None) -> Any:
        """Return a communicator of some ranks of this one; the null one if this is none of them."""
        context = self._live
        members = [context.ranks[rank] for rank in ranks]
        if context.rank not in ranks:
            return COMM_NULL
        inner = Context(context.mail, members, number, context.world)
        inner.errhandler = context.errhandler
        inner.kind = kind or Intracomm
        return inner.kind._of(inner)

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return a handle for an integer, of the class that fits the communicator."""
        found = Handle.fromhandle.__func__(cls, handle)  # type: ignore[attr-defined]
        return found._inner.kind._of(found._inner) if found else found

    def _agree(self, value: Any = None) -> tuple[list[Any], int]:
        """Return all ranks' values, and a number for a new communicator; collective."""
        parts = self.allgather((value, _Numbers.following))
        number = max(number for _, number in parts)
        _Numbers.following = number + 1
        return [value for value, _ in parts], number

    def Dup(self, info: Info | None = None) -> Any:
        """Return a communicator with the same ranks and attributes, and messages of its own."""
        context = self._live
        _, number = self._agree()
        copy = self._child(range(context.size), number, type(self))
        copy._inner.topology = context.topology
        copy._inner.hints = dict(context.hints if info is None else info.items())
        copy_attributes(self, copy._inner)
        return copy

    Clone = Dup

    def Dup_with_info(self, info: Info) -> Any:
        """Return a duplicate with other hints."""
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Any, Request]:
        """Return a duplicate, and a request that is complete."""
        return self.Dup(info), Request._of(empty())

    Idup_with_info = Idup

    def Create(self, group: Group) -> Any:
        """Return a communicator of a group; all ranks call it."""
        members = group._live.ranks
        _, number = self._agree()
        ranks = self._live.ranks
        return self._child([ranks.index(member) for member in members], number)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of the ranks with this rank's colour, ordered by key."""
        color, key = int(color), int(key)
        if color < 0 and color != UNDEFINED:
            raise MPIError(CLASSES["ERR_ARG"], f"Split: color {color} is negative")
        parts, number = self._agree((color, key))
        if color == UNDEFINED:
            return COMM_NULL
        mine = [(k, rank) for rank, (c, k) in enumerate(parts) if c == color]
        return self._child([rank for _, rank in sorted(mine)], number)

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> Any:
        """Return the communicator of the ranks of this host."""
        kind = split_type
        if kind in (COMM_TYPE_HW_GUIDED, COMM_TYPE_RESOURCE_GUIDED):
            shared = info.get("mpi_hw_resource_type") == "mpi_shared_memory"
            kind = COMM_TYPE_SHARED if shared else UNDEFINED
        hosts = self.allgather(_host())
        mine = hosts.index(hosts[self._live.rank])
        return self.Split(mine if kind == COMM_TYPE_SHARED else UNDEFINED, key)

    def Free(self) -> None:
        """Clear the handle; what this rank has posted still completes in its requests."""
        context = self._live
        if context.constant is not None:
            raise MPIError(CLASSES["ERR_COMM"], "Free: COMM_WORLD and COMM_SELF stay")
        delete_attributes(self)
        if context.plans is not None and context.plans is not context.world:
            context.plans.close()
        self._inner = None

    Disconnect = Free

    @classmethod
    def Get_parent(cls) -> Any:
        """Return a null handle, which equals ``COMM_NULL``: no program has started this one."""
        return Intercomm()

    @classmethod
    def Join(cls, fd: int) -> Any:
        """Refuse."""
        _refuse_processes("Comm.Join")

    def Abort(self, errorcode: int = 0) -> None:
        """End all processes of the world."""
        self._live.world.abort(f"Abort({errorcode})")
        os._exit(errorcode & 0xFF or 1)

    def _refuse_recovery(self, *args: Any) -> Any:
        """Refuse calls after failures."""
        refuse(
            "a call after a failure (ULFM)",
            "a communicator that has lost a rank is broken",
            "Use collective's shrink(), or `collective run --max-restarts`.",
        )

    Revoke = Is_revoked = Get_failed = Ack_failed = Agree = Iagree = _refuse_recovery
    Shrink = Ishrink = _refuse_recovery

    # -- messages of buffers -----------------------------------------------------------------

    def _peer(self, rank: int, wild: bool = False) -> int:
        rank = int(rank)
        if 0 <= rank < self._live.size or (wild and rank == ANY_SOURCE):
            return rank
        raise MPIError(CLASSES["ERR_RANK"], f"rank {rank} of {self._live.size}")

    def _post_send(self, data: Any, dest: int, tag: int, synchronous: bool = False) -> Operation:
        """Begin to send packed bytes; a synchronous send also waits for its receive."""
        if dest == PROC_NULL:
            return empty(PROC_NULL)
        if not 0 <= tag <= TAG_UB:
            raise MPIError(CLASSES["ERR_TAG"], f"tag {tag} (expected 0 to {TAG_UB})")
        context = self._live
        exchange = Exchange(context.points, tag)
        try:
            context.ledger.sends(self._peer(dest), tag, exchange if synchronous else None)
            exchange.send(data, dest)
        except collective.CollectiveError as error:
            raise translated(error) from error
        return exchange

    def _post_receive(self, piece: Piece, source: int, tag: int) -> Operation:
        if source == PROC_NULL:
            return empty(PROC_NULL)
        context = self._live
        exchange = Receive(context.points, _checked_tag(tag), context.ledger)
        try:
            exchange.received = exchange.receive(piece, self._peer(source, True))
        except collective.CollectiveError as error:
            raise translated(error) from error
        return exchange

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send a buffer."""
        return Request._of(self._send(buf, dest, tag))  # type: ignore[no-any-return]

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send a buffer; the request also waits for the receive to begin."""
        return Request._of(self._send(buf, dest, tag, True))  # type: ignore[no-any-return]

    def _send(self, buf: Any, dest: int, tag: int, synchronous: bool = False) -> Operation:
        self._live  # noqa: B018
        piece = NOTHING if dest == PROC_NULL else simple(buf, False)
        return self._post_send(piece.packed(), dest, tag, synchronous)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Begin to receive into a buffer."""
        return Request._of(outstanding(self._recv(buf, source, tag)))  # type: ignore[no-any-return]

    def _recv(self, buf: Any, source: int, tag: int) -> Operation:
        self._live  # noqa: B018
        piece = NOTHING if source == PROC_NULL else simple(buf, True)
        return self._post_receive(piece, source, tag)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer."""
        context = self._plain(buf, dest, tag)
        if context is None:
            _awaited(self._send(buf, dest, tag))
            return
        try:
            context.ledger.sends(dest, tag)
            posted = context.points.send(buf, dest, tag)
            if not posted.done:
                await_posted(context.points, posted)
        except collective.CollectiveError as error:
            raise translated(error) from error

    def _plain(self, buf: Any, peer: int, tag: int) -> Any:
        """Return the context if the engine can take the arguments as they are, or None."""
        context = self._inner
        if (
            type(buf) is np.ndarray
            and context is not None
            and buf.dtype.char in _PLAIN
            and buf.dtype.isnative
            and buf.flags.c_contiguous
            and buf.size
            and type(peer) is type(tag) is int
            and 0 <= peer < context.size
            and 0 <= tag <= TAG_UB
        ):
            return context
        return None

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer, and wait for its receive."""
        _awaited(self._send(buf, dest, tag, True))

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive into a buffer."""
        context = self._plain(buf, source, tag)
        if context is None or not buf.flags.writeable:
            _awaited(self._recv(buf, source, tag), status)
            return
        mail = context.points
        try:
            posted = mail.receive(buf, source, tag)
            await_posted(mail, posted)
        except collective.CollectiveError as error:
            raise translated(error) from error
        context.ledger.has_received(source, tag)
        if status is not None:
            _fill(status, mail.status(posted))

    Rsend, Irsend = Send, Isend

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of a buffer."""
        self._live  # noqa: B018
        piece = NOTHING if dest == PROC_NULL else simple(buf, False)
        keep(self._post_send(piece.packed().copy(), dest, tag))

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a copy of a buffer; the request is complete."""
        self.Bsend(buf, dest, tag)
        return Request._of(empty())  # type: ignore[no-any-return]

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send one buffer and receive into another."""
        context = self._plain(sendbuf, dest, sendtag)
        if (
            context is not None
            and self._plain(recvbuf, source, recvtag) is not None
            and recvbuf.flags.writeable
        ):
            mail = context.points
            try:
                received = mail.receive(recvbuf, source, recvtag)
                context.ledger.sends(dest, sendtag)
                await_posted(mail, received, mail.send(sendbuf, dest, sendtag))
            except collective.CollectiveError as error:
                raise translated(error) from error
            context.ledger.has_received(source, recvtag)
            if status is not None:
                _fill(status, mail.status(received))
            return
        self.Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag).wait(status)

    def Isendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG,
    ) -> Request:  # fmt: skip
        """Begin to send one buffer and to receive into another."""
        outgoing = NOTHING if dest == PROC_NULL else simple(sendbuf, False)
        incoming = NOTHING if source == PROC_NULL else simple(recvbuf, True)
        return self._both(outgoing.packed(), dest, sendtag, incoming, source, recvtag)

    def _both(
        self, data: Any, dest: int, sendtag: int, piece: Piece, source: int, recvtag: int
    ) -> Request:
        receive = self._post_receive(piece, source, recvtag)
        send = self._post_send(data, dest, sendtag)
        if isinstance(receive, Exchange) and isinstance(send, Exchange):
            receive.posted += send.posted
        elif isinstance(send, Exchange):
            send.fields = receive.fields
            receive = send
        return Request._of(receive)  # type: ignore[no-any-return]

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send a buffer and receive into the same."""
        self.Isendrecv_replace(buf, dest, sendtag, source, recvtag).wait(status)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:  # fmt: skip
        """Begin to send a buffer and to receive into the same."""
        piece = NOTHING if dest == source == PROC_NULL else simple(buf, True)
        return self._both(piece.packed().copy(), dest, sendtag, piece, source, recvtag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Return a persistent send."""
        piece = NOTHING if dest == PROC_NULL else simple(buf, False)
        return _persistent(lambda: self._post_send(piece.packed(), dest, tag))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Return a persistent receive."""
        piece = NOTHING if source == PROC_NULL else simple(buf, True)
        return _persistent(lambda: outstanding(self._post_receive(piece, source, tag)))

    Rsend_init = Send_init

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Return a persistent synchronous send."""
        piece = NOTHING if dest == PROC_NULL else simple(buf, False)
        return _persistent(lambda: self._post_send(piece.packed(), dest, tag, True))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Return a persistent send of copies."""
        piece = NOTHING if dest == PROC_NULL else simple(buf, False)

        def begin() -> Operation:
            keep(self._post_send(piece.packed().copy(), dest, tag))
            return empty()

        return _persistent(begin)

    def _refuse_parts(self, *args: Any, **options: Any) -> Any:
        """Refuse partitioned messages."""
        refuse("a partitioned message", "its engine sends whole messages", "Use Send_init.")

    Psend_init = Precv_init = _refuse_parts

    # -- probes ------------------------------------------------------------------------------

    def _probed(self, call: str, source: int, tag: int, **options: Any) -> Any:
        mail = self._live.points
        try:
            return getattr(mail, call)(self._peer(source, True), _checked_tag(tag), **options)
        except collective.CollectiveError as error:
            raise translated(error) from error

    def Probe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> bool:
        """Wait for a message; it stays."""
        if source == PROC_NULL:
            return self.Iprobe(source, tag, status)
        _fill(status, self._probed("probe", source, tag))
        return True

    def Iprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> bool:
        """Return whether there is a message; it stays."""
        if source == PROC_NULL:
            empty(PROC_NULL).settle(status)
            return True
        found = self._probed("iprobe", source, tag)
        if found is None:
            os.sched_yield()  # programs poll, and the sender may need this processor
            return False
        _fill(status, found)
        return True

    def Mprobe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        """Wait for a message, and take it."""
        if source == PROC_NULL:
            empty(PROC_NULL).settle(status)
            return Message._of(MESSAGE_NO_PROC._inner)  # type: ignore[no-any-return]
        return self._matched(self._probed("match", source, tag), status)

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take a message, or return None."""
        if source == PROC_NULL:
            return self.Mprobe(source, tag, status)
        posted = self._probed("imatch", source, tag)
        if posted is None:
            os.sched_yield()
            return None
        return self._matched(posted, status)

    def _matched(self, posted: Any, status: Status | None) -> Message:
        mail = self._live.points
        _fill(status, mail.status(posted))
        return Message._of(Matched(mail, self._inner.ledger, posted, pickling.loads))  # type: ignore[no-any-return]

    probe, iprobe, mprobe, improbe = Probe, Iprobe, Mprobe, Improbe

    # -- messages of objects -----------------------------------------------------------------

    def _send_object(self, obj: Any, dest: int, tag: int, synchronous: bool = False) -> Operation:
        data = b"" if dest == PROC_NULL else pickling.dumps(obj)
        return self._post_send(data, dest, tag, synchronous)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object."""
        return Request._of(self._send_object(obj, dest, tag))  # type: ignore[no-any-return]

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Begin to send an object; the request also waits for the receive to begin."""
        return Request._of(self._send_object(obj, dest, tag, True))  # type: ignore[no-any-return]

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        _awaited(self._send_object(obj, dest, tag))

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and wait for its receive."""
        _awaited(self._send_object(obj, dest, tag, True))

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object without waiting for its receiver."""
        keep(self.isend(obj, dest, tag)._inner)

    def ibsend(self, obj: Any, dest: int, tag: int = 0) -> Request:
        """Send an object without waiting for its receiver; the request is complete."""
        self.bsend(obj, dest, tag)
        return Request._of(empty())  # type: ignore[no-any-return]

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Begin to receive an object. ``buf`` is not used."""
        return Request._of(outstanding(self._recv_object(source, tag)))  # type: ignore[no-any-return]

    def _recv_object(self, source: int, tag: int) -> Operation:
        if source == PROC_NULL:
            return empty(PROC_NULL)
        context = self._live
        exchange = Receive(context.points, _checked_tag(tag), context.ledger)
        try:
            posted = exchange.received = exchange.receive_data(self._peer(source, True))
        except collective.CollectiveError as error:
            raise translated(error) from error
        exchange.then(lambda: None if posted.state == CANCELLED else pickling.loads(posted.data))
        return exchange

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Receive an object. ``buf`` is not used."""
        if buf is not None:
            warnings.warn("recv: the buffer is not used", UserWarning, stacklevel=2)
        return _awaited(self._recv_object(source, tag), status)

    def sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Send one object and receive another."""
        receive = self.irecv(recvbuf, source, recvtag)
        send = self.isend(sendobj, dest, sendtag)
        result = receive.wait(status)
        send.wait()
        return result

    # -- buffered sends ----------------------------------------------------------------------

    def Attach_buffer(self, buf: Any) -> None:
        """Keep a buffer for buffered sends. They need none, and take what memory they need."""
        bytes_of(buf, True)
        self._live.attached = buf

    def Detach_buffer(self) -> Any:
        """Wait for buffered sends, and return the buffer."""
        flush()
        return self._live.__dict__.pop("attached", None)

    def Flush_buffer(self) -> None:
        """Wait for buffered sends."""
        flush()

    def Iflush_buffer(self) -> Request:
        """Wait for buffered sends; the request is complete."""
        flush()
        return Request._of(empty())  # type: ignore[no-any-return]

    # -- collectives: how they run -----------------------------------------------------------

    def _start(self, plan: _Plan, tag: int = 0) -> Exchange:
        context = self._live
        exchange = Exchange(context.calls, tag or context.next_tag())
        try:
            plan(exchange)
        except collective.CollectiveError as error:
            raise translated(error) from error
        return exchange

    def _run(self, plan: _Plan) -> Any:
        exchange = self._start(plan)
        exchange.wait()
        if exchange.error is not None:
            raise exchange.error
        return exchange.result

    def _rooted(self, root: int) -> tuple[int, int]:
        """Return rank and size, once the root is valid."""
        context = self._live
        if not 0 <= root < context.size:
            raise MPIError(CLASSES["ERR_ROOT"], f"root {root} of {context.size}")
        return context.rank, context.size

    # -- collectives of objects --------------------------------------------------------------

    def _swap(self, outgoing: Sequence[Any], sources: Sequence[int], targets: Sequence[int]) -> Any:
        """Send an object to each target, and return one from each source."""

        def plan(exchange: Exchange) -> None:
            posted = [exchange.receive_data(source) for source in sources]
            for data, target in zip(outgoing, targets):
                exchange.send(pickling.dumps(data), target)
            exchange.then(lambda: [pickling.loads(each.data) for each in posted])

        return self._run(plan)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object."""
        rank, size = self._rooted(root)
        if rank != root:
            return self._swap((), [root], ())[0]
        data = pickling.dumps(obj)

        def plan(exchange: Exchange) -> None:
            for target in range(size):
                if target != root:
                    exchange.send(data, target)

        self._run(plan)
        return obj

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' objects at the root."""
        rank, size = self._rooted(root)
        objects = self._swap([sendobj], range(size) if rank == root else (), [root])
        return objects if rank == root else None

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return the root's object for this rank."""
        rank, size = self._rooted(root)
        if rank != root:
            return self._swap((), [root], ())[0]
        return self._swap(_as_many(sendobj, size), [root], range(size))[0]

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return all ranks' objects."""
        ranks = range(self._live.size)
        data = pickling.dumps(sendobj)

        def plan(exchange: Exchange) -> None:
            posted = [exchange.receive_data(source) for source in ranks]
            for target in ranks:
                exchange.send(data, target)
            exchange.then(lambda: [pickling.loads(each.data) for each in posted])

        return self._run(plan)  # type: ignore[no-any-return]

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return each rank's object for this one."""
        ranks = range(self._live.size)
        return self._swap(_as_many(sendobj, len(ranks)), ranks, ranks)  # type: ignore[no-any-return]

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Return all ranks' objects combined, in the order of the ranks, at the root."""
        objects = self.gather(sendobj, root)
        return None if objects is None else _combined(op, objects)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return all ranks' objects combined, in the order of the ranks."""
        return _combined(op, self.allgather(sendobj))

    # -- collectives of buffers --------------------------------------------------------------

    def _Barrier(self) -> _Plan:
        """Wait for all ranks."""
        context = self._live

        def plan(exchange: Exchange) -> None:
            for other in range(context.size):
                if other != context.rank:
                    exchange.receive(NOTHING, other)
                    exchange.send(b"", other)

        return plan

    _, Ibarrier, Barrier_init = _modes(_Barrier)

    def Barrier(self) -> None:
        """Wait for all ranks."""
        core = self._live.core()
        if core is None:
            self._run(self._Barrier())
        else:
            _by_core(core.barrier)

    def _Bcast(self, buf: Any, root: int = 0) -> _Plan:
        """Copy the root's buffer to all ranks."""
        rank, _ = self._rooted(root)
        return self._bcast(simple(buf, rank != root), root)

    def _bcast(self, piece: Piece, root: int) -> _Plan:
        rank, size = self._rooted(root)

        def plan(exchange: Exchange) -> None:
            if rank != root:
                exchange.receive(piece, root)
                return
            data = piece.packed()
            for target in range(size):
                if target != root:
                    exchange.send(data, target)

        return plan

    _, Ibcast, Bcast_init = _modes(_Bcast)

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Copy the root's buffer to all ranks."""
        rank, _ = self._rooted(root)
        piece = simple(buf, rank != root)
        # The ranks may describe the same bytes in different ways, so only the length decides.
        core = self._live.core() if piece.nbytes else None
        if core is None:
            self._run(self._bcast(piece, root))
            return
        direct = piece.direct
        data = piece.packed() if direct is None else direct
        if not data.flags.writeable:  # on the root alone, such as bytes
            _by_core(core.broadcast, data, root=root)
        else:
            _by_core(core.broadcast, data, root=root, out=data)
            if direct is None and rank != root:
                piece.unpack(data)

    def _exchange(self, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> _Plan:
        """Send a piece to each rank, and receive one from each."""
        ranks = range(self._live.size)
        return _between(outgoing, ranks, incoming, ranks)

    def _collect(self, piece: Any, pieces: Callable[[], list[Piece]], root: int) -> _Plan:
        rank, size = self._rooted(root)
        incoming = pieces() if rank == root else []
        in_place = rank == root and _in_place(piece)
        outgoing = [] if in_place else [simple(piece, False)]
        sources = [source for source in range(size) if rank == root and not (
            in_place and source == rank)]  # fmt: skip
        return _between(outgoing, [root], [incoming[source] for source in sources], sources)

    def _Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> _Plan:
        """Put all ranks' buffers together at the root."""
        size = self._live.size
        return self._collect(
            sendbuf, lambda: blocks_of(simple(recvbuf, True, size), size), root
        )  # fmt: skip

    def _Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> _Plan:
        """Put all ranks' buffers of any length together at the root."""
        return self._collect(sendbuf, lambda: vector(recvbuf, True, self._live.size), root)

    def _spread(self, pieces: Callable[[], list[Piece]], piece: Any, root: int) -> _Plan:
        rank, size = self._rooted(root)
        outgoing = pieces() if rank == root else []
        in_place = rank == root and _in_place(piece)
        targets = [target for target in range(size) if rank == root and not (
            in_place and target == rank)]  # fmt: skip
        incoming = [] if in_place else [simple(piece, True)]
        return _between([outgoing[target] for target in targets], targets, incoming, [root])

    def _Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> _Plan:
        """Give each rank its part of the root's buffer."""
        size = self._live.size
        return self._spread(
            lambda: blocks_of(simple(sendbuf, False, size), size), recvbuf, root
        )  # fmt: skip

    def _Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> _Plan:
        """Give each rank its part of any length of the root's buffer."""
        return self._spread(lambda: vector(sendbuf, False, self._live.size), recvbuf, root)

    def _Allgather(self, sendbuf: Any, recvbuf: Any) -> _Plan:
        """Put all ranks' buffers together on all ranks."""
        size = self._live.size
        return self._everywhere(sendbuf, blocks_of(simple(recvbuf, True, size), size))

    def _Allgatherv(self, sendbuf: Any, recvbuf: Any) -> _Plan:
        """Put all ranks' buffers of any length together on all ranks."""
        return self._everywhere(sendbuf, vector(recvbuf, True, self._live.size))

    def _everywhere(self, sendbuf: Any, incoming: list[Piece]) -> _Plan:
        rank, size = self._live.rank, self._live.size
        if not _in_place(sendbuf):
            return self._exchange([simple(sendbuf, False)] * size, incoming)
        others = [other for other in range(size) if other != rank]
        outgoing = [incoming[rank]] * len(others)
        return _between(outgoing, others, [incoming[other] for other in others], others)

    def _Alltoall(self, sendbuf: Any, recvbuf: Any) -> _Plan:
        """Give each rank its part of each rank's buffer."""
        size = self._live.size
        incoming = blocks_of(simple(recvbuf, True, size), size)
        return self._all_to_all(
            sendbuf, incoming, lambda: blocks_of(simple(sendbuf, False, size), size)
        )

    def _Alltoallv(self, sendbuf: Any, recvbuf: Any) -> _Plan:
        """Give each rank its part of any length of each rank's buffer."""
        size = self._live.size
        return self._all_to_all(
            sendbuf, vector(recvbuf, True, size), lambda: vector(sendbuf, False, size)
        )

    def _Alltoallw(self, sendbuf: Any, recvbuf: Any) -> _Plan:
        """Give each rank its part of each rank's buffer, with a datatype for each."""
        size = self._live.size
        incoming = vector_of_types(recvbuf, True, size)
        return self._all_to_all(
            sendbuf, incoming, lambda: vector_of_types(sendbuf, False, size)
        )  # fmt: skip

    def _all_to_all(
        self, sendbuf: Any, incoming: list[Piece], outgoing: Callable[[], list[Piece]]
    ) -> _Plan:
        if not _in_place(sendbuf):
            return self._exchange(outgoing(), incoming)
        ranks = range(self._live.size)

        def plan(exchange: Exchange) -> None:
            copies = [piece.packed().copy() for piece in incoming]
            for source in ranks:
                exchange.receive(incoming[source], source)
            for target in ranks:
                exchange.send(copies[target], target)

        return plan

    Gather, Igather, Gather_init = _modes(_Gather)
    Gatherv, Igatherv, Gatherv_init = _modes(_Gatherv)
    Scatter, Iscatter, Scatter_init = _modes(_Scatter)
    Scatterv, Iscatterv, Scatterv_init = _modes(_Scatterv)
    Allgather, Iallgather, Allgather_init = _modes(_Allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = _modes(_Allgatherv)
    Alltoall, Ialltoall, Alltoall_init = _modes(_Alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = _modes(_Alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = _modes(_Alltoallw)

    # -- reductions --------------------------------------------------------------------------

    def _fold(
        self, exchange: Exchange, op: Any, piece: Piece, parts: Sequence[Any],
        sources: Sequence[int], targets: Sequence[int], into: Piece | None,
    ) -> None:  # fmt: skip
        """Send packed parts to targets, and fold the parts of some ranks into a piece.

        Args:
            exchange, op: the call.
            piece: a piece with the datatype and the number of the elements.
            parts: packed elements for each target.
            sources: ranks whose parts are folded, in their order; may include this rank.
            targets: ranks that fold a part of this one.
            into: piece that receives the result, if any.
        """
        operator = op._live
        rank = self._live.rank
        received = {}
        for source in sources:
            if source != rank:
                received[source] = memory = np.empty(piece.nbytes, np.uint8)
                whole = Piece(memory, 0, piece.nbytes, NOTHING.layout)
                exchange.receive(whole, source)
        for part, target in zip(parts, targets):
            if target == rank:
                received[rank] = part.copy()
            else:
                exchange.send(part, target)

        def finish() -> None:
            assert into is not None
            result: Bytes | None = None
            for source in sources:
                if result is not None:
                    fold(operator, result, received[source], piece)
                result = received[source]
            assert result is not None
            into.unpack(result)

        if into is not None and sources:
            exchange.then(finish)

    def _pair(self, sendbuf: Any, recvbuf: Any) -> tuple[Piece, Piece]:
        """Return input and output of a reduction, which are alike."""
        target = simple(recvbuf, True)
        if _in_place(sendbuf):
            return target, target
        source = simple(sendbuf, False)
        check_alike(source, target)
        return source, target

    def _inputs(self, sendbuf: Any, recvbuf: Any, root: int) -> tuple[Piece, Piece | None]:
        rank, _ = self._rooted(root)
        if rank == root:
            return self._pair(sendbuf, recvbuf)
        return simple(recvbuf if _in_place(sendbuf) else sendbuf, False), None

    def _Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0) -> _Plan:
        """Combine all ranks' buffers at the root, in the order of the ranks."""
        rank, size = self._rooted(root)
        source, target = self._inputs(sendbuf, recvbuf, root)
        sources = range(size) if rank == root else ()
        return lambda exchange: self._fold(
            exchange, op, source, [source.packed()], sources, [root], target
        )

    def _Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> _Plan:
        """Combine all ranks' buffers on all ranks, in the order of the ranks."""
        source, target = self._pair(sendbuf, recvbuf)
        ranks = range(self._live.size)
        return lambda exchange: self._fold(
            exchange, op, source, [source.packed()] * len(ranks), ranks, ranks, target
        )

    _, Ireduce, Reduce_init = _modes(_Reduce)
    _, Iallreduce, Allreduce_init = _modes(_Allreduce)

    def _core_for(self, piece: Piece, op: Any) -> Any:
        """Return the library's communicator if its plans reduce such elements, or None.

        All ranks decide alike: by operator, type of the elements and whether there are any.
        """
        chars = _REDUCED.get(op._live.core, "")
        char = piece.layout.char
        return self._live.core() if char and char in chars and piece.count else None

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """Combine all ranks' buffers on all ranks, in the order of the ranks."""
        context = self._live
        if context.plans is not None and type(recvbuf) is np.ndarray:
            source = recvbuf if _in_place(sendbuf) else sendbuf
            if (
                type(source) is np.ndarray
                and source.dtype == recvbuf.dtype
                and source.dtype.char in _REDUCED.get(op._live.core, "")
                and source.ndim == recvbuf.ndim == 1
                and source.size == recvbuf.size > 0
                and source.flags.c_contiguous
                and recvbuf.flags.carray
            ):
                _by_core(context.plans.all_reduce, source, op=op._inner.core, out=recvbuf)
                return
        piece, target = self._pair(sendbuf, recvbuf)
        core = self._core_for(piece, op)
        if core is None:
            self._run(self._Allreduce(sendbuf, recvbuf, op))
            return
        dtype: Any = piece.layout.dtype
        out = target.packed().view(dtype)
        _by_core(core.all_reduce, piece.packed().view(dtype), op=op._live.core, out=out)
        if target.direct is None:
            target.unpack(out.view(np.uint8))

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0) -> None:
        """Combine all ranks' buffers at the root, in the order of the ranks."""
        piece, target = self._inputs(sendbuf, recvbuf, root)
        core = self._core_for(piece, op)
        if core is None:
            self._run(self._Reduce(sendbuf, recvbuf, op, root))
            return
        dtype: Any = piece.layout.dtype
        data = piece.packed().view(dtype)
        result = _by_core(core.reduce, data, op=op._live.core, root=root)
        if target is not None:
            target.unpack(np.ascontiguousarray(result).view(np.uint8))

    def _Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> _Plan:
        """Combine all ranks' buffers, and give each rank an equal part."""
        size = self._live.size
        if _in_place(sendbuf):
            source = simple(recvbuf, True, size)
            target = source
        else:
            source, target = simple(sendbuf, False, size), simple(recvbuf, True)
            check_alike(source, target)
        return self._reduce_parts(blocks_of(source, size), target, op)

    def _Reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None = None, op: Any = SUM
    ) -> _Plan:
        """Combine all ranks' buffers, and give each rank a part of its length."""
        rank, size = self._live.rank, self._live.size
        target = simple(recvbuf, True)
        source = target if _in_place(sendbuf) else simple(sendbuf, False)
        if recvcounts is None and not _in_place(sendbuf):
            counts = self.allgather(target.count)
        else:
            counts = [int(count) for count in recvcounts]  # type: ignore[union-attr]
            if len(counts) != size:
                raise ValueError(f"message: expecting {size} items, got {len(counts)}")
        if source.layout is not target.layout:
            raise ValueError("mismatch in send and receive MPI datatypes")
        if source.count != sum(counts):
            raise ValueError(f"mismatch in count {source.count} and sum(counts) {sum(counts)}")
        if not _in_place(sendbuf) and target.count != counts[rank]:
            raise ValueError(
                f"mismatch in receive count {target.count} and counts[{rank}] {counts[rank]}"
            )
        layout = source.layout
        parts = [
            Piece(source.memory, source.offset + start * layout.extent, count, layout)
            for start, count in zip(accumulate(counts, initial=0), counts)
        ]
        target = Piece(target.memory, target.offset, counts[rank], layout)
        return self._reduce_parts(parts, target, op)

    def _reduce_parts(self, parts: Sequence[Piece], target: Piece, op: Any) -> _Plan:
        ranks = range(self._live.size)
        return lambda exchange: self._fold(
            exchange, op, target, [part.packed().copy() for part in parts], ranks, ranks, target
        )

    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = _modes(
        _Reduce_scatter_block
    )
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = _modes(_Reduce_scatter)


def _between(
    outgoing: Sequence[Piece], targets: Sequence[int], incoming: Sequence[Piece],
    sources: Sequence[int],
) -> _Plan:  # fmt: skip
    """Return a plan that sends pieces to targets, and receives others from sources."""

    def plan(exchange: Exchange) -> None:
        for piece, source in zip(incoming, sources):
            exchange.receive(piece, source)
        for piece, target in zip(outgoing, targets):
            exchange.send(piece.packed(), target)

    return plan


def _persistent(make: Callable[[], Operation]) -> Prequest:
    return Prequest._of(Persistent(make))  # type: ignore[no-any-return]


def _by_core(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make a call of the library; its errors become ``MPI.Exception``."""
    try:
        return call(*args, **options)
    except collective.CollectiveError as error:
        raise translated(error) from error


def _in_place(buf: Any) -> bool:
    """Return whether an argument says that the other one has this rank's input."""
    return buf is None or buf is IN_PLACE


def _awaited(operation: Operation, status: Status | None = None) -> Any:
    """Wait for an operation, and return its object."""
    operation.wait()
    operation.settle(status)
    if operation.error is not None:
        raise operation.error
    return operation.result


def _checked_tag(tag: int) -> int:
    if tag != ANY_TAG and not 0 <= tag <= TAG_UB:
        raise MPIError(CLASSES["ERR_TAG"], f"tag {tag} (expected 0 to {TAG_UB})")
    return tag


def _fill(status: Status | None, found: Any) -> None:
    if status is not None:
        status.put((found.source, found.tag, 0, found.nbytes, False))


def _as_many(objects: Sequence[Any] | None, size: int) -> list[Any]:
    items = list(objects) if objects is not None else [None] * size
    if len(items) != size:
        raise ValueError(f"expecting {size} items, got {len(items)}")
    return items


def _combined(op: Any, objects: Sequence[Any]) -> Any:
    result = objects[0]
    for value in objects[1:]:
        result = op(result, value)
    return result


def _host() -> str:
    """Return a name of this host that no other host has."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _refuse_processes(what: str) -> Any:
    refuse(
        what,
        "it starts no processes in a running program, and has no intercommunicators",
        "Start all ranks with `collective run`; mpi4py.futures works on these.",
    )


class Intracomm(Comm):
    """Communicator of one group, as all are."""

    __slots__ = ()

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Return a communicator of a group; only its members call it."""
        context = self._live
        members = [context.ranks.index(member) for member in group._live.ranks]
        if context.rank not in members:
            return COMM_NULL
        # Numbers go through the first member, under tags that collective calls do not have.
        number = self._group_number(members, members[0], _CALL_TAGS + int(tag) % _CALL_TAGS)
        return self._child(members, number)

    def _group_number(self, members: Sequence[int], first: int, tag: int) -> int:
        """Agree with other members of a group on the number of a communicator."""
        context = self._live

        def swap(sources: Sequence[int], targets: Sequence[int], value: int) -> list[int]:
            exchange = Exchange(context.calls, tag)
            posted = [exchange.receive_data(source) for source in sources]
            for target in targets:
                exchange.send(value.to_bytes(8, "little"), target)
            exchange.then(lambda: [int.from_bytes(each.data, "little") for each in posted])
            exchange.wait()
            if exchange.error is not None:
                raise exchange.error
            return exchange.result  # type: ignore[no-any-return]

        others = [member for member in members if member != first]
        if context.rank == first:
            number = max([_Numbers.following, *swap(others, (), 0)])
            swap((), others, number)
        else:
            swap((), [first], _Numbers.following)
            (number,) = swap([first], (), 0)
        _Numbers.following = number + 1
        return number

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "org.mpi4py", info: Info = INFO_NULL,
        errhandler: Any = None,
    ) -> Any:  # fmt: skip
        """Return a communicator of a group of the world; only its members call it."""
        tag = sum(stringtag.encode()) % _CALL_TAGS
        return world.handle.Create_group(group, tag)

    def Create_intercomm(self, *args: Any, **options: Any) -> Any:
        """Refuse."""
        _refuse_intercommunicators("Intracomm.Create_intercomm")

    def Spawn(self, *args: Any, **options: Any) -> Any:
        """Refuse."""
        _refuse_processes("Intracomm.Spawn")

    Spawn_multiple = Accept = Connect = Spawn

    def _Scan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> _Plan:
        """Combine the buffers of this rank and the lower ones."""
        return self._prefix(sendbuf, recvbuf, op, 1)

    def _Exscan(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> _Plan:
        """Combine the buffers of the lower ranks."""
        return self._prefix(sendbuf, recvbuf, op, 0)

    def _prefix(self, sendbuf: Any, recvbuf: Any, op: Any, own: int) -> _Plan:
        source, target = self._pair(sendbuf, recvbuf)
        rank, size = self._live.rank, self._live.size
        sources, targets = range(rank + own), range(rank + 1 - own, size)
        return lambda exchange: self._fold(
            exchange, op, source, [source.packed()] * len(targets), sources, targets, target
        )

    Scan, Iscan, Scan_init = _modes(_Scan)
    Exscan, Iexscan, Exscan_init = _modes(_Exscan)

    def scan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the objects of this rank and the lower ones combined."""
        return _combined(op, self._lower(sendobj, 1))

    def exscan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the objects of the lower ranks combined; None on rank 0."""
        objects = self._lower(sendobj, 0)
        return _combined(op, objects) if objects else None

    def _lower(self, sendobj: Any, own: int) -> list[Any]:
        rank, size = self._live.rank, self._live.size
        targets = range(rank + 1 - own, size)
        return self._swap([sendobj] * len(targets), range(rank + own), targets)  # type: ignore[no-any-return]


class Intercomm(Comm):
    """Communicator between two groups, refused: every handle is null."""

    __slots__ = ()

    def Get_remote_group(self, high: bool = False) -> Any:
        """Raise, as the handle is null."""
        return self._live

    Get_remote_size = Merge = Get_remote_group
    remote_group = remote_size = property(Get_remote_group)

    @classmethod
    def Create_from_groups(cls, *args: Any, **options: Any) -> Any:
        """Refuse."""
        _refuse_intercommunicators("Intercomm.Create_from_groups")


def _refuse_intercommunicators(what: str) -> Any:
    refuse(
        what,
        "it has no intercommunicators",
        "Use one communicator of both groups, such as COMM_WORLD, and ranks in it.",
    )


COMM_NULL = Comm._constant("COMM_NULL")


def mail_of(comm: Comm) -> Any:
    """Return the messages of a communicator, for code that has requests of its own."""
    return comm._live.points


class _World:
    """The world of this process, once it is connected."""

    size = 1
    core: Any = None
    handle: Any = None
    alone: Any = None


world = _World()


def begin() -> tuple[Any, Any]:
    """Connect the ranks if they are not yet; return ``COMM_WORLD`` and ``COMM_SELF``."""
    if world.handle is None:
        core = collective.init()
        if session.settings().origins["timeout"] == "default":
            core.timeout = _FOREVER
        adopt(core)
    return world.handle, world.alone


def adopt(core: collective.Communicator) -> None:
    """Let ``COMM_WORLD`` have the ranks of ``core`` from now on."""
    mail = core.inner.mail
    everyone = Context(mail, range(core.size), 1, core)
    everyone.plans = core if core.size > 1 else None
    alone = Context(mail, [core.rank], 2, core)
    everyone.name, alone.name = "MPI_COMM_WORLD", "MPI_COMM_SELF"
    _Numbers.following = 3
    world.size, world.core = core.size, core
    if world.handle is None:
        world.handle = Intracomm._constant("COMM_WORLD", everyone)
        world.alone = Intracomm._constant("COMM_SELF", alone)
    for handle, context in ((world.handle, everyone), (world.alone, alone)):
        handle._inner, context.constant = context, handle
