"""The object a user holds: ranks that can call each other.

Every public method stands here with its docstring. A call makes an object of :mod:`.calls` and
passes it to the communicator's :class:`~.path.Path`; in front of such a method stands one in C,
which makes plain calls by itself. Groups, generations and the end are functions over a communicator
(:mod:`.groups`, :mod:`collective.elastic.changes`, :mod:`.lifecycle`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from collective import native
from collective.contract.backend import Backend
from collective.contract.copying import NotCopied
from collective.contract.failure import Failure
from collective.contract.stalls import Membership
from collective.deadline import Deadline
from collective.elastic import changes
from collective.elastic.lineage import Lineage
from collective.elastic.succession import Succession
from collective.errors import CommunicatorClosedError
from collective.memory.annotations import Array, Framework, Like, NumpyArray
from collective.ops import ReduceOp

from . import groups, lifecycle, prepared
from .calls.allocation import Adopt, Empty
from .calls.broadcasting import Barrier, Broadcast
from .calls.gathering import AllGather, AllToAll, Gather
from .calls.message import Recv, Send, SendRecv
from .calls.reduction import AllReduce, Reduce, ReduceScatter, Scan
from .calls.scattering import Scatter
from .foreign_names import ForeignNames, explained
from .grid import Grid
from .host_calls import HostCalls
from .listener import CallEvent, Hook, Listener
from .object_calls import ObjectCalls
from .path import Path
from .prepared import PreparedCall
from .status import Status

if TYPE_CHECKING:
    from typing_extensions import Self

    class _Handle:
        """Base class in C."""

else:
    _Handle = native.handle()

__all__ = ["Communicator"]

L = TypeVar("L", bound=Array)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _first_in_c(kind: type[Any]) -> Callable[[_Method], _Method]:
    """Have C make the plain calls of a method, where there is C.

    Args:
        kind: the class of the method's calls.
    """
    return lambda method: native.method(method, kind) or explained(method)


class Communicator(_Handle, NotCopied, ForeignNames):
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
        backend, capabilities: the name of the transport, and what it can do.
        recorder: the last calls of this communicator.
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
        self.rank = backend.rank
        self.size = backend.size
        self.capabilities = backend.capabilities
        self._path = Path(backend, timeout, check)
        self.recorder = self._path.recorder
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
        state = ", closed" if self.closed else ""
        return (
            f"<Communicator rank {self.rank} of {self.size} over {self.backend} on {self.host} "
            f"(local rank {self.local_rank} of {self.local_size}){state}>"
        )

    # -- reductions and pieces --------------------------------------------------------------

    @_first_in_c(AllReduce)
    def all_reduce(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give every rank the result.

        Collective: every rank calls it, with one op, shape and dtype.

        Args:
            x: an array of any strides, or one of Python's numbers; or a nested list, tuple or dict
                of these, which travel together. An ``int`` has 64 bits on the way, and is refused
                where the ranks' sum or product might not fit (arrays wrap).
            op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"avg"``, ``"band"``,
                ``"bor"``, ``"bxor"``, ``"land"``, ``"lor"``, or what
                ``collective.premul_sum`` or ``collective.user_op`` return. Integers wrap.
                To ``min`` and ``max`` -0 is less than 0, and NaN comes of any NaN, always
                the quiet one without sign and payload (on GPUs as NCCL has it).
            out: where the result goes, of the shape and dtype of ``x``; may be ``x``. For
                a structure, one of the same nesting.
            order: ``"rank"`` folds ``((x0 op x1) op x2) …``, so that the result has the
                same bits on every transport and in every run.
            timeout: seconds; the communicator's by default.
            async_op: return a ``Work`` at once; the arrays must not be touched until its
                ``wait()`` has returned.

        Returns:
            ``out``, or a new array of the framework, shape and dtype of ``x``; a number of the type
            of ``x``.

        Raises:
            DtypeError: the op is not defined for the dtype, or integers might not fit.
            MismatchError: the ranks' calls differ; nothing was written.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: after these ``out``
                holds some, all or none of the result.
            Exception: what a user's operator raised here; the others get PeerFailedError.

        See Also:
            MPI_Allreduce, ncclAllReduce, torch.distributed.all_reduce.
        """
        call = AllReduce(self._path, x, op, out, order)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Reduce)
    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give the result to ``root``.

        Collective: every rank calls it, with one root, op, shape and dtype.

        Args:
            x, op, order, timeout, async_op: as in :meth:`all_reduce`.
            root: the rank that gets the result.
            out: at the root, where the result goes; ignored elsewhere.

        Returns:
            At the root ``out`` or a new array; None elsewhere.

        Raises:
            As :meth:`all_reduce`.

        See Also:
            MPI_Reduce, ncclReduce.
        """
        call = Reduce(self._path, x, root, op, out, order)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Scan)
    def scan(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the arrays of ranks 0 to this one, inclusive, in rank order.

        Collective: every rank calls it, with one op, shape and dtype.

        Args:
            x, out, timeout, async_op: as in :meth:`all_reduce`.
            op: as there, but for ``"avg"``: an average over a varying number of ranks
                is not one operation.

        Returns:
            ``x0 op x1 … op x_rank``, as ``out`` or a new array.

        Raises:
            As :meth:`all_reduce`.

        See Also:
            MPI_Scan.
        """
        call = Scan(self._path, x, op, out)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(ReduceScatter)
    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str | ReduceOp = "sum",
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        order: str | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give each rank one piece of the result.

        Collective: every rank calls it, with one op, shape, dtype, axis and counts.

        Args:
            x, op, order, timeout, async_op: as in :meth:`all_reduce`.
            counts: lengths of the ranks' pieces along ``axis``; by default as
                ``numpy.array_split`` cuts.
            axis: the axis that is cut.
            out: where this rank's piece goes, of the piece's shape.

        Returns:
            Piece ``rank`` of the result, as ``out`` or a new array.

        Raises:
            As :meth:`all_reduce`. ShapeError: the counts do not add up to the axis.

        See Also:
            MPI_Reduce_scatter, ncclReduceScatter.
        """
        call = ReduceScatter(self._path, x, op, counts, axis, out, order)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Broadcast)
    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        like: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Give every rank the array of ``root``.

        Collective: every rank calls it, with one root.

        Args:
            x: at the root, an array, a number, or a nested list, tuple or dict of these. Elsewhere
                None, or the same, whose values do not matter and are not changed.
            root: the rank whose array it is.
            out: where it goes; ``broadcast(w, out=w)`` works in place.
            like: where ``x`` is None, the framework of the result: its name, or an array.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out`` if given; else, at the root ``x`` itself, elsewhere a new array. Of an array
            whose framework is unknown here and takes none of ours, all ranks get NumPy's, the root
            over the memory of ``x`` if that is writable. Where ``x`` is None structures come as
            they were nested at the root, tuples as lists, dicts with string keys; and numbers as
            arrays of no dimensions.

        Raises:
            MismatchError: shapes, dtypes or roots differ; nothing was written.

        See Also:
            MPI_Bcast, ncclBroadcast.
        """
        call = Broadcast(self._path, x, root, out, like)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Scatter)
    def scatter(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        like: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Cut the array of ``root`` into pieces and give each rank one.

        Collective: every rank calls it, with one root.

        Args:
            x: at the root, an array or a nested list, tuple or dict of arrays, each of
                which is cut. Elsewhere None, or something of the same shape.
            root: the rank whose array is cut.
            counts: at the root, lengths of the ranks' pieces along ``axis``; by default
                as ``numpy.array_split`` cuts.
            axis: at the root, the axis that is cut.
            out: where this rank's piece goes.
            like: the framework of the result where ``x`` and ``out`` are None.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            Piece ``rank``, as ``out`` or a new array. Structures come as they were nested
            at the root, dicts with string keys.

        Raises:
            ShapeError: the counts do not add up to the axis, or ``out`` does not fit (after
                the call: its own rank raises, nothing is written there).
            MismatchError: roots or operations differ.

        See Also:
            MPI_Scatterv.
        """
        call = Scatter(self._path, x, root, counts, axis, out, like)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Gather)
    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join the ranks' arrays along an axis, in rank order, at ``root``.

        Collective: every rank calls it, with one root, dtype and axis; shapes may differ
        along the axis.

        Args:
            x: an array, or a nested list, tuple or dict of arrays; or one of Python's numbers, of
                which the result is a list.
            root: the rank that gets the result.
            counts: the ranks' lengths along ``axis``, where all ranks know them: spares
                the exchange of shapes.
            axis: the axis to join along; a 0-d array counts as one of length 1.
            out: at the root, where the result goes.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            At the root ``out`` or a new array; None elsewhere.

        Raises:
            ShapeError: ``out`` does not fit (after the call; nothing is written).
            MismatchError: dtypes, other axes, roots or nestings differ.

        See Also:
            MPI_Gatherv.
        """
        call = Gather(self._path, x, root, counts, axis, out)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(AllGather)
    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join the ranks' arrays along an axis, in rank order, at every rank.

        Collective: as :meth:`gather`, without a root.

        Args:
            x, counts, axis, out, timeout, async_op: as in :meth:`gather`.

        Returns:
            ``out`` or a new array.

        Raises:
            As :meth:`gather`.

        See Also:
            MPI_Allgatherv, ncclAllGather.
        """
        call = AllGather(self._path, x, counts, axis, out)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(AllToAll)
    def all_to_all(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join what comes.

        Collective: every rank calls it, with one dtype and axis; shapes may differ along
        the axis.

        Args:
            x: an array, or a nested list, tuple or dict of arrays, each of which is cut.
            counts: lengths of the pieces that this rank sends; ranks may differ. By
                default as ``numpy.array_split`` cuts.
            axis: the axis to cut and to join along.
            out: where the result goes; may not be ``x``.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            The pieces for this rank, in the order of their senders, as ``out`` or a new
            array.

        Raises:
            ShapeError: the counts do not add up to the axis (before anything is sent), or
                ``out`` does not fit (after the call; nothing is written).
            MismatchError: dtypes, other axes or nestings differ.

        See Also:
            MPI_Alltoallv, ncclAlltoAll.
        """
        call = AllToAll(self._path, x, counts, axis, out)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Barrier)
    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called it.

        Collective: every rank calls it.

        Raises:
            CollectiveTimeoutError, PeerLostError, PeerFailedError: somebody did not.

        See Also:
            MPI_Barrier.
        """
        return self._path.make(Barrier(self._path), timeout, async_op)

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
        return prepared.plan(self, self._path, operation, args, options)

    # -- messages ---------------------------------------------------------------------------

    @_first_in_c(Send)
    def send(
        self,
        x: Any,
        dst: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send an array to rank ``dst``; return when ``x`` may be changed.

        The receiver may have to ask for it first. Messages to one rank with one tag
        arrive in the order in which they were sent.

        Args:
            x: an array of at most 12 dimensions, or a nested list, tuple or dict of
                arrays, which is one message.
            dst: another rank, or ``collective.NULL``: nothing is sent then.
            tag: an integer from 0 to 2**31 - 1 that the receiver has to give too.
            timeout, async_op: as in :meth:`all_reduce`.

        Raises:
            RankError, InvalidArgumentError: refused; nothing was sent.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: it may have arrived.

        See Also:
            MPI_Send.
        """
        call = Send(self._path, x, dst, tag)
        return self._path.post(call, timeout, async_op)

    @_first_in_c(Recv)
    def recv(
        self,
        out: Any,
        src: int,
        *,
        tag: int = 0,
        like: Any = None,
        status: Status | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive an array from rank ``src``.

        Args:
            out: where it goes, of the sender's shape and dtype (or a structure like the
                sender's); or None, to take whatever comes.
            src: another rank, ``collective.ANY_SOURCE``, or ``collective.NULL``: nothing is
                received then, and ``out`` stays as it is.
            tag: the sender's.
            like: the framework of the result where ``out`` is None: its name, or an array.
            status: is told who sent the message.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array; None where both ``out`` is None and ``src`` is NULL.

        Raises:
            ShapeError, DtypeError: what came does not fit ``out``. The message is gone,
                ``out`` is untouched, the communicator stays usable.

        See Also:
            MPI_Recv.
        """
        call = Recv(self._path, out, src, tag, like, status)
        return self._path.post(call, timeout, async_op)

    @_first_in_c(SendRecv)
    def sendrecv(
        self,
        x: Any,
        dst: int,
        src: int,
        *,
        out: Any = None,
        tag: int = 0,
        like: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send ``x`` to rank ``dst`` and receive from rank ``src``, neither waiting for the other.

        The ranks that take part all call ``sendrecv``, so that everyone who sends is
        received from. A rank may exchange with itself, and either side may be
        ``collective.NULL``: at the edge of a grid nothing goes there, and nothing comes.

        Args:
            x, dst, tag: as in :meth:`send`.
            src, out: as in :meth:`recv`, without ANY_SOURCE. ``out`` may be ``x``, or overlap it:
                what is sent is what ``x`` held when the call was made.
            like: the framework of the result where ``out`` is None; that of ``x`` by default.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array; None where both ``out`` is None and ``src`` is NULL.

        See Also:
            MPI_Sendrecv.
        """
        call = SendRecv(self._path, x, dst, src, out, tag, like)
        return self._path.post(call, timeout, async_op)

    # -- objects ----------------------------------------------------------------------------

    @explained
    def broadcast_object(
        self, obj: Any, *, root: int = 0, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Give every rank the object of ``root``.

        Collective: every rank calls it, with one root.

        An object is plain data: None, bool, int, float, complex, str, bytes, list, tuple, dict,
        set, and arrays, nested at will.

        Args:
            obj: the object at the root; ignored elsewhere.
            root: the rank whose object it is.
            pickle: carries anything. The sender *and* the receiver must pass it, as reading a
                pickle runs code that its writer chose. It is refused where ranks of several hosts
                have met without a secret: others may have joined.
            timeout: seconds; the communicator's by default.

        Returns:
            At the root ``obj`` itself, elsewhere a copy; at the root a copy, too, if ``obj`` has
            arrays that arrive as NumPy's: of GPUs, or of frameworks that are unknown here.
        """
        objects = self._objects("broadcast_object", pickle)
        return objects.broadcast(obj, root, timeout)

    @explained
    def gather_object(
        self, obj: Any, *, root: int = 0, pickle: bool = False, timeout: float | None = None
    ) -> list[Any] | None:
        """Give ``root`` the list of the ranks' objects, in rank order; None elsewhere.

        Collective: every rank calls it, with one root. Args as in :meth:`broadcast_object`.
        """
        objects = self._objects("gather_object", pickle)
        return objects.gather(obj, root, timeout)

    @explained
    def all_gather_object(
        self, obj: Any, *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any]:
        """Give every rank the list of the ranks' objects, in rank order.

        Collective: every rank calls it. Args as in :meth:`broadcast_object`.
        """
        return self._objects("all_gather_object", pickle).all_gather(obj, timeout)

    @explained
    def scatter_object(
        self,
        objs: Sequence[Any] | None,
        *,
        root: int = 0,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Give each rank its item of a sequence that ``root`` has.

        Collective: every rank calls it, with one root.

        Args:
            objs: at the root, one object for each rank; ignored elsewhere.
            root, pickle, timeout: as in :meth:`broadcast_object`.

        Raises:
            InvalidArgumentError: at the root, the sequence has another length (nothing is
                sent, and the other ranks keep waiting for a call that is right).
        """
        objects = self._objects("scatter_object", pickle)
        return objects.scatter(objs, root, timeout)

    @explained
    def send_object(
        self,
        obj: object,
        dst: int,
        *,
        tag: int = 0,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Send an object to rank ``dst``, who calls :meth:`recv_object`.

        Args:
            obj: the object.
            dst, tag, timeout: as in :meth:`send`.
            pickle: as in :meth:`broadcast_object`.
        """
        self._objects("send_object", pickle).send(obj, dst, tag, timeout)

    @explained
    def recv_object(
        self, src: int, *, tag: int = 0, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive an object that rank ``src`` sent with :meth:`send_object`.

        Args:
            src, tag, timeout: as in :meth:`recv`.
            pickle: as in :meth:`broadcast_object`.

        Returns:
            The object; None where ``src`` is ``collective.NULL``.

        Raises:
            InvalidArgumentError: the sender used pickle and this call does not; the message
                is gone and was not read.
        """
        return self._objects("recv_object", pickle).recv(src, tag, timeout)

    def _objects(self, operation: str, pickle: bool) -> ObjectCalls:
        return ObjectCalls(self.on_host, operation, pickle, self._open)

    # -- memory -----------------------------------------------------------------------------

    @overload
    def empty(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        like: Literal["numpy"] | None = None,
    ) -> NumpyArray: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: object = "float32", *, like: L) -> L: ...

    @overload
    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, like: Framework
    ) -> Any: ...

    @explained
    def empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", like: Like | None = None
    ) -> Any:
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
        return self._path.make(Empty(self._path, shape, dtype, like), None, False)

    @explained
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
        adopted: np.ndarray[Any, np.dtype[np.uint8]] | None
        adopted = self._path.make(Adopt(self._path, nbytes, move), None, False)
        return adopted

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
        absent = [self._path.check_rank("shrink", "exclude", rank) for rank in exclude]
        seconds = self.shrink_timeout if timeout is None else self._path.check_timeout(timeout)
        deadline = Deadline(seconds)
        backend, lineage = changes.shrink(self, absent, min_ranks, deadline)
        return lifecycle.succeed(self, backend, lineage, deadline)

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
        deadline = Deadline(self._path.check_timeout(timeout))
        backend, lineage = changes.grow(self, deadline)
        return lifecycle.succeed(self, backend, lineage, deadline)

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
        return changes.agree(self, bool(flag), Deadline(self._path.check_timeout(timeout)))

    # -- hooks ------------------------------------------------------------------------------

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
        return lambda: self._path.forget(hook)

    def listen(self, listener: Listener) -> None:
        """Tell ``listener`` of every call from now on, in the order in which listeners came.

        One that has lanes of its own has to come while nothing of this communicator is under way.

        Args:
            listener: what hears; :meth:`hook` is for functions.
        """
        self._path.listen(listener)

    # -- properties -----------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        """Seconds that a call may take where it names no other deadline."""
        return self._path.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._path.timeout = seconds

    @property
    def check(self) -> str:
        """Whether calls are compared before they are sent: "auto", "always" or "never"."""
        return self._path.check

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._path.closed

    @property
    def enqueues(self) -> bool:
        """Whether calls on arrays of GPUs are only enqueued, on their streams."""
        return self._path.enqueues

    @property
    def foreign(self) -> str:
        """In a forked child, why the communicator is not that process's; else empty."""
        return self._foreign

    @property
    def on_host(self) -> HostCalls:
        """Calls on arrays of the library's own on the CPU, whatever the transport takes."""
        return HostCalls(self._path)

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
        return self._path.backend

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
        lifecycle.close(self, Deadline(self.timeout))

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

    def __copy__(self) -> Self:
        """Return another object of the same connections."""
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        twin._path = self._path  # a member in C
        return twin

    def __deepcopy__(self, memo: object) -> Self:
        """Return the communicator itself: a copy of what has one talks to the same ranks."""
        return self
