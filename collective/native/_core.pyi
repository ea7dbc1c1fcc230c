"""The extension module, of module.c. Use it through :mod:`collective.native`."""

from typing import TypeVar

_Function = TypeVar("_Function")

PROTOCOL: int
#: The levels of instructions that the folds can take here, the last one by default.
LEVELS: tuple[str, ...]

def make_fold(op: str, dtype: int, reference: _Function, level: int = ..., /) -> _Function: ...
