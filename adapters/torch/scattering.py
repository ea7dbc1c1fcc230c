"""Batches cut into pieces for several devices of one process, and collected again.

Both are made of operations that torch itself can differentiate: the backward pass of
:func:`scatter` concatenates the pieces' gradients on the input's device, that of :func:`gather`
cuts the gradient and gives each piece back to its device, to any order.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from collective.errors import (
    DeviceError,
    DtypeError,
    InvalidArgumentError,
    ShapeError,
    UnsupportedError,
)

__all__ = ["as_device", "as_devices", "gather", "move", "scatter", "scatter_kwargs", "tensors_in"]

# Values that may come out of every replica: one stands for all where they are equal.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def as_device(device: Any) -> torch.device:
    """Return a device as tensors on it tell it.

    Args:
        device: a ``torch.device``, its text, or the number of a GPU.

    Raises:
        DeviceError: torch knows no such device.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"device: {device!r} is none; allowed are a torch.device, its text as 'cuda:1', and "
            "the number of a GPU."
        ) from error
    if found.type == "cpu":
        return torch.device("cpu")  # a tensor on "cpu:0" says "cpu"
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def as_devices(devices: Sequence[Any]) -> list[torch.device]:
    """Return a list of one device or more as :func:`as_device` does; one may come twice."""
    if isinstance(devices, (str, torch.device, int)) or not len(devices):
        raise DeviceError(
            f"devices: {devices!r}; allowed is a list of one device or more, as ['cuda:0', "
            "'cuda:1']."
        )
    return [as_device(device) for device in devices]


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device: itself if it is there, else a copy.

    The copy is ordered on the current streams, as any operation. Only a copy to a GPU may
    return early: what is read on the CPU has to have arrived.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested structure in the order in which they stand."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for item in _items(tree) or ():
        yield from tensors_in(item)


