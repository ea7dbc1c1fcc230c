"""The transports by name. Nothing is imported before it is used."""

from __future__ import annotations

import difflib
import importlib
from importlib import metadata
from typing import NamedTuple

from collective.backend import Backend
from collective.errors import BackendNotFoundError, BackendUnavailableError
from collective.install import hint

__all__ = ["BUILT_IN", "ENTRY_POINTS", "Entry", "find", "names"]

#: Third parties register under this entry-point group: name -> "module:Class".
ENTRY_POINTS = "collective.backends"


class Entry(NamedTuple):
    """Where a transport is, and how its dependencies are installed."""

    path: str
    install: str


BUILT_IN: dict[str, Entry] = {
    "gloo": Entry("collective.backends.gloo:GlooBackend", hint("torch")),
    "hierarchical": Entry("collective.backends.hierarchical:HierarchicalBackend", hint("torch")),
    "mpi": Entry("collective.backends.mpi:MpiBackend", hint("mpi")),
    "nccl": Entry("collective.backends.nccl:NcclBackend", hint("nccl")),
    "shm": Entry("collective.backends.shm:ShmBackend", hint()),
    "threads": Entry("collective.backends.threads:ThreadsBackend", hint()),
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
    entry = BUILT_IN.get(name) or (Entry(name, "") if ":" in name else None)
    if entry is None:
        for point in _entry_points():
            if point.name == name:
                distribution = point.dist.name if point.dist else ""
                entry = Entry(point.value, f"pip install {distribution}".strip())
                break
    if entry is None:
        known = names()
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise BackendNotFoundError(f"backend: {name!r}; one of {', '.join(known)}.{hint}")
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


def _entry_points() -> list[metadata.EntryPoint]:
    return [p for p in metadata.entry_points(group=ENTRY_POINTS) if p.name not in BUILT_IN]
