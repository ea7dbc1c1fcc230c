"""Ranks with NVIDIA GPUs, over NCCL; what is in the memory of the host goes another way.

The library is called through its C interface. Importing this package, or its parts, loads
neither NCCL nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .transport import NcclBackend

__all__ = ["NcclBackend"]


def __getattr__(name: str) -> Any:
    # Whoever asks where the library is does not need the transport.
    if name != "NcclBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .transport import NcclBackend

    return NcclBackend