def scatter(
    inputs: Any, devices: Sequence[Any], dim: int = 0, chunk_sizes: Sequence[int] | None = None
) -> list[Any]:
    """Cut the tensors of a structure into a piece a device.

    The backward pass concatenates the gradients of the pieces.

    Args:
        inputs: a tensor of any dtype, or tuples, lists, dicts, named tuples and dataclasses of
            them, nested at will. What is no tensor is shared between the pieces.
        devices: where the pieces go; a device may come more than once. A piece that is on its
            device already is a view.
        dim: the dimension that is cut; negative ones count from the last.
        chunk_sizes: the pieces' lengths, one a device; by default as ``torch.chunk`` cuts:
            equal pieces, the last one shorter, and fewer of them where that uses all up.

    Returns:
        The pieces, structures like ``inputs``. Fewer than devices if there are fewer samples;
        one a device if there is no tensor at all. Empty tensors yield empty pieces.

    Raises:
        ShapeError: a tensor has no dimension ``dim``, ``chunk_sizes`` do not add up to it, or
            two tensors yield different numbers of pieces.
        DeviceError: ``devices`` are not a list of devices.
        UnsupportedError: a sparse or nested tensor, or a packed sequence.
    """
    places = as_devices(devices)
    count = _count(list(tensors_in(inputs)), len(places), dim, chunk_sizes)
    return _spread(inputs, places[: count or len(places)], dim, chunk_sizes)


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    devices: Sequence[Any],
    dim: int = 0,
    chunk_sizes: Sequence[int] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cut the arguments of a call, positional and by keyword, into those of a call a device.

    Args:
        inputs: the positional arguments.
        kwargs: the arguments by keyword.
        devices, dim, chunk_sizes: as in :func:`scatter`.

    Returns:
        Positional arguments and arguments by keyword, each a list with an item a piece. One
        piece if there is no tensor in either: nothing is there to be shared out.

    Raises:
        ShapeError, DeviceError, UnsupportedError: as in :func:`scatter`.
    """
    # As one structure: the pieces of both are counted together, and a flag given by keyword
    # makes no pieces of its own.
    both = (tuple(inputs), dict(kwargs or {}))
    if next(tensors_in(both), None) is None:
        devices = as_devices(devices)[:1]
    pieces = scatter(both, devices, dim, chunk_sizes)
    return [piece[0] for piece in pieces], [piece[1] for piece in pieces]


def gather(outputs: Sequence[Any], device: Any, dim: int = 0) -> Any:
    """Concatenate the tensors of equal structures on one device.

    The backward pass cuts the gradient, and gives each its piece on its device.

    Args:
        outputs: an item a replica: tensors that differ in dimension ``dim`` at most, or
            structures of them as :func:`scatter` takes. Scalars become a vector, with a
            warning once in a process.
        device: where the result goes.
        dim: the dimension along which is concatenated.

    Returns:
        A structure like the items. What is no tensor is taken over if all have it alike.

    Raises:
        ShapeError: tensors differ in another dimension than ``dim``, or have no such.
        DtypeError: tensors differ in their dtype.
        InvalidArgumentError: the structures differ, or what is no tensor does.
        UnsupportedError: a packed sequence.
    """
    if not len(outputs):
        raise InvalidArgumentError("gather: no outputs; allowed are those of one replica or more.")
    return _collect(list(outputs), as_device(device), dim)


def _items(tree: Any) -> list[Any] | None:
    """Return what a container holds; None if it is no container."""
    if isinstance(tree, PackedSequence):
        raise UnsupportedError(
            "PackedSequence: its sequences do not lie along a dimension. Pass the padded batch "
            "and the lengths, and pack them inside of the module."
        )
    if isinstance(tree, (tuple, list)):
        return list(tree)
    if isinstance(tree, MutableMapping):
        return list(tree.values())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None


def _like(tree: Any, items: list[Any]) -> Any:
    """Return a container like ``tree`` that holds other items."""
    if isinstance(tree, tuple):
        if hasattr(tree, "_make"):
            return tree._make(items)
        return type(tree)(items)
    if type(tree) is list:
        return items
    # Copied, as the constructors of subclasses take what they like.
    built = copy.copy(tree)
    if isinstance(tree, list):
        built[:] = items
    elif isinstance(tree, MutableMapping):
        for key, item in zip(list(tree), items):
            built[key] = item
    else:
        for field, item in zip(dataclasses.fields(tree), items):
            object.__setattr__(built, field.name, item)  # also of a frozen one
    return built


def _count(tensors: list[Tensor], devices: int, dim: int, chunk_sizes: Sequence[int] | None) -> int:
    """Return the number of pieces; 0 if there is no tensor."""
    found = [(len(_sizes(tensor, devices, dim, chunk_sizes)), tensor) for tensor in tensors]
    # Of nothing there are as many pieces as the other tensors need.
    counts = {count: tensor.shape for count, tensor in found if tensor.shape[dim]}
    if len(counts) > 1:
        (one, first), (other, second) = sorted(counts.items())[:2]
        raise ShapeError(
            f"scatter: tensors of shapes {tuple(first)} and {tuple(second)} are cut into {one} "
            f"and {other} pieces along dimension {dim} for {devices} devices; allowed are "
            "tensors of as many pieces. Give them the same length (x.expand(...) copies "
            "nothing), or make what all replicas share a buffer of the module."
        )
    return next(iter(counts), 1 if tensors else 0)


def _sizes(tensor: Tensor, devices: int, dim: int, chunk_sizes: Sequence[int] | None) -> list[int]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise UnsupportedError(
            f"scatter: a {'nested' if tensor.is_nested else tensor.layout} tensor; allowed are "
            "dense ones. Use x.to_dense() or x.to_padded_tensor(...)."
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(
            f"scatter: dim {dim} of a tensor of shape {tuple(tensor.shape)}; allowed are tensors "
            "that have it. Pass a scalar as a number (x.item()), or expanded to the batch."
        )
    length = tensor.shape[dim]
    if chunk_sizes is None:
        step = max(1, -(-length // devices))
        return [min(step, length - start) for start in range(0, max(1, length), step)]
    sizes = list(chunk_sizes)
    if len(sizes) != devices or min(sizes) < 1 or sum(sizes) != length:
        raise ShapeError(
            f"scatter: chunk_sizes {sizes} for {devices} devices and a tensor of shape "
            f"{tuple(tensor.shape)}; allowed are as many positive lengths as devices, that add "
            f"up to {length}, the length of dimension {dim}."
        )
    return sizes


def _spread(
    tree: Any, places: list[torch.device], dim: int, chunk_sizes: Sequence[int] | None
) -> list[Any]:
    if isinstance(tree, Tensor):
        return _cut(tree, places, dim, chunk_sizes)
    items = _items(tree)
    if items is None:
        return [tree] * len(places)
    columns = [_spread(item, places, dim, chunk_sizes) for item in items]
    return [_like(tree, [column[i] for column in columns]) for i in range(len(places))]


def _cut(
    tensor: Tensor, places: list[torch.device], dim: int, chunk_sizes: Sequence[int] | None
) -> list[Tensor]:
    if not tensor.shape[dim]:
        return [move(tensor.narrow(dim, 0, 0), device) for device in places]
    sizes = _sizes(tensor, len(places), dim, chunk_sizes)
    if len(sizes) == 1:
        return [move(tensor, places[0])]
    pieces = torch.split(tensor, sizes, dim)
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        # The same memory with a version of its own each: a replica that writes to its piece
        # does not make those stale that another has saved for the backward pass.
        pieces = tuple(piece.data for piece in pieces)
    return [move(piece, device) for piece, device in zip(pieces, places)]


def _collect(nodes: list[Any], device: torch.device, dim: int) -> Any:
    first = nodes[0]
    if any(type(node) is not type(first) for node in nodes) and not all(
        isinstance(node, Tensor) for node in nodes
    ):
        names = ", ".join(sorted({type(node).__name__ for node in nodes}))
        raise InvalidArgumentError(
            f"gather: {names} in one place of the replicas' outputs; allowed are outputs of one "
            "structure. Return the same types from every replica."
        )
    if isinstance(first, Tensor):
        return _concatenate(nodes, device, dim)
    rows = [_items(node) for node in nodes]
    if rows[0] is None:
        return _common(nodes)
    if isinstance(first, MutableMapping):
        if any(set(node) != set(first) for node in nodes):
            raise InvalidArgumentError(
                f"gather: dicts with the keys {sorted({str(k) for n in nodes for k in n})[:8]}, "
                "of which not every replica's output has each. Return the same keys from all."
            )
        rows = [[node[key] for key in first] for node in nodes]
    lengths = [len(row or ()) for row in rows]
    if len(set(lengths)) > 1:
        raise InvalidArgumentError(
            f"gather: {type(first).__name__}s of lengths {lengths}; allowed are outputs of one "
            "structure. Return as many items from every replica."
        )
    columns = zip(*[row or () for row in rows])
    return _like(first, [_collect(list(column), device, dim) for column in columns])


def _common(values: list[Any]) -> Any:
    """Return what all replicas have alike and is no tensor."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, _PLAIN) and all(v == first or v != v != first for v in values):
        return first
    raise InvalidArgumentError(
        f"gather: {type(first).__name__} that differ between replicas "
        f"({', '.join(repr(value)[:40] for value in values[:4])}); allowed are tensors, and "
        "tuples, lists, dicts and dataclasses of them. Return it as a tensor."
    )


