"""``MPI.Comm`` and ``MPI.Intracomm``: their members, and how they are made and freed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import collective
from collective.inner import platform, session

from .attributes import ERRORS_RETURN, Attributed, Errhandler, copy_attributes, delete_attributes
from .collectives import CALL_TAGS, CollectiveMethods, Prefixes
from .exceptions import CLASSES, TRANSLATED, MPIError, last_used, refusing
from .groups import CONGRUENT, IDENT, UNDEFINED, Group, members
from .handles import Named, OpaqueObject, reader
from .info import INFO_NULL, Info
from .operations import ANY_SOURCE, idle
from .point_to_point import TAG_UB, MessageMethods
from .requests import Request

COMM_TYPE_SHARED, COMM_TYPE_HW_GUIDED, COMM_TYPE_HW_UNGUIDED, COMM_TYPE_RESOURCE_GUIDED = range(4)
ROOT = -3
# Keyvals of MPI itself.
KEYVALS = {"TAG_UB": 1, "IO": 2, "WTIME_IS_GLOBAL": 3, "UNIVERSE_SIZE": 4, "APPNUM": 5,
           "LASTUSEDCODE": 6}  # fmt: skip
#: Name of the processes of an executor. They import the rank's program, and are no ranks.
WORKER = "worker of mpi4py.futures"
# A communicator of few ranks gets one of the library's own, with plans, after so many such calls.
_CALLS_WITHOUT_PLANS = 8
# Seconds of a call without a deadline: a rank may work alone for as long as it needs.
_FOREVER = 1e9


class Context(OpaqueObject):
    """What a handle of a communicator names.

    Args:
        mail: messages of the world, from which those of the communicator are made.
        ranks: ranks of the members in the world.
        number: number that no other communicator of a member has.
        core: the library's communicator of the world.

    Attributes:
        rank, size: of this process in the communicator, and number of members.
        points, calls, answers: messages of the program, those of collective calls, and answers to
            synchronous sends.
        post_send, post_receive: the engine's functions, see :attr:`Mail.engine`.
        topology: dimensions or neighbours, or None.
    """

    def __init__(self, mail: Any, ranks: Sequence[int], number: int, core: Any) -> None:
        self.mail = mail
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(core.rank)
        self.size = len(self.ranks)
        self.points = mail.context(3 * number, self.ranks)
        self.post_send, self.post_receive = mail.engine.send, mail.engine.receive
        self.calls = mail.context(3 * number + 1, self.ranks)
        self.answers = mail.context(3 * number + 2, self.ranks)
        self.world = core
        self.plans: Any = None
        self.errhandler = ERRORS_RETURN._inner
        self.kind: Any = Intracomm
        self.topology: Any = None
        self.hints: dict[str, str] = {}
        self._tags = 0
        self._eligible = 0

    def next_tag(self) -> int:
        """Return the tag of the next collective call, the same on all members."""
        self._tags = (self._tags + 1) % CALL_TAGS
        return self._tags

    def core(self) -> Any:
        """Return the library's communicator for this call of all members, or None."""
        if self.plans is None:
            self._eligible += 1
            if self.size > 1 and self._eligible > _CALLS_WITHOUT_PLANS:
                with TRANSLATED:
                    self.plans = self.world.group(self.ranks)
        return self.plans


_NO_PROCESSES = (
    "it starts no processes in a running program, and has no intercommunicators",
    "Start all ranks with `collective run`; mpi4py.futures works on these.",
)
_NO_INTERCOMMUNICATORS = (
    "it has no intercommunicators",
    "Use one communicator of both groups, such as COMM_WORLD, and ranks in it.",
)


