"""The object a user holds: ranks that can call each other.

What it can do is a class a topic, each in a file of its own, on the path that all calls go
(:mod:`.calls`). In front of the methods that make calls are those in C, for what is plain.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from collective import native
from collective.contract.backend import Backend
from collective.contract.copying import NotCopied
from collective.contract.failure import Failure
from collective.contract.stalls import Membership
from collective.elastic import changes
from collective.elastic.lineage import Lineage
from collective.elastic.succession import Succession
from collective.errors import CommunicatorClosedError, InvalidArgumentError
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NUMPY
from collective.request import Disagreement

from . import groups, lifecycle
from .allocating import Allocating
from .foreign_names import ForeignNames, explain_keyword, explained
from .grid import Grid
from .listener import CallEvent, Hook
from .object_calls import ObjectCalls
from .pieces import Leaf
from .plan import PREPARE, CallForms, Planned, PreparedCall, refuse_unfit
from .reductions import Reductions
from .rows import Rows, split_sizes

__all__ = ["Communicator"]

_PLANNED = (
    "all_reduce", "reduce", "reduce_scatter", "scan", "broadcast", "gather", "all_gather",
    "scatter", "all_to_all", "barrier",
)  # fmt: skip

#: Of those the calls whose result has a shape of its own from the beginning.
_KEEPING = {"all_reduce", "reduce", "reduce_scatter", "scan", "broadcast"}

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.contract.backend import Plan

    # What is in front of the methods is called as they are.
    from .signatures import Signatures as _Methods
else:
    _FUNCTIONS = (
        Reductions.all_reduce, Reductions.reduce, Reductions.scan, Reductions.reduce_scatter,
        ObjectCalls.broadcast, ObjectCalls.scatter, ObjectCalls.all_gather, ObjectCalls.gather,
        ObjectCalls.all_to_all, ObjectCalls.barrier, ObjectCalls.send, ObjectCalls.recv,
        ObjectCalls.sendrecv,
    )  # fmt: skip
    _Methods = native.methods(*_FUNCTIONS) or type(
        "Methods", (), {each.__name__: explained(each) for each in _FUNCTIONS}
    )


class Communicator(_Methods, NotCopied, Reductions, ObjectCalls, Allocating, ForeignNames):
    """Ranks 0 to ``size - 1``, connected by one transport.

    Collective calls are made by all ranks in one order. One thread uses a communicator at
    a time; calls with ``async_op=True`` go on in the background, in the order in which they
    were made. An array passed in is never changed unless it is ``out``.

    As a context manager it is closed at the end of the body. An exception in the body
    aborts the peers: their calls raise ``PeerFailedError`` with its traceback.

    A deep copy of an object that has a communicator has the same one. A communicator cannot be
    pickled.

    Attributes:
        rank, size: which of how many this is.
        local_rank, local_size: the same among the ranks of this host.
        host: the name of this host.
        timeout: seconds that a call may take, unless it says otherwise.
        capabilities: what the transport can do.
    """

    instead = (
        "Leave it out of what is pickled (of a model, save the state_dict()), and give what is "
        "loaded a communicator of the process that loads it."
    )

    def __init__(
        self,
        backend: Backend,
        *,
        local_rank: int,
        local_size: int,
        host: str,
        timeout: float,
        check: str = "auto",
        lineage: Lineage | None = None,
        open_to_others: bool = False,
    ) -> None:
        super().__init__(backend, timeout, check)
        self.local_rank = local_rank
        self.local_size = local_size
        self.host = host
        self.backend = backend.name
        # The groups made of this communicator.
        self._children: weakref.WeakSet[Self] = weakref.WeakSet()
        self._membership = Membership(self)
        self._succession = Succession(lineage)
        self._open = open_to_others
        # In a forked child, why the communicator is not that process's.
        self._foreign = ""
        lifecycle.register(self)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"<Communicator rank {self.rank} of {self.size} over {self.backend} on {self.host} "
            f"(local rank {self.local_rank} of {self.local_size}){state}>"
        )

    # -- properties -----------------------------------------------------------------------

    @property
    def check(self) -> str:
        """Whether calls are compared before they are sent: "auto", "always" or "never"."""
        return self._check

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    @property
    def enqueues(self) -> bool:
        """Whether calls on arrays of GPUs are only enqueued, on their streams."""
        return self._enqueues

    @property
    def foreign(self) -> str:
        """In a forked child, why the communicator is not that process's; else empty."""
        return self._foreign

    @property
    def on_host(self) -> Self:
        """This communicator, for arrays on the CPU, whichever its transport takes.

        The calls of both are in one order.
        """
        return self._hosted()

    @property
    def succession(self) -> Succession:
        """What this communicator knows of its generations, for whoever starts or joins ranks."""
        return self._succession

    @property
    def transport(self) -> Backend:
        """Transport under this communicator, for tools and tests.

        A call of the transport's is neither recorded nor in turn with the communicator's own. Once
        the communicator is closed, every use raises ``CommunicatorClosedError``.
        """
        return self._backend

    # -- the end --------------------------------------------------------------------------

    def abort(self, reason: str = "aborted") -> None:
        """Break this communicator and the groups made of it, for every rank, at once.

        Calls that wait, and all later ones, raise ``CommunicatorAbortedError`` with the
        reason. May be called from any thread.
        """
        if self._foreign:
            raise CommunicatorClosedError(f"abort: {self._foreign}")
        self.fail(Failure("aborted", self.rank, f"rank {self.rank} aborted: {reason}"))

    def fail(self, cause: BaseException | Failure) -> None:
        """Break this communicator and the groups made of it, and tell the peers the cause.

        Their calls raise ``PeerFailedError`` with the traceback of an exception. Leaving a ``with``
        block by an exception calls it. May be called from any thread.

        Args:
            cause: what ended this rank's part. A ``PeerFailedError`` is a peer's failure, and is
                not passed on.
        """
        lifecycle.fail(self, cause)

    def close(self) -> None:
        """Leave the communicator and the groups made of it.

        Waits for this rank's own calls in the background, and for nobody else. A second
        close does nothing; any other use afterwards raises ``CommunicatorClosedError``.
        """
        lifecycle.close(self, self.timeout)

    def leave(self) -> None:
        """Close the transports of this communicator and its groups, waiting for nothing.

        For the end of a process or of a thread that is a rank; :meth:`close` is for programs.
        """
        lifecycle.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.fail(error)
        self.close()

    def hook(
        self,
        before: Callable[[CallEvent], object] | None = None,
        after: Callable[[CallEvent, BaseException | None], object] | None = None,
    ) -> Callable[[], None]:
        """Have functions called around every call that reaches the transport.

        For a program's own accounting: how many bytes, how long, how often. They run in the thread
        that makes the call, which is a lane's for what was started with ``async_op=True``, and
        must not make calls themselves. Groups that are made of this communicator have hooks of
        their own.

        An exception of theirs, of whatever class, is the call's on this rank, and breaks the
        communicator: the other ranks get ``PeerFailedError`` with its traceback, in the same call
        if ``before`` has raised it, else in that one or the next. If the call has failed, too, its
        error is the ``__context__`` of that of ``after``.

        Args:
            before: is given the call as it begins.
            after: is given the call and what it raised, or None; not called if ``before`` raised.

        Returns:
            A function that ends it.
        """
        hook = Hook(before, after)
        self.listen(hook)
        return lambda: self._forget(hook)

    def __copy__(self) -> Self:
        """Return another object of the same connections: the instance dict and the C members."""
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        for name, each in vars(_Methods).items():
            if inspect.ismemberdescriptor(each):
                setattr(twin, name, getattr(self, name))
        return twin

    def __deepcopy__(self, memo: object) -> Self:
        """Return the communicator itself: a copy of what has one talks to the same ranks."""
        return self

    # -- groups ---------------------------------------------------------------------------

    @explained
    def group(self, ranks: Sequence[int]) -> Self:
        """Return a communicator among ``ranks``, which become 0, 1, … in that order.

        Collective among ``ranks`` only: the others neither call it nor notice.

        Args:
            ranks: distinct ranks, this one among them, in the same order everywhere.

        Raises:
            RankError: a rank is outside, or twice there, or this one is missing.
            MismatchError: a member names other ranks, or in another order.
            AllocationError: a member has not enough file descriptors left; on every member.
            CollectiveTimeoutError: a member did not call it.

        See Also:
            MPI_Comm_create_group.
        """
        return groups.group(self, ranks)

    @overload
    def split(self, color: int, key: int = 0) -> Self: ...

    @overload
    def split(self, color: None, key: int = 0) -> None: ...

    @overload
    def split(self, color: int | None, key: int = 0) -> Self | None: ...

    @explained
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Part the ranks by colour: return the communicator of those with this one's.

        Collective: every rank calls it.

        Args:
            color: an integer; ranks with the same come together. None takes no part.
            key: orders the ranks of a colour; ties by rank here.

        Returns:
            The new communicator, or None if ``color`` is None.

        See Also:
            MPI_Comm_split.
        """
        return groups.split(self, color, key)

    @explained
    def split_by_host(self) -> Self:
        """Return the communicator of this host's ranks.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_split_type with MPI_COMM_TYPE_SHARED.
        """
        return groups.split_by_host(self)

    @explained
    def dup(self) -> Self:
        """Return a communicator of the same ranks whose calls don't mix with these.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_dup.
        """
        return groups.group(self, range(self.size))

    @explained
    def grid(
        self,
        shape: int | Sequence[int | None] | None,
        periodic: bool | Sequence[bool] = False,
    ) -> Grid[Self]:
        """Return the ranks as the points of a grid: this one's coordinates and neighbours.

        It sends nothing. Ranks that give different shapes see different grids.

        Args:
            shape: how many ranks there are along each axis. What is None or -1 is computed, and
                several of these as near to each other as may be, the larger first: ``(None,
                None)`` is 3 by 2 of six ranks.
            periodic: whether the last rank of an axis is next to the first, for all axes or each.

        Raises:
            InvalidArgumentError: the grid has not as many points as there are ranks.

        See Also:
            MPI_Cart_create, MPI_Dims_create.
        """
        return Grid(self, shape, periodic)

    # -- generations ----------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """How often :meth:`shrink` and :meth:`grow` were called on the way here, from 0."""
        return self._succession.generation

    @property
    def origin(self) -> tuple[int, ...]:
        """The ranks that were once these, in the order of those of now.

        They are numbered as in the communicator of generation 0; a group's as it was made. Who has
        joined since has a number of its own, greater than all that were before.
        """
        return self._succession.origin(self.size)

    @property
    def lost(self) -> frozenset[int]:
        """Of the ranks of the last generation, those that are not in this one."""
        return self._succession.lost

    @property
    def shrink_timeout(self) -> float:
        """Seconds that :meth:`shrink` may take where the call names no other deadline.

        The communicator's timeout, or as long as it takes to go on without silent ranks if that is
        longer: four times ``COLLECTIVE_SHRINK_GRACE``, and what connecting may take.
        """
        return self._succession.shrink_timeout(self.timeout)

    @property
    def joins(self) -> bool:
        """Whether this process is alone and waits to join other ranks, which :meth:`grow` does.

        So it is with ``init(join="late")``, as ``collective run --replace`` starts a process in
        place of a lost one.
        """
        return self._succession.joiner is not None

    @property
    def grows(self) -> bool:
        """Whether processes can join: not over every transport, and no group."""
        return self.capabilities.grows and self._succession.founders > 0

    @explained
    def shrink(
        self,
        *,
        exclude: Sequence[int] = (),
        min_ranks: int | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Return a communicator of the ranks that are left, after a loss or at any time.

        Collective among those: every rank that lives calls it, when a call of this communicator
        has raised ``PeerLostError``, or any error after which it is broken. One that is sound is
        broken by it first: calls of ranks that have not called it raise
        ``CommunicatorAbortedError``, which asks them to. Ranks keep their order. The ranks go on
        without those that have died or left, and without those that are silent for
        ``COLLECTIVE_SHRINK_GRACE`` seconds (5), or for a quarter of ``timeout`` if that is less.
        If a rank dies meanwhile the others decide again.

        This communicator is closed then, with the groups made of it. Its symmetric memory stays as
        it is, each rank's own.

        Args:
            exclude: ranks that are out, alive or not; they get ``ExcludedError``.
            min_ranks: go on only with so many, by default ``COLLECTIVE_MIN_RANKS`` (1).
            timeout: seconds for all of it, by default :attr:`shrink_timeout`.

        Returns:
            The next generation. All are in it, or nobody is left out who was not lost or silent.

        Raises:
            ExcludedError: the others went on without this rank.
            PeerLostError: fewer than ``min_ranks`` are left; on all of them.
            CollectiveTimeoutError: they did not agree in time; names who did not come.
            RendezvousError: the store in which the ranks met is gone.
            UnsupportedError: this transport, or that store, cannot.
            RankError: ``exclude`` names this rank, or one that there is not.

        See Also:
            MPIX_Comm_shrink, ncclCommShrink.
        """
        absent = [self._rank("shrink", "exclude", rank) for rank in exclude]
        seconds = self.shrink_timeout if timeout is None else self._seconds(timeout)
        backend, lineage = changes.shrink(self, absent, min_ranks, seconds)
        return lifecycle.succeed(self, backend, lineage, seconds)

    def waiting(self) -> int:
        """Return how many processes wait to join: the same on all ranks.

        Rank 0 looks, and broadcasts what it has seen: as long as nobody waits, one file that is
        not there, and a small broadcast. From the first call on processes find these ranks.

        Collective: every rank calls it.

        Raises:
            RendezvousError: the store in which the ranks met is gone; on all ranks.
            UnsupportedError: nobody can join over this transport, or a group.
        """
        return changes.waiting(self)

    @explained
    def grow(self, *, timeout: float | None = None) -> Self:
        """Return a communicator of these ranks and of all processes that wait to join.

        The ranks keep their order and come first. ``lost`` names those of them that have died
        meanwhile, and are not in it. If nobody waits it is the same ranks in a new generation. If
        a rank calls :meth:`shrink` instead, since it has met a loss, all shrink: nobody is let
        in, and who waits goes on waiting.

        A process that waits (:attr:`joins`) calls it, too, on the communicator of itself alone.

        Collective: every rank calls it, at the same point of the program, when its calls in the
        background are over. Unlike ``shrink()`` it waits for a rank that lives and is silent, and
        breaks the communicator if that does not call it in time. This one is closed then, with
        the groups made of it.

        Args:
            timeout: seconds for all of it, by default the communicator's; of a process that waits,
                until it is let in.

        Raises:
            CollectiveTimeoutError: a rank did not call it; of one that waits: nobody let it in.
            ExcludedError: the others went on without this rank; of one that waits: they have ended.
            PeerLostError: fewer than ``COLLECTIVE_MIN_RANKS`` are left.
            RendezvousError: the store in which the ranks met is gone.
            UnsupportedError: nobody can join over this transport, or a group.

        See Also:
            ncclCommGrow.
        """
        seconds = self._seconds(timeout)
        backend, lineage = changes.grow(self, seconds)
        return lifecycle.succeed(self, backend, lineage, seconds)

    @explained
    def agree(self, flag: bool = True, timeout: float | None = None) -> bool:
        """Return whether every rank that lives says yes: the same on all of them.

        Collective among those, whether the communicator is broken or sound; it breaks nothing. A
        rank that dies meanwhile counts if it had its say, and is not waited for. The answer goes
        by way of the store in which the ranks met: milliseconds, where a reduction takes
        microseconds.

        Args:
            flag: what this rank says.
            timeout: seconds, by default the communicator's.

        Raises:
            CollectiveTimeoutError: a rank that is not known to be lost did not call it.
            CommunicatorAbortedError: another rank has given up waiting, and calls ``shrink()``.
            RendezvousError: the store is gone.
            UnsupportedError: this transport, or that store, cannot.

        See Also:
            MPIX_Comm_agree.
        """
        return changes.agree(self, bool(flag), self._seconds(timeout))

    def plan(self, operation: str, *args: Any, **options: Any) -> PreparedCall:
        """Prepare a collective call, for loops that make the same one on the same arrays.

        ``step = comm.plan("all_reduce", x, out=y)`` sends nothing; ``step()`` makes the call, and
        spares what is found out about arrays and arguments anew in every
        ``comm.all_reduce(x, out=y)``. Other ranks may make the call either way. It goes by the
        memory that the arrays have when ``step()`` is called, and refuses arrays that no longer
        have the shape and dtype they had here.

        Args:
            operation: the method's name: ``"all_reduce"``, ``"reduce"``, ``"reduce_scatter"``,
                ``"scan"``, ``"broadcast"``, ``"gather"``, ``"all_gather"``, ``"scatter"``,
                ``"all_to_all"`` or ``"barrier"``.
            args, options: as the method takes them, but for ``async_op``, which is given when the
                call is made. Arrays are contiguous and on the CPU, no structures; what is cut or
                joined is so along the first axis.

        Raises:
            InvalidArgumentError: there is no such operation, or the arrays do not fit; and
                whatever else the method raises before it sends anything.
        """
        if operation not in _PLANNED:
            raise InvalidArgumentError(
                f"plan: operation {operation!r}; one of {', '.join(_PLANNED)} {self._who}."
            )
        if "async_op" in options:
            raise InvalidArgumentError("plan: async_op is given when the call is made.")
        x = args[0] if args else options.get("x")
        refuse_unfit(operation, x, options.get("out"), options.get("axis", 0))
        method = getattr(self, operation)

        def prepare(out: Any) -> CallForms:
            given = options if out is None else {**options, "out": out}
            make = method(*args, **given, async_op=PREPARE)
            # C remembers what it has found out, too, and needs nothing of Python. It has to be
            # given where the result goes, or it makes a new array in every call.
            whole = out is not None or operation == "barrier"
            in_c = whole and self._door is not None and given.get("timeout") is None
            return CallForms(make, functools.partial(method, *args, **given) if in_c else None)

        keeps = operation in _KEEPING and x is not None
        return PreparedCall(
            operation, prepare, {"x": x, "out": options.get("out")}, keeps, self._who
        )

    # -- in C ---------------------------------------------------------------------------

    @staticmethod
    def _explain(function: Callable[..., Any], error: TypeError) -> TypeError:
        """Return what a call ended in whose arguments may not be the function's."""
        return explain_keyword(function, error) if error.__traceback__ is None else error

    def _find_plan(
        self,
        what: str,
        x: Any,
        op: Any,
        order: str | None,
        root: int | None,
        counts: tuple[int, ...] | None,
    ) -> Planned | None:
        """Return the plan of a plain call, of which C has none yet; None for Python's way."""
        if what == "barrier":
            return self._plan_of_barrier()
        if what == "scan" and op == "avg":
            return None  # it is refused
        view = self._view(what, x)
        if what == "broadcast":
            assert root is not None
            return self._plan_of_broadcast(view.array, view.dtype, root)
        if what == "reduce_scatter":
            rows = Rows(what, view.array, 0)
            sizes = split_sizes(what, rows.length, self.size, None)
            return self._plan_of_pieces(view.array, view.dtype, op, order, rows, sizes, None)
        if op is not None:
            return self._plan_of(what, view.array, view.dtype, op, order, root)
        leaf = Leaf(what, view, 0)
        if what == "scatter":
            assert root is not None
            return self._plan_of_scatter(leaf, root, x)
        if what == "all_to_all":
            sizes = split_sizes(what, leaf.rows.length, self.size, None)
            return self._piece_plan(what, [leaf], 0, None, 0, None, [sizes])
        return self._plan_of_collection(what, view, root, 0, counts)

    @staticmethod
    def _run_plan(plan: Plan, x: Any, out: Any, seconds: float) -> None:
        """Run a plan that is not C's, on plain arrays."""
        dst = None if out is None else _buffer(out)
        work = plan(dst if x is out else None if x is None else _buffer(x), dst, seconds)
        if work is not None:
            work.wait()

    def _recover(
        self,
        what: str,
        x: Any,
        out: Any,
        root: int | None,
        counts: tuple[int, ...] | None,
        error: BaseException,
    ) -> Any:
        """Go on when a call that C has made has failed, as its method would, or raise."""
        self._note_failure(error)
        if not isinstance(error, Disagreement):
            try:
                raise error
            finally:
                del error  # or it would keep itself, and with its frames the arrays of the call
        # Ranks may differ in how much they have, or in having passed None: what then follows has
        # the time that is left.
        entry = self.recorder.entries(1)[0]
        left = max(1e-3, entry.began + self.timeout - time.monotonic())
        if what == "broadcast":
            assert root is not None
            return self._broadcast_one(x, x, root, out, left, False, error)
        if what == "scatter":
            assert root is not None
            mine = x if self.rank == root else None
            call = self._call_of_scatter(mine, root, None, 0, out, None)
            return self._scatter(call, left, False, error)
        if what == "all_to_all":
            return self._exchange(x, None, 0, out, left, False, error)
        if what in ("gather", "all_gather"):
            return self._collect(x, root, counts, 0, out, left, False, error)
        self._mismatch(error.headers)


def _buffer(x: Any) -> Buffer:
    """Return an array that C has found to be plain as a buffer."""
    if type(x) is np.ndarray:  # of one of NumPy's own types, or it would not be plain
        array, dtype = x, BY_NUMPY[x.dtype]
    else:
        array, dtype = adapter_of(x).view(x)
    return Buffer(array if array.ndim == 1 else array.reshape(-1), dtype)
