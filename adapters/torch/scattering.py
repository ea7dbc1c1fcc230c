"""Division of batches into pieces for several devices of one process, and their concatenation.

Both consist of operations that torch differentiates, to any order. The backward pass of
:func:`scatter` concatenates the pieces' gradients on the input's device. The backward pass of
:func:`gather` cuts the gradient and returns each piece to its device.
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

from collective import DeviceError, DtypeError, InvalidArgumentError, ShapeError, UnsupportedError

# Types of outputs that gather() compares by value: equal values of all replicas become one value.
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def as_device(device: Any) -> torch.device:
    """Return a device in the form of the ``device`` attribute of tensors on it.

    Args:
        device: ``torch.device``, its name, or the number of a GPU.

    Raises:
        DeviceError: torch knows no such device.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            f"device: {device!r} is no device (expected a torch.device, its name, such as "
            "'cuda:1', or the number of a GPU)."
        ) from error
    if place.type == "cpu":
        return torch.device("cpu")  # the device of a tensor on "cpu:0" is "cpu"
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def as_devices(devices: Sequence[Any]) -> list[torch.device]:
    """Return a list of at least one device, each as by :func:`as_device`; devices may repeat."""
    if isinstance(devices, (str, torch.device, int)) or not len(devices):
        raise DeviceError(
            f"devices: {devices!r} (expected a list of at least one device, such as ['cuda:0', "
            "'cuda:1'])."
        )
    return [as_device(device) for device in devices]


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device: the tensor itself if it is on that device, else a copy.

    The copy is ordered on the current streams, like any operation. Only a copy to a GPU may return
    before it has completed: the CPU could otherwise read a copy that has not arrived.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested structure, in order."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for item in _items(tree) or ():
        yield from tensors_in(item)


