"""Registry of the transports by name. It imports a transport only when it is used."""

from __future__ import annotations

import difflib
import importlib.util
from typing import TYPE_CHECKING, NamedTuple

from collective.errors import BackendNotFoundError, BackendUnavailableError
from collective.install import hint

from .backend import Backend

if TYPE_CHECKING:
    from importlib import metadata

#: Entry-point group under which third parties register transports: name -> "module:Class".
ENTRY_POINTS = "collective.backends"


class Registered(NamedTuple):
    """Entry of the registry: a transport that has a name.

    Attributes:
        path: location of the transport's class, ``module:Class``.
        install: command that installs the libraries that the transport needs.
        stands_on: alternative packages, of which the transport needs one.
    """

    path: str
    install: str
    stands_on: tuple[str, ...] = ()


BUILT_IN: dict[str, Registered] = {
    "gloo": Registered("collective.backends.gloo:GlooBackend", hint("torch"), ("torch",)),
    "hierarchical": Registered("collective.backends.hierarchical:HierarchicalBackend", hint()),
    "mpi": Registered("collective.backends.mpi:MpiBackend", hint("mpi"), ("mpi4py",)),
    "nccl": Registered("collective.backends.nccl:NcclBackend", hint("nccl")),
    "shm": Registered("collective.backends.shm:ShmBackend", hint()),
    "tcp": Registered("collective.backends.tcp:TcpBackend", hint()),
    "threads": Registered("collective.backends.threads:ThreadsBackend", hint()),
}


def names() -> list[str]:
    """Return the names of all transports, built-in and third parties', sorted."""
    return sorted({*BUILT_IN, *(point.name for point in _entry_points())})


def find(name: str) -> type[Backend]:
    """Return the transport called ``name``, or at ``module:Class``.

    A third party's entry point cannot take the name of a built-in one.

    Raises:
        BackendNotFoundError: there is no such transport; the text lists the known ones.
        BackendUnavailableError: it cannot be imported; the text has the reason and the remedy.
    """
    entry = _entry(name)
    module, _, attribute = entry.path.partition(":")
    try:
        backend = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = f" Try `{entry.install}`." if entry.install else ""
        raise BackendUnavailableError(
            f"backend {name!r}: {entry.path} cannot be imported: {error}.{remedy}"
        ) from error
    except Exception as error:  # a package that is installed, but broken
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise BackendUnavailableError(
            f"backend {name!r}: {entry.path} cannot be imported: {reason}. `python -c 'import "
            f"{module}'` shows where."
        ) from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise BackendUnavailableError(f"backend {name!r}: {entry.path} is no Backend.")
    return backend


def require(name: str) -> None:
    """Check, without importing it, that a transport exists and that its packages are installed.

    Raises:
        BackendNotFoundError: there is no such transport; the text lists the known ones.
        BackendUnavailableError: none of the packages that the transport needs is installed.
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
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint_text = f" Did you mean {near[0]!r}?" if near else ""
    raise BackendNotFoundError(f"backend: {name!r}; one of {', '.join(known)}.{hint_text}")


def _entry_points() -> list[metadata.EntryPoint]:
    # Takes a tenth of the time of `import collective`, and few processes need it.
    from importlib import metadata

    return [p for p in metadata.entry_points(group=ENTRY_POINTS) if p.name not in BUILT_IN]
