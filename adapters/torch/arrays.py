"""Views of PyTorch tensors as NumPy arrays, or as DeviceArrays if the tensors are on GPUs."""

from __future__ import annotations

import ctypes
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from collective import DeviceError, DtypeError, InvalidArgumentError
from collective.inner import BY_NAME, Adapter, DType, native, pass_over
from collective.memory.holding import hold

if TYPE_CHECKING:
    from collective.inner import Spot, cuda

_DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in BY_NAME.items() if hasattr(torch, name)
}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}
# Types that NumPy lacks: by name, types of torch and of NumPy that hold their bits.
_BITS = {
    "bfloat16": (torch.int16, np.dtype("int16")),
    "float8_e4m3fn": (torch.uint8, np.dtype("uint8")),
    "float8_e5m2": (torch.uint8, np.dtype("uint8")),
}
_STRIDED = torch.strided
pass_over(torch)


# Bytes at the beginning of a storage's C++ object. It has more, and the flags are among these.
_STORAGE_BYTES = 64


def _resizable_at() -> int:
    """Return the offset in a storage's C++ object of the flag that says whether it is resizable.

    ``Tensor.numpy()`` clears the flag for ever, and PyTorch has no function that sets it. So it is
    the byte that ``numpy()`` changes from 1 to 0, if ``resizable()`` follows that byte.

    Returns:
        0 if this version of PyTorch keeps the flag in another way.
    """
    try:
        tensors = [torch.zeros(1, device="cpu") for _ in range(2)]
        one, other = (tensor.untyped_storage() for tensor in tensors)
        before = ctypes.string_at(one._cdata, _STORAGE_BYTES)
        tensors[0].numpy()
        after = ctypes.string_at(one._cdata, _STORAGE_BYTES)
        (at,) = (at for at in range(_STORAGE_BYTES) if (before[at], after[at]) == (1, 0))
        flag = ctypes.c_bool.from_address(other._cdata + at)
        flag.value = False
        cleared = not other.resizable()
        flag.value = True
        return at if cleared and other.resizable() else 0
    except Exception:  # also in a mode in which tensors have no memory
        return 0


native.see_tensors(torch.Tensor, torch.nn.Parameter, _resizable_at())


def _numpy(x: Any) -> Any:
    """Return ``x.numpy()``, after which ``x`` can be resized if it could be before."""
    held = hold([x])
    array = x.numpy()
    del held  # C restores the flag
    return array


class TorchAdapter(Adapter):
    """Adapter for dense tensors on the CPU and on NVIDIA GPUs.

    Collectives are not differentiable. If a tensor requires a gradient, the adapter uses only its
    values, as ``tensor.detach()``.
    """

    name = "torch"

    def accepts(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def view(self, x: Any, writes: bool = False) -> tuple[Any, DType]:
        if x.requires_grad:
            x = x.detach()
        on_gpu = x.is_cuda
        if not (on_gpu or x.is_cpu) or x.layout is not _STRIDED or x.is_nested:
            raise DeviceError(
                f"torch: got a {'nested' if x.is_nested else x.layout} tensor on {x.device} "
                "(expected a dense tensor on the CPU or an NVIDIA GPU). Use x.cpu() or "
                "x.to_dense()."
            )
        dtype = _DTYPES.get(x.dtype)
        if dtype is None:
            raise DtypeError(
                f"torch: tensors of {x.dtype} cannot be sent (expected one of "
                f"{', '.join(map(str, _DTYPES))}). Convert the tensor with x.to(...)."
            )
        if x.is_neg() or (dtype.kind == "c" and x.is_conj()):
            if writes:
                raise InvalidArgumentError(
                    "out: the storage of a lazily conjugated or negated tensor does not hold its "
                    "values, so it cannot be an output. Pass x.resolve_conj().resolve_neg()."
                )
            x = x.resolve_conj().resolve_neg()
        if on_gpu:
            return (_gpu or _on_gpu()).view(x, dtype), dtype
        try:
            if dtype.name in _BITS:
                return _numpy(x.view(_BITS[dtype.name][0])).view(dtype.storage), dtype
            return _numpy(x), dtype
        except (RuntimeError, ValueError) as error:
            raise InvalidArgumentError(
                f"torch: a {type(x).__name__} has no memory of its own ({error}). Pass the plain "
                "tensor that it wraps, such as x.to_local() of a DTensor."
            ) from error

    def unchanged(self, x: Any) -> Any:
        inference = x.is_inference() and not torch.is_inference_mode_enabled()
        lazy = x.is_conj() or x.is_neg()
        ordered = x.is_contiguous() and not lazy
        if type(x) is torch.Tensor and ordered and not (x.requires_grad or inference):
            return x
        x = x.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        # Autograd refuses inference tensors, but not their copies.
        return x.clone(memory_format=torch.contiguous_format) if inference else x.contiguous()

    def spot(self, x: Any) -> Spot | None:
        dtype = _DTYPES.get(x.dtype)
        if dtype is None or not x.is_cuda:
            return None
        return (_gpu or _on_gpu()).spot(x, dtype)  # type: ignore[no-any-return]

    def output(self, x: Any) -> tuple[Any, DType]:
        return self.view(x, writes=True)

    def wrap(self, array: Any, dtype: DType) -> Any:
        if not isinstance(array, np.ndarray):
            return _on_gpu().wrap(array, _kind(dtype))
        if dtype.name in _BITS:
            return torch.from_numpy(array.view(_BITS[dtype.name][1])).view(_kind(dtype))
        return torch.from_numpy(array)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        device: cuda.Device | None,
        stream: cuda.Stream | None = None,
    ) -> Any:
        if device is None:
            return np.empty(shape, dtype.storage)
        return _on_gpu().empty(shape, _kind(dtype), dtype, device, stream)

    def current_stream(self, device: cuda.Device, stream: cuda.Stream | None = None) -> cuda.Stream:
        current: cuda.Stream = (_gpu or _on_gpu()).current_stream(device)
        return current

    def used_on(self, x: Any, stream: cuda.Stream) -> None:
        _on_gpu().used_on(x, stream)


def _kind(dtype: DType) -> torch.dtype:
    try:
        return _KINDS[dtype]
    except KeyError:
        raise DtypeError(
            f"torch: this version of torch has no {dtype}. Update torch, or pass like='numpy'."
        ) from None


_gpu: Any = None


def _on_gpu() -> Any:
    """Return the module for tensors on GPUs, which needs CUDA's driver."""
    global _gpu
    if _gpu is None:
        _gpu = importlib.import_module("collective.adapters.torch.cuda_arrays")
    return _gpu
