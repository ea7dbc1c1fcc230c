"""Types for annotations, with mpi4py's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

from .MPI import BottomType, Datatype, InPlaceType

__all__ = [
    "Aint", "Bottom", "BufSpec", "BufSpecB", "BufSpecV", "BufSpecW", "Buffer", "Count", "Displ",
    "InPlace", "Offset", "SupportsBuffer", "SupportsCAI", "SupportsDLPack", "TargetSpec",
    "TypeSpec",
]  # fmt: skip


class SupportsBuffer(Protocol):
    """Object with the buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class SupportsDLPack(Protocol):
    """Object with DLPack."""

    def __dlpack__(self, /, *, stream: Any = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCAI(Protocol):
    """Object with the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Buffer: TypeAlias = SupportsBuffer | SupportsDLPack | SupportsCAI
Bottom: TypeAlias = BottomType | None
InPlace: TypeAlias = InPlaceType | None
Aint: TypeAlias = SupportsIndex
Count: TypeAlias = SupportsIndex
Displ: TypeAlias = SupportsIndex
Offset: TypeAlias = SupportsIndex
TypeSpec: TypeAlias = Datatype | str
# A buffer alone, or a tuple of it with counts, displacements and types; or a list of these.
BufSpecB: TypeAlias = (
    Buffer | tuple[Buffer, Count | TypeSpec] | tuple[Buffer, Count, TypeSpec] | list[Any]
)
BufSpec: TypeAlias = BufSpecB | tuple[Bottom, Count, Datatype]
_Counts: TypeAlias = Sequence[Count]
_Both: TypeAlias = tuple[_Counts, Sequence[Displ]]
BufSpecV: TypeAlias = (
    Buffer
    | tuple[Buffer, _Counts | _Both | TypeSpec]
    | tuple[Buffer | Bottom, _Counts | _Both, TypeSpec]
    | tuple[Buffer | Bottom, _Counts, Sequence[Displ], TypeSpec]
    | list[Any]
)
BufSpecW: TypeAlias = (
    tuple[Buffer, Sequence[Datatype]]
    | tuple[Buffer | Bottom, _Both, Sequence[Datatype]]
    | tuple[Buffer | Bottom, _Counts, Sequence[Displ], Sequence[Datatype]]
    | list[Any]
)
TargetSpec: TypeAlias = (
    Displ
    | tuple[()]
    | tuple[Displ]
    | tuple[Displ, Count]
    | tuple[Displ, Count, TypeSpec]
    | list[Any]
)
