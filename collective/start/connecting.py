"""From a world to a communicator: the transport, and the trace if one is wanted."""

from __future__ import annotations

from collective.communicator import Communicator
from collective.communicator.shrinking import Lineage
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.world import World

__all__ = ["connect"]


def connect(
    world: World,
    backend: str | type[Backend],
    *,
    timeout: float = 300.0,
    start_timeout: float = 60.0,
    check: str = "auto",
    trace: str = "",
    shrink_grace: float = 5.0,
    min_ranks: int = 1,
) -> Communicator:
    """Connect the ranks of ``world`` and return this one's communicator.

    Most programs call :func:`collective.init`, which finds out the world and the transport.

    Args:
        world: who this rank is and where the ranks meet.
        backend: a registered name, ``module:Class``, or the class itself.
        timeout: seconds that a call may take.
        start_timeout: seconds to wait for the other ranks to arrive.
        check: ``"always"`` compares the ranks' calls on transports that do not by themselves.
        trace: a directory for the ranks' traces; see :mod:`collective.trace`.
        shrink_grace: seconds that a rank may be silent when the others shrink.
        min_ranks: with fewer ranks ``shrink()`` raises.

    Raises:
        BackendNotFoundError, BackendUnavailableError, RendezvousError.
        ConfigError: some rank's trace cannot be written; on every rank.
    """
    kind = registry.find(backend) if isinstance(backend, str) else backend
    transport = kind.connect(world, start_timeout)
    try:
        lineage = Lineage.begin(
            transport, world, start_timeout, grace=shrink_grace, min_ranks=min_ranks
        )
    except BaseException:
        transport.close()
        raise
    comm = Communicator(
        transport,
        lineage=lineage,
        local_rank=world.local_rank,
        local_size=world.local_size,
        host=world.host,
        timeout=timeout,
        check=check,
    )
    comm._open = world.open
    if trace:
        # Here and not above: what is not traced runs nothing of this.
        from collective.trace.traced import start_tracing

        try:
            start_tracing(comm, trace)
        except BaseException:
            comm.close()
            raise
    return comm
