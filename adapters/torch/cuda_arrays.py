"""Views of PyTorch tensors on GPUs as DeviceArrays."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from collective import AllocationError, DeviceError
from collective.inner import BY_NAME, DeviceArray, DType, Spot, cuda
from collective.memory import buffer, device_adapter, device_copies, dlpack

try:
    # This private function is ten times as fast as the public one. torch's own compiler uses it.
    _current_handle: Any = torch._C._cuda_getCurrentRawStream
except AttributeError:  # pragma: no cover

    def _current_handle(index: int) -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)


if torch.cuda.is_available():
    _init: Any = torch.cuda.init
    _init()  # the private functions used here do not initialise CUDA themselves

_FOR_AMD = torch.version.hip is not None
# Types for copies of bits, by the size of an element: torch's type, and the name of the dtype.
_MOVED = {
    1: (torch.uint8, "uint8"),
    2: (torch.int16, "int16"),
    4: (torch.int32, "int32"),
    8: (torch.int64, "int64"),
    16: (torch.complex128, "complex128"),
}
_streams: dict[cuda.Stream, Any] = {}


def current_stream(device: cuda.Device) -> cuda.Stream:
    """Return torch's current stream in this thread."""
    return device.stream(_current_handle(device.ordinal))


def view(x: Any, dtype: DType) -> DeviceArray:
    """Return the memory of a dense tensor that requires no gradient."""
    if _FOR_AMD:
        raise DeviceError(
            "torch: this build of torch is for AMD GPUs (expected NVIDIA GPUs). Use x.cpu()."
        )
    try:
        address = x.data_ptr()
    except RuntimeError:
        address = 0
    if not address and x.numel():
        raise DeviceError(
            f"torch: a {type(x).__name__} has no memory of its own. Pass the tensor that it wraps, "
            "such as x.to_local() of a DTensor."
        )
    ordinal = x.get_device()
    device = cuda.device(ordinal)
    stream = device.stream(_current_handle(ordinal))
    if x.is_contiguous():
        return DeviceArray.contiguous(
            address, tuple(x.shape), dtype.storage, device, stream, x, _SPACE
        )
    return DeviceArray(
        address,
        tuple(x.shape),
        dtype.storage,
        device,
        stream,
        strides=_in_bytes(x),
        owner=x,
        space=_SPACE,
    )


def spot(x: Any, dtype: DType) -> Spot | None:
    """Return the location of a tensor on a GPU; see :meth:`Adapter.spot`."""
    if _FOR_AMD or not x.is_contiguous() or x.is_neg() or (dtype.kind == "c" and x.is_conj()):
        return None
    try:
        # `data_ptr()` raises for a sparse tensor, `shape` for a nested one.
        address, shape = x.data_ptr(), x.shape
    except RuntimeError:
        return None
    if not address or address % dtype.storage.alignment:
        return None
    ordinal = x.get_device()
    device = cuda.device(ordinal)
    stream = device.stream(_current_handle(ordinal))
    return buffer.new_spot((address, x.numel(), dtype, shape, stream, device))


def empty(
    shape: tuple[int, ...],
    kind: torch.dtype,
    dtype: DType,
    device: cuda.Device,
    stream: cuda.Stream | None,
) -> DeviceArray:
    """Return the memory of a new tensor, allocated for later use on ``stream``.

    The allocation is ordered on the stream of :class:`collective.cuda.on`, or, outside of it, on
    torch's current stream.
    """
    forced = cuda.effective_stream(current_stream(device))
    with _current(forced):
        array = view(_allocate(shape, kind, device), dtype)
    if stream is not None and stream != forced:
        used_on(array, stream)
    return array


def wrap(array: DeviceArray, kind: torch.dtype) -> Any:
    """Return a tensor of type ``kind`` over an array's memory.

    If the memory belongs to such a tensor, return that tensor itself.
    """
    owner = device_adapter.root_owner(array)
    if (
        isinstance(owner, torch.Tensor)
        and owner.dtype is kind
        and tuple(owner.shape) == array.shape
        and owner.data_ptr() == array.address
        and (
            (array.flags.c_contiguous and owner.is_contiguous())
            or _in_bytes(owner) == array.strides
        )
    ):
        return owner
    bits = _tensor(array)
    if bits is None:
        bits = _tensor(array.copy())
    return bits.view(kind)


