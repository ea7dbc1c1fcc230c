"""Objects of other libraries whose destructors must not run in a forked child."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

__all__ = ["keep", "keep_in_children"]

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def keep(*things: Any) -> None:
    """Leak ``things``: their destructors never run, not even at the end of the process."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def keep_in_children(thing: Any) -> None:
    """Leak ``thing`` in all children forked from now on, even if it is garbage in this process.

    This is for objects that have threads, or that share a pipe with threads. A forked child
    inherits the pipe but not the threads. In the child, the destructor of such an object would
    wait forever for the threads, or end something that the parent still uses.
    """
    _known.add(thing)


def _keep_known() -> None:
    keep(*_known)


os.register_at_fork(after_in_child=_keep_known)