class Comm(Named, MessageMethods, CollectiveMethods, Attributed, kind=True):
    """Communicator."""

    __slots__ = ()
    null_error = CLASSES["ERR_COMM"]

    # -- members -----------------------------------------------------------------------------

    Get_rank, rank = reader(lambda context: context.rank, "this process's rank")
    Get_size, size = reader(lambda context: context.size, "the number of ranks")
    Get_group, group = reader(
        lambda context: Group._of(members(context.ranks, context.world.rank)), "the members"
    )
    Is_inter, is_inter = reader(lambda _: False, "False: there are no intercommunicators")
    Is_intra, is_intra = reader(lambda _: True, "True: there are no intercommunicators")
    Get_topology, topology = reader(
        lambda context: getattr(context.topology, "kind", UNDEFINED),
        "``CART``, ``GRAPH``, ``DIST_GRAPH`` or ``UNDEFINED``",
    )
    is_topo = property(lambda self: self._inner is not None and self._inner.topology is not None)

    def Compare(self, comm: Comm) -> int:
        """Return ``IDENT``, ``CONGRUENT``, ``SIMILAR`` or ``UNEQUAL``."""
        if self._live is comm._live:
            return IDENT
        result: int = self.group.Compare(comm.group)
        return CONGRUENT if result == IDENT else result

    def Get_info(self) -> Info:
        """Return the hints."""
        return Info.Create(self._live.hints)  # type: ignore[no-any-return]

    def Set_info(self, info: Info) -> None:
        """Set hints."""
        self._live.hints.update(info.items())

    info = property(Get_info, Set_info)

    def _fixed_attributes(self) -> dict[int, Any]:
        return {
            KEYVALS["TAG_UB"]: TAG_UB, KEYVALS["IO"]: ANY_SOURCE, KEYVALS["WTIME_IS_GLOBAL"]: False,
            KEYVALS["UNIVERSE_SIZE"]: self._live.world.size, KEYVALS["APPNUM"]: 0,
            KEYVALS["LASTUSEDCODE"]: last_used[0],
        }  # fmt: skip

    # -- error handlers ----------------------------------------------------------------------

    @classmethod
    def Create_errhandler(cls, errhandler_fn: Callable[..., None]) -> Errhandler:
        """Return a handler that calls ``errhandler_fn(handle, code)``."""
        return Errhandler._of(OpaqueObject(function=errhandler_fn))  # type: ignore[no-any-return]

    def Get_errhandler(self) -> Errhandler:
        """Return the handler."""
        return Errhandler._of(self._live.errhandler)  # type: ignore[no-any-return]

    def Set_errhandler(self, errhandler: Errhandler) -> None:
        """Set the handler."""
        self._live.errhandler = errhandler._live

    def Call_errhandler(self, errorcode: int) -> None:
        """Call the handler for an error code."""
        function = self._live.errhandler.function
        if function is not None:
            function(self, errorcode)

    # -- making and freeing ------------------------------------------------------------------

    def _child(self, ranks: Sequence[int], number: int, kind: Any = None) -> Any:
        """Return a communicator of some ranks of this one; a null one if this is none of them."""
        context, kind = self._live, kind or Intracomm
        members = [context.ranks[rank] for rank in ranks]
        if context.rank not in ranks:
            return kind()
        inner = Context(context.mail, members, number, context.world)
        inner.errhandler = context.errhandler
        inner.kind = kind
        return kind._of(inner)

    def _agree(self, value: Any = None) -> tuple[list[Any], int]:
        """Return all ranks' values, and a number for a new communicator; collective."""
        parts = self.allgather((value, world.following))
        number = max(number for _, number in parts)
        world.following = number + 1
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

    Clone = Dup_with_info = Dup

    def Idup(self, info: Info | None = None) -> tuple[Any, Request]:
        """Return a duplicate, and a request that is complete."""
        return self.Dup(info), Request._of(idle().start())

    Idup_with_info = Idup

    def Create(self, group: Group) -> Any:
        """Return a communicator of a group; all ranks call it."""
        chosen = group._live.ranks
        _, number = self._agree()
        ranks = self._live.ranks
        return self._child([ranks.index(member) for member in chosen], number)

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of the ranks with this rank's colour, ordered by key."""
        color, key = int(color), int(key)
        if color < 0 and color != UNDEFINED:
            raise MPIError(CLASSES["ERR_ARG"], f"Split: color {color} is negative")
        parts, number = self._agree((color, key))
        if color == UNDEFINED:
            return Intracomm()
        mine = [(k, rank) for rank, (c, k) in enumerate(parts) if c == color]
        return self._child([rank for _, rank in sorted(mine)], number)

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> Any:
        """Return the communicator of the ranks of this host."""
        kind = split_type
        if kind in (COMM_TYPE_HW_GUIDED, COMM_TYPE_RESOURCE_GUIDED):
            shared = info.get("mpi_hw_resource_type") == "mpi_shared_memory"
            kind = COMM_TYPE_SHARED if shared else UNDEFINED
        hosts = self.allgather(_host(self._live.world))
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

    Join = refusing("Comm.Join", *_NO_PROCESSES)

    def Abort(self, errorcode: int = 0) -> None:
        """End all processes of the world."""
        self._live.world.abort(f"Abort({errorcode})")
        os._exit(errorcode & 0xFF or 1)

    Revoke = Is_revoked = Get_failed = Ack_failed = Agree = Iagree = Shrink = Ishrink = refusing(
        "a call after a failure (ULFM)",
        "a communicator that has lost a rank is broken",
        "Use collective's shrink(), or `collective run --max-restarts`.",
    )


