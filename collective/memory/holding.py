"""Holds on the memory of arrays while a call works on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["hold"]


def hold(arrays: Iterable[Any]) -> list[Any]:
    """Return what keeps the memory of arrays where it is for as long as the list lives.

    NumPy's ``resize`` refuses an array that a weak reference refers to, also with
    ``refcheck=False``, where it minds no view and no buffer. A PyTorch tensor that is given other
    memory leaves its old memory to whoever has the storage.

    Args:
        arrays: arrays, nested lists, tuples and dicts of arrays, and anything else, which is not
            held.
    """
    held: list[Any] = []
    for each in arrays:
        if isinstance(each, np.ndarray):
            while isinstance(each.base, np.ndarray):
                each = each.base
            held.append(weakref.ref(each))
        elif isinstance(each, (list, tuple)):
            held.extend(hold(each))
        elif isinstance(each, dict):
            held.extend(hold(each.values()))
        elif hasattr(each, "untyped_storage"):
            held.append(each.untyped_storage())
    return held