def _concatenate(tensors: list[Tensor], device: torch.device, dim: int) -> Tensor:
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise DtypeError(
            f"gather: {' and '.join(dtypes)}; allowed is one dtype. Convert the replicas' outputs."
        )
    if all(tensor.dim() == 0 for tensor in tensors):
        _warn_of_scalars()
        return torch.cat([move(tensor.reshape(1), device) for tensor in tensors])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1 or not -min(ranks) <= dim < min(ranks):
        raise ShapeError(
            f"gather: dim {dim} of tensors of shapes {_named(shapes)}; allowed are tensors of "
            "as many dimensions each, that have it."
        )
    at = dim % min(ranks)
    if len({shape[:at] + shape[at + 1 :] for shape in shapes}) > 1:
        raise ShapeError(
            f"gather: tensors of shapes {_named(shapes)} along dim {dim}; allowed are shapes that "
            "differ in it alone. Pad the replicas' outputs to one length inside of the module."
        )
    moved = [move(tensor, device) for tensor in tensors]
    return moved[0] if len(moved) == 1 else torch.cat(moved, dim)


def _named(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(str(shape) for shape in dict.fromkeys(shapes))


@functools.cache
def _warn_of_scalars() -> None:
    warnings.warn(
        "gather: every replica returned a scalar; they become a vector with an element a "
        "replica. Take its mean() or sum(), or return losses by sample.",
        stacklevel=2,
    )