def _host(core: Any) -> str:
    """Return a text that is the same on ranks that can share memory, as for ``hierarchical``."""
    return f"{core.host} {platform.boot_id()} {platform.process_namespace()}"


class Intracomm(Prefixes, Comm):
    """Communicator of one group, as all are."""

    __slots__ = ()

    def Create_group(self, group: Group, tag: int = 0) -> Any:
        """Return a communicator of a group; only its members call it."""
        context = self._live
        members = [context.ranks.index(member) for member in group._live.ranks]
        if context.rank not in members:
            return Intracomm()
        # Numbers go through the first member, under tags that collective calls do not have.
        tag = CALL_TAGS + int(tag) % CALL_TAGS
        first, others = [members[0]], members[1:]
        targets, sources = ((), others) if context.rank == first[0] else (first, ())
        numbers = self._swap_one(world.following, targets, sources, tag)
        # The first member knows all numbers, and the others get the new one.
        number = max([world.following, *numbers])
        (number,) = self._swap_one(number, sources, targets, tag) or [number]
        world.following = number + 1
        return self._child(members, number)

    @classmethod
    def Create_from_group(
        cls, group: Group, stringtag: str = "org.mpi4py", info: Info = INFO_NULL,
        errhandler: Any = None,
    ) -> Any:  # fmt: skip
        """Return a communicator of a group of the world; only its members call it."""
        tag = sum(stringtag.encode())
        return world.handle.Create_group(group, tag)

    Create_intercomm = refusing("Intracomm.Create_intercomm", *_NO_INTERCOMMUNICATORS)
    Spawn = refusing("Intracomm.Spawn", *_NO_PROCESSES)
    Spawn_multiple = Accept = Connect = Spawn


class Intercomm(Comm):
    """Communicator between two groups, refused: every handle is null."""

    __slots__ = ()

    def Get_remote_group(self, high: bool = False) -> Any:
        """Raise, as the handle is null."""
        return self._live

    Get_remote_size = Merge = Get_remote_group
    remote_group = remote_size = property(Get_remote_group)

    Create_from_groups = refusing("Intercomm.Create_from_groups", *_NO_INTERCOMMUNICATORS)


COMM_NULL = Comm._constant("COMM_NULL")


def mail_of(comm: Comm) -> Any:
    """Return the messages of a communicator, for code that has requests of its own."""
    return comm._live.points


class _WorldState:
    """The world of this process, once it is connected.

    Attributes:
        following: number of the next communicator; none of this process's has it.
    """

    following = 2
    handle: Any = None
    alone: Any = None


world = _WorldState()


def begin() -> tuple[Any, Any]:
    """Connect the ranks if they are not yet; return ``COMM_WORLD`` and ``COMM_SELF``."""
    if world.handle is None:
        is_worker = multiprocessing.current_process().name == WORKER
        core = collective.init(rank=0, size=1) if is_worker else collective.init()
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
    world.following = 3
    if world.handle is None:
        world.handle = Intracomm._constant("COMM_WORLD", everyone)
        world.alone = Intracomm._constant("COMM_SELF", alone)
    for handle, context in ((world.handle, everyone), (world.alone, alone)):
        handle._inner, context.constant = context, handle
