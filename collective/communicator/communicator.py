"""The object a user holds: ranks that can call each other."""

from __future__ import annotations

import functools
import operator
import os
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from collective import native
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.stalls import Membership
from collective.contract.store import Store
from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    DtypeError,
    InvalidArgumentError,
    PeerFailedError,
    PeerLostError,
    RankError,
    ShapeError,
    UnsupportedError,
)
from collective.memory import dtypes
from collective.memory.arrays import adapter_of
from collective.request import Disagreement, Request

from .exchanging import Exchanging
from .grouping import meet
from .listener import CallEvent, Hook
from .object_calls import ObjectCalls
from .pieces import Leaf
from .plan import Planned
from .prepared import PREPARE, PreparedCall, refuse_unfit
from .reductions import Reductions
from .rows import Rows, split_sizes
from .shrinking import Lineage, Shrinking, agreed

__all__ = ["Communicator"]

_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()


_PLANNED = (
    "all_reduce", "reduce", "reduce_scatter", "scan", "broadcast", "gather", "all_gather",
    "scatter", "all_to_all", "barrier",
)  # fmt: skip


if TYPE_CHECKING:

    class _Methods:
        """What is in front of the methods is called as they are."""

else:
    _Methods = native.methods(
        Reductions.all_reduce, Reductions.reduce, Reductions.scan, Reductions.reduce_scatter,
        ObjectCalls.broadcast, ObjectCalls.scatter, ObjectCalls.all_gather, ObjectCalls.gather,
        Exchanging.all_to_all, ObjectCalls.barrier, ObjectCalls.send, ObjectCalls.recv,
    )  # fmt: skip


