"""Holds on the memory of arrays while a call works on it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from collective import native


def hold(arrays: Iterable[Any]) -> list[Any]:
    """Return a list of references that keep the memory of ``arrays`` in place while it exists.

    NumPy's ``resize`` refuses an array that has a weak reference. This holds even with
    ``refcheck=False``, where ``resize`` ignores views and buffers. Memory of another object, such
    as a ``bytearray`` or a ``mmap``, stays while there is a view of that object. A PyTorch tensor
    can get another storage at any time, but the old one lives on while an object refers to it. C
    also makes the storage refuse to be resized; without C, ``Tensor.numpy()`` has done so for ever.

    Args:
        arrays: arrays, and nested lists, tuples and dicts of arrays; all other objects are ignored.
    """
    arrays = list(arrays)
    if _in_c is not None:
        return _in_c(arrays)
    held: list[Any] = []
    # A structure that contains itself, and tensors without storage: the call itself refuses them.
    with contextlib.suppress(RecursionError, NotImplementedError):
        _hold_all(arrays, held)
    return held


def _hold_all(arrays: Iterable[Any], held: list[Any]) -> None:
    for item in arrays:
        if isinstance(item, np.ndarray):
            while isinstance(item.base, np.ndarray):
                item = item.base
            held.append(weakref.ref(item) if item.base is None else _view(item.base))
        elif isinstance(item, (list, tuple)):
            _hold_all(item, held)
        elif isinstance(item, dict):
            _hold_all(item.values(), held)
        elif hasattr(item, "untyped_storage"):
            held.append(item.untyped_storage())


def _view(owner: Any) -> Any:
    try:
        return memoryview(owner)
    except TypeError:  # such as a tensor, whose numpy() lets nobody resize the storage
        return owner


_in_c = native.holder()
