"""Tensors copied to several devices in few messages, and added up there.

They are laid side by side in flat buckets of one dtype, and each bucket travels as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collective.errors import DeviceError, InvalidArgumentError, ShapeError

from .scattering import as_device, as_devices, move

__all__ = ["broadcast_coalesced", "copied", "reduce_add_coalesced", "refuse_several_devices"]

BUFFER_BYTES = 10 << 20


def broadcast_coalesced(
    tensors: Sequence[Tensor], devices: Sequence[Any], buffer_bytes: int = BUFFER_BYTES
) -> list[list[Tensor]]:
    """Give each device the tensors, copied in buckets.

    The backward pass adds up the copies' gradients on the tensor's device, those there are.

    Args:
        tensors: dense or sparse, of any dtypes, all on one device.
        devices: where they are needed; a device may come more than once.
        buffer_bytes: how large a bucket grows, in bytes; a larger tensor travels by itself.

    Returns:
        A list a device, of the tensors there. On the device where they are, they share the
        memory of ``tensors``; elsewhere they have their own.

    Raises:
        DeviceError: the tensors are on several devices, or ``devices`` are no list of them.
        InvalidArgumentError: ``buffer_bytes`` is not positive.
    """
    places = as_devices(devices)
    tensors = list(tensors)
    refuse_several_devices("broadcast_coalesced", tensors)
    _check_size(buffer_bytes)
    rows: list[list[Any]] = [list(tensors) for _ in places]
    graph = torch.is_grad_enabled()
    with_grad = [at for at, tensor in enumerate(tensors) if graph and tensor.requires_grad]
    plain = [at for at, tensor in enumerate(tensors) if not (graph and tensor.requires_grad)]
    # A node in the graph for each bucket: its gradients are added up, and their memory is
    # freed, as soon as they are there.
    for bucket in _buckets([tensors[index] for index in with_grad], buffer_bytes):
        indices = [with_grad[at] for at in bucket]
        found = _broadcast(places, buffer_bytes, *[tensors[index] for index in indices])
        for at, tensor in enumerate(found):
            rows[at // len(indices)][indices[at % len(indices)]] = tensor
    for row, placed in zip(rows, _placed([tensors[at] for at in plain], places, buffer_bytes)):
        for index, tensor in zip(plain, placed):
            row[index] = tensor
    return rows


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]], device: Any = None, buffer_bytes: int = BUFFER_BYTES
) -> list[Tensor]:
    """Add up lists of tensors, element by element, on one device.

    The backward pass gives each the gradient of the sum, on its device.

    Args:
        inputs: lists of one length; those of one list are on one device. Tensors in the same
            place have one shape and dtype, and are dense or sparse.
        device: where the sums go; by default to the first list's device.
        buffer_bytes: as in :func:`broadcast_coalesced`.

    Returns:
        The sums, added in the order of ``inputs``, in memory of their own. Those of sparse
        tensors alone are sparse.

    Raises:
        InvalidArgumentError: no list is given, or ``buffer_bytes`` is not positive.
        ShapeError: the lists or the tensors in one place differ in length or shape.
        DeviceError: the tensors of a list are on several devices.
    """
    rows = [list(row) for row in inputs]
    _check_size(buffer_bytes)
    if not rows:
        raise InvalidArgumentError("reduce_add_coalesced: no lists of tensors; give one or more.")
    if len({len(row) for row in rows}) > 1:
        raise ShapeError(
            f"reduce_add_coalesced: lists of {[len(row) for row in rows]} tensors; allowed are "
            "lists of one length."
        )
    for column in zip(*rows):
        if len({tensor.shape for tensor in column}) > 1:
            raise ShapeError(
                "reduce_add_coalesced: tensors of shapes "
                f"{[tuple(tensor.shape) for tensor in column]} in one place; allowed is one shape."
            )
    for row in rows:
        refuse_several_devices("reduce_add_coalesced", row)
    if not rows[0]:
        return []
    target = rows[0][0].device if device is None else as_device(device)
    flat = [tensor for row in rows for tensor in row]
    return list(_reduce_add(target, buffer_bytes, len(rows), *flat))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, places: list[torch.device], buffer_bytes: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that nobody used gets no gradient
        ctx.home, ctx.count, ctx.buffer_bytes = tensors[0].device, len(tensors), buffer_bytes
        return tuple(t for row in _placed(list(tensors), places, buffer_bytes) for t in row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rows = [grads[at : at + ctx.count] for at in range(0, len(grads), ctx.count)]
        # Tensors whose gradients come from the same copies travel together.
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, column in enumerate(zip(*rows)):
            present = tuple(at for at, grad in enumerate(column) if grad is not None)
            groups.setdefault(present, []).append(index)
        sums: list[Tensor | None] = [None] * ctx.count
        for present, indices in groups.items():
            if present:
                picked: Any = [[rows[at][index] for index in indices] for at in present]
                found = reduce_add_coalesced(picked, ctx.home, ctx.buffer_bytes)
                for index, tensor in zip(indices, found):
                    sums[index] = tensor
        return (None, None, *sums)


class _ReduceAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, device: torch.device, buffer_bytes: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        each = len(tensors) // count
        rows = [list(tensors[at : at + each]) for at in range(0, len(tensors), each)]
        ctx.homes, ctx.buffer_bytes = [row[0].device for row in rows], buffer_bytes
        if count == 1:
            return tuple(copied(rows[0], device, buffer_bytes))
        sums = _placed(rows[0], [device], buffer_bytes)[0]
        for at, row in enumerate(rows[1:]):
            arrived = _placed(row, [device], buffer_bytes)[0]
            # The first sum is new memory, to which the others are added.
            sums = [_added(total, tensor, at > 0) for total, tensor in zip(sums, arrived)]
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows = broadcast_coalesced(grads, ctx.homes, ctx.buffer_bytes)
        return (None, None, None, *[grad for row in rows for grad in row])


_broadcast: Callable[..., tuple[Tensor, ...]] = _Broadcast.apply
_reduce_add: Callable[..., tuple[Tensor, ...]] = _ReduceAdd.apply


def _added(total: Tensor, tensor: Tensor, in_place: bool) -> Tensor:
    if total.layout is not tensor.layout and total.is_sparse:
        return tensor + total  # only a dense tensor takes a sparse one
    return total.add_(tensor) if in_place else total + tensor


def _placed(
    tensors: list[Tensor], places: list[torch.device], buffer_bytes: int
) -> list[list[Tensor]]:
    """Return the tensors on each device, as aliases where they are there."""
    return [
        # Their version is kept, to notice a step before the backward pass; as views they could
        # not be changed in place, as an embedding with max_norm does.
        [t.detach() for t in tensors]
        if tensors and tensors[0].device == device
        else copied(tensors, device, buffer_bytes)
        for device in places
    ]


def copied(
    tensors: list[Tensor], device: torch.device, buffer_bytes: int = BUFFER_BYTES
) -> list[Tensor]:
    """Return copies on a device, that came there in buckets.

    Each has a version of its own, as tensors that are not of one bucket: a buffer may be
    written to in place while another is saved for the backward pass.
    """
    with torch.no_grad():
        # A sparse tensor is two dense ones.
        parts: list[Tensor] = []
        for tensor in tensors:
            sparse = tensor.layout is torch.sparse_coo
            parts += [tensor._indices(), tensor._values()] if sparse else [tensor.detach()]
        arrived: list[Any] = [None] * len(parts)
        for bucket in _buckets(parts, buffer_bytes):
            if len(bucket) == 1:
                one = parts[bucket[0]]
                arrived[bucket[0]] = one.to(device, non_blocking=device.type == "cuda", copy=True)
                continue
            rows = [_in_memory_order(parts[index]) for index in bucket]
            flat = move(torch.cat([row.reshape(-1) for row, _ in rows]), device)
            ends = torch.split(flat, [row.numel() for row, _ in rows])
            for index, end, (row, back) in zip(bucket, ends, rows):
                arrived[index] = end.view(row.shape).permute(back).data
        taken = iter(arrived)
        return [_rebuilt(tensor, taken) for tensor in tensors]


def _rebuilt(tensor: Tensor, parts: Any) -> Tensor:
    if tensor.layout is not torch.sparse_coo:
        found: Tensor = next(parts)
        return found
    indices, values = next(parts), next(parts)
    return torch.sparse_coo_tensor(
        indices, values, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False
    )


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return a tensor with its dimensions as they lie in memory, and the way back.

    Flattened so, one that is dense in another order, as channels_last, keeps its strides.
    """
    order = sorted(range(tensor.dim()), key=lambda at: -tensor.stride()[at])
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order), back