class Communicator(_Methods, Reductions, Exchanging, ObjectCalls):
    """Ranks 0 to ``size - 1``, connected by one transport.

    Collective calls are made by all ranks in one order. One thread uses a communicator at
    a time; calls with ``async_op=True`` go on in the background, in the order in which they
    were made. An array passed in is never changed unless it is ``out``.

    As a context manager it is closed at the end of the body. An exception in the body
    aborts the peers: their calls raise ``PeerFailedError`` with its traceback.

    Attributes:
        rank, size: which of how many this is.
        local_rank, local_size: the same among the ranks of this host.
        host: the name of this host.
        timeout: seconds that a call may take, unless it says otherwise.
        capabilities: what the transport can do.
    """

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
    ) -> None:
        super().__init__(backend, timeout, check)
        self.local_rank = local_rank
        self.local_size = local_size
        self.host = host
        self.backend = backend.name
        self._children: weakref.WeakSet[Communicator] = weakref.WeakSet()
        # The store in which the ranks met, if this communicator is all that uses it.
        self._store: Store | None = None
        # Where its ranks met and which are left; None for one that cannot be shrunk.
        self._lineage = lineage
        self._agreements = 0
        # Called with the next generation, by whoever keeps this one.
        self._succession: Callable[[Communicator], None] = _forget_nothing
        self._membership = Membership(self)
        # In a forked child, why it is not this process's.
        self._foreign = ""
        _alive.add(self)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"<Communicator rank {self.rank} of {self.size} over {self.backend} on {self.host} "
            f"(local rank {self.local_rank} of {self.local_size}){state}>"
        )

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    @property
    def enqueues(self) -> bool:
        """Whether calls on arrays of GPUs are only enqueued, on their streams."""
        return self._enqueues

    @property
    def check(self) -> str:
        """Whether calls are compared before they are sent: "auto", "always" or "never"."""
        return self._check

    # -- generations ----------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """How often :meth:`shrink` was called on the way here; 0 for what ``init()`` returned."""
        return self._lineage.generation if self._lineage is not None else 0

    @property
    def origin(self) -> tuple[int, ...]:
        """The ranks that were once these, in the order of those of now.

        They are numbered as in the communicator of generation 0; a group's as it was made.
        """
        return self._lineage.origin if self._lineage is not None else tuple(range(self.size))

    @property
    def lost(self) -> frozenset[int]:
        """Of the ranks of the last generation, those that are not in this one."""
        return self._lineage.lost if self._lineage is not None else frozenset()

    def shrink(
        self,
        *,
        exclude: Sequence[int] = (),
        min_ranks: int | None = None,
        timeout: float | None = None,
    ) -> Communicator:
        """Return a communicator of the ranks that are left, after a loss or at any time.

        Collective among those: every rank that lives calls it, when a call of this communicator
        has raised ``PeerLostError``, or any error after which it is broken. One that is sound is
        broken by it first: calls of ranks that have not called it raise
        ``CommunicatorAbortedError``, which asks them to. Ranks keep their order. It goes on
        without those that have died or left, and without those that are silent for
        ``COLLECTIVE_SHRINK_GRACE`` seconds (5). If somebody dies meanwhile the others decide again.

        This communicator is closed then, with the groups made of it. Its symmetric memory stays as
        it is, each rank's own.

        Args:
            exclude: ranks that are out, alive or not; they get ``ExcludedError``.
            min_ranks: go on only with so many, by default ``COLLECTIVE_MIN_RANKS`` (1).
            timeout: seconds for all of it, by default the communicator's.

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
        lineage = self._lineage_for("shrink")
        out = [self._rank("shrink", "exclude", rank) for rank in exclude]
        if self.rank in out:
            raise RankError(
                f"shrink: exclude {out} names this rank; one that wants to go closes the "
                f"communicator {self._who}."
            )
        floor = lineage.min_ranks if min_ranks is None else min_ranks
        if isinstance(floor, bool) or not isinstance(floor, int) or floor < 1:
            raise InvalidArgumentError(f"shrink: min_ranks {floor!r}; a positive integer.")
        seconds = self._seconds(timeout)
        text = f"rank {self.rank} shrinks the communicator; call shrink() too, to go on with it"
        self._abort(Failure("shrink", self.rank, text))
        backend, following = Shrinking(
            lineage, self._backend, exclude=out, min_ranks=floor, timeout=seconds
        ).run()
        made = self._next(backend, following)
        self._shut(seconds)
        return made

    def _alike(
        self, backend: Backend, local_rank: int, local_size: int, lineage: Lineage | None = None
    ) -> Communicator:
        """Return a communicator over another transport, for the rest as this one is."""
        made = type(self)(
            backend,
            local_rank=local_rank,
            local_size=local_size,
            host=self.host,
            timeout=self.timeout,
            check=self._check,
            lineage=lineage,
        )
        made._open = self._open
        return made

    def _next(self, backend: Backend, lineage: Lineage) -> Communicator:
        made = self._alike(backend, lineage.local_rank, lineage.local_size, lineage)
        made._store, self._store = self._store, None
        made._succession = self._succession
        members = [rank for rank in range(self.size) if rank not in lineage.lost]
        for listener in self._listeners:
            listener.group(made, members)
        self._succession(made)
        return made

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
            RendezvousError: the store is gone.
            UnsupportedError: this transport, or that store, cannot.

        See Also:
            MPIX_Comm_agree.
        """
        lineage, seconds = self._lineage_for("agree"), self._seconds(timeout)
        self._agreements += 1
        return agreed(lineage, self._backend, self._agreements, bool(flag), seconds)

    def _lineage_for(self, what: str) -> Lineage:
        """Return the lineage, or refuse a communicator that cannot go on after a loss."""
        if self._closed:
            self._backend.refuse_broken(what)
        if not self.capabilities.shrinks:
            why = self._backend.why_not_shrink
            raise UnsupportedError(
                f"{what}: backend {self.backend!r} cannot go on without a rank"
                f"{why and f': {why}'} {self._who}. Use COLLECTIVE_BACKEND=shm on one host, gloo "
                "or hierarchical on several; or start all ranks again."
            )
        if self._lineage is None:
            raise UnsupportedError(
                f"{what}: this communicator was made of a transport, and nobody knows where its "
                f"ranks met {self._who}. Use collective.init() or collective.connect()."
            )
        return self._lineage

    # -- memory ---------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", like: Any = None) -> Any:
        """Return an uninitialised array in memory that the transport reduces without copies.

        On ``shm`` every rank sees the others' parts: collectives on such arrays, and on
        contiguous views of them, move each byte once. On ``nccl`` it is memory of the GPU that
        NCCL has registered, where its version can. Elsewhere it is ordinary memory. It is freed
        when the last rank has dropped its array.

        Collective: every rank calls it, with one shape and dtype.

        Args:
            shape: the array's shape.
            dtype: a name (``"bfloat16"``), or a NumPy or PyTorch dtype.
            like: the framework, as its name or an array; NumPy by default. On a transport that
                takes arrays of the CPU and of GPUs, an array on a GPU or ``"cuda"`` asks for
                the GPU's memory.

        Raises:
            AllocationError: there is not enough; on every rank.
            UnsupportedError: it is to be on a GPU, and the transport has no such memory to share.
            MismatchError: shapes or dtypes differ.

        See Also:
            MPI_Win_allocate_shared, ncclMemAlloc.
        """
        name = str(dtype).rpartition(".")[2] if not isinstance(dtype, type) else dtype.__name__
        kind = dtypes.BY_NAME.get(name)
        if kind is None:
            try:
                kind = dtypes.from_numpy(np.dtype(dtype))
            except TypeError:
                raise DtypeError(f"empty: dtype {dtype!r} {self._who}.") from None
        try:
            given = shape if isinstance(shape, Sequence) else (shape,)
            dimensions = tuple(operator.index(length) for length in given)
        except TypeError:
            dimensions = (-1,)
        if min(dimensions, default=0) < 0:
            raise ShapeError(
                f"empty: shape {shape!r}; an integer or some, none of them negative {self._who}."
            )
        on_gpu = self._wants_gpu(like)
        if on_gpu and not self._enqueues:
            raise UnsupportedError(
                f"empty: memory of a GPU; backend {self._backend.name!r} has none that ranks share "
                f"{self._who}. Make the array with its framework: calls take it as it is."
            )
        adapter = self._adapter(like, on_gpu)
        count = int(np.prod(dimensions, dtype=np.int64))
        nbytes = count * kind.itemsize
        request = Request("empty", kind, dimensions, device="cuda" if on_gpu else None)
        made: list[Any] = []

        def run() -> Any:
            def allocate(src: None, dst: None, seconds: float) -> None:
                method = self._backend.empty_device if on_gpu else self._backend.empty
                made.append(method(nbytes, request, seconds))

            self._carry(Planned(request, allocate), None, None, self.timeout)
            return adapter.wrap(made[0].view(kind.storage).reshape(dimensions), kind)

        return self._go("empty", run, False)

    def adopt(
        self, nbytes: int, move: Callable[[], int]
    ) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Make memory that a framework allocated symmetric, as if it came from :meth:`empty`.

        Collective: every rank calls it, with one length.

        Args:
            nbytes: the length of the memory on the host.
            move: puts the memory into POSIX shared memory and returns a descriptor that is open
                until this returns. Called once all ranks are here and there is room for it.

        Returns:
            The memory's bytes, mapped once more: collectives on views of this array move each
            byte once. None on every rank where the transport has no symmetric memory, or if
            one of the ranks could not: then the memory can be used as before.

        Raises:
            MismatchError: lengths differ.
        """
        request = Request("adopt", None, (nbytes,))
        made: list[Any] = []

        def run() -> Any:
            def share(src: None, dst: None, seconds: float) -> None:
                made.append(self._backend.adopt(nbytes, move, request, seconds))

            self._carry(Planned(request, share), None, None, self.timeout)
            return made[0]

        adopted: np.ndarray[Any, np.dtype[np.uint8]] | None
        adopted = self._go("adopt", run, False)  # type: ignore[assignment]
        return adopted

    def _wants_gpu(self, like: Any) -> bool:
        """Whether :meth:`empty` is for the GPU: all ranks have to mean the same."""
        if not self._on_device:
            return False
        if like is None or isinstance(like, str):
            return not self._on_host or like in ("cuda", "cupy")
        array, _ = adapter_of(like).view(like)
        return not isinstance(array, np.ndarray)

    # -- groups ---------------------------------------------------------------------------

    def group(self, ranks: Sequence[int]) -> Communicator:
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
        members = [self._rank("group", "rank", rank) for rank in ranks]
        if len(set(members)) != len(members) or self.rank not in members:
            raise RankError(
                f"group: ranks {members}; distinct ranks with this one among them {self._who}."
            )

        def run() -> Communicator:
            made: list[Backend] = []

            def make() -> None:
                end = time.monotonic() + self.timeout
                meet(self._backend, members, self.timeout)
                left = max(0.001, end - time.monotonic())
                made.append(self._backend.group(members, left))

            self._transport(make)
            child = self._child(made[0], members)
            for listener in self._listeners:
                listener.group(child, members)
            return child

        child: Communicator = self._go("group", run, False)  # type: ignore[assignment]
        return child

    def _child(self, backend: Backend, members: Sequence[int]) -> Communicator:
        child = self._alike(backend, backend.rank, backend.size)
        child._membership = Membership(child, self._membership, members)
        if self._lineage is not None:
            child._lineage = self._lineage.group(backend, members, child._membership.name)
        if self.capabilities.across_hosts:
            hosts = child.all_gather_object(self.host)
            child.local_rank = hosts[: child.rank].count(self.host)
            child.local_size = hosts.count(self.host)
        self._children.add(child)
        return child

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
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
        for name, value in (("color", color), ("key", key)):
            if value is None and name == "color":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise InvalidArgumentError(
                    f"split: {name} {value!r} is not an integer {self._who}."
                )
            if not -(2**63) <= value < 2**63:
                raise InvalidArgumentError(
                    f"split: {name} {value!r}; an integer of 64 bits {self._who}."
                )
        mine = np.array([[color is not None, color or 0, key]], np.int64)
        table = self._hosted().all_gather(mine, counts=[1] * self.size)
        if color is None:
            return None
        members = [r for r in range(self.size) if table[r, 0] and table[r, 1] == color]
        return self.group(sorted(members, key=lambda r: (table[r, 2], r)))

    def split_by_host(self) -> Communicator:
        """Return the communicator of this host's ranks.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_split_type with MPI_COMM_TYPE_SHARED.
        """
        hosts = self.all_gather_object(self.host)
        return self.group([r for r in range(self.size) if hosts[r] == self.host])

    def dup(self) -> Communicator:
        """Return a communicator of the same ranks whose calls don't mix with these.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_dup.
        """
        return self.group(range(self.size))

    # -- the same call again and again ----------------------------------------------------

    def plan(self, operation: str, *args: Any, **options: Any) -> PreparedCall:
        """Prepare a collective call, for loops that make the same one on the same arrays.

        ``step = comm.plan("all_reduce", x, out=y)`` sends nothing; ``step()`` makes the call, and
        spares what is found out about arrays and arguments anew in every
        ``comm.all_reduce(x, out=y)``. Other ranks may make the call either way.

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
        prepared: PreparedCall = method(*args, **options, async_op=PREPARE)
        whole = options.get("out") is not None or operation == "barrier"
        if whole and self._door is not None and options.get("timeout") is None:
            # C remembers what it has found out, too, and needs nothing of Python.
            prepared.replace(functools.partial(method, *args, **options))
        return prepared

    # -- in C ---------------------------------------------------------------------------

    def _find_plan(
        self, what: str, x: Any, op: Any, order: str | None, root: int | None
    ) -> Planned | None:
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
        return self._plan_of_collection(what, leaf, root, 0, None)

    def _recover(self, what: str, x: Any, out: Any, root: int | None, error: BaseException) -> Any:
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
            return self._scatter(mine, root, None, 0, out, None, left, False, error)
        if what == "all_to_all":
            return self._exchange(x, None, 0, out, left, False, error)
        if what in ("gather", "all_gather"):
            return self._collect(what, x, root, None, 0, out, left, False, error)
        self._mismatch(error.headers)

    # -- listening ------------------------------------------------------------------------

    def hook(
        self,
        before: Callable[[CallEvent], Any] | None = None,
        after: Callable[[CallEvent, BaseException | None], Any] | None = None,
    ) -> Callable[[], None]:
        """Have functions called around every call that reaches the transport.

        For a program's own accounting: how many bytes, how long, how often. They run in the thread
        that makes the call, which is a lane's for what was started with ``async_op=True``, and
        must not make calls themselves. An exception of theirs is the call's. Groups that are made
        of this communicator have hooks of their own.

        Args:
            before: is given the call as it begins.
            after: is given the call and what it raised, or None.

        Returns:
            A function that ends it.
        """
        hook = Hook(before, after)
        self.listen(hook)
        return lambda: self._forget(hook)

    # -- life -----------------------------------------------------------------------------

    def abort(self, reason: str = "aborted") -> None:
        """Break this communicator and the groups made of it, for every rank, at once.

        Calls that wait, and all later ones, raise ``CommunicatorAbortedError`` with the
        reason. May be called from any thread.
        """
        if self._foreign:
            raise CommunicatorClosedError(f"abort: {self._foreign}")
        self._abort(Failure("aborted", self.rank, f"rank {self.rank} aborted: {reason}"))

    def _abort(self, failure: Failure) -> None:
        for child in list(self._children):
            child._abort(failure)
        if not self._closed:
            self._backend.abort(failure)

    def close(self) -> None:
        """Leave the communicator and the groups made of it.

        Waits for this rank's own calls in the background, and for nobody else. A second
        close does nothing; any other use afterwards raises ``CommunicatorClosedError``.
        """
        self._shut(self.timeout)

    def _shut(self, seconds: float) -> None:
        """Close, waiting for so many seconds for what is in the background."""
        if self._closed:
            return
        for child in list(self._children):
            child._shut(seconds)
        for lane in (self._lane, *self._lanes.values()):
            lane.close(seconds)
        self._closed = True
        # What was prepared would go on calling the transport, and the frames of an error keep it.
        self._plans.clear()
        self._broken = None
        self._open_door()
        for listener in self._listeners:
            listener.close()
        backend, self._backend = self._backend, _Closed(self._backend, _CLOSED)  # type: ignore[assignment]
        backend.close()
        if self._store is not None:
            self._store.close()

    def _disown(self) -> None:
        """Refuse every call in a forked child, and have nothing there reach the peers."""
        if self._closed:
            return
        self._closed = True
        self._foreign = (
            f"this process (pid {os.getpid()}) was forked from that of rank {self.rank} of "
            f"{self.size} (pid {os.getppid()}), which alone may use the communicator. Start "
            "processes with the method 'spawn', or call collective.init() in all children, for "
            "a communicator of their own."
        )
        self._plans.clear()
        self._open_door()
        self._backend = _Closed(self._backend, self._foreign)  # type: ignore[assignment]

    def _leave(self) -> None:
        """Close the transports, waiting for nothing."""
        for child in list(self._children):
            child._leave()
        if not self._closed:
            self._backend.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._tell(error)
        self.close()

    def _tell(self, error: BaseException) -> None:
        """Pass ``error``, which ended this rank's body, to the peers."""
        if isinstance(error, PeerFailedError):
            return  # the peers know of that one
        if isinstance(error, (CommunicatorAbortedError, CollectiveTimeoutError)):
            # An echo of what others did or did not do, and passed on as such.
            kind, ranks = "aborted", getattr(error, "ranks", ())
            if isinstance(error, PeerLostError):
                kind = "lost"
            elif isinstance(error, CollectiveTimeoutError) and ranks:
                kind = "timeout"
            text = f"rank {self.rank} gave up: {error}"
            self._abort(Failure(kind, self.rank, text, ranks))
        else:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._abort(Failure("failed", self.rank, text))


def _forget_nothing(comm: Communicator) -> None:
    """Nobody keeps the communicator but the program."""


_CLOSED = "this communicator is closed. Make another with collective.init()."


class _Closed:
    """Stands where the transport was: every use says why it is there no more."""

    exchange = None

    def __init__(self, backend: Backend, why: str) -> None:
        self.name = backend.name
        self._why = why
        # In a forked child it stays as it is: its end would be the parent's as well.
        self._kept = backend if why is not _CLOSED else None

    def refuse_broken(self, where: object) -> NoReturn:
        raise CommunicatorClosedError(f"{where}: {self._why}")

    def plan(self, request: Request) -> NoReturn:
        self.refuse_broken(request.operation)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise CommunicatorClosedError(f"{attribute}: {self._why}")


def _disown() -> None:
    for comm in list(_alive):
        comm._disown()


os.register_at_fork(after_in_child=_disown)
