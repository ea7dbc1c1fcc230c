"""Copies of modules and tensors on several devices, and sums over devices, in few transfers.

Tensors of one dtype are laid side by side in flat buckets, and each bucket is one transfer. The
backward pass of a module's copies adds up their gradients, which are transferred in the same way.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from collective import DeviceError, InvalidArgumentError, ShapeError, UnsupportedError

from .scattering import as_device, as_devices, move

# Names of a module's own dicts and sets. Every copy gets its own, so that registering or removing
# something in a running copy affects only that copy.
_OWN = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]
_CONTAINERS = (list, tuple, dict, OrderedDict)
# Longer lists count as data, such as vocabularies: a search in them could take longer than a
# forward pass.
_LONGEST = 1000
_DEEPEST = 3
BUFFER_BYTES = 10 << 20


def replicate(module: nn.Module, devices: Sequence[Any], detach: bool = False) -> list[nn.Module]:
    """Return a copy of a module for each device.

    The copies' parameters are no leaves: their gradients flow back into the module's parameters.
    Submodules, parameters and buffers that are used in several places of the module stay shared
    within a copy. Plain attributes are shared with the module, except for those that refer to its
    parts.

    Args:
        module: any module whose parameters and buffers are on one device.
        devices: device of each copy; a device may appear more than once.
        detach: if true, the copies are detached from the graph, as in no_grad mode.

    Returns:
        The copies. A copy on the module's device shares the memory of its parameters. The first
        copy on that device also has the module's buffers themselves, so that in-place updates of
        running statistics are kept. The other copies' buffers are copies, whose changes are lost.

    Raises:
        UnsupportedError: a part of the module is a ScriptModule, or compiled.
        InvalidArgumentError: a parameter is not initialised yet.
        DeviceError: the module's tensors are on several devices, or ``devices`` is no list of
            devices.
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
    """Check that a module can be copied.

    Raises:
        UnsupportedError, InvalidArgumentError: as in :func:`replicate`.
    """
    for name, part in module.named_modules():
        where = f"{type(part).__name__} ({name or 'the module itself'})"
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"replicate: {where} is a ScriptModule, which cannot be copied (expected Python "
                "modules). Wrap the module before it is scripted or traced."
            )
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None):
            raise UnsupportedError(
                f"replicate: {where} is compiled for its own parameters, so it cannot be copied. "
                "Wrap the module without torch.compile."
            )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"replicate: {name!r} is not initialized, so its shape is unknown. Call the module "
                "once with a batch before you wrap it."
            )


def _own_rows(buffers: list[Tensor], places: list[torch.device]) -> list[list[Tensor]]:
    """Return the buffers for each device: themselves for the first entry of their device.

    All other entries get copies.
    """
    home = buffers[0].device if buffers else None
    first = places.index(home) if home in places else -1
    return [
        buffers if index == first else _copied(buffers, device)
        for index, device in enumerate(places)
    ]


