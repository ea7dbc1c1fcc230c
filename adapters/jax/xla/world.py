"""Connection of the ranks of ``jax.distributed``: rank n is JAX's process n."""

from __future__ import annotations

import importlib

from collective import Communicator, RendezvousError
from collective.control.store import PrefixedStore
from collective.start.meeting import connect_met
from collective.start.rendezvous import from_text

from .store import JaxStore

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
    address = str(state.coordinator_address or "")
    return connect_met(
        PrefixedStore(JaxStore(state.client), _PREFIX),
        int(state.process_id),
        int(state.num_processes),
        context=("jax.distributed",),
        # This host's address is the one toward JAX's coordinator.
        toward=lambda config: from_text(address, "the coordinator's address"),
        label="a process of jax.distributed",
        place=("jax.distributed.initialize", address),
    )
