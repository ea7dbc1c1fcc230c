"""Permission for peers to read this process's memory, for systems with the Yama security module.

If ``kernel.yama.ptrace_scope`` is 1, only the ancestors of a process may read it, and ranks are
siblings. But a process may name one other process that may read it, and the kernel then also admits
the descendants of that process (PR_SET_PTRACER(2const)). So a rank names the nearest common
ancestor of the ranks, such as the launcher, for as long as a communicator reads memory. Processes
outside of that tree stay locked out. If the rank allowed any process instead, they would not.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Sequence

from collective.platform import PROC, allow_to_read, process_status

_SCOPE = PROC / "sys/kernel/yama/ptrace_scope"

_granted: weakref.WeakSet[Permission] = weakref.WeakSet()
_lock = threading.Lock()


class Permission:
    """Permission for other processes to read this one, until :meth:`withdraw` or the process's end.

    The kernel lets a process name only one other process. So with several permissions, this
    process names the nearest common ancestor of all their processes. If a new permission would
    leave no common ancestor, it has no effect, and the other permissions stay as they are.

    Args:
        pids: the processes of all ranks, including this one.
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
                allow_to_read(ancestor)

    def withdraw(self) -> None:
        """Take the permission back; the other permissions stay in force."""
        with _lock:
            if self in _granted:
                _granted.discard(self)
                allow_to_read(_common_ancestor() or 0)


def _is_restricted() -> bool:
    with contextlib.suppress(OSError):
        return _SCOPE.read_text().strip() == "1"
    return False


def _common_ancestor() -> int | None:
    """Return the nearest common ancestor of all processes that have a permission; or None."""
    every = {pid for permission in _granted for pid in permission._pids}
    chains = [chain for pid in sorted(every) if (chain := _ancestors(pid))]
    if not chains:
        return None
    first, *others = chains
    return next((pid for pid in first if all(pid in chain for chain in others)), None)


def _ancestors(pid: int) -> Sequence[int]:
    """Return a process and its ancestors, the nearest first; nothing if the process has ended."""
    chain: list[int] = []
    while pid > 0:
        status = None
        with contextlib.suppress(OSError):
            status = process_status(pid)
        if status is None:
            # The first process has ended, or an ancestor is hidden. A hidden ancestor still has a
            # number.
            return [*chain, pid] if chain else []
        chain.append(pid)
        pid = status.parent
    return chain


def _begin_anew() -> None:
    """Forget all permissions in a forked child: the kernel does not pass them on to a child."""
    global _lock
    _lock = threading.Lock()
    _granted.clear()


os.register_at_fork(after_in_child=_begin_anew)
