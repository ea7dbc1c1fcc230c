"""``jax.distributed.initialize()`` without arguments, in programs that ``collective run`` starts.

JAX finds the number of a process in the variables of Slurm and of Open MPI. With this module it
also finds the number in the variables of ``collective run --jax``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# Variable with the address at which JAX's coordinator listens.
_LISTENS = "JAX_COORDINATOR_BIND_ADDRESS"


class _DetectionFinder:
    """Finder that teaches JAX to read this launcher's variables when JAX is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # jax._src.distributed asks the classes of jax._src.clusters, which it imports first.
        if name != "jax._src.distributed":
            return None
        sys.meta_path.remove(self)
        _register()
        return find_spec(name)


def detect_collective() -> None:
    """Have ``jax.distributed.initialize()`` find this process's number; call it before jax."""
    if "jax._src.distributed" in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _DetectionFinder())


def place(environ: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return coordinator, number of processes and number of this process; None without them.

    Unless the user names another address, rank 0 serves the coordinator at ``MASTER_PORT``. The
    launcher keeps this port from other programs, and chooses another one for each restart.
    """
    names = "MASTER_ADDR", "MASTER_PORT", "COLLECTIVE_SIZE", "COLLECTIVE_RANK"
    if not all(environ.get(name) for name in names):
        return None
    host, port, size, rank = (environ[name] for name in names)
    return environ.get("JAX_COORDINATOR_ADDRESS") or f"{host}:{port}", int(size), int(rank)


def _register() -> None:
    clusters = importlib.import_module("jax._src.clusters")

    class CollectiveCluster(clusters.ClusterEnv):  # type: ignore[misc,name-defined]
        """Ranks that ``collective run --jax`` has started. JAX asks for this class by itself."""

        name = "collective"

        @classmethod
        def is_env_present(cls) -> bool:
            # JAX asks this in each initialize(), before anything else. The program may name
            # another address now, and its coordinator has to listen there.
            known = place(os.environ)
            if known is not None and os.environ.get(_LISTENS) == known[0]:
                del os.environ[_LISTENS]
            return known is not None

        @classmethod
        def get_coordinator_address(cls, *args: object, **kwargs: object) -> str:
            address = _known()[0]
            # By default JAX's coordinator listens on all interfaces.
            os.environ.setdefault(_LISTENS, address)
            return address

        @classmethod
        def get_process_count(cls) -> int:
            return _known()[1]

        @classmethod
        def get_process_id(cls) -> int:
            return _known()[2]


def _known() -> tuple[str, int, int]:
    known = place(os.environ)
    if known is None:
        raise RuntimeError("the variables of `collective run --jax` were removed")
    # The coordinator would not answer the child of a process that is connected to it already.
    session = importlib.import_module("collective.start.session")
    launchers = importlib.import_module("collective.start.launchers")
    coordinator, size, rank = known
    launched = launchers.detect(os.environ)
    session.take_place("jax.distributed.initialize", rank, size, coordinator, launched)()
    return known
