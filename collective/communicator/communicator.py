"""The communicator: the object through which a program's ranks call each other.

This module has every public method with its docstring. A method makes an object of :mod:`.calls`
and passes it to the communicator's :class:`~.path.Path`. Where the native core is built, a method
in C is called first: it makes plain calls by itself and leaves the others to the method here.
Groups and generations are functions over a communicator (:mod:`.groups`,
:mod:`collective.generations.changes`). What adapters and tools need besides is in :mod:`.inner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from collective import native
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.process import NotCopied
from collective.deadline import Deadline
from collective.errors import CommunicatorClosedError
from collective.generations import changes
from collective.generations.lineage import Lineage
from collective.memory.annotations import Array, Framework, Like, NumpyArray
from collective.ops import ReduceOp
from collective.shards import Shards

from . import groups
from .calls.allocation import Empty
from .calls.broadcasting import Barrier, Broadcast
from .calls.gathering import AllGather, AllToAll, Gather
from .calls.message import Recv, Send, SendRecv, Status
from .calls.reduction import AllReduce, Reduce, ReduceScatter, Scan
from .calls.scattering import Scatter
from .foreign_names import ForeignNames, explained
from .grid import Grid
from .host_calls import ObjectCalls
from .inner import Inner
from .listener import CallEvent, Hook
from .membership import Membership
from .path import Path

if TYPE_CHECKING:

    class _Handle:
        """Base class in C."""

else:
    _Handle = native.handle()

L = TypeVar("L", bound=Array)
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _first_in_c(kind: type[Any]) -> Callable[[_Method], _Method]:
    """Return a decorator that lets C make a method's plain calls, if the native core is built.

    Args:
        kind: class of the method's calls.
    """
    return lambda method: native.method(method, kind) or explained(method)


class Communicator(_Handle, NotCopied, ForeignNames):
    """Ranks 0 to ``size - 1``, connected by one transport.

    All ranks must make the same collective calls in the same order. Only one thread may use a
    communicator at a time. Calls with ``async_op=True`` run in the background, in the order in
    which they were made. A call never changes an input array, except the array passed as ``out``.

    A result without ``out`` is a plain array on every rank: of the framework's own class, in C
    order, writable (except for JAX), and without a gradient. The framework is that of the rank's
    own argument, or of ``like``. Results belong to no autograd graph, even if inputs require a
    gradient: the modules ``functional`` of :mod:`collective.adapters` have differentiable calls.
    Structures come back as lists, tuples, named tuples and dicts.

    As a context manager, the communicator is closed at the end of the body. An exception in the
    body aborts the peers: their calls raise ``PeerFailedError`` with its traceback.

    A deep copy of an object that holds a communicator holds the same communicator. A communicator
    cannot be pickled.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        local_rank, local_size: the same among the ranks of this host.
        host: name of this host.
        backend, capabilities: name of the transport, and the features that it supports.
        recorder: record of the last calls of this communicator.
        inner: its members for adapters and tools.
    """

    instead = (
        "Remove the communicator from the object before pickling it (of a model, save the "
        "state_dict()). After loading, give the object a communicator of the loading process."
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
        self.inner = Inner(self._path, lineage, open_to_others)

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
        order: str | Shards | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give every rank the result.

        Collective: every rank calls it, with one op, shape and dtype.

        Args:
            x: array of any strides, or a Python number; or a nested list, tuple or dict of these,
                reduced in one call. An ``int`` is sent as 64 bits. If the ranks' sum or product
                might not fit into 64 bits, the call raises DtypeError (integer arrays wrap).
            op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"avg"``, ``"band"``,
                ``"bor"``, ``"bxor"``, ``"land"``, ``"lor"``, or the return value of
                ``collective.premul_sum`` or ``collective.user_op``. Integer arrays wrap.
                For ``min`` and ``max``, -0 is less than 0, and the result is NaN if any input
                is NaN: always the quiet NaN without sign and payload. On GPUs, NCCL's rules for
                -0 and NaN apply.
            out: array that receives the result, of the shape and dtype of ``x``; may be ``x``
                itself. If ``x`` is a structure, a structure of the same nesting.
            order: if ``"rank"``, fold ``((x0 op x1) op x2) …``, so that the result has the
                same bits on every transport and in every run. If a :class:`collective.Shards`,
                the first axis of ``x`` is this rank's shards. The shards of all ranks are folded
                along a tree, so that the result has the same bits on any number of ranks, and
                ``"avg"`` divides by the number of shards. ``x`` may then be a
                :class:`collective.ShardFold`, too.
            timeout: deadline in seconds; by default the communicator's timeout.
            async_op: if true, return a ``Work`` at once. The program must not touch the arrays
                until ``wait()`` of the ``Work`` has returned.

        Returns:
            ``out``, or a new array of the framework, shape and dtype of ``x``, without a gradient.
            If ``x`` is a number, a number of the same type.

        Raises:
            DtypeError: the op is not defined for the dtype, or a Python integer might not fit.
            MismatchError: the ranks' calls differ; nothing was written.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: the call was interrupted;
                ``out`` holds some, all or none of the result.
            Exception: a user's operator raised it on this rank; the other ranks raise
                PeerFailedError.

        See Also:
            MPI_Allreduce, ncclAllReduce, torch.distributed.all_reduce.
        """
        call = AllReduce(self._path, x, op=op, out=out, order=order)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Reduce)
    def reduce(
        self,
        x: Any,
        *,
        root: int = 0,
        op: str | ReduceOp = "sum",
        out: Any = None,
        order: str | Shards | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give the result to ``root``.

        Collective: every rank calls it, with one root, op, shape and dtype.

        Args:
            x, op, order, timeout, async_op: as in :meth:`all_reduce`.
            root: rank that gets the result.
            out: at the root, array that receives the result; ignored on the other ranks.

        Returns:
            At the root, ``out`` or a new array; None on the other ranks.

        Raises:
            As :meth:`all_reduce`.

        See Also:
            MPI_Reduce, ncclReduce.
        """
        call = Reduce(self._path, x, root=root, op=op, out=out, order=order)
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
        """Fold the arrays of rank 0 to this rank, inclusive, in rank order.

        Collective: every rank calls it, with one op, shape and dtype.

        Args:
            x, out, timeout, async_op: as in :meth:`all_reduce`.
            op: as in :meth:`all_reduce`, except ``"avg"``: every rank would average over another
                number of ranks.

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
        order: str | Shards | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Fold the ranks' arrays elementwise and give each rank one piece of the result.

        Collective: every rank calls it, with one op, shape, dtype, axis and counts.

        Args:
            x, op, order, timeout, async_op: as in :meth:`all_reduce`.
            counts: lengths of the ranks' pieces along ``axis``; by default the lengths that
                ``numpy.array_split`` gives.
            axis: axis along which the result is cut.
            out: array that receives this rank's piece, of the piece's shape.

        Returns:
            Piece ``rank`` of the result, as ``out`` or a new array.

        Raises:
            As :meth:`all_reduce`. ShapeError: the counts do not add up to the length of the axis.

        See Also:
            MPI_Reduce_scatter, ncclReduceScatter.
        """
        call = ReduceScatter(self._path, x, op=op, counts=counts, axis=axis, out=out, order=order)
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
            x: at the root, an array, a number, or a nested list, tuple or dict of these. On the
                other ranks, None, or a value of the same nesting, shapes and dtypes: its elements
                are ignored and not changed.
            root: rank whose array is broadcast.
            out: array that receives the result; ``broadcast(w, out=w)`` works in place.
            like: if ``x`` is None, framework of the result: its name, or an array of it.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out`` if given; else a new array, and at the root ``x`` itself if it is a plain array
            (see the class). The root gets a plain array for any other ``x``, such as an
            ``np.matrix`` or a ``Parameter``; it shares the memory of ``x`` if that is writable and
            in C order. If the framework of ``x`` is unknown to this library and does not accept
            the library's memory, all ranks get NumPy arrays. Where ``x`` is None, a structure
            arrives nested as at the root, but tuples become lists and dict keys become strings. A
            number arrives there as an array of no dimensions.

        Raises:
            MismatchError: shapes, dtypes or roots differ; nothing was written. Over ``gloo`` and
                ``hierarchical`` this breaks the communicator.

        See Also:
            MPI_Bcast, ncclBroadcast.
        """
        call = Broadcast(self._path, x, root=root, out=out, like=like)
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
            x: at the root, an array, or a nested list, tuple or dict of arrays, each of
                which is cut. On the other ranks, None or a value of the same shape.
            root: rank whose array is cut.
            counts: at the root, lengths of the ranks' pieces along ``axis``; by default the
                lengths that ``numpy.array_split`` gives.
            axis: at the root, axis along which the array is cut.
            out: array that receives this rank's piece.
            like: framework of the result, if ``x`` and ``out`` are None.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            Piece ``rank``, as ``out`` or a new array. A structure arrives nested as at the
            root, but dict keys become strings.

        Raises:
            ShapeError: the counts do not add up to the length of the axis, or ``out`` does not
                fit. In the second case only this rank raises, after the call; nothing is written.
            MismatchError: roots or operations differ.

        See Also:
            MPI_Scatterv.
        """
        call = Scatter(self._path, x, root=root, counts=counts, axis=axis, out=out, like=like)
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
            x: array, or a nested list, tuple or dict of arrays; or a Python number: then the
                result is a list of numbers.
            root: rank that gets the result.
            counts: lengths of the ranks' arrays along ``axis``, if all ranks know them: saves
                the exchange of shapes.
            axis: axis along which the arrays are joined; a 0-d array counts as one of length 1.
            out: at the root, array that receives the result.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            At the root, ``out`` or a new array; None on the other ranks.

        Raises:
            ShapeError: ``out`` does not fit (raised after the call; nothing is written).
            MismatchError: dtypes, other axes, roots or nestings differ.

        See Also:
            MPI_Gatherv.
        """
        call = Gather(self._path, x, root=root, counts=counts, axis=axis, out=out)
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
        call = AllGather(self._path, x, counts=counts, axis=axis, out=out)
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
        """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join the received.

        Collective: every rank calls it, with one dtype and axis; shapes may differ along
        the axis.

        Args:
            x: array, or a nested list, tuple or dict of arrays, each of which is cut.
            counts: lengths of the pieces that this rank sends; other ranks may pass other
                lengths. By default the lengths that ``numpy.array_split`` gives.
            axis: axis along which arrays are cut and joined.
            out: array that receives the result; must not be ``x``.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            The pieces for this rank, in the order of their senders, as ``out`` or a new
            array.

        Raises:
            ShapeError: the counts do not add up to the length of the axis (raised before anything
                is sent), or ``out`` does not fit (raised after the call; nothing is written).
            MismatchError: dtypes, other axes or nestings differ.

        See Also:
            MPI_Alltoallv, ncclAlltoAll.
        """
        call = AllToAll(self._path, x, counts=counts, axis=axis, out=out)
        return self._path.make(call, timeout, async_op)

    @_first_in_c(Barrier)
    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until every rank has called ``barrier``.

        Collective: every rank calls it.

        Raises:
            CollectiveTimeoutError, PeerLostError, PeerFailedError: some rank did not call it.

        See Also:
            MPI_Barrier.
        """
        return self._path.make(Barrier(self._path), timeout, async_op)

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

        The call may block until the receiver calls :meth:`recv`. Messages to one rank with one tag
        arrive in the order in which they were sent.

        Args:
            x: array of at most 12 dimensions, or a nested list, tuple or dict of arrays, sent
                as one message. Named tuples arrive as tuples.
            dst: another rank, or ``collective.NULL``: then nothing is sent.
            tag: integer from 0 to 2**31 - 1; the receiver must pass the same tag.
            timeout, async_op: as in :meth:`all_reduce`.

        Raises:
            RankError, InvalidArgumentError: an argument was refused; nothing was sent.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: the call was interrupted; the
                message may or may not have arrived, and the communicator is broken.

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
            out: array that receives the message, of the sender's shape and dtype (or a structure
                like the sender's); or None, to accept a message of any shape and dtype.
            src: another rank, ``collective.ANY_SOURCE``, or ``collective.NULL``: then nothing is
                received, and ``out`` stays unchanged. If several ranks have sent, receives from
                ANY_SOURCE take their messages in turns; over gloo and mpi, in an order that Gloo
                or MPI chooses, mostly that of arrival.
            tag: tag that the sender passed.
            like: if ``out`` is None, framework of the result: its name, or an array of it.
            status: object whose ``source`` is set to the sender's rank.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array; None if ``out`` is None and ``src`` is NULL.

        Raises:
            RankError, InvalidArgumentError, UnsupportedError: an argument was refused; nothing was
                received.
            ShapeError, DtypeError, InvalidArgumentError: the message does not fit ``out``, or is an
                object. The message is lost, ``out`` is unchanged, and the communicator stays
                usable.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: the call was interrupted;
                ``out`` may hold part of the message, and the communicator is broken.

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

        All ranks that take part must call ``sendrecv``, so that every rank's message is received.
        A rank may exchange with itself. ``dst`` or ``src`` may be ``collective.NULL``, for example
        at the edge of a grid. Then that half of the call does nothing.

        Args:
            x, dst, tag: as in :meth:`send`.
            src, out: as in :meth:`recv`, but without ANY_SOURCE. ``out`` may be ``x``, or overlap
                ``x``: the call sends the values that ``x`` held when the call was made.
            like: framework of the result if ``out`` is None; by default the framework of ``x``.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array; None if ``out`` is None and ``src`` is NULL.

        Raises:
            RankError, InvalidArgumentError: an argument was refused; nothing was sent.
            ShapeError, DtypeError, InvalidArgumentError: the received message does not fit ``out``,
                as in :meth:`recv`.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: the call was interrupted. ``x``
                may or may not have arrived, ``out`` may hold part of the message, and the
                communicator is broken.

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
        set, and arrays, nested to any depth.

        Args:
            obj: the object at the root; ignored on the other ranks.
            root: rank whose object is broadcast.
            pickle: if true, send any object as a pickle. The sender *and* the receiver must pass
                it, because reading a pickle runs code that its writer chose. The call refuses it
                if ranks of several hosts have connected without a secret: strangers may have
                joined.
            timeout: deadline in seconds; by default the communicator's timeout.

        Returns:
            At the root, ``obj`` itself; on the other ranks, a copy. Without ``pickle``, arrays
            arrive as plain arrays (see the class), and arrays on GPUs, or of frameworks that this
            library does not know, as NumPy arrays. If ``obj`` contains other arrays, the root gets
            a copy, too.
        """
        objects = self._objects("broadcast_object", pickle)
        return objects.broadcast(obj, root, timeout)

    @explained
    def gather_object(
        self, obj: Any, *, root: int = 0, pickle: bool = False, timeout: float | None = None
    ) -> list[Any] | None:
        """Give ``root`` the list of the ranks' objects, in rank order; return None on other ranks.

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
        """Give each rank its item of the sequence that ``root`` passes.

        Collective: every rank calls it, with one root.

        Args:
            objs: at the root, one object for each rank; ignored on the other ranks.
            root, pickle, timeout: as in :meth:`broadcast_object`.

        Raises:
            InvalidArgumentError: at the root, the length of the sequence is not the number of
                ranks. Nothing is sent, and the other ranks keep waiting for a correct call.
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
        """Send an object to rank ``dst``, which must call :meth:`recv_object`.

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
            The object; None if ``src`` is ``collective.NULL``.

        Raises:
            InvalidArgumentError: the sender passed ``pickle=True`` and this call did not, or sent
                an array by :meth:`send`. The message is lost and was not read.
            CollectiveError: the object cannot be unpickled; the text names the sender.
        """
        return self._objects("recv_object", pickle).recv(src, tag, timeout)

    def _objects(self, operation: str, pickle: bool) -> ObjectCalls:
        return ObjectCalls(self._path, operation, pickle, self.inner.open_to_others)

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

        On ``shm`` every rank can access the other ranks' parts: collectives on such arrays, and on
        contiguous views of them, move each byte once. On ``nccl`` it is GPU memory registered with
        NCCL, if the NCCL version supports registration. On other transports it is ordinary memory.
        The memory is freed when the last rank has dropped its array.

        Collective: every rank calls it, with one shape and dtype.

        Args:
            shape: shape of the array.
            dtype: name (``"bfloat16"``), or a NumPy or PyTorch dtype.
            like: framework of the array: its name, or an array of it; by default NumPy. On a
                transport that takes arrays on the CPU and on GPUs, an array on a GPU or ``"cuda"``
                requests GPU memory.

        Raises:
            AllocationError: some rank does not have enough memory; raised on every rank.
            UnsupportedError: GPU memory was requested, and the transport cannot share GPU memory.
            MismatchError: shapes or dtypes differ.

        See Also:
            MPI_Win_allocate_shared, ncclMemAlloc.
        """
        return self._path.make(Empty(self._path, shape, dtype, like), None, False)

    # -- groups ---------------------------------------------------------------------------

    @explained
    def group(self, ranks: Sequence[int]) -> Self:
        """Return a communicator among ``ranks``, which become 0, 1, … in that order.

        Collective among ``ranks`` only: the other ranks do not call it and are not affected.

        Args:
            ranks: distinct ranks that include this rank, in the same order on every member.

        Raises:
            RankError: a rank is outside the communicator or listed twice, or this rank is missing.
            MismatchError: a member names other ranks, or the same ranks in another order.
            AllocationError: a member does not have enough file descriptors left; raised on every
                member.
            CollectiveTimeoutError: a member did not call it.

        See Also:
            MPI_Comm_create_group.
        """
        return groups.group(self, ranks)

    @overload
    def split(self, color: int | Literal["host"], key: int = 0) -> Self: ...

    @overload
    def split(self, color: None, key: int = 0) -> None: ...

    @overload
    def split(self, color: int | Literal["host"] | None, key: int = 0) -> Self | None: ...

    @explained
    def split(self, color: int | Literal["host"] | None, key: int = 0) -> Self | None:
        """Split the ranks by colour: return the communicator of the ranks with this rank's colour.

        Collective: every rank calls it.

        Args:
            color: integer; ranks with the same colour form one communicator. With None, this rank
                joins no communicator. With ``"host"``, on every rank, the ranks of each host form
                one communicator.
            key: integer that orders the ranks of one colour; equal keys are ordered by rank.

        Returns:
            The new communicator, or None if ``color`` is None.

        See Also:
            MPI_Comm_split, MPI_Comm_split_type.
        """
        return groups.split(self, color, key)

    @explained
    def dup(self) -> Self:
        """Return a new communicator of the same ranks, whose calls never mix with this one's calls.

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
        """Return the ranks as points of a grid, with this rank's coordinates and neighbours.

        The call sends nothing, so ranks that pass different shapes get different grids.

        Args:
            shape: number of ranks along each axis. A length of None or -1 is computed. Several
                computed lengths are as close to each other as possible, the larger first:
                ``(None, None)`` is 3 by 2 for six ranks.
            periodic: whether the last rank of an axis is next to the first: one bool for all axes,
                or one for each axis.

        Raises:
            InvalidArgumentError: the number of points in the grid is not the number of ranks.

        See Also:
            MPI_Cart_create, MPI_Dims_create.
        """
        return Grid(self, shape, periodic)

    # -- generations ----------------------------------------------------------------------

    @property
    def membership(self) -> Membership:
        """Generation of this communicator, and which ranks are lost or wait to join."""
        return Membership(self)

    @explained
    def shrink(
        self,
        *,
        exclude: Sequence[int] = (),
        min_ranks: int | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Return a communicator of the surviving ranks, after a loss or at any time.

        Collective among the survivors: every rank that lives calls it, after a call of this
        communicator has raised ``PeerLostError`` or any other error that breaks the communicator.
        If the communicator is still sound, ``shrink`` breaks it first: then calls of ranks that
        have not called ``shrink`` raise ``CommunicatorAbortedError``, whose text asks them to.

        The surviving ranks keep their order. They continue without ranks that have died or left.
        They also continue without ranks that are silent for ``COLLECTIVE_SHRINK_GRACE`` seconds
        (5), or for a quarter of ``timeout`` if that is less. If a rank dies meanwhile, the other
        ranks decide again.

        Afterwards this communicator and the groups made from it are closed. Each rank keeps its own
        part of the symmetric memory, unchanged.

        Args:
            exclude: ranks to leave out, alive or not; their calls raise ``ExcludedError``.
            min_ranks: minimum number of ranks to continue with; by default
                ``COLLECTIVE_MIN_RANKS`` (1).
            timeout: deadline in seconds for the whole call; by default
                :attr:`Membership.shrink_timeout`.

        Returns:
            The communicator of the next generation. Only lost, silent and excluded ranks are
            missing from it.

        Raises:
            ExcludedError: the other ranks continued without this rank.
            PeerLostError: fewer than ``min_ranks`` ranks remain; raised on all of them.
            CollectiveTimeoutError: the ranks did not agree in time; names the missing ranks.
            RendezvousError: the store in which the ranks met is gone.
            UnsupportedError: this transport or that store does not support it.
            RankError: ``exclude`` names this rank, or a rank that does not exist.

        See Also:
            MPIX_Comm_shrink, ncclCommShrink.
        """
        absent = [self._path.check_rank("shrink", "exclude", rank) for rank in exclude]
        usual = self.membership.shrink_timeout
        deadline = Deadline(usual if timeout is None else self._path.check_timeout(timeout))
        backend, lineage = changes.shrink(self, absent, min_ranks, deadline)
        return groups.succeed(self, backend, lineage, deadline)

    @explained
    def grow(self, *, timeout: float | None = None) -> Self:
        """Return a communicator of these ranks and of all processes that wait to join.

        The present ranks keep their order and come first. Ranks that have died meanwhile are not in
        it; ``membership.lost`` of the new communicator names them. If no process waits, the same
        ranks form a new generation. If a rank has met a loss and calls :meth:`shrink` instead, all
        ranks shrink: no process is let in, and waiting processes keep waiting.

        A waiting process (``membership.joins``) calls ``grow``, too, on its communicator of one
        rank.

        Collective: every rank calls it, at the same point of the program, after its background
        calls have completed. Unlike :meth:`shrink`, it waits for a rank that lives and is silent,
        as long as the communicator is whole. If that rank does not call it in time, the
        communicator breaks. Afterwards this communicator and the groups made from it are closed.

        Args:
            timeout: deadline in seconds for the whole call, by default the communicator's timeout.
                On a waiting process, the time until it is let in counts, too.

        Raises:
            CollectiveTimeoutError: a rank did not call it; on a waiting process: no rank let it in.
            ExcludedError: the other ranks continued without this rank; on a waiting process: the
                ranks have ended.
            PeerLostError: fewer than ``COLLECTIVE_MIN_RANKS`` ranks remain.
            RendezvousError: the store in which the ranks met is gone.
            UnsupportedError: processes cannot join over this transport, or cannot join a group.

        See Also:
            ncclCommGrow.
        """
        deadline = Deadline(self._path.check_timeout(timeout))
        backend, lineage = changes.grow(self, deadline)
        return groups.succeed(self, backend, lineage, deadline)

    # -- hooks ------------------------------------------------------------------------------

    def hook(
        self,
        before: Callable[[CallEvent], object] | None = None,
        after: Callable[[CallEvent, BaseException | None], object] | None = None,
    ) -> Callable[[], None]:
        """Register functions that are called around every call that reaches the transport.

        Hooks are for a program's own accounting: how many bytes, how long, how often. They run in
        the thread that makes the call; with ``async_op=True`` that is a background thread. Hooks
        must not make calls themselves. Groups made from this communicator have their own hooks.

        If a hook raises an exception of any class, the call raises it on this rank, and the
        communicator breaks. The other ranks raise ``PeerFailedError`` with its traceback: in the
        same call if ``before`` raised it, else in the same call or the next one. If the call
        failed, too, its error is the ``__context__`` of the error of ``after``.

        Args:
            before: function of the call, called as the call begins.
            after: function of the call and the exception that it raised, or None. It is not called
                if ``before`` raised.

        Returns:
            A function that removes the hook.
        """
        hook = Hook(before, after)
        self._path.listen(hook)
        return lambda: self._path.forget(hook)

    # -- properties -----------------------------------------------------------------------

    @property
    def timeout(self) -> float:
        """Seconds that a call may take if it passes no ``timeout``; a positive number."""
        return self._path.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._path.timeout = self._path.positive(seconds)
        self._path.open_doors()  # C has copied the timeout of unlocked calls

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._path.closed

    # -- the end --------------------------------------------------------------------------

    def abort(self, reason: str = "aborted") -> None:
        """Break this communicator and the groups made from it, for every rank, at once.

        Waiting calls and all later calls raise ``CommunicatorAbortedError`` with the reason. Any
        thread may call this method.
        """
        if self.inner.foreign:
            raise CommunicatorClosedError(f"abort: {self.inner.foreign}")
        self.inner.fail(Failure("aborted", self.rank, f"rank {self.rank} aborted: {reason}"))

    def close(self) -> None:
        """Close the communicator and the groups made from it.

        The method waits for this rank's own background calls, but not for other ranks. A call in
        which another thread of this rank waits raises ``CommunicatorClosedError`` at once. A second
        close does nothing; any other use afterwards raises ``CommunicatorClosedError``.
        """
        self.inner.close(Deadline(self.timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self.inner.fail(error)
        self.close()

    def __copy__(self) -> Self:
        """Return another communicator object that uses the same connections."""
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        twin._path = self._path  # a member in C
        return twin

    def __deepcopy__(self, memo: object) -> Self:
        """Return the communicator itself: a copied object must keep talking to the same ranks."""
        return self
