"""Startup file of a Python that has nothing of Linux: add this folder to PYTHONPATH.

It takes away what Linux offers beyond other systems, as far as Python code can reach it: functions
and constants, the files of the kernel, abstract socket names, and functions of the C library. The
platform is called "darwin". COLLECTIVETEST_FIRST names modules to import before, such as PyTorch,
which would look for files of macOS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import select
import signal
import socket
import sys
import sysconfig
from typing import Any

sysconfig.get_config_vars()  # a file that is named after the platform
# Modules of Python that choose by the platform, and others that the test names, such as PyTorch.
_FIRST = "asyncio multiprocessing.connection subprocess tempfile urllib.request uuid numpy"
for name in [*_FIRST.split(), *os.environ.get("COLLECTIVETEST_FIRST", "").split()]:
    with contextlib.suppress(ImportError):
        __import__(name)

GONE: dict[Any, str] = {
    os: "eventfd memfd_create pidfd_open sched_getaffinity sched_getparam sched_getscheduler "
        "sched_param sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler "
        "posix_fallocate posix_fadvise copy_file_range splice setns unshare waitid getrandom "
        "getxattr setxattr listxattr",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
    select: "epoll",
    socket: "SO_PEERCRED SO_DOMAIN SO_PROTOCOL SO_MARK SOCK_CLOEXEC SOCK_NONBLOCK TCP_KEEPIDLE "
            "TCP_USER_TIMEOUT TCP_QUICKACK MSG_NOSIGNAL MSG_CMSG_CLOEXEC",
    fcntl: "F_ADD_SEALS F_GET_SEALS F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_SEAL_WRITE "
           "F_SETPIPE_SZ F_OFD_SETLK",
    mmap: "MADV_HUGEPAGE",
}  # fmt: skip
#: Constants of these modules, by the beginnings of their names.
GROUPS = {os: ("SCHED_", "MFD_", "EFD_", "P_ALL", "P_PID", "WNOWAIT", "O_PATH")}
FUNCTIONS = {"prctl", "process_vm_readv", "process_vm_writev", "memfd_create", "pidfd_open"}
KERNEL = ("/proc", "/sys", "/dev/shm")

for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
for module, beginnings in GROUPS.items():
    for name in [name for name in vars(module) if name.startswith(beginnings)]:
        delattr(module, name)


def _is_kernels(path: object) -> bool:
    if isinstance(path, int) or not isinstance(path, (str, bytes, os.PathLike)):
        return False
    text = os.fsdecode(path)
    return any(text == folder or text.startswith(f"{folder}/") for folder in KERNEL)


def _hidden(function: Any) -> Any:
    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if _is_kernels(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *arguments, **options)

    return call


for name in ("stat", "lstat", "readlink", "listdir", "scandir", "access", "statvfs"):
    setattr(os, name, _hidden(getattr(os, name)))


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _is_kernels(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])
    if event in ("socket.bind", "socket.connect"):
        address = arguments[1]
        if isinstance(address, (str, bytes)) and os.fsencode(address).startswith(b"\0"):
            raise OSError(errno.EINVAL, "abstract names are Linux's")


sys.addaudithook(_watch)
_find = ctypes.CDLL.__getattr__


def _found(library: ctypes.CDLL, name: str) -> Any:
    if name in FUNCTIONS:
        raise AttributeError(name)
    return _find(library, name)


ctypes.CDLL.__getattr__ = _found  # type: ignore[method-assign]
sys.platform = "darwin"
