"""PyTorch tensors on the CPU as NumPy over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from collective.arrays import Adapter
from collective.dtypes import BY_NAME, DType
from collective.errors import DeviceError, DtypeError, InvalidArgumentError

__all__ = ["TorchAdapter"]

Array = np.ndarray[Any, Any]

_DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in BY_NAME.items() if hasattr(torch, name)
}


class TorchAdapter(Adapter):
    """Dense tensors on the CPU.

    Collectives are not differentiable: a tensor that requires a gradient is taken for its
    values, as ``tensor.detach()``.
    """

    name = "torch"

    def accepts(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def view(self, x: Any) -> tuple[Array, DType]:
        if x.requires_grad:
            x = x.detach()
        if not x.is_cpu or x.layout is not torch.strided or x.is_nested:
            raise DeviceError(
                f"torch: a {'nested' if x.is_nested else x.layout} tensor on {x.device}; this "
                "transport takes dense tensors on the CPU. Use x.cpu() or x.to_dense()."
            )
        dtype = _DTYPES.get(x.dtype)
        if dtype is None:
            raise DtypeError(
                f"torch: {x.dtype} cannot travel; one of {', '.join(map(str, _DTYPES))}. "
                "Convert with x.to(...)."
            )
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        if dtype.name == "bfloat16":
            return x.view(torch.int16).numpy().view(np.uint16), dtype
        return x.numpy(), dtype

    def output(self, x: Any) -> tuple[Array, DType]:
        if x.is_conj() or x.is_neg():
            raise InvalidArgumentError(
                "out: a lazily conjugated or negated tensor has no memory of its own to write "
                "to; pass x.resolve_conj().resolve_neg()."
            )
        return self.view(x)

    def wrap(self, array: Array, dtype: DType) -> Any:
        if dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
