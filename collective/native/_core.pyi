"""The extension module, of module.c. Use it through :mod:`collective.native`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Function = TypeVar("_Function")

PROTOCOL: int
#: The levels of instructions that the folds can take here, the last one by default.
LEVELS: tuple[str, ...]

def make_fold(op: str, dtype: int, reference: _Function, level: int = ..., /) -> _Function: ...
def see_tensors(exchange_api: Any, tensor: type, parameter: type, /) -> None: ...
def view(array: Any, /) -> tuple[int, int, int, tuple[int, ...], bool] | None: ...

class Shared:
    """What the ranks of one host share; see :func:`collective.native.shared`."""

    def __init__(
        self,
        segment: Any,
        rank: int,
        places: Sequence[Sequence[int]],
        area_bytes: int,
        looks: int,
        wait: Callable[[int, int, int], None],
    ) -> None: ...
    def folds(self, op: str, dtype: int, /) -> bool: ...
    def arrive(self, step: int, digest: int, /) -> bool: ...
    def small_all_reduce(
        self, src: Any, dst: Any, op: str, dtype: int, step: int, digest: int, /
    ) -> bool: ...
    def all_reduce(self, src: Any, dst: Any, op: str, dtype: int, mean: bool, /) -> bool: ...
    def broadcast(self, buffer: Any, root: int, /) -> bool: ...
    def all_gather(self, src: Any, dst: Any, /) -> bool: ...
