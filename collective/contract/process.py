"""Processes: how a rank sees that another one has ended, and what must not leave a process.

The hub knows which ranks have died, until rank 0 dies and the hub with it. After that, a remaining
rank can look at the processes of its own host (:class:`RankProcess`). The system may have given a
process's number to another process by then. So the identity includes the time when the process
began (:func:`~collective.platform.process_status`). Both numbers are valid only for processes that
see the same process table. Some systems do not tell when a process began, which is harmless.

Further: objects that cannot be copied (:class:`NotCopied`), objects whose destructors must not run
in a forked child (:func:`keep_in_children`), and the limit of open files (:func:`shortage`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import weakref
from typing import Any, ClassVar, NamedTuple, NoReturn

from collective.errors import InvalidArgumentError
from collective.platform import boot_id, process_namespace, process_status

# Number of descriptors to leave free for the files that other libraries open.
_SPARE = 16

#: Remedy for a lack of file descriptors, for error texts.
RAISE_THE_LIMIT = (
    "Close communicators that are not needed any more, or raise the limit of open files (ulimit -n)"
)

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def forked_from(rank: str) -> str:
    """Return the reason, for error texts, why a forked child may not call the ranks.

    Args:
        rank: the rank that its parent is.
    """
    return (
        f"this process (pid {os.getpid()}) was forked from that of {rank} (pid {os.getppid()}), "
        "which alone may use the communicator. Start processes with the method 'spawn', and give "
        "them ranks of their own: collective.init(rank=, size=, store=)."
    )


class RankProcess(NamedTuple):
    """A process of some host.

    Attributes:
        host: text that is equal for processes that see each other in the process table.
        pid: number of the process on that host.
        started: when the process began, in clock ticks since the host's boot.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> RankProcess | None:
        """Return this process; None where the system has no such information."""
        try:
            status = process_status(os.getpid())
        except OSError:
            return None
        return None if status is None else cls(_host(), os.getpid(), status.started)

    @classmethod
    def parse(cls, text: object) -> RankProcess | None:
        """Return the process whose ``str()`` is ``text``; None if no process has such a text."""
        host, _, numbers = str(text).rpartition(" ")
        pid, _, started = numbers.partition("-")
        if not host or not pid.isdecimal() or not started.isdecimal():
            return None
        return cls(host, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.host} {self.pid}-{self.started}"

    def has_ended(self) -> bool:
        """Tell whether the process has ended; False if this process cannot find out.

        A zombie, whose parent has not waited for it yet, counts as ended.
        """
        if self.host != _host():
            return False
        try:
            status = process_status(self.pid)
        except OSError:  # such as a lack of file descriptors: says nothing about that process
            return False
        return status is None or status.started != self.started or status.state in "ZX"


def _host() -> str:
    """Return a text that is equal for processes that see the same process table."""
    boot, namespace = boot_id(), process_namespace()
    return f"{boot} {namespace}" if boot and namespace else "unknown"


class NotCopied:
    """Base of classes whose objects refuse to be copied and pickled.

    Attributes:
        instead: sentence for the error text, about what the caller can do instead.
    """

    __slots__ = ()
    instead: ClassVar[str]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # The functions of the module copy call this method, too.
        raise InvalidArgumentError(
            f"{type(self).__name__}: the object is bound to this process and can be neither copied "
            f"nor pickled. {self.instead}"
        )


def keep_in_children(thing: Any) -> None:
    """Leak ``thing`` in all children forked from now on, even if it is garbage in this process.

    Its destructor never runs there, not even at the end of the child.

    This is for objects that have threads, or that share a pipe with threads. A forked child
    inherits the pipe but not the threads. In the child, the destructor of such an object would
    wait forever for the threads, or end something that the parent still uses.
    """
    _known.add(thing)


def _keep_known() -> None:
    for thing in _known:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_keep_known)


def shortage(needed: int) -> str:
    """Return an error text if this process cannot open ``needed`` more files, else "".

    Transports call this before they use a library that cannot report the failure: without file
    descriptors, Gloo ends the process.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if not needed or limit == resource.RLIM_INFINITY:
        return ""
    try:
        used = len(os.listdir("/dev/fd")) - 1  # the listing itself takes one
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        used = limit  # not even the listing could be opened
    if used + needed + _SPARE <= limit:
        return ""
    return (
        f"{used} of {limit} file descriptors are in use, and {needed} more are needed (plus "
        f"{_SPARE} to spare). {RAISE_THE_LIMIT}"
    )
