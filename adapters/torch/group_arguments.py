"""What torch passes to the methods of a process group: a list or a tensor, options or a root."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["listed", "op_of", "options_of", "root_of", "seconds_of"]

Tensor = torch.Tensor


def listed(tensors: Any) -> Sequence[Tensor]:
    """Return the tensors of a call that may have been given one alone."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def options_of(opts: Any, timeout: timedelta | None) -> Any:
    """Return the options of a call, which may be something else, and a timeout beside it."""
    return opts if hasattr(opts, "timeout") else SimpleNamespace(timeout=timeout)


def seconds_of(opts: Any) -> float | None:
    """Return the seconds that a call may take, None for the group's own timeout."""
    timeout = getattr(opts, "timeout", None)
    if timeout is None or timeout <= timedelta(0):  # torch says "unset" with a negative one
        return None
    return float(timeout.total_seconds())


def op_of(opts: Any) -> Any:
    """Return the operator that options hold, or that stands in their place."""
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def root_of(opts: Any) -> int:
    """Return the root that options hold, or that stands in their place."""
    if opts is None or isinstance(opts, int):
        return opts or 0
    return int(opts.rootRank)
