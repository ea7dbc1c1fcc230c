"""Arguments that torch passes to the methods of a process group, in one form each."""

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
    """Return the tensors of a call as a list, also if the call got a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def options_of(opts: Any, timeout: timedelta | None) -> Any:
    """Return the options of a call, or options with ``timeout`` if ``opts`` has none."""
    return opts if hasattr(opts, "timeout") else SimpleNamespace(timeout=timeout)


def seconds_of(opts: Any) -> float | None:
    """Return the timeout of a call in seconds; None for the group's own timeout."""
    timeout = getattr(opts, "timeout", None)
    if timeout is None or timeout <= timedelta(0):  # in torch a negative timeout means "not set"
        return None
    return float(timeout.total_seconds())


def op_of(opts: Any) -> Any:
    """Return the operator in the options, or passed in place of the options."""
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


def root_of(opts: Any) -> int:
    """Return the root in the options, or passed in place of the options."""
    if opts is None or isinstance(opts, int):
        return opts or 0
    return int(opts.rootRank)
