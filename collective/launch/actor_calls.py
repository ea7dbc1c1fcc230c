"""Calls of ``ray.util.collective`` as calls of a communicator, without an import of Ray.

Ray passes one array as a list of one. It passes a list of arrays as a list of one list. Every
result goes into an array of the caller.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective import Communicator, DtypeError, InvalidArgumentError, ShapeError, UnsupportedError
from collective.ops import Op

_OPS: dict[str, Op] = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}


class ActorCalls:
    """The eight calls of Ray's ``BaseGroup``, over :attr:`comm`."""

    comm: Communicator

    def allreduce(self, tensors: Sequence[Any], options: Any = None) -> None:
        """Replace the array by the fold of all ranks' arrays."""
        x = _writable(_only(tensors, "allreduce"))
        self.comm.all_reduce(x, op=_op(options), out=x)

    def barrier(self, options: Any = None) -> None:
        """Return when all ranks have called this."""
        self.comm.barrier()

    def reduce(self, tensors: Sequence[Any], options: Any = None) -> None:
        """On the root, replace the array by the fold of all ranks' arrays."""
        x, root = _writable(_only(tensors, "reduce")), getattr(options, "root_rank", 0)
        if root == self.comm.rank:
            self.comm.reduce(x, root=root, op=_op(options), out=x)
        else:
            self.comm.reduce(x, root=root, op=_op(options))

    def broadcast(self, tensors: Sequence[Any], options: Any = None) -> None:
        """Replace the array by that of the root."""
        x = _writable(_only(tensors, "broadcast"))
        self.comm.broadcast(x, root=getattr(options, "root_rank", 0), out=x)

    def allgather(
        self, tensor_lists: Sequence[Any], tensors: Sequence[Any], options: Any = None
    ) -> None:
        """Copy the array of rank n to place n of the list."""
        places, x = _only(tensor_lists, "allgather"), _only(tensors, "allgather")
        self._check("allgather", places, x)
        for place, piece in zip(places, self.comm.all_gather(x[None])):
            _assign(_writable(place), piece)

    def reducescatter(
        self, tensors: Sequence[Any], tensor_lists: Sequence[Any], options: Any = None
    ) -> None:
        """Replace the array of rank n by the fold of all ranks' arrays at place n."""
        out = _writable(_only(tensors, "reducescatter"))
        pieces = _only(tensor_lists, "reducescatter")
        self._check("reducescatter", pieces, out)
        self.comm.reduce_scatter(_stack(pieces, out), op=_op(options), out=out[None])

    def send(self, tensors: Sequence[Any], options: Any) -> None:
        """Send the array to another rank; return when it may be changed."""
        _refuse_part(options)
        self.comm.send(_only(tensors, "send"), options.dst_rank)

    def recv(self, tensors: Sequence[Any], options: Any) -> None:
        """Receive another rank's array into the array."""
        _refuse_part(options)
        self.comm.recv(_writable(_only(tensors, "recv")), options.src_rank)

    def _check(self, call: str, pieces: Sequence[Any], x: Any) -> None:
        """Check that the list has one array for each rank, each like ``x``."""
        rank, size = self.comm.rank, self.comm.size
        if len(pieces) != size:
            raise InvalidArgumentError(
                f"{call}: the list has {len(pieces)} arrays, expected one for each of {size} "
                f"ranks, on rank {rank}. Pass a list of {size} arrays."
            )
        for place, piece in enumerate(pieces):
            if tuple(piece.shape) != tuple(x.shape):
                raise ShapeError(
                    f"{call}: array {place} of the list has shape {tuple(piece.shape)}, the other "
                    f"array has {tuple(x.shape)}, on rank {rank}. Pass arrays of one shape."
                )
            if _dtype(piece) != _dtype(x):
                raise DtypeError(
                    f"{call}: array {place} of the list has dtype {_dtype(piece)}, the other array "
                    f"has {_dtype(x)}, on rank {rank}. Pass arrays of one dtype."
                )


def _only(tensors: Sequence[Any], call: str) -> Any:
    if len(tensors) != 1:
        raise UnsupportedError(
            f"{call}: got arrays for {len(tensors)} GPUs of this process, expected one array. This "
            "backend has one GPU for each process: start an actor for each GPU."
        )
    return tensors[0]


def _refuse_part(options: Any) -> None:
    if getattr(options, "n_elements", 0):
        raise UnsupportedError(
            f"send, recv: n_elements={options.n_elements} asks for a part of the array. Pass a "
            "view of that part."
        )


def _op(options: Any) -> Op:
    operator = getattr(options, "reduceOp", None)
    return "sum" if operator is None else _OPS[operator.name]


def _framework(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


class _WritableMemory:
    """Memory of an array, which NumPy may write to."""

    def __init__(self, x: np.ndarray[Any, Any]) -> None:
        interface = x.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self._array = x  # keeps the memory


def _writable(x: Any) -> Any:
    """Return ``x``, or a writable view of an array that Ray passed to the actor.

    Ray marks such an array as read-only. Its memory can be written to, and the calls of Ray's own
    backends do so. Programs rely on this.
    """
    if not isinstance(x, np.ndarray) or x.flags.writeable:
        return x
    base = x.base
    while isinstance(base, np.ndarray):
        base = base.base
    return np.asarray(_WritableMemory(x)) if type(base).__module__.startswith("ray.") else x


def _viewed(x: Any) -> Any:
    """Return a NumPy array over the memory of an array on the host."""
    return x.detach().numpy() if _framework(x) == "torch" else np.asarray(x)


def _stack(pieces: Sequence[Any], like: Any) -> Any:
    """Return the pieces as one array of the framework of ``like``; frameworks may be mixed."""
    framework = _framework(like)
    library = importlib.import_module(framework if framework in ("torch", "cupy") else "numpy")
    if any(_framework(piece) != framework for piece in pieces):
        views = [_viewed(piece) for piece in pieces]
        return library.from_numpy(np.stack(views)) if framework == "torch" else np.stack(views)
    return library.stack([*pieces])


def _assign(place: Any, piece: Any) -> None:
    """Copy ``piece`` to ``place``, of the same or another framework."""
    if _framework(place) == _framework(piece):
        place[...] = piece
    else:
        _viewed(place)[...] = _viewed(piece)