def _copies_of(module: nn.Module, known: list[dict[int, Any]]) -> list[nn.Module]:
    """Return copies of a module.

    Args:
        module: module to copy.
        known: for each copy, the tensors that replace the module's, by the ids of the latter. The
            function adds the copies of the module's parts.
    """
    parts = list(module.modules())
    for found in known:
        found.update((id(part), object.__new__(type(part))) for part in parts)
    for part in parts:
        attributes = vars(part)
        own = {name: attributes[name] for name in _OWN if name in attributes}
        # The search for references is slow, so it runs once, not for each copy.
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
    """Return whether an attribute refers to parts of the module, like an RNN's list of weights."""
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
    """Copy tensors to each device, in buckets.

    The backward pass adds up the existing gradients of the copies, on the tensors' device.

    Args:
        tensors: dense or sparse tensors of any dtypes, all on one device.
        devices: devices for the copies; a device may appear more than once.
        buffer_bytes: largest size of a bucket, in bytes; a larger tensor has its own bucket.

    Returns:
        For each device, a list of the tensors on it. On the device of ``tensors``, they share the
        memory of ``tensors``; on other devices they have their own memory.

    Raises:
        DeviceError: the tensors are on several devices, or ``devices`` is no list of devices.
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
    # Each bucket is a node of the graph. So its gradients are added up, and their memory is freed,
    # as soon as they have arrived.
    for bucket in _buckets([tensors[index] for index in with_grad], buffer_bytes):
        indices = [with_grad[at] for at in bucket]
        copies = _broadcast(places, buffer_bytes, *[tensors[index] for index in indices])
        for at, tensor in enumerate(copies):
            rows[at // len(indices)][indices[at % len(indices)]] = tensor
    for row, placed in zip(rows, _placed([tensors[at] for at in plain], places, buffer_bytes)):
        for index, tensor in zip(plain, placed):
            row[index] = tensor
    return rows


def reduce_add_coalesced(
    inputs: Sequence[Sequence[Tensor]], device: Any = None, buffer_bytes: int = BUFFER_BYTES
) -> list[Tensor]:
    """Add up lists of tensors, element by element, on one device.

    In the backward pass, each tensor gets the gradient of its sum, on the tensor's device.

    Args:
        inputs: lists of the same length. The tensors of a list are on one device. Tensors in the
            same place of the lists have one shape and dtype; each is dense or sparse.
        device: device of the sums; by default the first list's device.
        buffer_bytes: as in :func:`broadcast_coalesced`.

    Returns:
        The sums, added in the order of ``inputs``, in new memory. A sum of sparse tensors only is
        sparse.

    Raises:
        InvalidArgumentError: ``inputs`` is empty, or ``buffer_bytes`` is not positive.
        ShapeError: the lists differ in length, or tensors in the same place differ in shape.
        DeviceError: the tensors of a list are on several devices.
    """
    rows = [list(row) for row in inputs]
    _check_size(buffer_bytes)
    if not rows:
        raise InvalidArgumentError(
            "reduce_add_coalesced: got no lists of tensors (expected at least one)."
        )
    if len({len(row) for row in rows}) > 1:
        raise ShapeError(
            f"reduce_add_coalesced: got lists of {[len(row) for row in rows]} tensors (expected "
            "lists of the same length)."
        )
    for column in zip(*rows):
        if len({tensor.shape for tensor in column}) > 1:
            raise ShapeError(
                "reduce_add_coalesced: tensors in the same place of the lists have shapes "
                f"{[tuple(tensor.shape) for tensor in column]} (expected equal shapes)."
            )
    for row in rows:
        _refuse_several_devices("reduce_add_coalesced", row)
    if not rows[0]:
        return []
    target = rows[0][0].device if device is None else as_device(device)
    flat = [tensor for row in rows for tensor in row]
    return list(_reduce_add(target, buffer_bytes, len(rows), *flat))


class _BroadcastFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, places: list[torch.device], buffer_bytes: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a parameter that no copy used gets no gradient
        ctx.home, ctx.count, ctx.buffer_bytes = tensors[0].device, len(tensors), buffer_bytes
        return tuple(t for row in _placed(list(tensors), places, buffer_bytes) for t in row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rows = [grads[at : at + ctx.count] for at in range(0, len(grads), ctx.count)]
        # Gradients that exist in the same copies are transferred together.
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, column in enumerate(zip(*rows)):
            present = tuple(at for at, grad in enumerate(column) if grad is not None)
            groups.setdefault(present, []).append(index)
        sums: list[Tensor | None] = [None] * ctx.count
        for present, indices in groups.items():
            if present:
                picked: Any = [[rows[at][index] for index in indices] for at in present]
                totals = reduce_add_coalesced(picked, ctx.home, ctx.buffer_bytes)
                for index, tensor in zip(indices, totals):
                    sums[index] = tensor
        return (None, None, *sums)


class _ReduceAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, device: torch.device, buffer_bytes: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        length = len(tensors) // count
        rows = [list(tensors[at : at + length]) for at in range(0, len(tensors), length)]
        ctx.homes, ctx.buffer_bytes = [row[0].device for row in rows], buffer_bytes
        if count == 1:
            return tuple(_copied(rows[0], device, buffer_bytes))
        sums = _placed(rows[0], [device], buffer_bytes)[0]
        for at, row in enumerate(rows[1:]):
            arrived = _placed(row, [device], buffer_bytes)[0]
            # The first addition allocates the sum; later ones add to it in place.
            sums = [_added(total, tensor, at > 0) for total, tensor in zip(sums, arrived)]
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows = broadcast_coalesced(grads, ctx.homes, ctx.buffer_bytes)
        return (None, None, None, *[grad for row in rows for grad in row])


_broadcast: Callable[..., tuple[Tensor, ...]] = _BroadcastFunction.apply
_reduce_add: Callable[..., tuple[Tensor, ...]] = _ReduceAdd.apply


def _added(total: Tensor, tensor: Tensor, in_place: bool) -> Tensor:
    if total.layout is not tensor.layout and total.is_sparse:
        return tensor + total  # torch adds a sparse tensor to a dense one, not the reverse
    return total.add_(tensor) if in_place else total + tensor


def _placed(
    tensors: list[Tensor], places: list[torch.device], buffer_bytes: int
) -> list[list[Tensor]]:
    """Return the tensors on each device; on their own device, as aliases."""
    return [
        # Detached tensors share the version counter, so autograd notices an optimizer's step
        # before the backward pass. Views would not allow in-place changes, which an embedding with
        # max_norm makes.
        [t.detach() for t in tensors]
        if tensors and tensors[0].device == device
        else _copied(tensors, device, buffer_bytes)
        for device in places
    ]


def _copied(
    tensors: list[Tensor], device: torch.device, buffer_bytes: int = BUFFER_BYTES
) -> list[Tensor]:
    """Return copies on a device, transferred in buckets.

    Each copy has its own version counter, although a bucket's copies share its memory. So a buffer
    may be changed in place while another one is saved for the backward pass.
    """
    with torch.no_grad():
        # A sparse tensor consists of two dense ones.
        parts: list[Tensor] = []
        for tensor in tensors:
            sparse = tensor.layout is torch.sparse_coo
            parts += [tensor._indices(), tensor._values()] if sparse else [tensor.detach()]
        arrived: list[Any] = [None] * len(parts)
        for bucket in _buckets(parts, buffer_bytes):
            if len(bucket) == 1:
                part = parts[bucket[0]]
                arrived[bucket[0]] = part.to(device, non_blocking=device.type == "cuda", copy=True)
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
        dense: Tensor = next(parts)
        return dense
    indices, values = next(parts), next(parts)
    return torch.sparse_coo_tensor(
        indices, values, tensor.shape, device=values.device, is_coalesced=tensor.is_coalesced(),
        check_invariants=False,
    )  # fmt: skip


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return a tensor with its dimensions in memory order, and the permutation to undo that.

    In this order a tensor that is dense in another order, such as channels_last, keeps its strides
    in a flat bucket.
    """
    order = sorted(range(tensor.dim()), key=lambda at: -tensor.stride()[at])
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order), back


def _buckets(tensors: Sequence[Tensor], buffer_bytes: int) -> list[list[int]]:
    """Return the tensors' indices, in a list for each bucket."""
    done: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        if not _is_plain(tensor):
            done.append([index])  # its memory cannot be part of a flat bucket
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
    """Check that the tensors are on one device; the DeviceError names ``call``."""
    devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
    if len(devices) > 1:
        raise DeviceError(
            f"{call}: the tensors are on {' and '.join(devices)} (expected a single device). Move "
            "them with .to(device)."
        )


def _check_size(buffer_bytes: int) -> None:
    if buffer_bytes < 1:
        raise InvalidArgumentError(
            f"buffer_bytes: {buffer_bytes} (expected a positive number of bytes)."
        )
