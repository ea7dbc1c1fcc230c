"""From a world to a communicator: connects the transport, and starts a trace on request."""

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
    """Connect the ranks of ``world`` and return the communicator of this rank.

    Most programs call :func:`collective.init`, which determines the world and the transport.

    Args:
        world: identity of this rank, and the store where the ranks meet.
        backend: a registered name, ``module:Class``, or the class itself.
        timeout: seconds that a call may take.
        start_timeout: seconds to wait for the other ranks to arrive.
        check: ``"always"`` compares the ranks' calls also on transports without built-in checks;
            ``"results"`` compares their results.
        trace: a directory for the ranks' traces; see :mod:`collective.trace`.
        shrink_grace: seconds that a rank may be silent when the others shrink.
        min_ranks: least number of ranks; with fewer, ``shrink()`` raises.
        join: if true, join ranks that have met in ``world.store`` and are already connected.
            They admit this process when they call ``grow()``, within ``start_timeout``. Ranks and
            sizes of ``world`` are ignored then.

    Raises:
        BackendNotFoundError, BackendUnavailableError, RendezvousError: the transport does not
            exist or cannot be used here, or the ranks did not meet.
        CollectiveTimeoutError, ExcludedError: with ``join``, the ranks did not admit this
            process, or all ranks have ended.
        UnsupportedError: ``check="results"`` with a transport that enqueues calls on GPUs.
        ConfigError: the trace of some rank cannot be written; raised on every rank.
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
    except BaseException:
        transport.close()
        raise
    if trace:
        # Imported here, so that programs without a trace run no code of it.
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
        world: the store where the ranks have met, and the host of this process.
        find: function that returns the transport of this process, given the name of the ranks'
            transport.
        timeout, check, trace, shrink_grace, min_ranks: as in :func:`connect`.
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
    """Return ``kind`` if a process can join ranks with it whose transport is ``theirs``.

    Raises:
        ConfigError: ``kind`` is another transport.
    """
    if kind.name == theirs:
        return kind
    raise ConfigError(
        f"join: the ranks are connected by {theirs!r}, but this process is set to use "
        f"{kind.name!r}. Give this process backend={theirs!r} (COLLECTIVE_BACKEND)."
    )
