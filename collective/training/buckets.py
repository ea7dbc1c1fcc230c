"""Buckets that hold gradients, and the descriptions of the parameters that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collective.contract.work import Work

__all__ = ["Bucket", "Parameter", "Reduce"]


class Parameter(NamedTuple):
    """Description of one parameter, as far as the engine needs it.

    Attributes:
        name: the name that errors print.
        shape: shape of its gradient.
        dtype: name of its gradient's type, such as ``"float32"``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        index: position in the order in which buckets are reduced; the same on all ranks.
        array: memory of the gradients, one-dimensional, an array of the framework. Gaps between
            gradients hold zeros.
        members: numbers of the parameters whose gradients the bucket holds.
        views: gradients in the bucket, one for each member.
        is_last: whether it is the last bucket of a backward pass.
        pending: number of gradients that the pass has not completed yet.
    """

    index: int
    array: Any
    members: list[int]
    views: list[Any]
    is_last: bool = False
    pending: int = field(default=0, repr=False)


#: Starts the reduction of a bucket, in place. Returns the work to wait for, or None if the
#: reduction is already complete.
Reduce = Callable[["Bucket"], "Work[Any] | None"]
