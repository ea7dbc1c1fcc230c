"""Transport between ranks with NVIDIA GPUs, over NCCL.

Another transport carries the data in the memory of the host. The package calls NCCL through its C
interface. Importing the package or its modules loads neither NCCL nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.lazy import on_demand

if TYPE_CHECKING:
    from .transport import NcclBackend
else:  # to a type checker, a __getattr__ would mean that the module has any name
    # A program that only looks for the library does not need the transport.
    __getattr__, __dir__ = on_demand(__name__, {"transport": "NcclBackend"})

__all__ = ["NcclBackend"]
