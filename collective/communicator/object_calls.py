"""The calls that carry Python objects instead of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.contract.secret import REMEDY
from collective.errors import InvalidArgumentError

from . import objects
from .broadcasting import Broadcasting
from .foreign_names import explained
from .gathering import Gathering
from .point_to_point import MessageCalls
from .scattering import Scattering

__all__ = ["ObjectCalls"]


class ObjectCalls(Broadcasting, Scattering, Gathering, MessageCalls):
    """The part of a communicator for objects.

    By default an object is plain data: None, bool, int, float, complex, str, bytes, list,
    tuple, dict, set, and arrays, nested at will. ``pickle=True`` carries anything, and has
    to be given by sender *and* receiver: reading a pickle runs code that its writer chose.
    Where ranks of several hosts have met without a secret it is refused: others may have
    joined.
    """

    # Whether others may have: collective.contract.world.World.open.
    _open = False

    @explained
    def broadcast_object(
        self, obj: Any, *, root: int = 0, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Give every rank the object of ``root``.

        Collective: every rank calls it, with one root.

        Args:
            obj: the object at the root; ignored elsewhere.
            root: the rank whose object it is.
            pickle: see the class.
            timeout: seconds; the communicator's by default.

        Returns:
            At the root ``obj`` itself, elsewhere a copy; at the root a copy, too, if ``obj`` has
            arrays that arrive as NumPy's: of GPUs, or of frameworks that are unknown here.
        """
        self._check_pickle("broadcast_object", pickle)
        mine = objects.encode(obj, pickle) if self.rank == root else None
        raw = self._hosted().broadcast(mine, root=root, timeout=timeout)
        if self.rank == root and (pickle or objects.arrives_alike(obj)):
            return obj
        return objects.decode(raw, pickle)

    @explained
    def gather_object(
        self, obj: Any, *, root: int = 0, pickle: bool = False, timeout: float | None = None
    ) -> list[Any] | None:
        """Give ``root`` the list of the ranks' objects, in rank order; None elsewhere.

        Collective: every rank calls it, with one root. Args as in :meth:`broadcast_object`.
        """
        self._check_pickle("gather_object", pickle)
        raw = objects.encode(obj, pickle)
        joined = self._hosted().gather(_framed(raw), root=root, timeout=timeout)
        return None if joined is None else _unframed(joined, self.size, pickle)

    @explained
    def all_gather_object(
        self, obj: Any, *, pickle: bool = False, timeout: float | None = None
    ) -> list[Any]:
        """Give every rank the list of the ranks' objects, in rank order.

        Collective: every rank calls it. Args as in :meth:`broadcast_object`.
        """
        self._check_pickle("all_gather_object", pickle)
        raw = objects.encode(obj, pickle)
        return _unframed(
            self._hosted().all_gather(_framed(raw), timeout=timeout), self.size, pickle
        )

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
        self._check_pickle("scatter_object", pickle)
        joined, counts = None, None
        if self.rank == root:
            if objs is None or len(objs) != self.size:
                found = None if objs is None else len(objs)
                raise InvalidArgumentError(
                    f"scatter_object: {found} objects for {self.size} ranks {self._who}."
                )
            encoded = [objects.encode(obj, pickle) for obj in objs]
            counts = [raw.size for raw in encoded]
            joined = np.concatenate(encoded)
        raw = self._hosted().scatter(joined, root=root, counts=counts, timeout=timeout)
        return objects.decode(raw, pickle)

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
            pickle: see the class.
        """
        self._check_pickle("send_object", pickle)
        self._hosted().send(objects.encode(obj, pickle), dst, tag=tag, timeout=timeout)

    @explained
    def recv_object(
        self, src: int, *, tag: int = 0, pickle: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive an object that rank ``src`` sent with :meth:`send_object`.

        Args:
            src, tag, timeout: as in :meth:`recv`.
            pickle: see the class.

        Returns:
            The object; None where ``src`` is ``collective.NULL``.

        Raises:
            InvalidArgumentError: the sender used pickle and this call does not; the message
                is gone and was not read.
        """
        self._check_pickle("recv_object", pickle)
        raw = self._hosted().recv(None, src, tag=tag, timeout=timeout)
        return None if raw is None else objects.decode(raw, pickle)

    def _check_pickle(self, operation: str, pickle: bool) -> None:
        if pickle and self._open:
            raise InvalidArgumentError(
                f"{operation}: pickle=True, and the hosts have met without a secret: whoever "
                f"reaches the port may have joined, and a pickle runs its writer's code "
                f"{self._who}. {REMEDY}; or send plain data."
            )


def _framed(raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Put the length before the bytes: what is gathered does not tell where ranks part."""
    return np.concatenate([np.array([raw.size], np.int64).view(np.uint8), raw])


def _unframed(joined: np.ndarray[Any, Any], size: int, pickle: bool) -> list[Any]:
    found, at = [], 0
    for _ in range(size):
        length = int(joined[at : at + 8].copy().view(np.int64)[0])
        found.append(objects.decode(joined[at + 8 : at + 8 + length], pickle))
        at += 8 + length
    return found
