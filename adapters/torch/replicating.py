"""Modules and tensors copied to several devices in few messages, and added up there.

Tensors are laid side by side in flat buckets of one dtype, and each bucket travels as one. The
backward pass of a module's copies adds up their gradients, which travel the same way.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collective.errors import DeviceError, InvalidArgumentError, ShapeError, UnsupportedError

from .scattering import as_device, as_devices, move

__all__ = ["broadcast_coalesced", "check_replicable", "reduce_add_coalesced", "replicate"]

# A module's own dicts and sets, which every copy has for itself: one that registers or removes
# something while it runs does so for itself alone.
_OWN = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]
_CONTAINERS = (list, tuple, dict, OrderedDict)
# Longer lists are taken for data, as vocabularies: to search them would outlast a forward pass.
_LONGEST = 1000
_DEEPEST = 3
BUFFER_BYTES = 10 << 20


def replicate(module: nn.Module, devices: Sequence[Any], detach: bool = False) -> list[nn.Module]:
    """Return a copy of a module for each device.

    The copies' parameters are no leaves: their gradients flow back into the module's. Submodules,
    parameters and buffers that are shared stay shared within a copy; plain attributes are
    shared with the module, save for those that refer to its parts.

    Args:
        module: any module, its parameters and buffers on one device.
        devices: a device a copy; one may come more than once.
        detach: whether the copies are cut off the graph, as they are in no_grad mode.

    Returns:
        The copies. Parameters share the module's memory where they are on its device. The first
        copy there has the module's buffers themselves, so that running statistics that are
        updated in place are kept; those of the others are copies, and go with them.

    Raises:
        UnsupportedError: a part of it is a ScriptModule, or compiled.
        InvalidArgumentError: a parameter is not initialized yet.
        DeviceError: its tensors are on several devices, or ``devices`` are no list of them.
    """
    check_replicable(module)
    places = as_devices(devices)
    graph = torch.is_grad_enabled() and not detach
    buffers = list(module.buffers())
    own = [buffer for buffer in buffers if not (graph and buffer.requires_grad)]
    shared = [*module.parameters(), *(b for b in buffers if graph and b.requires_grad)]
    _refuse_several_devices("replicate", [*shared, *own])
    rows = broadcast_coalesced(shared if graph else [t.detach() for t in shared], places)
    keys = [id(tensor) for tensor in [*shared, *own]]
    known = [
        dict(zip(keys, [*row, *own_row])) for row, own_row in zip(rows, _own_rows(own, places))
    ]
    return _copies_of(module, known)


def check_replicable(module: nn.Module) -> None:
    """Refuse a module that cannot be copied.

    Raises:
        UnsupportedError, InvalidArgumentError: as in :func:`replicate`.
    """
    for name, part in module.named_modules():
        where = f"{type(part).__name__} ({name or 'the module itself'})"
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"replicate: {where} is a ScriptModule, whose parts are fixed; allowed are "
                "modules of Python. Wrap the module before it is scripted or traced."
            )
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None):
            raise UnsupportedError(
                f"replicate: {where} is compiled for its own parameters; allowed are modules "
                "that are not. Wrap the module without torch.compile."
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"replicate: {name!r} is not initialized; allowed are modules that know their "
                "shapes. Call the module once with a batch before it is wrapped."
            )


def _own_rows(buffers: list[Tensor], places: list[torch.device]) -> list[list[Tensor]]:
    """Return the buffers themselves for the first place that is theirs, and copies elsewhere."""
    home = buffers[0].device if buffers else None
    first = places.index(home) if home in places else -1
    return [
        buffers if index == first else _copied(buffers, device)
        for index, device in enumerate(places)
    ]


def _copies_of(module: nn.Module, known: list[dict[int, Any]]) -> list[nn.Module]:
    """Return copies of a module, each with the tensors that stand for its own by their ids."""
    parts = list(module.modules())
    for found in known:
        found.update((id(part), object.__new__(type(part))) for part in parts)
    for part in parts:
        attributes = vars(part)
        own = {name: attributes[name] for name in _OWN if name in attributes}
        # Looked for once, not for each copy.
        live = {
            name: value
            for name, value in attributes.items()
            if name not in own and _refers(value, known[0], _DEEPEST)
        }
        for found in known:
            copied = vars(found[id(part)])
            copied.update(attributes)
            for name, value in own.items():
                keep = not value or isinstance(value, set)
                copied[name] = value.copy() if keep else _mapped(value, found)
            for name, value in live.items():
                copied[name] = _mapped(value, found)
    return [found[id(module)] for found in known]


def _refers(value: Any, found: Mapping[int, Any], depth: int) -> bool:
    """Tell whether an attribute refers to parts of the module, as an RNN's list of weights."""
    if id(value) in found:
        return True
    if isinstance(value, types.MethodType):
        return id(value.__self__) in found
    if type(value) not in _CONTAINERS or len(value) > _LONGEST or not depth:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_refers(item, found, depth - 1) for item in items)


def _mapped(value: Any, found: Mapping[int, Any], depth: int = _DEEPEST) -> Any:
    """Return an attribute with a copy's parts in place of the module's."""
    if id(value) in found:
        return found[id(value)]
    if isinstance(value, types.MethodType) and id(value.__self__) in found:
        return types.MethodType(value.__func__, found[id(value.__self__)])
    if type(value) not in _CONTAINERS or not depth:
        return value
    if isinstance(value, dict):
        items = ((key, _mapped(item, found, depth - 1)) for key, item in value.items())
        return type(value)(items)
    return type(value)(_mapped(item, found, depth - 1) for item in value)


# -- tensors in buckets ---------------------------------------------------------------------------


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
    _refuse_several_devices("broadcast_coalesced", tensors)
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
        _refuse_several_devices("reduce_add_coalesced", row)
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
            return tuple(_copied(rows[0], device, buffer_bytes))
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
        else _copied(tensors, device, buffer_bytes)
        for device in places
    ]


def _copied(
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


def _refuse_several_devices(call: str, tensors: Sequence[Tensor]) -> None:
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
