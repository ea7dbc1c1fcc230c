"""``init()``, and the current communicator, which module-level calls use."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, NoReturn

from collective.communicator import Communicator
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.recorder import dump_on_signal
from collective.contract.work import deliver
from collective.contract.world import World
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    ConfigError,
    InvalidArgumentError,
    ToldByText,
    UnsupportedError,
    outer_frames,
)

from .choice import Choice, choose
from .config import Config, load
from .connecting import connect, connect_alone, joined_by, tell_failing
from .launchers import Launched, names_of_place
from .resolver import adopt, build
from .rundir import claim

# The current communicator. It belongs to the thread if ranks are threads, else to the process.
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

    The rank, the number of ranks and the transport come from several sources. In this order, they
    are the arguments, ``COLLECTIVE_*`` variables, ``collective.toml`` or ``pyproject.toml``, and
    the launcher (``collective run``, torchrun, mpiexec, srun). Without any of them, the process
    is the only rank. ``collective config`` shows the source of each value.

    Collective: every rank calls it, as often as the others; with ``comm``, every rank of ``comm``.

    Args:
        backend: name of a transport; ``"auto"`` picks one.
        rank, size: number of this rank, and how many there are, for ranks without a launcher.
        timeout: seconds that a call may take before it raises, 300 by default.
        comm: an ``MPI.Comm`` of mpi4py that the program made. Its ranks become the ranks of the
            new communicator, over ``mpi`` unless ``backend`` names another transport. The program
            keeps ownership of ``comm``; messages over ``comm`` and over the new communicator
            never mix.
        settings: further settings: ``store``, ``start_timeout``, ``check``, ``local_rank``,
            ``local_size``, ``interface``, ``across``, ``device``, …. The command
            ``collective config`` shows all of them. With ``join=True`` this process joins ranks
            that met in ``store`` and are already connected. They admit it when they call
            ``grow()``.

    Returns:
        The communicator. Module-level calls use it from now on.

    Raises:
        ConfigError: a setting is unknown or wrong. The text names the setting and its source.
        InvalidArgumentError: ``comm`` is not an ``MPI.Comm``, or is combined with ``rank``,
            ``size`` or another setting that ``comm`` determines.
        BackendNotFoundError, BackendUnavailableError: the transport does not exist or cannot be
            used here; with ``comm``, MPI connects fewer processes than the launcher started.
        ConfigError: another process of this host, such as the parent, is this rank already.
        RendezvousError: not all ranks arrived within ``start_timeout``. The text names them.
        CollectiveTimeoutError, ExcludedError: with ``join``, the ranks did not admit this process
            within ``start_timeout``, or they have ended.

    Warns:
        RuntimeWarning: a settings file was not read, since another user could have written it.
    """
    shorten_tracebacks()
    arguments = {"backend": backend, "rank": rank, "size": size, "timeout": timeout, **settings}
    return _begin(arguments, comm)


def _begin(arguments: dict[str, object], comm: object) -> Communicator:
    """Return the communicator for the arguments of :func:`init`, now the current one."""
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
    settled.name_libraries()
    options, where = settled.of_communicator(), settled.shared()
    with contextlib.ExitStack() as opened:
        # A process that joins other ranks gets its number from them.
        if where and not as_thread and settled.join != "on":
            opened.callback(take_place("init", settled.rank, settled.size, where, settled.launched))
        chosen = choose(settled, "threads" if as_thread else "mpi" if comm is not None else "")
        if world is None:
            world = build(settled, chosen)
        elif comm is not None:
            world = adopt(comm, settled, chosen, world)
        else:
            _check_threads(settled, chosen)
            world = replace(world, options=chosen.options)
        if not as_thread:
            opened.callback(world.store.close)
        if settled.join == "off":
            begin = settled.start_timeout
            communicator = connect(world, chosen.name, start_timeout=begin, **options)
        else:
            communicator = _joined(world, chosen, settled, options)
        _see_to(communicator, opened.pop_all().close)
    if not as_thread and world.launcher == "collective" and settled.join == "off":
        _Ending.launcher = world.rank, world.store
    set_current(communicator)
    if "dump_signal" not in settled.disable:
        dump_on_signal()
    return communicator


