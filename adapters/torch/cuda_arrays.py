"""PyTorch tensors on GPUs as DeviceArrays over the same memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from collective import cuda
from collective.cuda import Device, Stream
from collective.errors import AllocationError, DeviceError
from collective.memory import dlpack
from collective.memory.buffer import Spot, new_spot
from collective.memory.device_adapter import root_owner
from collective.memory.device_array import DeviceArray
from collective.memory.device_copies import PLAIN
from collective.memory.device_space import DeviceElements
from collective.memory.dtypes import BY_NAME, DType

__all__ = ["current_stream", "empty", "spot", "used_on", "view", "wrap"]

try:
    # Private, and ten times as fast as the public way; torch's own compiler uses it.
    _current_handle: Any = torch._C._cuda_getCurrentRawStream
except AttributeError:  # pragma: no cover

    def _current_handle(index: int) -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)


if torch.cuda.is_available():
    _init: Any = torch.cuda.init
    _init()  # the functions used here do not do it themselves

_FOR_AMD = torch.version.hip is not None
# Types by the size of an element, in which bits are moved.
_MOVED = {
    1: (torch.uint8, "uint8"),
    2: (torch.int16, "int16"),
    4: (torch.int32, "int32"),
    8: (torch.int64, "int64"),
    16: (torch.complex128, "complex128"),
}
_streams: dict[Stream, Any] = {}


def current_stream(device: Device) -> Stream:
    """Return torch's current stream in this thread."""
    return device.stream(_current_handle(device.ordinal))


def view(x: Any, dtype: DType) -> DeviceArray:
    """Return the memory of a dense tensor that requires no gradient."""
    if _FOR_AMD:
        raise DeviceError("torch: this build is for AMD's GPUs; only NVIDIA's are reached.")
    try:
        address = x.data_ptr()
    except RuntimeError:
        address = 0
    if not address and x.numel():
        raise DeviceError(
            f"torch: a {type(x).__name__} has no memory of its own; pass the tensor inside, as "
            "x.to_local() of a DTensor."
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
    """Return where a tensor on a GPU is; see :meth:`Adapter.spot`."""
    if _FOR_AMD or not x.is_contiguous() or x.is_neg() or (dtype.kind == "c" and x.is_conj()):
        return None
    try:
        # Of a sparse tensor the first of these raises, of a nested one the other.
        address, shape = x.data_ptr(), x.shape
    except RuntimeError:
        return None
    if not address or address % dtype.storage.alignment:
        return None
    ordinal = x.get_device()
    device = cuda.device(ordinal)
    stream = device.stream(_current_handle(ordinal))
    return new_spot((address, x.numel(), dtype, shape, stream, device))


def empty(
    shape: tuple[int, ...],
    kind: torch.dtype,
    dtype: DType,
    device: Device,
    stream: Stream | None,
) -> DeviceArray:
    """Return a new tensor's memory, on the stream in force, for use on ``stream`` afterwards."""
    forced = cuda.effective_stream(current_stream(device))
    with _current(forced):
        made = view(_allocate(shape, kind, device), dtype)
    if stream is not None and stream != forced:
        used_on(made, stream)
    return made


def wrap(array: DeviceArray, kind: torch.dtype) -> Any:
    """Return a tensor of type ``kind`` over an array's memory; its owner, if it is that."""
    owner = root_owner(array)
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
    found = _tensor(array)
    if found is None:
        found = _tensor(array.copy())
    return found.view(kind)


def used_on(x: Any, stream: Stream) -> None:
    """Tell torch's allocator of another stream that uses a tensor's memory."""
    owner = root_owner(x)
    if isinstance(owner, torch.Tensor):
        if owner.is_cuda:
            owner.record_stream(_torch_stream(stream))
    elif isinstance(owner, cuda.Memory):
        owner.used_on(stream)


class TorchSpace:
    """Memory of torch's caching allocator, copied by torch's kernels."""

    def empty(self, nbytes: int, device: Device, stream: Stream) -> tuple[int, Any]:
        """Return an address, and what owns it, for use in ``stream``'s order."""
        with _current(stream):
            owner = _allocate((nbytes,), torch.uint8, device)
        return owner.data_ptr(), owner

    def assign(self, dst: DeviceElements, src: DeviceElements) -> None:
        """Copy between arrays of one shape and item size, with any strides."""
        target, source = _tensor(dst), _tensor(src)
        if target is None or source is None:
            PLAIN.assign(dst, src)
            return
        # A tensor made in inference mode must not be written to outside of it.
        with _current(cuda.effective_stream(dst.stream)), torch.inference_mode():
            target.copy_(source)


_SPACE = TorchSpace()


def _in_bytes(x: Any) -> tuple[int, ...]:
    size = x.element_size()
    return tuple(stride * size for stride in x.stride())


def _allocate(shape: tuple[int, ...], kind: torch.dtype, device: Device) -> Any:
    try:
        return torch.empty(shape, dtype=kind, device=f"cuda:{device.ordinal}")
    except torch.cuda.OutOfMemoryError as error:
        raise AllocationError(
            f"torch: no memory for {kind} of shape {shape} on {device}: {error}"
        ) from error


def _current(stream: Stream) -> contextlib.AbstractContextManager[Any]:
    """Make a stream torch's current one, if it is not."""
    if stream == current_stream(stream.device):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(_torch_stream(stream))
    return context


def _torch_stream(stream: Stream) -> Any:
    found = _streams.get(stream)
    if found is None:
        ordinal = stream.device.ordinal
        if stream.handle <= dlpack.LEGACY:
            # Odd handles are torch's own numbers to torch.
            found = torch.cuda.default_stream(ordinal)
        else:
            external: Any = torch.cuda.ExternalStream
            found = external(stream.handle, device=ordinal)
        _streams[stream] = found
    return found


def _tensor(array: DeviceElements) -> Any:
    """Return the bits of an array as a tensor; None if torch has no such strides."""
    size = array.dtype.itemsize
    if any(stride < 0 or stride % size for stride in array.strides):
        return None
    owner = root_owner(array)
    kind, name = _MOVED[size]
    if isinstance(owner, torch.Tensor):
        found = _part(owner, array, kind)
        if found is not None:
            return found
    # Its owner is kept by the capsule, and by whatever is made of it.
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


def _part(owner: Any, array: DeviceElements, kind: torch.dtype) -> Any:
    """Return the part of a tensor's storage that an array covers; None if torch cannot."""
    size, unit = array.dtype.itemsize, owner.element_size()
    start = array.address - owner.data_ptr() + owner.storage_offset() * unit
    strides = [stride // size for stride in array.strides]
    if start % unit or start % size:
        return None
    if size == unit:
        return owner.as_strided(array.shape, strides, start // size).view(kind)
    # As a row of the owner's elements, then of ours.
    extent = size + sum((n - 1) * s for n, s in zip(array.shape, array.strides))
    if not array.size or extent % unit:
        return None
    row = owner.as_strided((extent // unit,), (1,), start // unit).view(kind)
    return row.as_strided(array.shape, strides, row.storage_offset())
