"""A ChainerMN communicator over any transport."""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any, NoReturn

import chainer
import numpy as np
from chainermn.communicators.communicator_base import CommunicatorBase

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.memory.annotations import Framework
from collective.memory.overlap import call_in_place

from . import arrays as messages
from .gradients import PackedGradients
from .objects import ANY_TAG, OBJECT_TAG, Mailbox, MpiComm

__all__ = ["CollectiveCommunicator", "opened"]

#: The communicators of this process that are not finalized.
opened: weakref.WeakSet[CollectiveCommunicator] = weakref.WeakSet()


class CollectiveCommunicator(CommunicatorBase):  # type: ignore[misc]  # Chainer has no types
    """What ChainerMN's programs call, over a :class:`collective.Communicator`.

    Calls are ChainerMN's, and so is what they take: arrays of NumPy and CuPy of int32, int64,
    float16, float32 or float64, whose shapes may differ from rank to rank. Results are arrays
    of the kind that was sent. Made by all ranks of ``comm``.

    Args:
        comm: connects the ranks.
        allreduce_grad_dtype: the type in which gradients are reduced; by default their own.
        pickle: whether objects may be what only pickle can carry, as datasets are. Reading a
            pickle runs code that its writer chose: False refuses them, and carries plain data
            and arrays alone.
        mpi_comm: the ``MPI.Comm`` whose ranks they are, if there is one.
        own: whether :meth:`finalize` closes ``comm``.

    Attributes:
        comm: the communicator below.
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
        # Chainer's own is of the class: all communicators would share it.
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
        # Without GPUs nobody has to ask where the root's array is.
        self._gpus = any(gpu for _, gpu in every)
        opened.add(self)

    def __repr__(self) -> str:
        return f"<CollectiveCommunicator over {self.comm!r}>"

    def __setattr__(self, name: str, value: Any) -> None:
        # Chainer's own takes the flag that tells whether it is inside for a setting as well.
        if self.within_config_scope and not name.startswith("_"):
            self._configs[name] = value
        object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> CollectiveCommunicator:
        # A copy of a model talks to the ranks that the model talks to.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "CollectiveCommunicator: it cannot be pickled, as it connects this process. Make one "
            "in the other process, or leave it out of what is sent."
        )

    # -- who ------------------------------------------------------------------------------

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
        """The ``MPI.Comm`` that this was made of, or else what stands for one."""
        return MpiComm(self._mailbox) if self._mpi_comm is None else self._mpi_comm

    # -- configuration --------------------------------------------------------------------

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Set ``allreduce_grad_dtype``, ``pickle`` or ``batched_copy`` (which changes nothing).

        Raises:
            ValueError: there is no such setting, or it cannot have that value.
        """
        if kwargs:
            raise InvalidArgumentError(f"set_config: unknown options {', '.join(sorted(kwargs))}.")
        if name == "allreduce_grad_dtype":
            value = None if value is None else _floating(value)
        elif name in ("pickle", "batched_copy"):
            value = bool(value)
        else:
            raise InvalidArgumentError(
                f"Unknown config: {name}; allreduce_grad_dtype, batched_copy, pickle."
            )
        with self.config_scope():
            setattr(self, name, value)

    def get_config(self, name: str | None = None) -> Any:
        """Return a setting, or all of them as a dictionary."""
        if name is None:
            return dict(self._configs)
        if name not in self._configs:
            raise InvalidArgumentError(
                f"Unknown config: {name}; {', '.join(sorted(self._configs))}."
            )
        return self._configs[name]

    # -- groups and life ------------------------------------------------------------------

    def split(self, color: int | None, key: int) -> CollectiveCommunicator | None:
        """Part the ranks by colour; None for a rank whose ``color`` is None.

        The new communicator has the settings of this one as they are now.
        """
        comm = self.comm.split(color, key)
        if comm is None:
            return None
        made = CollectiveCommunicator(comm, own=True)
        for name, value in self._configs.items():
            with made.config_scope():
                setattr(made, name, value)
        return made

    def finalize(self) -> None:
        """Leave the ranks; a second time does nothing. A communicator that was given stays open."""
        opened.discard(self)
        if self._own:
            self.comm.close()

    # -- arrays ---------------------------------------------------------------------------

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        """Send an array, or a tuple or list of arrays, to rank ``dest``."""
        if tag == OBJECT_TAG:
            raise InvalidArgumentError(f"send: tag {tag}; objects have that one. Take another.")
        several = isinstance(data, (tuple, list))
        arrays = messages.checked_each("send", data if several else (data,))
        if not any(map(messages.on_gpu, arrays)):
            self.comm.send(arrays if several else arrays[0], dest, tag=tag)
            return
        # The receiver has to know that it is to allocate on its GPU.
        self.comm.send({"on_gpu": np.array([several, len(arrays)])}, dest, tag=tag)
        for array in arrays:
            self.comm.send(array, dest, tag=tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """Receive an array, or a tuple of arrays, as rank ``source`` has sent them."""
        received = self.comm.recv(None, source, tag=tag)
        if not isinstance(received, dict):
            return received
        several, count = received["on_gpu"]
        arrays = tuple(self.comm.recv(None, source, tag=tag, like="cupy") for _ in range(count))
        return arrays if several else arrays[0]

    def bcast(self, x: Any, root: int = 0) -> Any:
        """Give every rank the array of ``root``; there ``x`` itself, elsewhere ``x`` is ignored."""
        if self.rank != root:
            return self.comm.broadcast(None, root=root, like=self._framework(None, root))
        if isinstance(x, (tuple, list)):
            raise messages.MessageTypeError("bcast: a tuple of arrays; one array.")
        x = messages.checked("bcast", x)
        self._framework(x, root)
        return self.comm.broadcast(x, root=root)

    def _framework(self, x: Any, root: int) -> Framework | None:
        """Return what arrays from the root are to be like: ``x``, which it alone has."""
        if not self._gpus:
            return None
        mine = x is not None and messages.on_gpu(x)
        return "cupy" if self.comm.broadcast_object(mine, root=root) else "numpy"

    def gather(self, x: Any, root: int = 0) -> tuple[Any, ...] | None:
        """Give ``root`` the ranks' arrays, whose shapes may differ; None elsewhere."""
        x, shapes = self._exchanged("gather", x)
        counts = [each.length for each in shapes]
        joined = self.comm.gather(messages.flat([x]), root=root, counts=counts)
        return None if joined is None else messages.parted(joined, shapes)

    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Give every rank all ranks' arrays, whose shapes may differ."""
        x, shapes = self._exchanged("allgather", x)
        counts = [each.length for each in shapes]
        joined = self.comm.all_gather(messages.flat([x]), counts=counts)
        return messages.parted(joined, shapes)

    def _exchanged(self, what: str, x: Any) -> tuple[Any, list[messages.Shape]]:
        """Return ``x`` as an array, and what array each rank has."""
        x = messages.checked(what, x)
        shapes = [each[0] for each in messages.exchanged(self.comm, [x])]
        messages.agreed(what, shapes, self.comm)
        return x, shapes

    def alltoall(self, xs: Any) -> tuple[Any, ...]:
        """Send array ``j`` of ``xs`` to rank ``j``; return those for this rank, in rank order."""
        arrays = messages.checked_each("alltoall", xs, self.size)
        table = messages.exchanged(self.comm, arrays)
        messages.agreed("alltoall", [each[0] for each in table], self.comm)
        counts = [each.length for each in table[self.rank]]
        joined = self.comm.all_to_all(messages.flat(arrays), counts=counts)
        return messages.parted(joined, [each[self.rank] for each in table])

    def scatter(self, xs: Any, root: int = 0) -> Any:
        """Return array number ``rank`` of those that the root has: a tuple, or cut at axis 0."""
        arrays = None
        if self.rank == root:
            if isinstance(xs, chainer.get_array_types()):
                if xs.ndim == 0:
                    raise InvalidArgumentError("scatter: an array of shape (); cut at axis 0.")
                xs = tuple(xs)
            arrays = messages.checked_each("scatter", xs, self.size)
        shapes = messages.from_root(self.comm, root, arrays)
        mine = self.comm.scatter(
            None if arrays is None else messages.flat(arrays),
            root=root,
            counts=[each.length for each in shapes],
            like="cupy" if shapes[0].on_gpu else "numpy",
        )
        return mine.reshape(shapes[self.rank].shape)

    def allreduce(self, x: Any) -> Any:
        """Return the sum of the ranks' arrays, which are of one shape."""
        return self.comm.all_reduce(messages.checked("allreduce", x))

    # -- objects --------------------------------------------------------------------------

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``."""
        self._mailbox.send(obj, dest, tag)

    def recv_obj(self, source: int, status: Any = None, tag: int = ANY_TAG) -> Any:
        """Receive an object from rank ``source``, with any tag unless it is said.

        Args:
            source: a rank; any if it is negative, on transports that can.
            status: gets the attributes ``source`` and ``tag``, as an ``MPI.Status`` has them.
            tag: the sender's; any if it is negative.
        """
        return self._mailbox.recv(source, status, tag)

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give every rank the object of ``root``, which may be None; elsewhere it is ignored.

        Args:
            obj: the object.
            max_buf_len: of no meaning here: there is no limit that would need pieces.
            root: the rank whose object it is.
        """
        return self.comm.broadcast_object(obj, root=root, pickle=self._mailbox.pickle)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Give ``root`` the list of the ranks' objects; None elsewhere."""
        return self.comm.gather_object(obj, root=root, pickle=self._mailbox.pickle)

    def allreduce_obj(self, obj: Any) -> Any:
        """Return the sum, by ``+`` in rank order, of the ranks' objects."""
        every = self.comm.all_gather_object(obj, pickle=self._mailbox.pickle)
        return functools.reduce(operator.add, every)

    # -- models ---------------------------------------------------------------------------

    def bcast_data(self, model: chainer.Link) -> None:
        """Give all ranks the parameters of rank 0, in place; those without data are left out."""
        named = sorted(model.namedparams(), key=lambda item: item[0])
        params = [param for _, param in named if param.array is not None]
        for param in params:
            if not getattr(param.array.flags, "writeable", True):
                param.array = param.array.copy()
        arrays = [param.array for param in params]
        call_in_place(functools.partial(self.comm.broadcast, arrays, root=0), arrays)

    def multi_node_mean_grad(self, model: chainer.Link, zero_fill: bool = False) -> None:
        """Replace the gradients of ``model`` by their means over the ranks.

        The new ones lie in memory that the next call writes to.

        Args:
            model: the same on all ranks.
            zero_fill: whether a gradient that is None counts as zeros. If not, it stays None,
                and has to be None on all ranks.

        Raises:
            MismatchError: the ranks' parameters differ, or which of them have gradients.
        """
        packed = self._packed.get(model)
        if packed is None:
            packed = self._packed[model] = PackedGradients(self.comm)
        packed.begin(model, zero_fill, self.get_config("allreduce_grad_dtype"))
        packed.unpack()

    def _multi_node_mean(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write the mean of the ranks' ``sendbuf``, or of ``recvbuf`` if it is None, to that."""
        given = recvbuf if sendbuf is None else sendbuf
        self.comm.all_reduce(given, op="avg", out=recvbuf)
        if chainer.is_debug():
            xp = chainer.backend.get_array_module(recvbuf)
            if not bool(xp.isfinite(recvbuf).all()):
                raise ValueError(
                    f"_multi_node_mean: the mean is not finite [rank {self.rank} of {self.size}]; "
                    "what some rank passed is not."
                )


def _floating(value: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(value)
    if dtype.kind != "f":
        raise InvalidArgumentError(
            f"allreduce_grad_dtype: {dtype}; float16, float32, float64 or None."
        )
    return dtype
