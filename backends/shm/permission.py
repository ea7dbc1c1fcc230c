"""Leave for peers to read this process's memory, where the Yama security module asks for it.

Under ``kernel.yama.ptrace_scope`` 1 a process is read by its ancestors alone, and ranks are
siblings. A process may name one other that may read it, and the kernel then lets in the
descendants of that one, too (PR_SET_PTRACER(2const)). So a rank names the nearest common ancestor
of the ranks, such as the launcher, for as long as a communicator reads memory. Processes outside
of that tree stay locked out, as they would not be if any process were allowed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["Permission"]

_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61

_granted: weakref.WeakSet[Permission] = weakref.WeakSet()
_lock = threading.Lock()


class Permission:
    """Leave for some processes to read this one, until :meth:`withdraw` or the end of the process.

    A process has one such leave. With several permissions it is for the nearest common ancestor
    of all processes that they are for. A permission that would leave no such ancestor gives none
    beyond the others.

    Args:
        pids: the processes of all ranks, this one among them.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        if not _is_restricted():
            return
        with _lock:
            _granted.add(self)
            ancestor = _common_ancestor()
            if ancestor is None:
                _granted.discard(self)
            else:
                _allow(ancestor)

    def withdraw(self) -> None:
        """Take the permission back, and leave in force what other permissions need."""
        with _lock:
            if self in _granted:
                _granted.discard(self)
                _allow(_common_ancestor() or 0)


def _is_restricted() -> bool:
    with contextlib.suppress(OSError):
        return _SCOPE.read_text().strip() == "1"
    return False


def _common_ancestor() -> int | None:
    """Return the nearest ancestor of all processes that a permission is for; or None."""
    every = {pid for permission in _granted for pid in permission._pids}
    chains = [chain for pid in sorted(every) if (chain := _ancestors(pid))]
    if not chains:
        return None
    first, *others = chains
    return next((pid for pid in first if all(pid in chain for chain in others)), None)


def _ancestors(pid: int) -> Sequence[int]:
    """Return a process and its ancestors, the nearest first; nothing of one that has ended."""
    chain: list[int] = []
    while pid > 0:
        try:
            state = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # its own, or it is hidden: then its number is all that is known
            return [*chain, pid] if chain else []
        chain.append(pid)
        # The name, in parentheses, may have any characters; behind it are state and parent.
        pid = int(state.rpartition(")")[2].split()[1])
    return chain


def _allow(pid: int) -> None:
    """Let a process and its descendants read this one; with 0, ancestors alone."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def _begin_anew() -> None:
    """Forget what was granted: the kernel gives no leave of a process to its child."""
    global _lock
    _lock = threading.Lock()
    _granted.clear()


os.register_at_fork(after_in_child=_begin_anew)
