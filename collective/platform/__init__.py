"""Calls to Linux that Python does not offer, or that some kernels, C libraries or containers lack.

Where the system hides something or forbids it, the function says what it returns instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import re
import secrets
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "CGROUPS",
    "PROC",
    "SHARED_MEMORY",
    "TCP_INFO_BYTES",
    "EndOfProcess",
    "ProcessStatus",
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
    "is_silent",
    "mapped_files",
    "notice_silence",
    "port_holder",
    "process_ids",
    "process_namespace",
    "process_status",
    "read_process",
    "shared_file",
    "short_path",
    "still_leads_to",
    "stop_listening",
    "tcp_info",
    "unacknowledged",
    "unsent",
    "usable_cores",
    "want_huge_pages",
]

#: Directory of the kernel's files about itself and about processes, proc(5).
PROC = Path("/proc")
#: Directory of the control groups, cgroups(7).
CGROUPS = Path("/sys/fs/cgroup")
#: Directory of POSIX shared memory, shm_open(3).
SHARED_MEMORY = Path("/dev/shm")
#: Bytes of a ``struct tcp_info`` (linux/tcp.h) that :func:`is_silent` needs.
TCP_INFO_BYTES = 4

# From <linux/tcp.h>.
_TCP_INFO = 11
# Numbers of retransmissions and of probes without an answer from which on a host is silent.
_RETRANSMITTED, _PROBED = 3, 2
# The first processor stands for all.
# From linux/sockios.h.
_SIOCOUTQNSD = 0x894B
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

# From <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
# Bytes for the fenv_t of any C library, and the processors on which FE_DFL_ENV is -1, fenv.h.
_FLOATS_BYTES = 128
_DEFAULT_FLOATS = ("x86_64", "aarch64")


# -- the host ------------------------------------------------------------------------------


def usable_cores(*others: int) -> int:
    """Return the number of cores on which this process may run, or one of ``others`` by their ids.

    Ranks that are bound to cores have different ones.
    """
    cores = os.sched_getaffinity(0)
    for pid in others:
        with contextlib.suppress(OSError):  # it has ended, or belongs to another process table
            cores |= os.sched_getaffinity(pid)
    return len(cores)


def boot_id() -> str:
    """Return the id of this boot of the kernel, which tells hosts apart; "" if it is unknown."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def cache_bytes() -> int | None:
    """Return the size of the processor's last cache; None if it is unknown."""
    try:
        return int(_CACHE.read_text().removesuffix("K\n")) << 10
    except (OSError, ValueError):
        return None


def cpu_name() -> str:
    """Return the name of the processor; "" if it is unknown."""
    model = re.search(r"^model name\s*:\s*(.+)$", (PROC / "cpuinfo").read_text(), re.MULTILINE)
    return model[1] if model else ""


def busy_seconds() -> float:
    """Return the time that the usable cores together have been busy, or stolen, since boot.

    Raises:
        OSError: the system does not tell.
    """
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = [line.split() for line in (PROC / "stat").read_text().splitlines()]
    ticks = 0
    for row in [row for row in rows if row[0] in mine] or rows[:1]:  # the first row is the sum
        user, nice, system, _, _, irq, soft, steal = map(int, row[1:9])
        ticks += user + nice + system + irq + soft + steal
    return ticks / os.sysconf("SC_CLK_TCK")


# -- processes -----------------------------------------------------------------------------


class ProcessStatus(NamedTuple):
    """Status of a process, as in ``/proc/PID/stat`` (proc(5)).

    Attributes:
        name: name of the program, of at most 15 characters.
        state: letter such as ``R`` (runs), ``S`` (sleeps), ``T`` (stopped) or ``Z`` (zombie).
        parent: process id of its parent.
        started: when the process began, in clock ticks since the host's boot.
    """

    name: str
    state: str
    parent: int
    started: int


def process_namespace() -> str:
    """Return a name of the process table that this process sees; "" if it is unknown."""
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def process_ids() -> list[int]:
    """Return the ids of all processes that this process sees."""
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdecimal()]
    except OSError:
        return []