def _joined(
    world: World, chosen: Choice, settled: Config, options: Mapping[str, Any]
) -> Communicator:
    """Return a communicator that has joined other ranks, or with ``join="late"`` is still alone."""
    if world.comm is not None or getattr(_of_thread, "world", None) is not None:
        raise UnsupportedError(
            f"init: join {settled.join!r} ({settled.origins['join']}); no process can join the "
            "ranks of an MPI.Comm, or ranks that `collective run` starts as threads. Omit join, "
            "or use COLLECTIVE_BACKEND=shm."
        )

    def find(theirs: str) -> type[Backend]:
        if settled.backend == "auto" and theirs in registry.BUILT_IN:
            return registry.find(theirs)
        return joined_by(registry.find(chosen.name), theirs)

    alone = connect_alone(world, find, **options)
    if settled.join == "late":
        return alone
    with contextlib.closing(alone):
        return alone.grow(timeout=settled.start_timeout)


def take_place(
    caller: str, rank: int, size: int, where: str, launched: Launched | None
) -> Callable[[], None]:
    """Take a place among ranks, which no other process may have at the same time.

    The child of a rank inherits the variables of the launcher. With them it would wait for ranks
    that are connected already, or form a second world with other children.

    Args:
        caller: name of the function that the program called, for the error.
        rank, size, where, launched: as for :func:`~.launchers.names_of_place`. If there is one
            rank, any number of processes may have the place.

    Returns:
        A function that gives the place back.

    Raises:
        ConfigError: another process of this host has the place.
    """
    if size == 1:
        return lambda: None
    try:
        return claim(names_of_place(rank, size, where, launched))
    except BlockingIOError:
        raise ConfigError(
            f"{caller}: rank {rank} of {size} is another process, which is still connected, and "
            f"this process (pid {os.getpid()}, child of {os.getppid()}) has the settings of the "
            "same rank. Perhaps it is a child of that rank. If multiprocessing or a DataLoader "
            "imported the script here, put the calls of the script behind `if __name__ == "
            '"__main__":`. To use the library in this process, start it with `collective run`, or '
            "pass it a place of its own: rank=0 and size=1, or rank=, size= and store= for ranks "
            "among such processes."
        ) from None


def _see_to(comm: Communicator, *at_end: Callable[[], None]) -> None:
    """Register ``comm`` to be closed at the end, and each of its next generations as well.

    Args:
        comm: the communicator.
        at_end: functions to call when its last generation closes.
    """
    tell_at_exit(comm)
    if getattr(_of_thread, "world", None) is not None:
        _of_thread.opened.append(comm)
    succession = comm.inner.succession
    succession.on_next = functools.partial(_succeed, weakref.ref(comm))
    succession.at_end += at_end


def _succeed(before: weakref.ref[Communicator], comm: Communicator) -> None:
    """Register a next generation; make it the current communicator if the last one was."""
    was_current = before() is _current()
    _see_to(comm)
    if was_current:
        set_current(comm)


def _check_threads(settled: Config, chosen: Choice) -> None:
    """Raise UnsupportedError if ranks that are threads of one process cannot use ``chosen``."""
    if chosen.host != "threads":
        raise UnsupportedError(
            f"init: backend {settled.backend!r} ({settled.origins['backend']}); the ranks of this "
            "program are threads of one process and cannot use it. Start the program with "
            f"`collective run --backend {settled.backend}`, or do not name a backend."
        )


def _world_of(comm: Any, arguments: Mapping[str, object], as_thread: bool) -> World:
    """Return the world of an ``MPI.Comm``; raise if ``comm`` or the arguments do not fit."""
    # A program that has made an MPI.Comm has already imported mpi4py.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise InvalidArgumentError(
            f"init: comm={comm!r} of type {type(comm).__name__}; it must be an MPI.Intracomm of "
            "mpi4py that this process is in, such as MPI.COMM_WORLD, or None."
        )
    # Check the settings before world_of() sends anything: if this rank raised later, the other
    # ranks would wait for it.
    settled = load({**arguments, "rank": 0, "size": 1, "local_rank": 0, "local_size": 1})
    conflicts = [key for key in _DECIDED_BY_COMM if arguments.get(key) is not None]
    if conflicts:
        raise InvalidArgumentError(
            f"init: comm= together with {', '.join(conflicts)}; comm already determines the ranks "
            "and where they meet. Give one or the other."
        )
    if as_thread:
        raise UnsupportedError(
            "init: comm= cannot be used, since the ranks of this program are threads of one "
            "process, and a process is one rank of MPI. Start the program with mpiexec."
        )
    from .mpi_world import world_of

    return world_of(comm, timeout=settled.start_timeout)


