"""Makes process groups of torch.distributed: how the ranks meet and what connects them.

::

    import collective.adapters.torch

    torch.distributed.init_process_group("collective")

The import registers the backend, and with the package installed torch does so itself. The
transport is what ``COLLECTIVE_BACKEND`` says, as for :func:`collective.init`.
"""

from __future__ import annotations

import functools
import importlib
import os
import secrets
import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collective import trace
from collective.communicator import Communicator
from collective.contract.recorder import dump_on_signal
from collective.contract.secret import Secret
from collective.contract.store import Store
from collective.contract.world import World
from collective.deadline import Deadline
from collective.start import certificates, choice, session
from collective.start.config import Config, load, secret_of, settings
from collective.start.connecting import connect
from collective.start.rendezvous import from_environment
from collective.start.resolver import address, name_libraries, options, warn_of_open
from collective.start.sealed_store import seal
from collective.start.torch_store import TorchStore

if TYPE_CHECKING:
    from .process_group import ProcessGroup

__all__ = ["TorchStore", "create"]


def create(given: Any, more: Any = None) -> ProcessGroup:
    """Make a process group; torch calls this on every member of it.

    Args:
        given: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, members.
        more: ``pg_options``, of which there are none.
    """
    from .process_group import ProcessGroup

    secret = secret_of(settings({}))
    if secret is not None:
        secret = secret.within("torch.distributed", given.group_id)
    comm = _communicator(
        seal(TorchStore(given.store), secret), secret, given.group_rank, given.group_size,
        given.timeout, list(given.global_ranks_in_group),
    )  # fmt: skip
    session.tell_at_exit(comm)
    return ProcessGroup(comm, given.store)


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
    job, local_rank, local_size = _meet(meeting, rank, size, Deadline(seconds))
    identity.update(local_rank=local_rank, local_size=local_size)
    config = load(identity)
    config.warn_of_refused()
    name_libraries(config)
    dump_on_signal(config.dump_signal)
    chosen = choice.choose(config)
    if members and _over_mpi(chosen):
        whole = _world_group()
        if whole is not None:
            # Processes of one MPI world meet there only as a whole.
            made: Communicator = whole.comm.group(members)
            made.timeout = _deadline(config, timeout)
            return made
    open_ = secret is None and local_size < size
    if open_:
        warn_of_open(config, str(meeting))
    asked = local_size < size and not config.interface
    endpoint = from_environment(os.environ, config.launched) if asked else None
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
    """Have the trace show where an optimizer has stepped: torch's own wrappers do not tell."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers.register_optimizer_step_post_hook(lambda *_: trace.step("optimizer"))


def _meet(store: Store, rank: int, size: int, deadline: Deadline) -> tuple[str, int, int]:
    """Return the group's own name, and this rank's place among those of its host."""
    if size == 1:
        return f"torch-{secrets.token_hex(8)}", 0, 1
    if rank == 0:
        store.set("job", f"torch-{secrets.token_hex(8)}".encode())
    mine = f"{socket.gethostname()} {_boot()}".encode()
    store.set(f"host-{rank}", mine)
    hosts = [store.get(f"host-{other}", deadline) for other in range(size)]
    job = store.get("job", deadline).decode()
    return job, hosts[:rank].count(mine), hosts.count(mine)


def _boot() -> str:
    """Return what tells hosts of one name apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _over_mpi(chosen: choice.Choice) -> bool:
    names = {chosen.name, chosen.host}
    return "mpi" in names or ("hierarchical" in names and chosen.options.get("across") == "mpi")


def _world_group() -> ProcessGroup | None:
    """Return the group of all ranks, if it is one of ours."""
    from .process_group import ProcessGroup

    whole = importlib.import_module("torch.distributed").group.WORLD
    return whole if isinstance(whole, ProcessGroup) else None


def _deadline(config: Config, timeout: timedelta) -> float:
    """Return the seconds that a call may take: torch's, unless only ours was ever chosen."""
    default = importlib.import_module("torch.distributed.constants").default_pg_timeout
    if timeout == default and config.origin("timeout") != "default":
        return config.timeout
    return timeout.total_seconds()
