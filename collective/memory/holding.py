"""Holds on the memory of arrays while a call works on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["hold"]


def hold(arrays: Iterable[Any]) -> list[Any]:
    """Return a list of references that keep the memory of ``arrays`` in place while it exists.

    NumPy's ``resize`` refuses an array that has a weak reference. This holds even with
    ``refcheck=False``, where ``resize`` ignores views and buffers. A PyTorch tensor can get other
    memory at any time, but the old memory lives on while an object refers to the old storage.

    Args:
        arrays: arrays, and nested lists, tuples and dicts of arrays; all other objects are ignored.
    """
    held: list[Any] = []
    for item in arrays:
        if isinstance(item, np.ndarray):
            while isinstance(item.base, np.ndarray):
                item = item.base
            held.append(weakref.ref(item))
        elif isinstance(item, (list, tuple)):
            held.extend(hold(item))
        elif isinstance(item, dict):
            held.extend(hold(item.values()))
        elif hasattr(item, "untyped_storage"):
            held.append(item.untyped_storage())
    return held