def process_status(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if there is no such process.

    Raises:
        OSError: the system does not tell.
    """
    try:
        text = (PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # the latter if the process ends after open()
        return None
    # The name is in parentheses and may contain any character, so split after the last ")".
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStatus(
        text[text.index("(") + 1 : text.rindex(")")],
        fields[0],
        int(fields[1]),
        int(fields[19]),
    )


def mapped_files(pid: int) -> bytes:
    """Return the memory map of a process, which ends each line with a file; b"" if it is hidden."""
    try:
        return (PROC / str(pid) / "maps").read_bytes()
    except OSError:
        return b""


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent dies.

    So no process that a child started can leave the tree. It becomes a child of this process, which
    can find and end it. Its process id cannot be reused before this process has reaped it.
    """
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """Return a function for a child to call before exec, so that it dies with this process."""
    # Look up prctl before the fork: between fork and exec a child should do as little as possible.
    prctl = _libc().prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call of prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def ended_child() -> tuple[int, int] | None:
    """Return id and exit status of a child that has ended, and do not reap it; None if none has.

    Raises:
        ChildProcessError: this process has no children.
    """
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else (ended.si_pid, ended.si_status)


class EndOfProcess:
    """Process of which this one is not the parent, to notice its end and to kill it.

    The number of the process may be given to another process when it has ended. The descriptor of
    pidfd_open(2) stays with the process.

    Attributes:
        descriptor: descriptor that becomes readable when the process ends.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.descriptor = os.pidfd_open(pid)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


def stop_listening(address: tuple[str, int]) -> None:
    """Refuse connections at an address where other code of this process listens, from now on.

    The descriptor of that code stays open, so that it can close it, but becomes a new socket.
    """
    for name in os.listdir(PROC / "self/fd"):
        # It is no socket, or another thread closes it meanwhile, at any of these steps.
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=int(name))
            try:
                listens = (
                    sock.family in (socket.AF_INET, socket.AF_INET6)
                    and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    and sock.getsockname()[:2] == address
                )
            finally:
                descriptor = sock.detach()
            if listens:
                with socket.socket() as unused:
                    os.dup2(unused.fileno(), descriptor, inheritable=False)


# -- memory --------------------------------------------------------------------------------


def shared_file(name: str) -> tuple[int, str]:
    """Return the descriptor of new memory, and a path by which processes of this user open it.

    The memory is anonymous, memfd_create(2). It is never in a file system, so it ends with its
    last process. If this Python was built for a C library without that call, the memory is a
    temporary file of mode 0600, which has to be deleted (:func:`is_file`).

    Args:
        name: name of the memory in ``/proc``, or beginning of the file's name.
    """
    if not hasattr(os, "memfd_create"):
        return tempfile.mkstemp(prefix=f"{name}-")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return descriptor, f"{PROC}/{os.getpid()}/fd/{descriptor}"


def is_file(path: str) -> bool:
    """Return whether the path from :func:`shared_file` is a file that has to be deleted."""
    return not path.startswith(f"{PROC}/")


def still_leads_to(path: str, name: str) -> bool:
    """Return whether ``path`` leads to memory that :func:`shared_file` has made.

    The process that made the memory may have died. Another process may have its number by now, and
    the path may lead to a file of that process.
    """
    return is_file(path) or os.readlink(path).startswith(f"/memfd:{name}")


def fix_length(descriptor: int) -> None:
    """Fix the length of anonymous memory permanently, if the system supports seals.

    Without the seals any process of this user could shorten the memory through its path. Then each
    process that has mapped it would die of SIGBUS at its next access behind the new end. A file in
    a directory has no seals.
    """
    if hasattr(fcntl, "F_ADD_SEALS"):
        with contextlib.suppress(OSError):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def descriptor_path(descriptor: int) -> str:
    """Return a path by which other processes of this user open a file of this process."""
    return f"{PROC}/{os.getpid()}/fd/{descriptor}"


def want_huge_pages(mapped: mmap.mmap) -> None:
    """Ask for transparent huge pages; with them there are a tenth as many page faults."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)


def discard_pages(start: int, nbytes: int) -> None:
    """Release whole pages of memory whose contents are not needed; the addresses stay usable."""
    advise = _libc().madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    advise(start, nbytes, mmap.MADV_DONTNEED)


@contextlib.contextmanager
def default_floats() -> Iterator[None]:
    """Compute in the default floating-point mode: round to nearest, flush no numbers to zero.

    The mode belongs to the thread, and is restored afterwards. It stays as it is on processors
    other than x86-64's and ARM's, and where Python's process does not export the functions.
    """
    library, saved = _libc(), ctypes.create_string_buffer(_FLOATS_BYTES)
    if os.uname().machine not in _DEFAULT_FLOATS or not hasattr(library, "fesetenv"):
        yield
        return
    library.fegetenv(saved)
    library.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        library.fesetenv(saved)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _process_vm_readv() -> Callable[..., int] | None:
    function = getattr(_libc(), "process_vm_readv", None)
    if function is None:
        return None
    function.restype = ctypes.c_ssize_t
    vector = ctypes.POINTER(_IoVec)
    function.argtypes = (
        ctypes.c_int, vector, ctypes.c_ulong, vector, ctypes.c_ulong, ctypes.c_ulong,
    )  # fmt: skip
    loaded: Callable[..., int] = function
    return loaded


def read_process(pid: int, address: int, into: int, nbytes: int) -> bool:
    """Copy ``nbytes`` from ``address`` of process ``pid`` to address ``into`` of this process.

    The kernel makes a single copy, by process_vm_readv(2). Return False if the system has no such
    call or forbids it.

    Raises:
        ProcessLookupError: the process is gone.
    """
    function = _process_vm_readv()
    if function is None:
        return False
    local, remote = _IoVec(into, nbytes), _IoVec(address, nbytes)
    while nbytes:
        copied = function(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if copied == nbytes:
            return True
        if copied < 0:
            if ctypes.get_errno() == errno.ESRCH:
                raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone")
            return False
        # A single call moves at most 2 GiB less a page.
        nbytes -= copied
        local = _IoVec(local.base + copied, nbytes)
        remote = _IoVec(remote.base + copied, nbytes)
    return True


def allow_to_read(pid: int) -> None:
    """Let a process and its descendants read this one; with 0, only this process's ancestors."""
    _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


# -- sockets -------------------------------------------------------------------------------


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a free TCP port, and keep it from other programs until the context ends.

    A socket stays bound to the port, on all addresses of this host. So the kernel gives the port
    to no program that asks for any port, and no program can bind it without ``SO_REUSEADDR``. A
    server that sets ``SO_REUSEADDR`` can bind the port and listen there, since the socket does not
    listen (socket(7)). Torch's TCPStore, asyncio and this library set it.
    """
    with _any_port() as holder:
        port: int = holder.getsockname()[1]
        yield port


def _any_port() -> socket.socket:
    """Return a socket that is bound to a free port of all addresses, and does not listen."""
    if socket.has_ipv6:
        with contextlib.suppress(OSError):  # the kernel has no IPv6, or it is switched off
            return _bound(socket.AF_INET6, "::")
    return _bound(socket.AF_INET, "0.0.0.0")


def _bound(family: socket.AddressFamily, address: str) -> socket.socket:
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The socket holds the port for IPv4, too. Some systems switch that off by default.
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind((address, 0))
    except BaseException:
        holder.close()
        raise
    return holder


def bound_locally() -> tuple[socket.socket, str]:
    """Return a bound socket for processes of this host, and its address.

    An address with a space is a host and a port of TCP. :func:`connected_locally` takes addresses
    without a space. The socket has a random name in the kernel's abstract namespace, which no other
    host can reach and which vanishes with the socket (unix(7)).
    """
    name = f"collective-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"\0{name}")
    except BaseException:
        sock.close()
        raise
    return sock, name


def connected_locally(address: str, seconds: float) -> socket.socket:
    """Return a socket that is connected to an address of :func:`bound_locally`.

    Raises:
        OSError: no program listens there.
        BlockingIOError: the listener's queue stayed full for ``seconds``.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        # Use the kernel's timeout: with one of Python's, connect() would not wait for a full queue.
        limit = struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        sock.connect(f"\0{address}")
    except BaseException:
        sock.close()
        raise
    return sock


def port_holder(port: int) -> str:
    """Return words for the process that listens at a TCP port of this host, or is connected there.

    Returns:
        Such as ``process 17 (python train.py)``; ``a process of user 1000`` if the kernel hides the
        process from this one; empty if nobody listens there, or the kernel hides that, too.
    """
    owners: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "self/net" / table).read_text().splitlines()[1:]:
                fields = line.split()  # proc_net_tcp in the kernel's documentation
                if int(fields[1].rpartition(":")[2], 16) == port and fields[9] != "0":
                    owners[f"socket:[{fields[9]}]"] = int(fields[7])
    for pid in process_ids() if owners else ():
        with contextlib.suppress(OSError):
            for name in os.listdir(PROC / str(pid) / "fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(PROC / str(pid) / "fd" / name) in owners:
                        command = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0")
                        text = command.replace(b"\0", b" ").decode(errors="replace")
                        return f"process {pid} ({text:.100})"
    return next((f"a process of user {user}" for user in owners.values()), "")


def notice_silence(sock: socket.socket, seconds: int) -> None:
    """Let the kernel end a TCP connection whose other host has vanished for ``seconds``.

    Keep-alive probes find such a host while the connection is idle. While sent data is not
    acknowledged the kernel sends no probes. Instead it retransmits the data for a quarter of an
    hour; TCP_USER_TIMEOUT ends that earlier (tcp(7)).
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, seconds - 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def is_silent(info: bytes) -> bool:
    """Return whether the other host of a TCP connection has left packets unanswered for seconds.

    A process that is stopped is not silent: its kernel answers.

    Args:
        info: value of the socket's option TCP_INFO, or its first :data:`TCP_INFO_BYTES`. The kernel
            fills a ``struct tcp_info``, whose third byte counts the retransmissions of the oldest
            unanswered data, and whose fourth byte counts the unanswered probes.
    """
    # The kernel retransmits after 0.2 s, 0.4 s and so on, and probes an idle connection once a
    # second (notice_silence). A single lost packet is no silence.
    return len(info) >= TCP_INFO_BYTES and (info[2] >= _RETRANSMITTED or info[3] >= _PROBED)


def tcp_info(sock: socket.socket) -> bytes:
    """Return the first bytes of a socket's option TCP_INFO; none if the kernel has none."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, TCP_INFO_BYTES)
    except OSError:  # closed, or another system
        return b""


def unacknowledged(descriptor: int) -> int:
    """Return how many bytes a socket has taken that the other host has not acknowledged, tcp(7).

    A closed descriptor counts as one byte.
    """
    try:
        raw = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 1
    return int.from_bytes(raw, sys.byteorder)


def unsent(descriptor: int) -> int:
    """Return how many bytes a socket has taken that have not left this host, tcp(7).

    A connection that is closed or reset has none.
    """
    ended = select.poll()
    try:
        nbytes = int.from_bytes(fcntl.ioctl(descriptor, _SIOCOUTQNSD, bytes(4)), sys.byteorder)
        ended.register(descriptor, 0)  # for POLLERR and POLLHUP
    except (OSError, ValueError):
        return 0
    return 0 if nbytes and ended.poll(0) else nbytes


@contextlib.contextmanager
def short_path(address: str) -> Iterator[str]:
    """Yield a name for a socket's file that fits into a socket address, which has 107 bytes.

    The path of a job's directory for temporary files may be too long.
    """
    folder = os.open(os.path.dirname(address), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"{PROC}/self/fd/{folder}/{os.path.basename(address)}"
    finally:
        os.close(folder)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
