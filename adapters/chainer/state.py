"""Replication of a link over ranks: parameters, persistent values, initial values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective.errors import MismatchError
from collective.memory.overlap import call_in_place
from collective.start.session import comm_or_current

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["broadcast_state", "distinct_parameters", "follow_root", "persistent_values"]


def distinct_parameters(link: Any) -> list[tuple[str, Any]]:
    """Return a link's parameters with their paths; each parameter once, even if links share it."""
    by_identity: dict[int, tuple[str, Any]] = {}
    for name, parameter in link.namedparams():
        by_identity.setdefault(id(parameter), (name, parameter))
    return list(by_identity.values())


def broadcast_state(
    link: Any, comm: Communicator | None = None, root: int = 0, *, persistent: bool = True
) -> None:
    """Give every rank the parameters of ``root``, and its persistent values if ``persistent``.

    Afterwards all parameters that ``root`` has initialised are initialised on all ranks.

    Collective: every rank calls it, with the same link.

    Args:
        comm: ranks that take part; None: those of the current communicator.

    Raises:
        MismatchError: the ranks' links have different parameters, or another rank has initialised
            a parameter that ``root`` has not.
    """
    comm = comm_or_current(comm, "broadcast_state")
    parameters = distinct_parameters(link)
    _compare(parameters, comm, root)
    known: list[Any] = comm.broadcast_object(
        [list(p.shape) if p.is_initialized else None for _, p in parameters], root=root
    )
    arrays = []
    for (_, parameter), shape in zip(parameters, known):
        if shape is None:
            continue
        if not parameter.is_initialized:
            bare = getattr(parameter.initializer, "bare", None)
            if bare is not None:  # root has its values already, so no rank must wait for it
                parameter.initializer = bare
            parameter.initialize(tuple(shape))
        arrays.append(parameter.array)
    if arrays:
        call_in_place(partial(comm.broadcast, arrays, root=root), arrays)
    if persistent:
        _broadcast_persistent(link, comm, root)


def _compare(parameters: list[tuple[str, Any]], comm: Communicator, root: int) -> None:
    """Check that the ranks' links are equal; every rank raises the error."""
    mine = [
        (name, list(p.shape), p.dtype.name) if p.is_initialized else (name, None, None)
        for name, p in parameters
    ]
    every: list[list[Any]] = comm.all_gather_object(mine)
    theirs = every[root]
    for rank, entries in enumerate(every):
        what = ""
        if len(entries) != len(theirs):
            what = f"{len(entries)} parameters, but rank {root} has {len(theirs)}"
        for a, b in zip(entries, theirs):
            if a[0] != b[0] or (a[1] is not None and (a[1] != b[1] or a[2] != b[2])):
                what = f"{_described(a)}, but rank {root} has {_described(b)}"
                break
        if what:
            raise MismatchError(
                f"broadcast_state: the ranks' links differ: rank {rank} has {what} "
                f"[rank {comm.rank} of {comm.size}]. Make the same link on every rank, and load it "
                f"on rank {root} or on all ranks."
            )


def _described(entry: Any) -> str:
    name, shape, dtype = entry
    return f"{name} not initialised" if shape is None else f"{name} {dtype}{list(shape)}"


def persistent_values(link: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the path, the link and the attribute's name of each persistent value."""
    for path, child in link.namedlinks():
        for name in sorted(child._persistent):
            yield f"{path}/{name}", child, name


def _broadcast_persistent(link: Any, comm: Communicator, root: int) -> None:
    """Give every rank the persistent values of ``root``: statistics and counts, which are small."""
    host = chainer.get_device("@numpy")
    mine = {}
    for path, child, name in persistent_values(link):
        value = child.__dict__[name]
        mine[path] = host.send(value) if isinstance(value, chainer.get_array_types()) else value
    theirs = comm.broadcast_object(mine if comm.rank == root else None, root=root)
    if comm.rank == root:
        return
    for path, child, name in persistent_values(link):
        if path not in theirs:
            continue
        value, here = theirs[path], child.__dict__[name]
        if isinstance(value, np.ndarray):
            value = child.device.send(value)
            if isinstance(here, chainer.get_array_types()) and here.shape == value.shape:
                here[...] = value
                continue
        child.__dict__[name] = value


class _FromRoot:
    """Initializer that gives all ranks the values that rank 0 has drawn.

    Collective: all ranks call it, for the parameters in the same order.

    Attributes:
        bare: the parameter's original initializer, which replaces this one after the call.
    """

    def __init__(self, parameter: Any, comm: Communicator) -> None:
        self.bare = parameter.initializer
        self._parameter = parameter
        self._comm = comm

    def __call__(self, array: Any) -> None:
        self.bare(array)
        self._parameter.initializer = self.bare
        self._comm.broadcast(array, out=array)

    def __getattr__(self, name: str) -> Any:  # for dtype, which not all initializers have
        if name in ("bare", "_parameter", "_comm") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.bare, name)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.bare  # a copy of the link is not replicated

    def __reduce__(self) -> Any:
        return _itself, (self.bare,)


def _itself(initializer: Any) -> Any:
    return initializer


def follow_root(link: Any, comm: Communicator) -> None:
    """Make parameters that are not initialised yet take rank 0's values at initialisation.

    Collective: every rank calls it, and later initialises the parameters in the same order.
    """
    for _, parameter in distinct_parameters(link):
        if parameter.is_initialized:
            continue
        if isinstance(parameter.initializer, _FromRoot):  # of an earlier communicator
            parameter.initializer = parameter.initializer.bare
        parameter.initializer = _FromRoot(parameter, comm)
