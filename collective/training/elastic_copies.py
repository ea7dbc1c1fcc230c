"""Copies of what training has: nested dicts, lists and tuples, with plain data and arrays in them.

The *leaves* of such a tree are named by the keys on the way to them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.communicator.objects import encode
from collective.memory.arrays import is_array

__all__ = ["Path", "copied", "digest_of", "leaves", "mapped", "plain"]

Path = tuple[Any, ...]
_DIGEST_BYTES = 16


def mapped(tree: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a tree of the same containers with ``function`` of each leaf in its place."""
    if isinstance(tree, dict) and tree:
        made = copy.copy(tree)  # of its class, with what PyTorch keeps beside the entries
        for key, value in tree.items():
            made[key] = mapped(value, function, (*path, key))
        return made
    if isinstance(tree, (list, tuple)) and tree and not hasattr(tree, "_fields"):
        return type(tree)(mapped(value, function, (*path, n)) for n, value in enumerate(tree))
    return function(path, tree)


def leaves(tree: Any) -> dict[Path, Any]:
    """Return the leaves of a tree by their names."""
    found: dict[Path, Any] = {}
    mapped(tree, found.setdefault)
    return found


def plain(tree: Any) -> Any:
    """Return a tree with dicts, lists and tuples of Python's own alone, to be sent."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        kind = tuple if isinstance(tree, tuple) else list
        return kind(map(plain, tree))
    return tree


def digest_of(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal values, of arrays also by dtype and shape."""
    return hashlib.blake2b(encode(value).data, digest_size=_DIGEST_BYTES).digest()


def copied(tree: Any, rooms: Any = None) -> Any:
    """Return a tree that shares no memory with this one.

    Args:
        rooms: an earlier copy that nobody needs any more: its arrays are written to, where they are
            like those that are copied. It is worth nothing then, also if this is interrupted.
    """
    free = {} if rooms is None else leaves(rooms)
    return mapped(tree, lambda path, value: _copied_leaf(value, free.get(path)))


def _copied_leaf(value: Any, room: Any) -> Any:
    if not is_array(value):
        return copy.deepcopy(value)
    if hasattr(value, "clone"):
        value = value.detach()
        if _is_like(room, value, "dtype", "shape", "device", "layout"):
            return room.copy_(value)
        return value.clone()
    if isinstance(value, np.ndarray) and _is_like(room, value, "dtype", "shape"):
        room[...] = value
        return room
    return value.copy()


def _is_like(room: Any, value: Any, *attributes: str) -> bool:
    return type(room) is type(value) and all(
        getattr(room, name) == getattr(value, name) for name in attributes
    )
