"""Creation of process groups for torch.distributed: rendezvous and connection of the ranks.

::

    import collective.adapters.torch

    torch.distributed.init_process_group("collective")

The import registers the backend. If the package is installed, torch registers the backend itself,
and the import is not needed. ``COLLECTIVE_BACKEND`` selects the transport, as for
:func:`collective.init`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from collective import trace
from collective.communicator import Communicator
from collective.contract.recorder import dump_on_signal
from collective.contract.secret import Secret
from collective.contract.store import Store
from collective.contract.world import World
from collective.deadline import Deadline
from collective.start import certificates, choice, resolver, session
from collective.start.config import Config, load, secret_of, settings
from collective.start.connecting import connect
from collective.start.launchers import detect
from collective.start.meeting import meet
from collective.start.network import own_address
from collective.start.rendezvous import from_environment
from collective.start.resolver import address, name_libraries, options, warn_of_open
from collective.start.sealed_store import seal
from collective.start.torch_store import TorchStore

if TYPE_CHECKING:
    from .process_group import ProcessGroup

__all__ = ["TorchStore", "create", "launched_rank", "rendezvous"]

# Numbers of this process's meetings. A program that destroys its groups may meet again.
_meetings = itertools.count()


def create(given: Any, more: Any = None) -> ProcessGroup:
    """Make a process group; torch calls this function on every member of the group.

    Args:
        given: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, members.
        more: torch's ``pg_options``; they are ignored, because this backend has no options.
    """
    from .process_group import ProcessGroup

    rank, size = given.group_rank, given.group_size
    with contextlib.ExitStack() as opened:
        if not given.global_ranks_in_group:  # the default group, which comes first
            where = _where(given.store)
            opened.callback(session.take_place("init_process_group", rank, size, where))
        comm = _connected(given)
        comm.succession.at_end.append(opened.pop_all().close)
    session.tell_at_exit(comm)
    return ProcessGroup(comm, given.store)


def _where(store: Any) -> str:
    """Return the address or the file of a store of torch, or an empty text."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if hasattr(store, "host"):
        return f"{store.host}:{store.port}"
    return str(getattr(store, "path", ""))


def _connected(given: Any) -> Communicator:
    secret = secret_of(settings({}))
    if secret is not None:
        secret = secret.within("torch.distributed", given.group_id)
    return _communicator(
        seal(TorchStore(given.store), secret), secret, given.group_rank, given.group_size,
        given.timeout, list(given.global_ranks_in_group),
    )  # fmt: skip


def launched_rank() -> tuple[int, int] | None:
    """Return rank and size as the launcher of this process says; None if it was not launched."""
    launched = detect(os.environ)
    return None if launched is None else (launched.rank, launched.size)


@functools.cache
def _launched_world() -> World:
    # Kept until the process ends: the directory of a store goes with the last rank that uses it.
    return resolver.build(load({}))


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
        host = "localhost" if world.local_size == world.size else own_address()
        store = serve(host, 0, is_master=True)
        world.store.set(key, f"{host} {store.port}".encode())
    else:
        host, port = world.store.get(key, deadline).decode().split()
        store = serve(host, int(port), is_master=False)
    return store, world.rank, world.size


def _communicator(
    meeting: Store,
    secret: Secret | None,
    rank: int,
    size: int,
    timeout: timedelta,
    members: list[int],
) -> Communicator:
    seconds = timeout.total_seconds()
    identity = {"rank": rank, "size": size}
    job, local_rank, local_size = meet(meeting, "torch", rank, size, Deadline(seconds))
    identity.update(local_rank=local_rank, local_size=local_size)
    config = load(identity)
    config.warn_of_refused()
    name_libraries(config)
    dump_on_signal(config.dump_signal)
    chosen = choice.choose(config)
    if members and _over_mpi(chosen):
        world_group = _world_group()
        if world_group is not None:
            # A subset of an MPI world cannot connect on its own. It needs a group of the world's
            # communicator.
            subgroup: Communicator = world_group.comm.group(members)
            subgroup.timeout = _deadline(config, timeout)
            return subgroup
    open_ = secret is None and local_size < size
    if open_:
        warn_of_open(config, str(meeting))
    needs_address = local_size < size and not config.interface
    endpoint = from_environment(os.environ, config.launched) if needs_address else None
    world = World(
        rank, size, local_rank, local_size, socket.gethostname(),
        config.launched.launcher if config.launched else "none",
        job, meeting, {**options(config), **chosen.options}, address(config, endpoint),
        secret=secret, open=open_, tls=certificates.resolve(config),
    )  # fmt: skip
    if config.trace:
        _trace_steps()
    return connect(
        world, chosen.name,
        timeout=_deadline(config, timeout), start_timeout=seconds, check=config.check,
        trace=config.trace,
    )  # fmt: skip


@functools.cache
def _trace_steps() -> None:
    """Record optimizers' steps in the trace, because torch's own wrappers do not report them."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_post_hook(lambda *_: trace.step("optimizer"))


def _over_mpi(chosen: choice.Choice) -> bool:
    names = {chosen.name, chosen.host}
    return "mpi" in names or ("hierarchical" in names and chosen.options.get("across") == "mpi")


def _world_group() -> ProcessGroup | None:
    """Return torch's group of all ranks, if it is a group of this backend."""
    from .process_group import ProcessGroup

    group = importlib.import_module("torch.distributed").group.WORLD
    return group if isinstance(group, ProcessGroup) else None


def _deadline(config: Config, timeout: timedelta) -> float:
    """Return the timeout of a call, in seconds.

    It is torch's timeout for the group. If torch has its default timeout, and this library's
    configuration sets a timeout, the configured timeout is used.
    """
    default = importlib.import_module("torch.distributed.constants").default_pg_timeout
    if timeout == default and config.origin("timeout") != "default":
        return config.timeout
    return timeout.total_seconds()