def settings() -> Config:
    """Return the settings that ``init()`` would use, each with its source."""
    return load({})


def current() -> Communicator:
    """Return the communicator of module-level calls, which ``init()`` last returned here.

    Raises:
        CommunicatorClosedError: ``init()`` has not been called, or the communicator is closed.
    """
    comm = _current()
    if comm is None or comm.closed:
        why = "there is no open communicator; call collective.init() first."
        raise CommunicatorClosedError(f"collective: {(comm and comm.inner.foreign) or why}")
    return comm


def comm_or_current(comm: Communicator | None, caller: str) -> Communicator:
    """Return ``comm``, or the current communicator if ``comm`` is None.

    Raises:
        InvalidArgumentError: ``comm`` is something else, such as another library's argument in the
            place of ``comm``. The text names ``caller``.
        CommunicatorClosedError: ``comm`` is None, and there is no current communicator.
    """
    if comm is None:
        return current()
    # A wrapper around a communicator is accepted, too.
    if not hasattr(comm, "all_reduce"):
        raise InvalidArgumentError(
            f"{caller}: comm is {comm!r} of type {type(comm).__name__} (expected a communicator of "
            "collective, or None for the current one). Pass other arguments by keyword."
        )
    return comm


def _current() -> Communicator | None:
    of_thread: Communicator | None = getattr(_of_thread, "communicator", None)
    return _of_process if of_thread is None else of_thread


def set_current(comm: Communicator) -> None:
    """Make ``comm`` the communicator of module-level calls; per thread if ranks are threads."""
    global _of_process
    alone = comm.size == 1 and getattr(_of_thread, "communicator", None) is None
    if comm.capabilities.in_process and not alone:
        _of_thread.communicator = comm
    else:
        _of_process = comm


def thread_world(world: World | None) -> None:
    """Make ``init()`` in this thread join ``world``, for launchers whose ranks are threads."""
    _of_thread.world = world
    _of_thread.opened = []


def leave_thread(failure: Failure | None) -> None:
    """Close the communicators of this thread, after reporting ``failure``, if any, to the peers."""
    for comm in getattr(_of_thread, "opened", ()):
        if failure is not None:
            comm.inner.fail(failure)
        comm.inner.leave(Deadline(comm.timeout) if failure is None else None)


def tell_at_exit(comm: Communicator) -> None:
    """Register ``comm`` so that its peers learn at exit why this process ended.

    ``init()`` registers its communicator itself. This function is for communicators from
    :func:`collective.connect`.
    """
    _open.add(comm)
    _notice_failures()
    _leave_with_child_process()
    if "collective.backends.mpi.library" in sys.modules:
        # Its exit handler, which finalises MPI, must run after this one.
        atexit.unregister(_leave)
        atexit.register(_leave)


class _Ending:
    """How the program ends.

    Attributes:
        over: whether the main thread has ended. Other threads may still run.
        exit: text of the last ``sys.exit()`` with a failure, the outermost frame of the main
            thread, and the place in it from which that was called; None before.
        code: exit code of that exit.
        launcher: number of this rank for `collective run`, and the store that the two share.
    """

    over = False
    exit: tuple[str, FrameType, int] | None = None
    code = 1
    launcher: tuple[int, Store] | None = None


def _exit(status: Any = None, /) -> NoReturn:
    """Exit as ``sys.exit`` does; note a failure, of which Python keeps nothing for the exit."""
    __tracebackhide__ = True  # pytest shows the line of the caller
    if status and threading.current_thread() is threading.main_thread():
        frame = outermost = sys._getframe(1)
        while outermost.f_back is not None:
            outermost = outermost.f_back
        stack = "".join(traceback.format_stack(frame))
        text = f"Traceback (most recent call last):\n{stack}SystemExit: {status}\n"
        _Ending.exit = text, outermost, outermost.f_lasti
        _Ending.code = status & 0xFF if isinstance(status, int) else 1
    raise SystemExit(status)


