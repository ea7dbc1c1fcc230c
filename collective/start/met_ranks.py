"""Connection of ranks that another framework started and that meet in a store of its own."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.contract.recorder import dump_on_signal
from collective.contract.secret import Secret
from collective.contract.store import Store
from collective.contract.world import World

from . import certificates, choice, session
from .config import load
from .connecting import connect
from .rendezvous import Endpoint
from .resolver import address, name_libraries, options, warn_of_open

__all__ = ["Place", "connect_met"]


class Place(NamedTuple):
    """Place of this process among the ranks; see :class:`~collective.contract.world.World`."""

    job: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def connect_met(
    place: Place, store: Store, secret: Secret | None, toward: Endpoint | None, **settings: Any
) -> Communicator:
    """Connect the ranks and return the communicator of this rank.

    The transport and the other settings come from ``COLLECTIVE_*`` variables and files, as for
    :func:`collective.init`.

    Args:
        place: the place of this process, of which the ranks have agreed.
        store: the store in which they met.
        secret: secret of the job, with which ``store`` is sealed, or None.
        toward: an address that all hosts reach. The host's own address is chosen by it.
        settings: settings that replace those of variables and files.

    Raises:
        ConfigError, RendezvousError, BackendUnavailableError: as for :func:`collective.init`.
    """
    job, rank, size, local_rank, local_size = place
    numbers = {"rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size}
    config = load({**numbers, **settings})
    config.warn_of_refused()
    name_libraries(config)
    chosen = choice.choose(config)
    open_ = secret is None and local_size < size
    if open_:
        warn_of_open(config, str(store))
    world = World(
        rank, size, local_rank, local_size, socket.gethostname(),
        config.launched.launcher if config.launched else "none", job, store,
        {**options(config), **chosen.options}, address(config, toward),
        secret=secret, open=open_, tls=certificates.resolve(config),
    )  # fmt: skip
    comm = connect(
        world, chosen.name,
        timeout=config.timeout, start_timeout=config.start_timeout, check=config.check,
        trace=config.trace, shrink_grace=config.shrink_grace, min_ranks=config.min_ranks,
    )  # fmt: skip
    session.tell_at_exit(comm)
    dump_on_signal(config.dump_signal)
    return comm
