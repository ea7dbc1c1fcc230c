"""Copies of training state: nested dicts, lists and tuples of plain data and arrays.

The *leaves* of such a tree are named by their paths: the keys from the root to the leaf.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.communicator.objects import encode
from collective.memory.arrays import is_array

Path = tuple[Any, ...]
_DIGEST_BYTES = 16


def mapped(tree: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a tree of the same containers, with ``function(path, leaf)`` in place of each leaf."""
    if isinstance(tree, dict) and tree:
        # copy.copy() keeps the class, and the attributes that PyTorch stores beside the entries.
        copied_dict = copy.copy(tree)
        for key, value in tree.items():
            copied_dict[key] = mapped(value, function, (*path, key))
        return copied_dict
    if isinstance(tree, (list, tuple)) and tree and not hasattr(tree, "_fields"):
        return type(tree)(mapped(value, function, (*path, n)) for n, value in enumerate(tree))
    return function(path, tree)


def leaves(tree: Any) -> dict[Path, Any]:
    """Return the leaves of a tree by their paths."""
    leaf_by_path: dict[Path, Any] = {}
    mapped(tree, leaf_by_path.setdefault)
    return leaf_by_path


def plain(tree: Any) -> Any:
    """Return a tree whose containers are plain dicts, lists and tuples, so that it can be sent."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        kind = tuple if isinstance(tree, tuple) else list
        return kind(map(plain, tree))
    return tree


def digest_of(value: Any) -> bytes:
    """Return 16 bytes that are equal for equal values; arrays also need equal dtype and shape."""
    return hashlib.blake2b(encode(value).data, digest_size=_DIGEST_BYTES).digest()


def copied(tree: Any, rooms: Any = None) -> Any:
    """Return a tree that shares no memory with this one.

    Args:
        rooms: earlier copy that is no longer needed. Its arrays are overwritten where they are
            like the arrays that are copied. Afterwards ``rooms`` is no valid copy, even if this
            call is interrupted.
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
