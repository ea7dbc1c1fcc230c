"""Creation of process groups for torch.distributed: rendezvous and connection of the ranks.

::

    import collective.adapters.torch

    torch.distributed.init_process_group("collective")

The import registers the backend. If the package is installed, torch registers the backend itself,
and the import is not needed. ``COLLECTIVE_BACKEND`` selects the transport, as for
:func:`collective.init`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from collective import Communicator
from collective.inner import Config, Deadline, World, detect, load, settings, trace
from collective.start import choice, meeting, network, resolver
from collective.start.rendezvous import from_environment
from collective.start.torch_store import TorchStore

if TYPE_CHECKING:
    from .process_group import GroupCalls

__all__ = ["TorchStore", "create", "launched_rank", "rendezvous"]

# Numbers of this process's meetings. A program that destroys its groups may meet again.
_meetings = itertools.count()
# Backend of each group. With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch keeps only the C++ part alive.
_backends: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def create(given: Any, more: Any = None) -> GroupCalls:
    """Make a backend, or a process group where torch takes no backend written in Python.

    torch calls this function on every member of the group.

    Args:
        given: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, members.
        more: torch's ``pg_options``; they are ignored, because this backend has no options.
    """
    from .backend import Backend, way
    from .process_group import ProcessGroup

    found = settings({})
    if "trace" in found and found["trace"].value:
        _trace_steps()
    members = list(given.global_ranks_in_group)
    seconds = given.timeout.total_seconds()
    default = importlib.import_module("torch.distributed.constants").default_pg_timeout
    # A configured timeout replaces torch's default, but no timeout that the program has set.
    is_configured = given.timeout == default and "timeout" in found
    comm = meeting.connect_met(
        TorchStore(given.store),
        given.group_rank,
        given.group_size,
        context=("torch.distributed", given.group_id),
        toward=lambda config: from_environment(os.environ, config.launched),
        label="a process of torch.distributed",
        # Other groups than the default group, which comes first, may have the same place.
        place=None if members else ("init_process_group", _where(given.store)),
        instead=functools.partial(_subgroup, members),
        start_timeout=seconds,
        timeout=None if is_configured else seconds,
    )
    if way() == "ProcessGroup":
        return ProcessGroup(comm, given.store)
    backend = _backends[given.process_group] = Backend(comm)
    return backend


def _where(store: Any) -> str:
    """Return the address or the file of a store of torch, or an empty text."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", ""))


def launched_rank() -> tuple[int, int] | None:
    """Return rank and size as the launcher of this process says; None if it was not launched."""
    launched = detect(os.environ)
    return None if launched is None else (launched.rank, launched.size)


@functools.cache
def _launched_world() -> World:
    # Kept until the process ends: the directory of a store goes with the last rank that uses it.
    config = load({})
    return resolver.build(config, choice.choose(config))


def rendezvous(timeout: timedelta, **_: Any) -> tuple[Any, int, int]:
    """Return a store of torch that all launched ranks have, and the rank and size of this process.

    Rank 0 serves the store. It publishes the address where :func:`collective.init` would meet.
    """
    world = _launched_world()
    deadline = Deadline(timeout.total_seconds())
    key = f"torch's store {next(_meetings)}"
    serve = functools.partial(
        importlib.import_module("torch.distributed").TCPStore,
        world_size=world.size, timeout=timeout, wait_for_workers=False,
    )  # fmt: skip
    if world.rank == 0:
        host = "localhost" if world.local_size == world.size else network.own_address()
        store = serve(host, 0, is_master=True)
        world.store.set(key, f"{host} {store.port}".encode())
    else:
        host, port = world.store.get(key, deadline).decode().split()
        store = serve(host, int(port), is_master=False)
    return store, world.rank, world.size


def _subgroup(members: list[int], config: Config, chosen: choice.Choice) -> Communicator | None:
    """Return a group of the world's communicator if the group cannot connect on its own.

    A subset of an MPI world cannot.
    """
    group = importlib.import_module("torch.distributed").group.WORLD
    # torch's group of all ranks may be of another backend.
    world = getattr(group, "comm", None) if members and chosen.over_mpi else None
    if world is None:
        return None
    subgroup: Communicator = world.group(members)
    subgroup.timeout = config.timeout
    return subgroup


@functools.cache
def _trace_steps() -> None:
    """Record optimizers' steps in the trace, because torch's own wrappers do not report them."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_post_hook(lambda *_: trace.step("optimizer"))
