"""Connection of the ranks of ``jax.distributed``: rank n is JAX's process n."""

from __future__ import annotations

import importlib
import socket
from typing import Any

from collective.communicator import Communicator
from collective.contract.recorder import dump_on_signal
from collective.contract.store import PrefixedStore
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import RendezvousError
from collective.start import certificates, choice, session
from collective.start.config import load, secret_of, settings
from collective.start.connecting import connect
from collective.start.meeting import meet
from collective.start.rendezvous import Endpoint
from collective.start.resolver import address, name_libraries, options, warn_of_open
from collective.start.sealed_store import seal

from .store import JaxStore

__all__ = ["connect_processes"]

_PREFIX = "collective/"


def connect_processes() -> Communicator:
    """Return the communicator of all processes of ``jax.distributed``.

    The ranks meet in JAX's own key-value store, so the program may have been started by any
    launcher. The transport and other settings come from ``COLLECTIVE_*`` variables and files, as
    for :func:`collective.init`.

    Raises:
        ConfigError, RendezvousError, BackendUnavailableError: as for :func:`collective.init`.
    """
    state = importlib.import_module("jax._src.distributed").global_state
    if state.client is None:
        raise RendezvousError(
            "jax: jax.distributed.initialize() has not been called, so this process has no peers. "
            "Call it before the first use of JAX."
        )
    rank, size = int(state.process_id), int(state.num_processes)
    found = settings({})
    secret = secret_of(found)
    if secret is not None:
        secret = secret.within("jax.distributed")
    store = seal(PrefixedStore(JaxStore(state.client), _PREFIX), secret)
    deadline = Deadline(load({"rank": 0, "size": 1}).start_timeout)
    job, local_rank, local_size = meet(store, "jax", rank, size, deadline)
    config = load({"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size})
    config.warn_of_refused()
    name_libraries(config)
    chosen = choice.choose(config)
    open_ = secret is None and local_size < size
    if open_:
        warn_of_open(config, str(store))
    world = World(
        rank, size, local_rank, local_size, socket.gethostname(),
        config.launched.launcher if config.launched else "none", job, store,
        {**options(config), **chosen.options}, address(config, _endpoint(state)),
        secret=secret, open=open_, tls=certificates.resolve(config),
    )  # fmt: skip
    comm = connect(
        world, chosen.name,
        timeout=config.timeout, start_timeout=config.start_timeout, check=config.check,
        trace=config.trace,
    )  # fmt: skip
    session.tell_at_exit(comm)
    dump_on_signal(config.dump_signal)
    return comm


def _endpoint(state: Any) -> Endpoint | None:
    """Return the address of JAX's coordinator, toward which this host's address is chosen."""
    host, _, port = str(state.coordinator_address or "").rpartition(":")
    if not host or not port.isdecimal():
        return None
    return Endpoint(host.strip("[]"), int(port), "the coordinator's address")
