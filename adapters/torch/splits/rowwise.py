"""Functions that make each row of their result of the same rows of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from collective.memory import nested
from collective.training.splits.blocks import Read, Run, Step
from collective.training.splits.serial import fitting

from .cut import Cut

if TYPE_CHECKING:
    from .executor import TensorExecutor

__all__ = ["in_place", "row_for_row"]

Tensor = torch.Tensor


def in_place(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that a call writes into, None if it writes into none."""
    name = getattr(function, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__")
    augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    if ends or augmented or name in ("__setitem__", "__set__") or kwargs.get("inplace"):
        return args[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return None


def row_for_row(
    function: Any,
    name: str,
    structure: Any,
    leaves: Sequence[Any],
    like: Tensor,
    executor: TensorExecutor,
) -> Step:
    """Return the step of a function that works row for row.

    Args:
        function: the function.
        name: for people.
        structure: its arguments, ``[args, kwargs]``.
        leaves: what is in them, flat; what is cut has the result's rows.
        like: what the result looks like.
        executor: makes the call.
    """
    cut = [x for x in leaves if isinstance(x, Cut)]
    values = tuple(x.value for x in cut)
    plain = {
        at: x for at, x in enumerate(leaves) if isinstance(x, Tensor) and not isinstance(x, Cut)
    }
    others = {
        in_part: {at: executor.shared(values[0], in_part)(x) for at, x in plain.items()}
        for in_part in (False, True)
    }
    by_channel = function is functional.prelu or function is torch.prelu
    writes = in_place(function, *structure) is not None
    channels = like.shape[1] if like.dim() > 1 else 0

    def made(some: range | None) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            pieces = iter(arrays)
            found = [
                next(pieces)
                if isinstance(x, Cut)
                else _fitting(
                    others[some is not None][at], read, like.dim(), some, by_channel, channels
                )
                if at in plain
                else x
                for at, x in enumerate(leaves)
            ]
            if writes:
                found[0] = found[0].clone()  # it may be a view of an array that is read again
            args, kwargs = nested.rebuild(structure, iter(found))
            return function(*args, **kwargs)

        return run

    each = all(x.shape[1:2] == like.shape[1:2] for x in cut)
    axes = max(0, like.dim() - 1)
    along = made if each and channels else None
    return Step(name, values, (None,) * axes, made(None), channels, along=along)


def _fitting(
    x: Tensor, read: Read, dims: int, some: range | None, by_channel: bool, channels: int
) -> Tensor:
    """Return the rows and channels of a whole tensor that a piece is combined with."""
    if by_channel:  # one number a channel, or one for all
        return x if some is None or x.numel() == 1 else x[some.start : some.stop]
    for at, rows in fitting(x.shape, read, dims, some, channels):
        x = x.narrow(at, rows.start, len(rows))
    return x
