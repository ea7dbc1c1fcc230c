"""Ray's actors as ranks: the backend ``collective`` of ``ray.util.collective``.

The import of this module registers the backend in this process, and the transports of arrays
between actors (:mod:`.arrays`). Ray needs that on the driver and in every actor::

    import collective.launch.ray
    from ray.util import collective as col

    col.init_collective_group(world_size, rank, backend="collective")

For actors whose code cannot import it, name :func:`register` as the hook of the workers::

    ray.init(runtime_env={"worker_process_setup_hook": "collective.launch.ray.register"})

:func:`run` runs a function on ranks that are actors of its own.
"""

from __future__ import annotations

import importlib

from collective.errors import BackendUnavailableError
from collective.install import hint

try:
    importlib.import_module("ray")
except ImportError as _error:
    raise BackendUnavailableError(
        f"collective.launch.ray: Ray cannot be imported: {_error}. Try `{hint('ray')}`."
    ) from _error

from .arrays import (
    Ends,
    GroupTransport,
    NumpyGroupTransport,
    NumpyTransport,
    SharedArrays,
    SharedMemoryTransport,
)
from .group import ActorGroup
from .registration import NAME, register
from .running import run

__all__ = ["NAME", "ActorGroup", "register", "run"]

# Ray's threads import these classes by the names of their modules, perhaps while another thread
# imports this package. The name of a submodule would be a deadlock: Python locks the submodule and
# then waits for the package, which waits for the submodule.
for _kind in (
    Ends, GroupTransport, NumpyGroupTransport, NumpyTransport, SharedArrays, SharedMemoryTransport,
):  # fmt: skip
    _kind.__module__ = __name__

register()
