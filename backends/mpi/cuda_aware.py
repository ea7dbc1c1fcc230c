"""``mpi`` on a library that takes addresses in the memory of GPUs.

MPI knows no streams: it may read a buffer when the stream is done that last wrote to it, and
what it has written is there when its call returns. What needs arithmetic of ours goes through
host memory, as everything does where the library is not CUDA-aware.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.buffer import Buffer

from .datatypes import native_op
from .transport import MpiBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from collective.dtypes import DType
    from collective.ops import ReduceOp

__all__ = ["CudaAwareMpi"]

# The average is a sum and a division, and a factor a multiplication before the sum.
_SCALED = ("avg", "premul_sum")


class CudaAwareMpi(MpiBackend):
    """Ranks of an MPI communicator, for arrays of the CPU and of GPUs."""

    capabilities = replace(MpiBackend.capabilities, devices=frozenset({"cpu", "cuda"}))

    def supports(self, what: str, op: ReduceOp, dtype: DType, ordered: bool) -> bool:
        exact = dtype.kind in "biu"
        return (
            native_op(self._mpi, op, dtype) is not None
            and op.name not in _SCALED
            and (exact or not (ordered or what == "scan"))
        )


def _in_its_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``method`` wait for the streams of its buffers."""

    @functools.wraps(method)
    def call(self: CudaAwareMpi, *args: Any) -> Any:
        for argument in args:
            if type(argument) is Buffer and type(argument.array) is not np.ndarray:
                argument.stream.synchronize()
        return method(self, *args)

    return call


for _name in (
    "send", "recv", "sendrecv", "broadcast", "reduce", "all_reduce", "reduce_scatter", "scan",
    "scatter", "gather", "all_gather", "all_to_all",
):  # fmt: skip
    setattr(CudaAwareMpi, _name, _in_its_turn(getattr(MpiBackend, _name)))
