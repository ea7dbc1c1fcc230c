"""Types for annotations, with mpi4py's names."""

from __future__ import annotations

from typing import Any, Protocol, SupportsIndex, TypeAlias

from .MPI import BottomType, Datatype, InPlaceType


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


# Type checkers read mpi4py's own stubs. While a program runs, these only have to exist.
Buffer: TypeAlias = SupportsBuffer | SupportsDLPack | SupportsCAI
Bottom: TypeAlias = BottomType | None
InPlace: TypeAlias = InPlaceType | None
Aint: TypeAlias = SupportsIndex
Count: TypeAlias = SupportsIndex
Displ: TypeAlias = SupportsIndex
Offset: TypeAlias = SupportsIndex
TypeSpec: TypeAlias = Datatype | str
# A buffer alone, or a tuple or list of it with counts, displacements and types.
BufSpec = BufSpecB = BufSpecV = BufSpecW = Buffer | tuple[Any, ...] | list[Any]
TargetSpec: TypeAlias = Displ | tuple[Any, ...] | list[Any]