def used_on(x: Any, stream: cuda.Stream) -> None:
    """Tell torch's allocator that another stream uses a tensor's memory."""
    owner = device_adapter.root_owner(x)
    if isinstance(owner, torch.Tensor):
        if owner.is_cuda:
            owner.record_stream(_torch_stream(stream))
    elif isinstance(owner, cuda.Memory):
        owner.used_on(stream)


class TorchSpace:
    """Memory of torch's caching allocator, copied by torch's kernels."""

    def empty(self, nbytes: int, device: cuda.Device, stream: cuda.Stream) -> tuple[int, Any]:
        """Return the address and the owner of new memory, for use in the order of ``stream``."""
        with _current(stream):
            owner = _allocate((nbytes,), torch.uint8, device)
        return owner.data_ptr(), owner

    def assign(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Copy between arrays of the same shape and item size, with any strides."""
        target, source = _tensor(dst), _tensor(src)
        if target is None or source is None:
            device_copies.PLAIN.assign(dst, src)
            return
        # A tensor made in inference mode may be written to only in inference mode.
        with _current(cuda.effective_stream(dst.stream)), torch.inference_mode():
            target.copy_(source)


_SPACE = TorchSpace()


def _in_bytes(x: Any) -> tuple[int, ...]:
    size = x.element_size()
    return tuple(stride * size for stride in x.stride())


def _allocate(shape: tuple[int, ...], kind: torch.dtype, device: cuda.Device) -> Any:
    try:
        return torch.empty(shape, dtype=kind, device=f"cuda:{device.ordinal}")
    except torch.cuda.OutOfMemoryError as error:
        raise AllocationError(
            f"torch: no memory for {kind} of shape {shape} on {device}: {error}"
        ) from error


def _current(stream: cuda.Stream) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a stream is torch's current stream."""
    if stream == current_stream(stream.device):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(_torch_stream(stream))
    return context


def _torch_stream(stream: cuda.Stream) -> Any:
    torch_stream = _streams.get(stream)
    if torch_stream is None:
        ordinal = stream.device.ordinal
        if stream.handle <= dlpack.LEGACY:
            # torch interprets odd handles as its own stream numbers, so this handle cannot be an
            # external stream.
            torch_stream = torch.cuda.default_stream(ordinal)
        else:
            external: Any = torch.cuda.ExternalStream
            torch_stream = external(stream.handle, device=ordinal)
        _streams[stream] = torch_stream
    return torch_stream


def _tensor(array: DeviceArray) -> Any:
    """Return the bits of an array as a tensor; None if torch has no such strides."""
    size = array.dtype.itemsize
    if any(stride < 0 or stride % size for stride in array.strides):
        return None
    owner = device_adapter.root_owner(array)
    kind, name = _MOVED[size]
    if isinstance(owner, torch.Tensor):
        part = _part(owner, array, kind)
        if part is not None:
            return part
    # The capsule keeps the array's owner alive, and so does every tensor made from the capsule.
    lent = dlpack.lend(
        dlpack.Lent(
            array.address,
            array.shape,
            array.strides,
            BY_NAME[name],
            dlpack.device_of(array),
            True,
            array,
        ),
        None,
    )
    return torch.utils.dlpack.from_dlpack(lent)


def _part(owner: Any, array: DeviceArray, kind: torch.dtype) -> Any:
    """Return the part of a tensor's storage that an array covers; None if torch has no view."""
    size, unit = array.dtype.itemsize, owner.element_size()
    start = array.address - owner.data_ptr() + owner.storage_offset() * unit
    strides = [stride // size for stride in array.strides]
    if start % unit or start % size:
        return None
    if size == unit:
        return owner.as_strided(array.shape, strides, start // size).view(kind)
    # View the memory as a row of the owner's elements, then as a row of the array's.
    extent = size + sum((n - 1) * s for n, s in zip(array.shape, array.strides))
    if not array.size or extent % unit:
        return None
    row = owner.as_strided((extent // unit,), (1,), start // unit).view(kind)
    return row.as_strided(array.shape, strides, row.storage_offset())
