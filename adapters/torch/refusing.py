"""Backend that torch's C++ code looks for beneath a process group.

For a process group, C++ keeps a backend for each kind of device. A group that is written in Python
has no such backend, since torch calls the group's methods. Two functions ask for a backend all the
same: ``batch_p2p_ops`` of the functional collectives, to learn whether the backend coalesces
messages; and, since torch 2.15, ``init_process_group``, to learn whether the backend reports that
it is aborted.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist

__all__ = ["register"]

_c10d: Any = importlib.import_module("torch._C._distributed_c10d")


class _Refusing(_c10d.Backend):  # type: ignore[misc]
    """Backend without calls: C++ raises an error for each call, with this backend's name."""

    # If a property were missing here, Python would read it from C++, which would read it from here.
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
        settings = options()
        settings.error_on_collective = True
        return _c10d.FakeProcessGroup._create_internal(rank, size, settings)


def register(group: Any, rank: int, size: int) -> Any:
    """Register a backend beneath a group that refuses every collective which bypasses the group.

    The backend must not work: a collective within it would return wrong numbers without an error.

    Args:
        group: process group that is written in Python.
        rank, size: rank in the group and number of its ranks.

    Returns:
        The backend, which the caller has to keep as long as the group. None if torch has no
        suitable backend; these versions do not need one, as nothing asks for it before torch 2.6.
    """
    backend = _refusing(rank, size)
    if backend is not None:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in group._device_types:
            group._register_backend(device, kind, backend)
        group._set_default_backend(kind)
    return backend
