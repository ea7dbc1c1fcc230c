"""Counterparts of :mod:`.linux` for other systems, which need nothing but POSIX.

Where a system does not tell something, the function says so as its counterpart does for a kernel
that hides it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .process_status import ProcessStatus

__all__ = [
    "CGROUPS",
    "PROC",
    "SHARED_MEMORY",
    "EndOfProcess",
    "adopt_orphans",
    "allow_to_read",
    "boot_id",
    "bound_locally",
    "busy_seconds",
    "cache_bytes",
    "connected_locally",
    "cpu_name",
    "default_floats",
    "descriptor_path",
    "die_with_parent",
    "discard_pages",
    "ended_child",
    "fix_length",
    "held_port",
    "is_file",
    "let_others_run_first",
    "mapped_files",
    "notice_silence",
    "process_ids",
    "process_namespace",
    "process_status",
    "read_process",
    "shared_file",
    "short_path",
    "still_leads_to",
    "stop_listening",
    "threads",
    "usable_cores",
    "want_huge_pages",
]

#: Directories that exist on no system: /dev/null is not a directory.
PROC = CGROUPS = SHARED_MEMORY = Path(os.devnull, "none")

# How often a thread looks whether a process has ended.
_LOOK_S = 0.05


# -- the host ------------------------------------------------------------------------------


def usable_cores() -> int:
    """Return the number of cores."""
    return os.cpu_count() or 1


def boot_id() -> str:
    """Return "": the id is unknown."""
    return ""


def cache_bytes() -> int | None:
    """Return None: the size is unknown."""
    return None


def cpu_name() -> str:
    """Return the name of the processor; "" if it is unknown."""
    return platform.processor()


def busy_seconds() -> float:
    """Return the processor time of this process; the system does not tell that of the others."""
    return time.process_time()


# -- processes -----------------------------------------------------------------------------


def process_namespace() -> str:
    """Return "": the name is unknown."""
    return ""


def process_ids() -> list[int]:
    """Return an empty list: the ids are unknown."""
    return []


def process_status(pid: int) -> ProcessStatus | None:
    """Return None if there is no such process.

    Raises:
        OSError: there is one, and the system does not tell its status.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def mapped_files(pid: int) -> bytes:
    """Return b"": the map is hidden."""
    del pid
    return b""


def adopt_orphans() -> None:
    """Do nothing: the first process of the system adopts orphans."""


def die_with_parent() -> Callable[[], None]:
    """Return a function that does nothing: a child outlives a parent that is killed."""
    return lambda: None


def ended_child() -> tuple[int, int] | None:
    """Return None: a child that has ended cannot be seen before it is reaped."""
    return None


class EndOfProcess:
    """Process of which this one is not the parent, to notice its end and to kill it.

    A thread looks whether the process is there. If another process gets its number within one
    look, the thread does not notice.

    Attributes:
        descriptor: descriptor that becomes readable when the process ends.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        os.kill(pid, 0)
        self._pid = pid
        self.descriptor, self._ended = os.pipe()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._look, name=f"collective-end-of-{pid}", daemon=True
        )
        self._thread.start()

    def _look(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                break
        os.close(self._ended)  # the end of file makes the other end readable

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self._thread.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptor, and end the thread."""
        self._closing.set()
        self._thread.join()
        os.close(self.descriptor)


def threads() -> dict[int, str]:
    """Return an empty dictionary: the threads are unknown."""
    return {}


def let_others_run_first(thread: int) -> None:
    """Raise OSError: the class of a thread cannot be changed."""
    del thread
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def stop_listening(address: tuple[str, int]) -> None:
    """Do nothing: the system does not list the descriptors of this process."""
    del address


# -- memory --------------------------------------------------------------------------------


def shared_file(name: str) -> tuple[int, str]:
    """Return the descriptor of new memory, and a path by which processes of this user open it.

    The memory is a temporary file of mode 0600, which has to be deleted.

    Args:
        name: beginning of the file's name.
    """
    return tempfile.mkstemp(prefix=f"{name}-")


def is_file(path: str) -> bool:
    """Return True: the path from :func:`shared_file` is a file that has to be deleted."""
    del path
    return True


def still_leads_to(path: str, name: str) -> bool:
    """Return True: no other process makes a file of this name."""
    del path, name
    return True


def fix_length(descriptor: int) -> None:
    """Do nothing: the length of a file cannot be fixed."""


def descriptor_path(descriptor: int) -> str | None:
    """Return None: a file of this process has no path for other processes."""
    del descriptor
    return None


def want_huge_pages(mapped: mmap.mmap) -> None:
    """Do nothing: the system chooses the pages."""


def discard_pages(start: int, nbytes: int) -> None:
    """Do nothing: the pages stay until the memory is freed."""


def read_process(pid: int, address: int, into: int, nbytes: int) -> bool:
    """Return False: a process cannot read another one's memory."""
    del pid, address, into, nbytes
    return False


def allow_to_read(pid: int) -> None:
    """Do nothing: no process can read this one's memory."""


# -- sockets -------------------------------------------------------------------------------


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a TCP port that was free a moment ago; another program may take it meanwhile.

    On BSD systems a second socket cannot listen at a port that is bound already, even with
    ``SO_REUSEADDR``. So no socket can hold the port for a server in another process.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    yield port


def bound_locally() -> tuple[socket.socket, str]:
    """Return a bound socket for processes of this host, and its address.

    The address is ``127.0.0.1`` and a port, with a space between them. A socket in a directory
    would need a short path, and would stay behind when its process is killed.
    """
    sock = socket.socket(socket.AF_INET)
    try:
        sock.bind(("127.0.0.1", 0))
    except BaseException:
        sock.close()
        raise
    return sock, f"127.0.0.1 {sock.getsockname()[1]}"


def connected_locally(address: str, seconds: float) -> socket.socket:
    """Raise OSError: :func:`bound_locally` returns only addresses of TCP."""
    del seconds
    raise OSError(errno.EINVAL, f"{address!r} is no address of this system")


def notice_silence(sock: socket.socket, seconds: int) -> None:
    """Let the kernel end a TCP connection whose other host has vanished for ``seconds``.

    Keep-alive probes find such a host while the connection is idle. Systems lack some of the
    options. macOS calls the first one TCP_KEEPALIVE.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPALIVE": 1,
        "TCP_KEEPIDLE": 1,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": seconds - 1,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@contextlib.contextmanager
def default_floats() -> Iterator[None]:
    """Leave the floating-point mode as it is: each system has a name of its own for the default."""
    yield


@contextlib.contextmanager
def short_path(address: str) -> Iterator[str]:
    """Yield ``address``: there is no shorter name for a socket's file."""
    yield address