def scatter(
    inputs: Any, devices: Sequence[Any], dim: int = 0, chunk_sizes: Sequence[int] | None = None
) -> list[Any]:
    """Cut the tensors of a structure into one piece for each device.

    The backward pass concatenates the gradients of the pieces.

    Args:
        inputs: tensor of any dtype; or tuples, lists, dicts, named tuples and dataclasses of
            tensors, in any nesting. The pieces share values that are no tensors.
        devices: devices of the pieces; a device may appear more than once. A piece that is on its
            device already is a view.
        dim: dimension that is cut; negative numbers count from the last dimension.
        chunk_sizes: lengths of the pieces, one for each device. By default the tensors are cut as
            by ``torch.chunk``: into equal pieces, except for the last one, which may be shorter.
            Fewer pieces are made if these already cover the tensor.

    Returns:
        The pieces, which are structures like ``inputs``. There are fewer pieces than devices if
        there are fewer samples. If ``inputs`` has no tensor, there is one piece for each device.
        Empty tensors give empty pieces.

    Raises:
        ShapeError: a tensor has no dimension ``dim``, ``chunk_sizes`` do not add up to its length,
            or two tensors have different numbers of pieces.
        DeviceError: ``devices`` is no list of devices.
        UnsupportedError: a tensor is sparse or nested, or ``inputs`` has a packed sequence.
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
    """Cut the arguments of a call into the arguments of one call for each device.

    Args:
        inputs: positional arguments.
        kwargs: keyword arguments.
        devices, dim, chunk_sizes: as in :func:`scatter`.

    Returns:
        A list of positional arguments and a list of keyword arguments, each with one item for each
        piece. If the arguments contain no tensor, there is a single piece.

    Raises:
        ShapeError, DeviceError, UnsupportedError: as in :func:`scatter`.
    """
    # Both are cut as one structure. So their pieces are counted together, and keyword arguments
    # without tensors do not determine a number of pieces.
    both = (tuple(inputs), dict(kwargs or {}))
    if next(tensors_in(both), None) is None:
        devices = as_devices(devices)[:1]
    pieces = scatter(both, devices, dim, chunk_sizes)
    return [piece[0] for piece in pieces], [piece[1] for piece in pieces]


def gather(outputs: Sequence[Any], device: Any, dim: int = 0) -> Any:
    """Concatenate the tensors of equal structures on one device.

    The backward pass cuts the gradient, and gives each tensor its piece on the tensor's device.

    Args:
        outputs: one item for each replica: tensors that differ only in dimension ``dim``, or
            structures of such tensors, as in :func:`scatter`. Scalars become a vector, with one
            warning per process.
        device: device of the result.
        dim: dimension along which the tensors are concatenated.

    Returns:
        A structure like the items. Values that are no tensors have to be equal in all items, and
        are returned once.

    Raises:
        ShapeError: tensors differ in another dimension than ``dim``, or have no dimension ``dim``.
        DtypeError: tensors differ in their dtype.
        InvalidArgumentError: the structures differ, or values that are no tensors differ.
        UnsupportedError: the items contain a packed sequence.
    """
    if not len(outputs):
        raise InvalidArgumentError(
            "gather: got no outputs (expected outputs of at least one replica)."
        )
    return _collect(list(outputs), as_device(device), dim)


def _items(tree: Any) -> list[Any] | None:
    """Return the items of a container; None if ``tree`` is no container."""
    if isinstance(tree, PackedSequence):
        raise UnsupportedError(
            "PackedSequence: its sequences are not along a dimension, so it cannot be cut. Pass "
            "the padded batch and the lengths, and pack them inside of the module."
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
    # Copy the container instead of calling its class: subclasses' constructors may take any
    # arguments.
    built = copy.copy(tree)
    if isinstance(tree, list):
        built[:] = items
    elif isinstance(tree, MutableMapping):
        for key, item in zip(list(tree), items):
            built[key] = item
    else:
        for field, item in zip(dataclasses.fields(tree), items):
            object.__setattr__(built, field.name, item)  # also works for a frozen dataclass
    return built


def _count(tensors: list[Tensor], devices: int, dim: int, chunk_sizes: Sequence[int] | None) -> int:
    """Return the number of pieces; 0 if there is no tensor."""
    numbers = [(len(_sizes(tensor, devices, dim, chunk_sizes)), tensor) for tensor in tensors]
    # An empty tensor can be cut into any number of pieces, so it does not count.
    counts = {count: tensor.shape for count, tensor in numbers if tensor.shape[dim]}
    if len(counts) > 1:
        (one, first), (other, second) = sorted(counts.items())[:2]
        raise ShapeError(
            f"scatter: tensors of shapes {tuple(first)} and {tuple(second)} are cut into {one} "
            f"and {other} pieces along dimension {dim} for {devices} devices (expected the same "
            "number of pieces). Give the tensors the same length (x.expand(...) copies nothing). "
            "If all replicas need a whole tensor, make it a buffer of the module."
        )
    return next(iter(counts), 1 if tensors else 0)


def _sizes(tensor: Tensor, devices: int, dim: int, chunk_sizes: Sequence[int] | None) -> list[int]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise UnsupportedError(
            f"scatter: got a {'nested' if tensor.is_nested else tensor.layout} tensor (expected a "
            "dense tensor). Use x.to_dense() or x.to_padded_tensor(...)."
        )
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(
            f"scatter: a tensor of shape {tuple(tensor.shape)} has no dim {dim}. Pass a scalar as "
            "a number (x.item()), or expand it to the length of the batch."
        )
    length = tensor.shape[dim]
    if chunk_sizes is None:
        step = max(1, -(-length // devices))
        return [min(step, length - start) for start in range(0, max(1, length), step)]
    sizes = list(chunk_sizes)
    if len(sizes) != devices or min(sizes) < 1 or sum(sizes) != length:
        raise ShapeError(
            f"scatter: chunk_sizes is {sizes}, for {devices} devices and a tensor of shape "
            f"{tuple(tensor.shape)} (expected as many positive lengths as devices, which add up to "
            f"{length}, the length of dimension {dim})."
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
        # Each piece gets its own version counter, over the same memory. So a replica that writes
        # to its piece does not invalidate pieces that other replicas have saved for the backward
        # pass.
        pieces = tuple(piece.data for piece in pieces)
    return [move(piece, device) for piece, device in zip(pieces, places)]


def _collect(nodes: list[Any], device: torch.device, dim: int) -> Any:
    first = nodes[0]
    if any(type(node) is not type(first) for node in nodes) and not all(
        isinstance(node, Tensor) for node in nodes
    ):
        names = ", ".join(sorted({type(node).__name__ for node in nodes}))
        raise InvalidArgumentError(
            f"gather: the replicas' outputs have different types in the same place: {names}. "
            "Return the same types from every replica."
        )
    if isinstance(first, Tensor):
        return _concatenate(nodes, device, dim)
    rows = [_items(node) for node in nodes]
    if rows[0] is None:
        return _common(nodes)
    if isinstance(first, MutableMapping):
        if any(set(node) != set(first) for node in nodes):
            raise InvalidArgumentError(
                "gather: the replicas' dicts have different keys, out of "
                f"{sorted({str(k) for n in nodes for k in n})[:8]}. Return the same keys from "
                "every replica."
            )
        rows = [[node[key] for key in first] for node in nodes]
    lengths = [len(row or ()) for row in rows]
    if len(set(lengths)) > 1:
        raise InvalidArgumentError(
            f"gather: the replicas returned a {type(first).__name__} of lengths {lengths} "
            "(expected equal lengths). Return the same number of items from every replica."
        )
    columns = zip(*[row or () for row in rows])
    return _like(first, [_collect(list(column), device, dim) for column in columns])


def _common(values: list[Any]) -> Any:
    """Return a value that is no tensor, and that all replicas have in common."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, _PLAIN) and all(v == first or v != v != first for v in values):
        return first
    raise InvalidArgumentError(
        f"gather: values of type {type(first).__name__} differ between replicas "
        f"({', '.join(repr(value)[:40] for value in values[:4])}), but only tensors can be "
        "concatenated, also in tuples, lists, dicts and dataclasses. Return the value as a tensor."
    )


def _concatenate(tensors: list[Tensor], device: torch.device, dim: int) -> Tensor:
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise DtypeError(
            f"gather: tensors of {' and '.join(dtypes)} (expected a single dtype). Convert the "
            "replicas' outputs."
        )
    if all(tensor.dim() == 0 for tensor in tensors):
        _warn_of_scalars()
        return torch.cat([move(tensor.reshape(1), device) for tensor in tensors])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1 or not -min(ranks) <= dim < min(ranks):
        raise ShapeError(
            f"gather: got dim {dim} and tensors of shapes {_named(shapes)} (expected the same "
            "number of dimensions in each tensor, including this one)."
        )
    at = dim % min(ranks)
    if len({shape[:at] + shape[at + 1 :] for shape in shapes}) > 1:
        raise ShapeError(
            f"gather: got dim {dim} and tensors of shapes {_named(shapes)} (expected shapes that "
            "differ only in this dim). Pad the replicas' outputs to one length inside of the "
            "module."
        )
    moved = [move(tensor, device) for tensor in tensors]
    return moved[0] if len(moved) == 1 else torch.cat(moved, dim)


def _named(shapes: list[tuple[int, ...]]) -> str:
    return " and ".join(str(shape) for shape in dict.fromkeys(shapes))


@functools.cache
def _warn_of_scalars() -> None:
    warnings.warn(
        "gather: every replica returned a scalar, so the result is a vector with one element for "
        "each replica. Use its mean() or sum(), or return the loss of each sample.",
        stacklevel=2,
    )
