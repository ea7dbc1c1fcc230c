"""Types for annotations, with mpi4py's names."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = [
    "Bottom", "BufSpec", "BufSpecB", "BufSpecV", "BufSpecW", "Buffer", "Count", "Displ", "InPlace",
    "Offset", "SupportsBuffer", "SupportsCAI", "SupportsDLPack", "TargetSpec", "TypeSpec",
]  # fmt: skip

SupportsBuffer: TypeAlias = Any
SupportsDLPack: TypeAlias = Any
SupportsCAI: TypeAlias = Any
Buffer: TypeAlias = Any
Bottom: TypeAlias = Any
InPlace: TypeAlias = Any
Offset: TypeAlias = int
Count: TypeAlias = int
Displ: TypeAlias = int
TypeSpec: TypeAlias = Any
BufSpec: TypeAlias = Any
BufSpecB: TypeAlias = Any
BufSpecV: TypeAlias = Any
BufSpecW: TypeAlias = Any
TargetSpec: TypeAlias = Any
Aint: TypeAlias = int
