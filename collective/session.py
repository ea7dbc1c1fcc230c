"""init(), and the communicator that module-level calls use."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import Any

from collective.backend import Failure
from collective.communicator import Communicator, connect
from collective.config import Config, load
from collective.errors import CommunicatorClosedError, ConfigError, UnsupportedError
from collective.world import World, build

__all__ = ["choose", "current", "init", "leave_thread", "set_current", "settings", "thread_world"]

# The current communicator: a thread's own where ranks are threads, else the process's.
_of_thread = threading.local()
_of_process: Communicator | None = None
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
# A forked child is no rank, and must not take leave for its parent.
os.register_at_fork(after_in_child=_open.clear)


def init(
    backend: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    **settings: Any,
) -> Communicator:
    """Join the other ranks of this program and return the communicator of all of them.

    Who this rank is, how many there are and which transport connects them come from the
    arguments, ``COLLECTIVE_*`` variables, ``collective.toml`` or ``pyproject.toml``, the
    launcher (``collective run``, torchrun, mpiexec, srun), in this order; with none of
    them it is a world of one. ``collective config`` shows where each value came from.

    Collective: every rank calls it, as often as the others.

    Args:
        backend: a transport's name; ``"auto"`` picks one.
        rank, size: this rank among how many, for ranks that no launcher started.
        timeout: seconds that a call may take before it raises, 300 by default.
        settings: further keys of the configuration: ``store``, ``start_timeout``,
            ``check``, ``local_rank``, ``local_size``.

    Returns:
        The communicator, which is also what module-level calls use from now on.

    Raises:
        ConfigError: a setting is unknown or wrong; names it and where it came from.
        BackendNotFoundError, BackendUnavailableError: no such transport, or not here.
        RendezvousError: not all ranks arrived within ``start_timeout``; names them.
    """
    arguments = {"backend": backend, "rank": rank, "size": size, "timeout": timeout, **settings}
    world: World | None = getattr(_of_thread, "world", None)
    if world is not None:
        arguments.update(
            rank=world.rank, size=world.size,
            local_rank=world.local_rank, local_size=world.local_size,
        )  # fmt: skip
    settled = load(arguments)
    as_thread = world is not None
    if world is None:
        world, name = build(settled), choose(settled)
    else:
        # Ranks that are threads of this process cannot be anything else to each other,
        # whatever a script asks for by default; they can be told to use another.
        name = "threads" if settled.backend == "auto" else choose(settled)
        if name != "threads":
            raise UnsupportedError(
                f"init: backend {name!r} ({settled.origin('backend')}); this program runs with "
                "its ranks as threads of one process. Start it with `collective run --backend "
                f"{name}`, or leave the choice to the launcher."
            )
    comm = connect(
        world,
        name,
        timeout=settled.timeout,
        start_timeout=settled.start_timeout,
        check=settled.check,
    )
    set_current(comm)
    _open.add(comm)
    if as_thread:
        _of_thread.opened.append(comm)
    return comm


def choose(settled: Config) -> str:
    """Return the transport that the settings mean; ``"auto"`` takes the nearest that works.

    One rank needs none (``threads``), ranks of one host share memory (``shm``).
    ``"cpu:shm,cuda:nccl"`` names one for each device.

    Raises:
        UnsupportedError: ``auto``, and the ranks are on several hosts.
        ConfigError: a list by device without one for the CPU.
    """
    name = settled.backend
    if name.startswith(("cpu:", "cuda:")):
        by_device = dict(part.strip().partition(":")[::2] for part in name.split(","))
        if "cpu" not in by_device:
            raise ConfigError(
                f"backend: {name!r} ({settled.origin('backend')}) names none for the CPU; write "
                "'cpu:shm,…'."
            )
        name = by_device["cpu"]
    if name != "auto":
        return name
    if settled.size == 1:
        return "threads"
    if settled.local_size == settled.size:
        return "shm"
    raise UnsupportedError(
        f"init: backend 'auto' with {settled.size} ranks, {settled.local_size} of them on this "
        "host; the transports installed here work within one host. Start all ranks on one host, "
        "or name a transport of a third party that crosses hosts."
    )


def settings() -> Config:
    """Return the settings that ``init()`` would use, each with where it came from."""
    return load({})


def current() -> Communicator:
    """Return the communicator of module-level calls: what ``init()`` last returned here.

    Raises:
        CommunicatorClosedError: there is none, or it is closed.
    """
    comm: Communicator | None = getattr(_of_thread, "communicator", None)
    if comm is None:
        comm = _of_process
    if comm is None or comm.closed:
        raise CommunicatorClosedError(
            "collective: there is no open communicator; call collective.init() first."
        )
    return comm


def set_current(comm: Communicator) -> None:
    """Make ``comm`` what module-level calls use, in this thread if ranks are threads."""
    global _of_process
    if comm.capabilities.in_process and comm.size > 1:
        _of_thread.communicator = comm
    else:
        _of_process = comm


def thread_world(world: World | None) -> None:
    """Make ``init()`` in this thread join ``world``: launchers of ranks as threads say this."""
    _of_thread.world = world
    _of_thread.opened = []


def leave_thread(failure: Failure | None) -> None:
    """Close what this thread's ``init()`` opened, telling the peers of a failure."""
    for comm in getattr(_of_thread, "opened", ()):
        if failure is not None:
            comm._abort(failure)
        comm._leave()


@atexit.register
def _leave() -> None:
    """At exit, tell the peers: of an exception that ended the program, or that it is over."""
    error = getattr(sys, "last_value", None)
    for comm in list(_open):
        if isinstance(error, BaseException) and not comm.closed:
            comm._tell(error)
        comm._leave()
