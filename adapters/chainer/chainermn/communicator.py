"""ChainerMN communicator over any transport."""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any, NoReturn

import chainer
import numpy as np
from chainermn.communicators.communicator_base import CommunicatorBase

from collective import Communicator, InvalidArgumentError, MismatchError
from collective.inner import Framework, call_in_place

from . import arrays as messages
from .gradients import PackedGradients
from .objects import ANY_TAG, OBJECT_TAG, Mailbox, MpiComm

#: Communicators of this process that are not finalized.
opened: weakref.WeakSet[CollectiveCommunicator] = weakref.WeakSet()


class CollectiveCommunicator(CommunicatorBase):  # type: ignore[misc]  # Chainer has no types
    """ChainerMN communicator over a :class:`collective.Communicator`.

    The calls and their arguments are those of ChainerMN: arrays of NumPy and CuPy of int32, int64,
    float16, float32 or float64, whose shapes may differ from rank to rank. Results are arrays of
    the kind that was sent. All ranks of ``comm`` make it.

    Args:
        comm: communicator that connects the ranks.
        allreduce_grad_dtype: dtype in which gradients are reduced; by default their own.
        pickle: whether objects may need pickle to be sent, as datasets do. Reading a pickle runs
            code that its writer chose. False refuses such objects, and allows only plain data and
            arrays.
        mpi_comm: ``MPI.Comm`` of the same ranks, if there is one.
        own: whether :meth:`finalize` closes ``comm``.

    Attributes:
        comm: communicator of ``collective`` that this one uses.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        allreduce_grad_dtype: Any = None,
        pickle: bool = True,
        mpi_comm: Any = None,
        own: bool = False,
    ) -> None:
        super().__init__()
        # Chainer's attribute belongs to the class, and all communicators would share it.
        self._configs: dict[str, Any] = {}
        self.comm = comm
        self._mpi_comm = mpi_comm
        self._own = own
        self._mailbox = Mailbox(comm, self._configs)
        self._packed: weakref.WeakKeyDictionary[chainer.Link, PackedGradients] = (
            weakref.WeakKeyDictionary()
        )
        self.set_config("allreduce_grad_dtype", allreduce_grad_dtype)
        self.set_config("pickle", pickle)
        self.set_config("batched_copy", True)
        every = comm.all_gather_object((comm.host, bool(chainer.backends.cuda.available)))
        hosts = list(dict.fromkeys(host for host, _ in every))
        self._inter_rank, self._inter_size = hosts.index(comm.host), len(hosts)
        # If no rank has a GPU, the root need not send where its array is.
        self._gpus = any(gpu for _, gpu in every)
        opened.add(self)

    def __repr__(self) -> str:
        return f"<CollectiveCommunicator over {self.comm!r}>"

    def __setattr__(self, name: str, value: Any) -> None:
        # Chainer's method would also record its own flag, whether it is inside the scope, as a
        # setting.
        if self.within_config_scope and not name.startswith("_"):
            self._configs[name] = value
        object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveCommunicator:
        # A copy of a model communicates with the same ranks as the model.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "CollectiveCommunicator: it cannot be pickled, because it holds connections of this "
            "process. Make a communicator in the other process, or remove it from the object that "
            "is pickled."
        )

    # -- ranks ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def intra_rank(self) -> int:
        return self.comm.local_rank

    @property
    def intra_size(self) -> int:
        return self.comm.local_size

    @property
    def inter_rank(self) -> int:
        return self._inter_rank

    @property
    def inter_size(self) -> int:
        return self._inter_size

    @property
    def mpi_comm(self) -> Any:
        """``MPI.Comm`` that this communicator was made of, or else a replacement for one."""
        return MpiComm(self._mailbox) if self._mpi_comm is None else self._mpi_comm

    # -- configuration --------------------------------------------------------------------

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Set ``allreduce_grad_dtype``, ``pickle`` or ``batched_copy`` (which has no effect).

        Raises:
            ValueError: the setting does not exist, or cannot have this value.
        """
        if kwargs:
            raise InvalidArgumentError(f"set_config: unknown options {', '.join(sorted(kwargs))}.")
        if name == "allreduce_grad_dtype":
            value = None if value is None else _floating(value)
        elif name in ("pickle", "batched_copy"):
            value = bool(value)
        else:
            raise InvalidArgumentError(
                f"Unknown config: {name} (expected allreduce_grad_dtype, batched_copy or pickle)."
            )
        with self.config_scope():
            setattr(self, name, value)

    def get_config(self, name: str | None = None) -> Any:
        """Return a setting, or all of them as a dictionary."""
        if name is None:
            return dict(self._configs)
        if name not in self._configs:
            raise InvalidArgumentError(
                f"Unknown config: {name} (expected one of {', '.join(sorted(self._configs))})."
            )
        return self._configs[name]

    # -- groups and lifetime --------------------------------------------------------------

    def split(self, color: int | None, key: int) -> CollectiveCommunicator | None:
        """Split the ranks by colour; return None on a rank whose ``color`` is None.

        The new communicator takes over the present settings of this one.
        """
        comm = self.comm.split(color, key)
        if comm is None:
            return None
        part = CollectiveCommunicator(comm, own=True)
        for name, value in self._configs.items():
            with part.config_scope():
                setattr(part, name, value)
        return part

    def finalize(self) -> None:
        """Leave the ranks; idempotent. A communicator that was passed in stays open."""
        opened.discard(self)
        if self._own:
            self.comm.close()

    # -- arrays ---------------------------------------------------------------------------

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        """Send an array, or a tuple or list of arrays, to rank ``dest``."""
        if tag == OBJECT_TAG:
            raise InvalidArgumentError(f"send: tag {tag} is reserved for objects. Use another tag.")
        several = isinstance(data, (tuple, list))
        arrays = messages.checked_each("send", data if several else (data,))
        if not any(map(messages.on_gpu, arrays)):
            self.comm.send(arrays if several else arrays[0], dest, tag=tag)
            return
        # The receiver has to know that it must allocate on its GPU.
        self.comm.send({"on_gpu": np.array([several, len(arrays)])}, dest, tag=tag)
        for array in arrays:
            self.comm.send(array, dest, tag=tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """Receive an array, or a tuple of arrays, in the form in which rank ``source`` sent it."""
        received = self.comm.recv(None, source, tag=tag)
        if not isinstance(received, dict):
            return received
        several, count = received["on_gpu"]
        arrays = tuple(self.comm.recv(None, source, tag=tag, like="cupy") for _ in range(count))
        return arrays if several else arrays[0]

    def bcast(self, x: Any, root: int = 0) -> Any:
        """Return the array of ``root``, which is ``x`` there; other ranks' ``x`` is ignored."""
        if self.rank != root:
            return self.comm.broadcast(None, root=root, like=self._framework(None, root))
        if isinstance(x, (tuple, list)):
            raise messages.MessageTypeError("bcast: a tuple of arrays (expected one array).")
        x = messages.checked("bcast", x)
        self._framework(x, root)
        self.comm.broadcast(x, root=root)
        return x

    def _framework(self, x: Any, root: int) -> Framework | None:
        """Return the framework of arrays from the root, decided by the root's array ``x``."""
        if not self._gpus:
            return None
        mine = x is not None and messages.on_gpu(x)
        return "cupy" if self.comm.broadcast_object(mine, root=root) else "numpy"

    def gather(self, x: Any, root: int = 0) -> tuple[Any, ...] | None:
        """Give ``root`` the ranks' arrays, whose shapes may differ; return None on other ranks."""
        x, shapes = self._exchanged("gather", x)
        counts = [described.length for described in shapes]
        joined = self.comm.gather(messages.flat([x]), root=root, counts=counts)
        return None if joined is None else messages.parted(joined, shapes)

    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Give every rank the arrays of all ranks, whose shapes may differ."""
        x, shapes = self._exchanged("allgather", x)
        counts = [described.length for described in shapes]
        joined = self.comm.all_gather(messages.flat([x]), counts=counts)
        return messages.parted(joined, shapes)

    def _exchanged(self, what: str, x: Any) -> tuple[Any, list[messages.Shape]]:
        """Return ``x`` as an array, and descriptions of all ranks' arrays."""
        x = messages.checked(what, x)
        shapes = [row[0] for row in messages.exchanged(self.comm, [x])]
        messages.agreed(what, shapes, self.comm)
        return x, shapes

    def alltoall(self, xs: Any) -> tuple[Any, ...]:
        """Send array ``j`` of ``xs`` to rank ``j``; return the received arrays, in rank order."""
        arrays = messages.checked_each("alltoall", xs, self.size)
        table = messages.exchanged(self.comm, arrays)
        messages.agreed("alltoall", [row[0] for row in table], self.comm)
        counts = [described.length for described in table[self.rank]]
        joined = self.comm.all_to_all(messages.flat(arrays), counts=counts)
        return messages.parted(joined, [row[self.rank] for row in table])

    def scatter(self, xs: Any, root: int = 0) -> Any:
        """Return array number ``rank`` of the root's tuple, or of its array cut along axis 0."""
        arrays = None
        if self.rank == root:
            if isinstance(xs, chainer.get_array_types()):
                if xs.ndim == 0:
                    raise InvalidArgumentError(
                        "scatter: an array of shape () (expected at least one dimension, because "
                        "the array is cut along axis 0)."
                    )
                xs = tuple(xs)
            arrays = messages.checked_each("scatter", xs, self.size)
        shapes = messages.from_root(self.comm, root, arrays)
        mine = self.comm.scatter(
            None if arrays is None else messages.flat(arrays),
            root=root,
            counts=[described.length for described in shapes],
            like="cupy" if shapes[0].on_gpu else "numpy",
        )
        return mine.reshape(shapes[self.rank].shape)

    def allreduce(self, x: Any) -> Any:
        """Return the sum of the ranks' arrays, which have the same shape."""
        return self.comm.all_reduce(messages.checked("allreduce", x))

    # -- objects --------------------------------------------------------------------------

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``."""
        self._mailbox.send(obj, dest, tag)

    def recv_obj(self, source: int, status: Any = None, tag: int = ANY_TAG) -> Any:
        """Receive an object from rank ``source``; by default with any tag.

        Args:
            source: sending rank; any rank if negative, on transports that support this.
            status: object whose attributes ``source`` and ``tag`` are set, as in ``MPI.Status``.
            tag: tag that the sender used; any tag if negative.
        """
        return self._mailbox.recv(source, status, tag)

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give every rank the object of ``root``, which may be None; other ranks' is ignored.

        Args:
            obj: object to send.
            max_buf_len: accepted for compatibility; has no effect, because objects of any size are
                sent in one piece.
            root: rank whose object is sent.
        """
        return self.comm.broadcast_object(obj, root=root, pickle=self._mailbox.pickle)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Give ``root`` the list of the ranks' objects; return None on other ranks."""
        return self.comm.gather_object(obj, root=root, pickle=self._mailbox.pickle)

    def allreduce_obj(self, obj: Any) -> Any:
        """Return the sum of the ranks' objects, by ``+`` in rank order."""
        every = self.comm.all_gather_object(obj, pickle=self._mailbox.pickle)
        return functools.reduce(operator.add, every)

    # -- models ---------------------------------------------------------------------------

    def bcast_data(self, model: chainer.Link) -> None:
        """Give all ranks rank 0's parameters, in place; it skips parameters without data."""
        named = sorted(model.namedparams(), key=lambda item: item[0])
        params = [param for _, param in named if param.array is not None]
        for param in params:
            if not getattr(param.array.flags, "writeable", True):
                param.array = param.array.copy()
        arrays = [param.array for param in params]
        try:
            call_in_place(functools.partial(self.comm.broadcast, arrays, root=0), arrays)
        except MismatchError as error:
            # ChainerMN's optimizer calls this if the set of parameters has changed on this rank.
            packed = self._packed.get(model)
            for change in () if packed is None else packed.changes(named):
                error.add_note(f"On this rank [{self.rank} of {self.size}] {change}.")
            raise

    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Replace the gradients of ``model`` by their means over the ranks.

        The new gradients are views of memory that the next call overwrites.

        Args:
            model: link to train, the same on all ranks.
            zero_fill: whether a gradient that is None counts as zeros. If not, it stays None,
                and has to be None on all ranks.

        Raises:
            MismatchError: the ranks' parameters differ, or different parameters have gradients.
        """
        packed = self._packed.get(model)
        if packed is None:
            packed = self._packed[model] = PackedGradients(self.comm)
        packed.begin(model, zero_fill, self.get_config("allreduce_grad_dtype"))
        packed.unpack()

    def _multi_node_mean(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write the mean of the ranks' ``sendbuf`` to ``recvbuf``; None: average ``recvbuf``."""
        source = recvbuf if sendbuf is None else sendbuf
        self.comm.all_reduce(source, op="avg", out=recvbuf)
        if chainer.is_debug():
            xp = chainer.backend.get_array_module(recvbuf)
            if not bool(xp.isfinite(recvbuf).all()):
                raise ValueError(
                    f"_multi_node_mean: the mean is not finite [rank {self.rank} of {self.size}]. "
                    "Some rank passed values that are not finite, or their sum overflows."
                )


def _floating(value: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(value)
    if dtype.kind != "f":
        raise InvalidArgumentError(
            f"allreduce_grad_dtype: got {dtype} (expected float16, float32, float64 or None)."
        )
    return dtype