def _buckets(tensors: Sequence[Tensor], buffer_bytes: int) -> list[list[int]]:
    """Return the tensors' indices by the bucket in which they travel."""
    done: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        if not _is_plain(tensor):
            done.append([index])  # not memory that can be laid beside another's
            continue
        size = tensor.numel() * tensor.element_size()
        bucket, filled = filling.get(tensor.dtype, ([], 0))
        if bucket and filled + size > buffer_bytes:
            done.append(bucket)
            bucket, filled = [], 0
        filling[tensor.dtype] = ([*bucket, index], filled + size)
    return done + [bucket for bucket, _ in filling.values()]


def _is_plain(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return strided and type(tensor) in (Tensor, nn.Parameter)


def refuse_several_devices(call: str, tensors: Sequence[Tensor]) -> None:
    """Raise DeviceError, in the name of ``call``, where the tensors are on several devices."""
    devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    if len(devices) > 1:
        raise DeviceError(
            f"{call}: tensors on {' and '.join(devices)}; allowed is one device. Move them with "
            ".to(device)."
        )


def _check_size(buffer_bytes: int) -> None:
    if buffer_bytes < 1:
        raise InvalidArgumentError(
            f"buffer_bytes: {buffer_bytes}; allowed is a positive number of bytes."
        )
