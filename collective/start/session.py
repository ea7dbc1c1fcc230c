"""init(), and the communicator that module-level calls use."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from collective.communicator import Communicator
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.recorder import dump_on_signal
from collective.contract.world import World
from collective.errors import CommunicatorClosedError, InvalidArgumentError, UnsupportedError

from .choice import Choice, choose
from .config import Config, Setting, load
from .config import settings as collect
from .connecting import connect, connect_alone, joined_by
from .keys import KEYS
from .resolver import adopt, build, name_libraries, options

__all__ = [
    "current",
    "init",
    "leave_thread",
    "set_current",
    "settings",
    "tell_at_exit",
    "thread_world",
]

# The current communicator: a thread's own where ranks are threads, else the process's.
_of_thread = threading.local()
_of_process: Communicator | None = None
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_DECIDED_BY_COMM = ("rank", "size", "local_rank", "local_size", "store")


def init(
    backend: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
    comm: object = None,
    **settings: object,
) -> Communicator:
    """Join the other ranks of this program and return the communicator of all of them.

    Who this rank is, how many there are and which transport connects them come from the
    arguments, ``COLLECTIVE_*`` variables, ``collective.toml`` or ``pyproject.toml``, the
    launcher (``collective run``, torchrun, mpiexec, srun), in this order; with none of
    them it is a world of one. ``collective config`` shows where each value came from.

    Collective: every rank calls it, as often as the others; with ``comm``, every rank of that.

    Args:
        backend: a transport's name; ``"auto"`` picks one.
        rank, size: this rank among how many, for ranks that no launcher started.
        timeout: seconds that a call may take before it raises, 300 by default.
        comm: an ``MPI.Comm`` of mpi4py that the program made: the ranks are that
            communicator's, over ``mpi`` unless another transport is named. It is left as it
            is, and the program goes on to own it; messages over it and ours never mix.
        settings: further keys of the configuration: ``store``, ``start_timeout``,
            ``check``, ``local_rank``, ``local_size``, ``interface``, ``across``,
            ``device``, …: all that ``collective config`` shows. With ``join=True`` this process
            joins ranks that met in ``store`` and are connected already, when they call ``grow()``.

    Returns:
        The communicator, which is also what module-level calls use from now on.

    Raises:
        ConfigError: a setting is unknown or wrong; names it and where it came from.
        InvalidArgumentError: ``comm`` is not an ``MPI.Comm``, or comes with ``rank``,
            ``size`` or another setting that it decides.
        BackendNotFoundError, BackendUnavailableError: no such transport, or not here; with
            ``comm``, MPI connects fewer processes than the launcher started.
        RendezvousError: not all ranks arrived within ``start_timeout``; names them.
        CollectiveTimeoutError, ExcludedError: with ``join``, nobody let this process in within
            ``start_timeout``, or the ranks have ended.

    Warns:
        RuntimeWarning: a file with settings was not read, since others could have written it.
    """
    arguments = {"backend": backend, "rank": rank, "size": size, "timeout": timeout, **settings}
    world: World | None = getattr(_of_thread, "world", None)
    as_thread = world is not None
    if comm is not None:
        world = _world_of(comm, arguments, as_thread)
    if world is not None:
        arguments.update(
            rank=world.rank, size=world.size,
            local_rank=world.local_rank, local_size=world.local_size,
        )  # fmt: skip
    settled = load(arguments)
    settled.warn_of_refused()
    name_libraries(settled)
    if world is None:
        world, chosen = build(settled), choose(settled)
    elif comm is not None:
        world, chosen = adopt(comm, settled, world), choose(settled, "mpi")
    else:
        world, chosen = replace(world, options=options(settled)), _of_threads(settled)
    world = replace(world, options={**world.options, **chosen.options})
    try:
        made = _connected(world, chosen, settled)
    except BaseException:
        if not as_thread:
            world.store.close()
        raise
    if not as_thread:
        made.succession.owns_store = True
    set_current(made)
    _see_to(made)
    dump_on_signal(settled.dump_signal)
    return made


def _connected(world: World, chosen: Choice, settled: Config) -> Communicator:
    """Connect with the other ranks, or join them, or be alone until the program does."""
    given: dict[str, Any] = {
        key: getattr(settled, key)
        for key in ("timeout", "check", "trace", "shrink_grace", "min_ranks")
    }
    if settled.join == "off":
        return connect(world, chosen.name, start_timeout=settled.start_timeout, **given)
    if world.comm is not None or getattr(_of_thread, "world", None) is not None:
        raise UnsupportedError(
            f"init: join {settled.join!r} ({settled.origin('join')}); ranks of an MPI.Comm, and "
            "ranks that `collective run` starts as threads, are as many as they were at first. "
            "Leave it out, or use COLLECTIVE_BACKEND=shm."
        )

    def find(theirs: str) -> type[Backend]:
        if settled.backend == "auto" and theirs in registry.BUILT_IN:
            return registry.find(theirs)
        return joined_by(registry.find(chosen.name), theirs)

    alone = connect_alone(world, find, **given)
    if settled.join == "late":
        return alone
    with contextlib.closing(alone):
        return alone.grow(timeout=settled.start_timeout)


def _see_to(comm: Communicator) -> None:
    """See to the end of ``comm``, and then to its next generation."""
    tell_at_exit(comm)
    if getattr(_of_thread, "world", None) is not None:
        _of_thread.opened.append(comm)
    comm.succession.on_next = functools.partial(_succeed, weakref.ref(comm))


def _succeed(before: weakref.ref[Communicator], comm: Communicator) -> None:
    """See to the end of a next generation; it is the current one if the last was."""
    was_current = before() is _current()
    _see_to(comm)
    if was_current:
        set_current(comm)


def _of_threads(settled: Config) -> Choice:
    # Ranks that are threads of this process cannot be anything else to each other,
    # whatever a script asks for by default; they can be told to use another.
    chosen = choose(settled, "threads")
    if chosen.host != "threads":
        raise UnsupportedError(
            f"init: backend {settled.backend!r} ({settled.origin('backend')}); this program runs "
            "with its ranks as threads of one process. Start it with `collective run --backend "
            f"{settled.backend}`, or leave the choice to the launcher."
        )
    return chosen


def _world_of(comm: Any, arguments: Mapping[str, object], as_thread: bool) -> World:
    """Return the world of an ``MPI.Comm``, or refuse what is none or does not go with it."""
    # Whoever has made one has imported this.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise InvalidArgumentError(
            f"init: comm={comm!r} of type {type(comm).__name__}; it must be an MPI.Intracomm of "
            "mpi4py that this process is in, such as MPI.COMM_WORLD, or None."
        )
    found = collect(arguments)  # before anything is sent, since other ranks would wait
    given = [key for key in _DECIDED_BY_COMM if arguments.get(key) is not None]
    if given:
        raise InvalidArgumentError(
            f"init: comm= together with {', '.join(given)}; who the ranks are and where they meet "
            "is what comm says. Give one or the other."
        )
    if as_thread:
        raise UnsupportedError(
            "init: comm=, and this program runs with its ranks as threads of one process, which "
            "is one rank to MPI. Start it with mpiexec."
        )
    from .mpi_world import world_of

    default = Setting(KEYS["start_timeout"].default, "default")
    world: World = world_of(comm, timeout=found.get("start_timeout", default).value)
    return world


def settings() -> Config:
    """Return the settings that ``init()`` would use, each with where it came from."""
    return load({})


def current() -> Communicator:
    """Return the communicator of module-level calls: what ``init()`` last returned here.

    Raises:
        CommunicatorClosedError: there is none, or it is closed.
    """
    comm = _current()
    if comm is None or comm.closed:
        why = "there is no open communicator; call collective.init() first."
        raise CommunicatorClosedError(f"collective: {(comm and comm.foreign) or why}")
    return comm


def _current() -> Communicator | None:
    of_thread: Communicator | None = getattr(_of_thread, "communicator", None)
    return _of_process if of_thread is None else of_thread


def set_current(comm: Communicator) -> None:
    """Make ``comm`` what module-level calls use, in this thread if ranks are threads."""
    global _of_process
    alone = comm.size == 1 and getattr(_of_thread, "communicator", None) is None
    if comm.capabilities.in_process and not alone:
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
            comm.fail(failure)
        comm.leave()


def tell_at_exit(comm: Communicator) -> None:
    """When this process ends, tell the peers of ``comm`` what ended it, and leave.

    ``init()`` sees to that itself; this is for what :func:`collective.connect` made.
    """
    _open.add(comm)


@atexit.register
def _leave() -> None:
    """At exit, tell the peers: of an exception that ended the program, or that it is over."""
    error = getattr(sys, "last_value", None)
    for comm in list(_open):
        if isinstance(error, BaseException) and not comm.closed:
            comm.fail(error)
        comm.leave()


def _forget() -> None:
    """A forked child is no rank: it takes no leave for its parent, nor joins the parent's world."""
    _open.clear()
    _of_thread.world = None
    _of_thread.opened = []


os.register_at_fork(after_in_child=_forget)