def _failed() -> BaseException | str:
    """Return the exception that has ended the main thread, or the traceback of ``sys.exit()``.

    The text is empty if neither has.
    """
    # The second one is that of a child of multiprocessing.
    error = getattr(sys, "last_value", None) or sys.exc_info()[1]
    if isinstance(error, BaseException) and not (isinstance(error, SystemExit) and not error.code):
        return error
    if _Ending.exit is not None:
        text, outermost, place = _Ending.exit
        # If the program has caught the exception, its outermost frame has gone on.
        if outermost.f_lasti == place:
            return text
    return ""


def _tell(why: BaseException | str) -> None:
    """Tell the peers of all open communicators that this rank has failed, if it has."""
    for comm in list(_open):
        if why != "" and not comm.closed:
            comm.inner.fail(Failure("failed", comm.rank, why) if isinstance(why, str) else why)


def _tell_torchrun(error: BaseException) -> None:
    """Write the error to the file from which torchrun's report of a failed run takes its text.

    The root cause of the report has the smallest time in seconds. So the error of a rank that
    follows from another rank's failure gets a later one.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or not _open or os.path.exists(path):
        return
    trace = outer_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    when = int(time.time()) + isinstance(error, CommunicatorAbortedError)
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": text, "timestamp": when}, file)


def _main_ended() -> None:
    """Tell the peers of a failure of the main thread before Python waits for other threads."""
    _Ending.over = True
    why = _failed()
    if isinstance(why, BaseException):
        _tell_torchrun(why)
    _tell(why)
    runs_on = any(
        not thread.daemon and thread is not threading.main_thread()
        for thread in threading.enumerate()
    )
    if runs_on and why != "" and _Ending.launcher is not None:
        rank, store = _Ending.launcher
        code = _Ending.code if isinstance(why, str) else 1
        with contextlib.suppress(CollectiveError):  # the launcher has ended
            tell_failing(store, rank, code)


def _thread_failed(before: Callable[[Any], object], args: threading.ExceptHookArgs) -> None:
    """Tell the peers if a thread that outlives the main thread fails; call the hook ``before``."""
    before(args)
    daemon = args.thread is not None and args.thread.daemon
    if _Ending.over and not daemon and args.exc_value and args.exc_type is not SystemExit:
        _tell(args.exc_value)


@functools.cache
def _notice_failures() -> None:
    """Notice how the main thread and other threads of this process end, from now on."""
    # Python runs these functions in the reverse order of their registration, before it waits for
    # threads. That of concurrent.futures waits for threads itself, so it must come after ours.
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(_main_ended)  # type: ignore[attr-defined]
    sys.exit = _exit
    threading.excepthook = functools.partial(_thread_failed, threading.excepthook)


@functools.cache
def shorten_tracebacks() -> None:
    """Let Python end with an error of this package at the line that called the package.

    ``collective run`` shortens what its ranks write itself, and ``python -X dev`` shows all frames.
    """
    if "COLLECTIVE_RANK" not in os.environ and not sys.flags.dev_mode:
        sys.excepthook = functools.partial(_show_shortened, sys.excepthook)


def _show_shortened(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show an exception by the hook ``before``."""
    if isinstance(error, ToldByText):
        trace = outer_frames(trace)
        error.__traceback__ = trace
    before(kind, error, trace)


@functools.cache
def _leave_with_child_process() -> None:
    """Call :func:`_leave` at the end of a child of multiprocessing, which has no exit handlers."""
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        importlib.import_module("multiprocessing.util").Finalize(None, _leave, exitpriority=0)


@atexit.register
def _leave() -> None:
    """Report to the peers at exit: a failure that ended the program, or a normal end.

    After a normal end, this process first completes what it has begun in the background, as
    ``close()`` does. A program that has failed waits for nobody.
    """
    why = _failed()
    still_open = [comm for comm in _open if not comm.closed]
    try:
        if why != "":
            _tell(why)
        elif still_open:
            deliver(None, Deadline(max(comm.timeout for comm in still_open)))
    finally:
        for comm in list(_open):
            comm.inner.leave()


def _forget() -> None:
    """Clear the state in a forked child, which is not a rank.

    The child must not leave the communicators of its parent, nor join its parent's world.
    """
    _open.clear()
    _Ending.exit = _Ending.launcher = None
    _leave_with_child_process.cache_clear()
    _of_thread.world = None
    _of_thread.opened = []


os.register_at_fork(after_in_child=_forget)
