"""Ranks with NVIDIA GPUs, over NCCL; what is in the memory of the host goes another way.

The library is called through its C interface. Importing this package, or its parts, loads
neither NCCL nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.lazy import on_demand

if TYPE_CHECKING:
    from .transport import NcclBackend
else:  # to a type checker it would mean that there is any name
    # Whoever asks where the library is does not need the transport.
    __getattr__, __dir__ = on_demand(__name__, {"NcclBackend": "transport"})

__all__ = ["NcclBackend"]
