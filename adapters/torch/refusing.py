"""The backend that torch's C++ looks for beneath a process group.

Under a process group C++ keeps a backend for each kind of device. A group that is written in
Python has none, since torch calls its methods; but some of what is C++ asks for one all the same:
``batch_p2p_ops`` of the functional collectives, whether it joins messages; and from torch 2.15 on
``init_process_group``, whether it tells when it is aborted.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist

__all__ = ["register"]

_c10d: Any = importlib.import_module("torch._C._distributed_c10d")


class _Refusing(_c10d.Backend):  # type: ignore[misc]
    """A backend that has no calls: C++ refuses each, by this name."""

    # Properties that are not set here would be looked up in C++, which looks them up here.
    supports_coalescing = False
    supports_reconfigure = False
    supports_shrinking = False
    supports_splitting = False
    supports_window = False
    _supports_time_estimate = False

    def getBackendName(self) -> str:
        return "collective"


def _refusing(rank: int, size: int) -> Any:
    try:
        return _Refusing(rank, size)
    except TypeError:  # before torch 2.14 a backend cannot be made in Python
        options: Any = getattr(getattr(_c10d, "FakeProcessGroup", None), "Options", None)
        if not hasattr(options, "error_on_collective"):
            return None
        asked = options()
        asked.error_on_collective = True
        return _c10d.FakeProcessGroup._create_internal(rank, size, asked)


def register(group: Any, rank: int, size: int) -> Any:
    """Register beneath a group what refuses every collective that goes past the group.

    It must not be one that works: among itself it would return numbers, and wrong ones.

    Args:
        group: a process group in Python.
        rank, size: the group's.

    Returns:
        What is to be kept as long as the group; None where torch has no such backend. It has no
        use for one then: before 2.6 nothing asks.
    """
    made = _refusing(rank, size)
    if made is not None:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in group._device_types:
            group._register_backend(device, kind, made)
        group._set_default_backend(kind)
    return made
