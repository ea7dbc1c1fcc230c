"""From a world to a communicator: the transport, and the trace if one is wanted."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from collective.communicator import Communicator
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.world import World
from collective.deadline import Deadline
from collective.elastic.joining import Joiner
from collective.elastic.lineage import Lineage
from collective.errors import ConfigError

__all__ = ["connect", "connect_alone", "joined_by"]


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
    join: bool = False,
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
        join: join ranks that have met in ``world.store`` and are connected, when they call
            ``grow()``, within ``start_timeout``. The ranks and sizes of ``world`` are of no
            account then.

    Raises:
        BackendNotFoundError, BackendUnavailableError, RendezvousError.
        CollectiveTimeoutError, ExcludedError: with ``join``, nobody let this process in, or there
            is nobody left.
        ConfigError: some rank's trace cannot be written; on every rank.
    """
    kind = registry.find(backend) if isinstance(backend, str) else backend
    if join:
        alone = connect_alone(
            world, partial(joined_by, kind),
            timeout=timeout, check=check, trace=trace, shrink_grace=shrink_grace,
            min_ranks=min_ranks,
        )  # fmt: skip
        with contextlib.closing(alone):
            return alone.grow(timeout=start_timeout)
    deadline = Deadline(start_timeout)
    transport = kind.connect(world, deadline)
    try:
        lineage = Lineage.begin(transport, world, deadline, grace=shrink_grace, min_ranks=min_ranks)
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
        open_to_others=world.open,
    )
    if trace:
        # Here and not above: what is not traced runs nothing of this.
        from collective.trace.traced import start_tracing

        try:
            start_tracing(comm, trace)
        except BaseException:
            comm.close()
            raise
    return comm


def connect_alone(
    world: World,
    find: Callable[[str], type[Backend]],
    *,
    timeout: float = 300.0,
    check: str = "auto",
    trace: str = "",
    shrink_grace: float = 5.0,
    min_ranks: int = 1,
) -> Communicator:
    """Return a communicator of this process alone, whose ``grow()`` joins the ranks of ``world``.

    Args:
        world: where they have met, and this process's host.
        find: returns the transport to join them by, given the name of theirs.
        timeout, check, trace, shrink_grace, min_ranks: as :func:`connect` takes them.
    """
    alone = replace(
        world, rank=0, size=1, local_rank=0, local_size=1, job=f"alone-{secrets.token_hex(8)}"
    )
    comm = connect(
        alone, "threads", timeout=timeout, check=check, trace=trace, shrink_grace=shrink_grace,
    )  # fmt: skip
    comm.succession.joiner = Joiner(world, find, shrink_grace, min_ranks)
    return comm


def joined_by(kind: type[Backend], theirs: str) -> type[Backend]:
    """Return ``kind``, by which a process is to join ranks whose transport is ``theirs``.

    Raises:
        ConfigError: it is another one.
    """
    if kind.name == theirs:
        return kind
    raise ConfigError(
        f"join: the ranks are connected by {theirs!r}, and this process is to be by "
        f"{kind.name!r}. Give it backend={theirs!r} (COLLECTIVE_BACKEND)."
    )
