"""Objects of other libraries that outlive a forked child, since their end would be the parent's."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

__all__ = ["keep", "keep_in_children"]

_known: weakref.WeakSet[Any] = weakref.WeakSet()


def keep(*things: Any) -> None:
    """Keep ``things`` for ever: nothing calls their destructors, the end of the process neither."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def keep_in_children(thing: Any) -> None:
    """Keep ``thing`` for ever in children that are forked from now on, even if it is garbage here.

    For what has threads, which a child has not, or shares a pipe with them, which a child does
    share: a destructor there would wait for ever, or end what the parent still uses.
    """
    _known.add(thing)


def _keep_known() -> None:
    keep(*_known)


os.register_at_fork(after_in_child=_keep_known)
