"""The transports by name. Nothing is imported before it is used."""

from __future__ import annotations

import difflib
import importlib.util
from importlib import metadata
from typing import NamedTuple

from collective.errors import BackendNotFoundError, BackendUnavailableError
from collective.install import hint

from .backend import Backend

__all__ = ["BUILT_IN", "ENTRY_POINTS", "Registered", "find", "names", "require"]

#: Third parties register under this entry-point group: name -> "module:Class".
ENTRY_POINTS = "collective.backends"


class Registered(NamedTuple):
    """A transport that is known by its name.

    Attributes:
        path: where it is, ``module:Class``.
        install: the command that installs what it needs.
        stands_on: packages, of which it needs one.
    """

    path: str
    install: str
    stands_on: tuple[str, ...] = ()


BUILT_IN: dict[str, Registered] = {
    "gloo": Registered("collective.backends.gloo:GlooBackend", hint("torch"), ("torch",)),
    "hierarchical": Registered(
        "collective.backends.hierarchical:HierarchicalBackend", hint("torch"), ("torch", "mpi4py")
    ),
    "mpi": Registered("collective.backends.mpi:MpiBackend", hint("mpi"), ("mpi4py",)),
    "nccl": Registered("collective.backends.nccl:NcclBackend", hint("nccl")),
    "shm": Registered("collective.backends.shm:ShmBackend", hint()),
    "threads": Registered("collective.backends.threads:ThreadsBackend", hint()),
}


def names() -> list[str]:
    """Return the names of all transports, built-in and third parties', sorted."""
    return sorted({*BUILT_IN, *(point.name for point in _entry_points())})


def find(name: str) -> type[Backend]:
    """Return the transport called ``name``, or at ``module:Class``.

    A third party's entry point cannot take the name of a built-in one.

    Raises:
        BackendNotFoundError: no such transport; lists the known ones.
        BackendUnavailableError: it cannot be imported; carries the install command.
    """
    entry = _entry(name)
    module, _, attribute = entry.path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = f" Try `{entry.install}`." if entry.install else ""
        raise BackendUnavailableError(
            f"backend {name!r}: {entry.path} cannot be imported: {error}.{remedy}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendUnavailableError(f"backend {name!r}: {entry.path} is no Backend.")
    return found


def require(name: str) -> None:
    """Refuse a transport that :func:`find` would not find, without importing any.

    Raises:
        BackendNotFoundError: no such transport; lists the known ones.
        BackendUnavailableError: none of the packages is there that it stands on.
    """
    entry = _entry(name)
    if entry.stands_on and not any(map(importlib.util.find_spec, entry.stands_on)):
        raise BackendUnavailableError(
            f"backend {name!r}: {' and '.join(entry.stands_on)} cannot be found. Try "
            f"`{entry.install}`."
        )


def _entry(name: str) -> Registered:
    if ":" in name:
        return Registered(name, "")
    if name in BUILT_IN:
        return BUILT_IN[name]
    for point in _entry_points():
        if point.name == name:
            distribution = point.dist.name if point.dist else ""
            return Registered(point.value, f"pip install {distribution}".strip())
    known = names()
    near = difflib.get_close_matches(name, known, 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise BackendNotFoundError(f"backend: {name!r}; one of {', '.join(known)}.{meant}")


def _entry_points() -> list[metadata.EntryPoint]:
    return [p for p in metadata.entry_points(group=ENTRY_POINTS) if p.name not in BUILT_IN]
