"""Types for annotations, with mpi4py's names.

Type checkers read mpi4py's own stubs. While a program runs, these only have to exist.
"""

from __future__ import annotations

from typing import Any, SupportsIndex, TypeAlias

from .MPI import BottomType, Datatype, InPlaceType

SupportsBuffer = SupportsDLPack = SupportsCAI = Buffer = Any
Bottom: TypeAlias = BottomType | None
InPlace: TypeAlias = InPlaceType | None
Aint = Count = Displ = Offset = SupportsIndex
TypeSpec: TypeAlias = Datatype | str
# A buffer alone, or a tuple or list of it with counts, displacements and types.
BufSpec = BufSpecB = BufSpecV = BufSpecW = Any
TargetSpec: TypeAlias = SupportsIndex | tuple[Any, ...] | list[Any]
