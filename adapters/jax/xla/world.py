"""Connection of the ranks of ``jax.distributed``: rank n is JAX's process n."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from collective.communicator import Communicator
from collective.contract.store import PrefixedStore
from collective.deadline import Deadline
from collective.errors import RendezvousError
from collective.start import session
from collective.start.config import load, secret_of, settings
from collective.start.meeting import meet
from collective.start.met_ranks import Place, connect_met
from collective.start.rendezvous import Endpoint
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
    where = str(state.coordinator_address or "")
    with contextlib.ExitStack() as opened:
        opened.callback(session.take_place("jax.distributed.initialize", rank, size, where))
        comm = _connected(state, rank, size)
        comm.succession.at_end.append(opened.pop_all().close)
    return comm


def _connected(state: Any, rank: int, size: int) -> Communicator:
    found = settings({})
    secret = secret_of(found)
    if secret is not None:
        secret = secret.within("jax.distributed")
    store = seal(PrefixedStore(JaxStore(state.client), _PREFIX), secret)
    deadline = Deadline(load({"rank": 0, "size": 1}).start_timeout)
    job, local_rank, local_size = meet(store, "jax", rank, size, deadline)
    place = Place(job, rank, size, local_rank, local_size)
    return connect_met(place, store, secret, _endpoint(state))


def _endpoint(state: Any) -> Endpoint | None:
    """Return the address of JAX's coordinator, toward which this host's address is chosen."""
    host, _, port = str(state.coordinator_address or "").rpartition(":")
    if not host or not port.isdecimal():
        return None
    return Endpoint(host.strip("[]"), int(port), "the coordinator's address")
