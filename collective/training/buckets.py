"""What gradients are kept in, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collective.contract.work import Work

__all__ = ["Bucket", "Parameter", "Reduce"]


class Parameter(NamedTuple):
    """What the engine has to know of one.

    Attributes:
        name: for errors.
        shape: of its gradient.
        dtype: the name of its gradient's type, such as ``"float32"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        index: its place in the order in which buckets are reduced, the same on all ranks.
        array: their memory, one-dimensional, of the framework; gaps between them hold zeros.
        members: which parameters' they are, by number.
        views: the gradients in it, one for each member.
        is_last: whether it is the last one of a backward pass.
    """

    index: int
    array: Any
    members: list[int]
    views: list[Any]
    is_last: bool = False
    missing: int = field(default=0, repr=False)


#: Starts the reduction of a bucket, in place; returns what to wait for, or None if it is over.
Reduce = Callable[["Bucket"], "Work[Any] | None"]
