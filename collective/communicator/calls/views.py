"""Views of the arrays of any framework as memory, on the CPU or on this rank's GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from collective.deadline import Deadline
from collective.errors import DeviceError, InvalidArgumentError
from collective.memory import dtypes, nested
from collective.memory.arrays import Adapter, adapter_like, adapter_of
from collective.memory.dtypes import DType
from collective.memory.numbers import NUMBERS, is_number
from collective.memory.through_host import Distant, Staged

from ..output import same_memory
from ..path import Path

__all__ = [
    "Array", "View", "adapter_for", "check_device", "device_view", "room_on_gpu", "staged", "view",
    "views", "where",
]  # fmt: skip

Array = np.ndarray[Any, Any]
# Operations that take Python numbers: their result is then a plain Python value.
_OF_NUMBERS = {"all_reduce", "reduce", "scan", "broadcast", "gather", "all_gather"}
_UINT8 = dtypes.BY_NAME["uint8"]
_new: Any = tuple.__new__


class View(NamedTuple):
    """View of an array in a form that the transport accepts.

    Attributes:
        adapter: adapter that makes results of the array's framework.
        array: memory of the array: a NumPy array or a ``DeviceArray``.
        dtype: element type of the array.
    """

    adapter: Adapter
    array: Array
    dtype: DType


def view(path: Path, what: str, x: Any, hosted: str = "") -> View:
    """Return a view of an array in a form that the transport accepts.

    Args:
        what: the operation, for errors.
        hosted: not empty if the array is one of the library's own on the CPU, which every transport
            accepts: ``"array"``, or ``"object"`` if it is an encoded object.

    Raises:
        DeviceError: the transport only takes arrays on GPUs, or the array is on another GPU than
            this rank's.
    """
    try:
        adapter = adapter_of(x, what)
    except InvalidArgumentError:
        if not is_number(x) or what not in _OF_NUMBERS:
            raise
        adapter = NUMBERS
    array, dtype = adapter.view(x)
    if type(array) is not np.ndarray and (path.on_host or not isinstance(array, Distant)):
        if not path.on_device or isinstance(array, Distant):
            return staged(path, View(adapter, array, dtype))
        if array.device is not path.gpu:
            check_device(path, what, array)
    elif not path.on_host and not hosted:
        raise DeviceError(
            f"{what}: an array on the CPU; backend {path.backend.name!r} takes arrays "
            f"on GPUs {path.who}. Copy it to the GPU, or use backend='cpu:shm,cuda:nccl', "
            "which takes both."
        )
    # This makes a View like View(…), but without calling a Python function.
    return _new(View, (adapter, array, dtype))  # type: ignore[no-any-return]


def views(path: Path, what: str, x: Any, hosted: str = "") -> list[View]:
    """Return views of the arrays of a structure; refuse a mixture of CPU and GPU arrays."""
    leaves = [view(path, what, leaf, hosted) for leaf in nested.flatten(x)]
    for leaf in leaves[1:]:
        same_memory(what, leaves[0].array, leaf.array)
    return leaves


def staged(path: Path, seen: View) -> View:
    """Return a view of an array's copy in host memory; its adapter copies results to the device."""
    array: Any = seen.array
    # The array may be the result of a call that is still running in the background.
    path.lane.drain(Deadline(path.timeout))
    if path.enqueues and not isinstance(array, Distant):
        array.stream.wait_for(path.backend.side_stream(array.device))
    return View(Staged(seen.adapter, array.device), array.to_host(), seen.dtype)


def check_device(path: Path, what: str, array: Any) -> None:
    """Refuse an array on a GPU that is not this rank's."""
    device = path.backend.device
    # An array without elements may not know its device.
    if device is not None and array.device is not device and array.size:
        raise DeviceError(
            f"{what}: an array on cuda:{array.device.ordinal}; this rank's GPU is "
            f"cuda:{device.ordinal} {path.who}. Copy the array to this rank's GPU, or choose "
            "another GPU with COLLECTIVE_DEVICE."
        )
    path.gpu = device


def where(path: Path, array: Any) -> str | None:
    """Return ``"cuda"`` if all ranks must have their arrays on GPUs, else None."""
    return "cuda" if path.enqueues and not isinstance(array, np.ndarray) else None


def adapter_for(like: Any, on_gpu: bool = False) -> Adapter:
    """Return the adapter that makes results like ``like``: a framework's name, an array, or None.

    Args:
        on_gpu: whether the result is on the GPU already. Then the adapter for NumPy or None makes
            an array that any framework can use without a copy.
    """
    if on_gpu:
        by_name = isinstance(like, str) and like == "numpy"
        anything = like is None or by_name or isinstance(like, np.ndarray)
        return adapter_like("cuda" if anything else like)
    adapter = adapter_like("numpy" if like is None else like)
    if like is None or isinstance(like, (str, np.ndarray)):
        return adapter
    array: Any = adapter.view(like)[0]
    return adapter if isinstance(array, np.ndarray) else Staged(adapter, array.device)


def room_on_gpu(path: Path, adapter: Adapter, nbytes: int, near: Any = None) -> Any:
    """Return memory of ``nbytes`` bytes on this rank's GPU.

    Args:
        near: DeviceArray on whose stream the memory will be used, if the framework has no current
            stream.
    """
    stream = None if near is None else near.stream
    return adapter.empty((nbytes,), _UINT8, path.backend.device, stream)


def device_view(like: Any) -> Any:
    """Return the transport's view of an array on a GPU; None for any other value."""
    if like is None or isinstance(like, (str, np.ndarray)) or nested.is_tree(like):
        return None
    array: Any = adapter_of(like).view(like)[0]
    return None if isinstance(array, np.ndarray) else array
