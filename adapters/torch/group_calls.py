"""Synchronous versions of torch.distributed's calls, by calls of a communicator.

torch.distributed takes lists of tensors of any strides. A communicator joins and cuts arrays along
an axis. So tensors that are joined or cut are flattened before they are sent.

Senders and receivers both state lengths, and only a comparison of each pair shows that they fit: a
total may fit all the same. In calls with ``counts``, the ranks compare these. In the others, they
compare :attr:`Inner.expects`. A rank whose own tensors contradict each other breaks the
group, so that all ranks get the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from collective import (
    CollectiveTimeoutError,
    Communicator,
    DtypeError,
    InvalidArgumentError,
    ReduceOp,
    Status,
    UnsupportedError,
    premul_sum,
    user_op,
)
from collective.inner import BY_NAME, Failure, Op, call_in_place

from .synchronous import sum_sparse

Tensor = torch.Tensor
_KNOWN = {getattr(torch, name) for name in BY_NAME if hasattr(torch, name)}
# A view of these as bytes would have a byte for each element, which is longer than their memory.
_PACKED = {torch.quint4x2, torch.quint2x4}
_OPS: dict[str, Op] = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
# Integer types that NCCL averages, by a division that drops the remainder. This library's ``avg``
# does not take integers.
_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Operators for booleans: torch counts True as 1, and any result other than 0 as True.
_OF_TRUTHS: dict[Op, Op] = {"sum": "lor", "max": "lor", "prod": "land", "min": "land"}


def _sum_of_average(a: Any, b: Any) -> Any:
    return a + b


# A separate operator from ``sum``. So a comparison of the ranks' calls detects that some ranks
# average and others sum.
_SUMMED = user_op(_sum_of_average, commutative=True)
# Operators by torch's number and the dtype: a look-up takes 1 us, comparisons of torch's operators
# took 5. They are names wherever possible, because C makes only calls whose operators are names.
_NUMBERS: dict[Op, int] = {name: int(getattr(dist.ReduceOp, kind)) for kind, name in _OPS.items()}
_OPERATORS: dict[tuple[int, torch.dtype], Op | ReduceOp] = {
    (number, dtype): name for name, number in _NUMBERS.items() for dtype in _KNOWN
}
_OPERATORS |= {(_NUMBERS[name], torch.bool): truth for name, truth in _OF_TRUTHS.items()}
_OPERATORS |= {(_NUMBERS["avg"], dtype): _SUMMED for dtype in _WHOLE}


def _operator_of(op: Any, dtype: torch.dtype) -> Op | ReduceOp:
    """Return this library's operator for an operator of torch.

    For an average of integers it is a sum; the caller divides the sum by :func:`_divided`.

    Raises:
        DtypeError: this library has no such dtype: it can move its bytes, and cannot add them.
        UnsupportedError: ``PREMUL_SUM`` has a tensor of several factors.
    """
    kind = getattr(op, "op", op)
    operator = _OPERATORS.get((int(kind), dtype))
    if operator is not None:
        return operator
    if dtype not in _KNOWN:
        raise DtypeError(
            f"torch: tensors of {dtype} cannot be reduced, only moved (expected one of "
            f"{', '.join(sorted(str(known) for known in _KNOWN))}). Convert the tensor with "
            "x.to(...)."
        )
    assert kind == dist.ReduceOp.PREMUL_SUM
    factor = op.__getstate__()[1]  # older versions have no op.factor
    if isinstance(factor, Tensor):
        if factor.numel() != 1:
            raise UnsupportedError(
                f"PREMUL_SUM: got a tensor of {factor.numel()} factors (expected a single "
                "factor). Multiply the tensor before the call."
            )
        factor = factor.item()
    return premul_sum(factor)


def _divided(comm: Communicator, tensor: Tensor, operator: Op | ReduceOp) -> None:
    """Divide a sum of integers in place, rounded toward zero, if it is for their average."""
    if operator is _SUMMED:
        tensor.div_(comm.size, rounding_mode="trunc")


# -- flat tensors --------------------------------------------------------------------------


def _view(tensor: Tensor) -> Tensor | None:
    """Return the tensor's memory as a flat tensor of a type that can be sent.

    Returns:
        None if the elements are not in the memory, one after another.
    """
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in _KNOWN:
        return tensor if tensor.ndim == 1 else tensor.view(-1)
    if tensor.dtype in _PACKED:
        raise DtypeError(
            f"torch: tensors of {tensor.dtype} cannot be sent: a byte holds several elements. Send "
            "x.int_repr()."
        )
    # A view of a quantized tensor would count as quantized, which crashes torch.cat().
    plain: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    width = tensor.element_size()
    start, length = tensor.storage_offset() * width, tensor.numel() * width
    plain.set_(tensor.untyped_storage(), start, (length,), (1,))
    return cast("Tensor", plain)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements in order, as a type that can be sent; a view wherever possible."""
    flat = _view(tensor)
    if flat is None:
        flat = _view(tensor.detach().resolve_conj().resolve_neg().contiguous())
        assert flat is not None
    return flat


class _Target:
    """Destination of a result: a tensor's own memory, or a buffer that finish() copies to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._own = tensor, tensor
        view = _view(tensor)
        if view is None:
            self._own = torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)
            view = _flat(self._own)
        self.flat = view

    def finish(self) -> None:
        if self._own is not self._tensor:
            self._tensor.detach().copy_(self._own)


def _unpack(joined: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive pieces of ``joined`` to the tensors."""
    at = 0
    for tensor in tensors:
        target = _Target(tensor)
        count = target.flat.numel()
        target.flat.copy_(joined[at : at + count])
        target.finish()
        at += count


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat tensor of all elements."""
    return torch.cat([_flat(tensor) for tensor in tensors])


# -- lengths -------------------------------------------------------------------------------


def _lengths(
    comm: Communicator, what: str, tensors: Sequence[Tensor], like: Tensor | None = None
) -> list[int]:
    """Return the lengths of the tensors for the ranks, in elements of a flat tensor.

    Args:
        what: name of the call, for errors.
        like: another tensor of the call; by default the first one.

    Raises:
        DtypeError: the tensors have several dtypes.
        InvalidArgumentError: there is not one tensor for each rank.
    """
    if len(tensors) != comm.size:
        raise InvalidArgumentError(
            f"{what}: got a list of {len(tensors)} tensors (expected one for each of {comm.size} "
            f"ranks) [rank {comm.rank} of {comm.size}]."
        )
    like = tensors[0] if like is None else like
    for tensor in tensors:
        _check_alike(comm, what, tensor, like)
    width = 1 if like.dtype in _KNOWN else like.element_size()
    return [tensor.numel() * width for tensor in tensors]


def _uneven(counts: Sequence[int]) -> Sequence[int] | None:
    """Return the lengths of the pieces; None if they are equal, because C makes calls without."""
    return counts if len(set(counts)) > 1 else None


def _check_alike(comm: Communicator, what: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.dtype is not like.dtype:
        error = DtypeError(
            f"{what}: got tensors of {tensor.dtype} and of {like.dtype} (expected one dtype) "
            f"[rank {comm.rank} of {comm.size}]."
        )
        comm.inner.fail(error)
        raise error


def _refuse_lengths(
    comm: Communicator, what: str, sent: int | Fraction, expected: int | Fraction
) -> NoReturn:
    """Break the group, since this rank states two lengths for its own piece."""
    text = f"rank {comm.rank} sends {sent} to rank {comm.rank}, which expects {expected}"
    failure = Failure("mismatch", comm.rank, f"{text}. The tensors of a call must fit each other")
    comm.inner.fail(failure)
    raise failure.error(what, comm.rank)


def _compared(
    comm: Communicator, call: Callable[..., Any], expects: Sequence[int], length: int | None,
    seconds: float | None,
) -> Any:  # fmt: skip
    """Make a call in which the ranks compare the lengths that senders and receivers state.

    Args:
        call: function of a timeout in seconds.
        expects: length that this rank expects from each rank.
        length: length that this rank sends to each rank; None if its pieces differ.
    """
    # C does not compare expectations, so it may only make a call whose expectations follow from
    # what this rank sends. It makes no call with a timeout.
    if seconds is None and any(expected != length for expected in expects):
        seconds = comm.timeout
    comm.inner.expects = expects
    try:
        return call(timeout=seconds)
    finally:
        comm.inner.expects = None


def one_by_one(
    comm: Communicator, call: Callable[..., None], entries: Sequence[Any], seconds: float | None
) -> None:
    """Make a call of this module for each of several lists of arguments."""
    for entry in entries:
        call(comm, *entry, seconds)


# -- reductions ----------------------------------------------------------------------------


def all_reduce(comm: Communicator, tensor: Tensor, op: Any, seconds: float | None) -> None:
    """Reduce a dense tensor, or a sparse one in COO format, in place on every rank."""
    if tensor.layout is not torch.strided:
        _all_reduce_sparse(comm, tensor, op, seconds)
        return
    if tensor.requires_grad:
        tensor = tensor.detach()
    operator = _operator_of(op, tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        target = _Target(tensor)
        comm.all_reduce(_flat(tensor), op=operator, out=target.flat, timeout=seconds)
        target.finish()
    else:
        comm.all_reduce(tensor, op=operator, out=tensor, timeout=seconds)
        _divided(comm, tensor, operator)


def all_reduce_together(
    comm: Communicator, tensors: Sequence[Tensor], op: Any, seconds: float | None
) -> None:
    """Reduce several tensors in place, in few messages if they have one dtype and device."""
    alike = len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
    if not alike or any(
        t.layout is not torch.strided or t.is_conj() or t.is_neg() for t in tensors
    ):
        for tensor in tensors:
            all_reduce(comm, tensor, op, seconds)
    else:
        plain = [tensor.detach() for tensor in tensors]
        operator = _operator_of(op, plain[0].dtype)
        call_in_place(partial(comm.all_reduce, plain, op=operator, timeout=seconds), plain)
        for tensor in plain:
            _divided(comm, tensor, operator)


def _all_reduce_sparse(comm: Communicator, tensor: Tensor, op: Any, seconds: float | None) -> None:
    kind = getattr(op, "op", op)
    averages = kind == dist.ReduceOp.AVG
    if tensor.layout is not torch.sparse_coo or not (averages or kind == dist.ReduceOp.SUM):
        raise UnsupportedError(
            f"all_reduce: got op {_operator_of(op, tensor.dtype)} and a {tensor.layout} tensor "
            "(expected sum or average for a sparse tensor, in COO format) [rank "
            f"{comm.rank} of {comm.size}]. Use to_dense() first."
        )
    total = sum_sparse(tensor, comm, seconds)
    if averages:
        rounding = "trunc" if tensor.dtype in _WHOLE else None
        total = torch.div(total, comm.size, rounding_mode=rounding)
    # For a sparse tensor, detach() would make a copy.
    with torch.no_grad():
        tensor.copy_(total)


def reduce(comm: Communicator, tensor: Tensor, root: int, op: Any, seconds: float | None) -> None:
    """Reduce a tensor in place at ``root``; other ranks' tensors are not changed."""
    target = _Target(tensor) if comm.rank == root else None
    out = None if target is None else target.flat
    operator = _operator_of(op, tensor.dtype)
    comm.reduce(_flat(tensor), root=root, op=operator, out=out, timeout=seconds)
    if target is not None:
        _divided(comm, target.flat, operator)
        target.finish()


def reduce_scatter(
    comm: Communicator, output: Tensor, inputs: Sequence[Tensor], op: Any, seconds: float | None
) -> None:
    """Reduce the ranks' lists of tensors and give each rank its entry of the result."""
    operator = _operator_of(op, output.dtype)
    counts = _lengths(comm, "reduce_scatter", inputs, output)
    if counts[comm.rank] != output.numel():
        _refuse_lengths(comm, "reduce_scatter", counts[comm.rank], output.numel())
    target = _Target(output)
    comm.reduce_scatter(
        _joined(inputs), op=operator, counts=_uneven(counts), out=target.flat, timeout=seconds
    )
    _divided(comm, target.flat, operator)
    target.finish()


def reduce_scatter_single(
    comm: Communicator, output: Tensor, tensor: Tensor, op: Any, seconds: float | None
) -> None:
    """Reduce tensors that consist of a part for each rank, and give each rank its part."""
    operator = _operator_of(op, output.dtype)
    _check_alike(comm, "reduce_scatter", output, tensor)
    if tensor.numel() != output.numel() * comm.size:
        _refuse_lengths(comm, "reduce_scatter", Fraction(tensor.numel(), comm.size), output.numel())
    target = _Target(output)
    comm.reduce_scatter(_flat(tensor), op=operator, out=target.flat, timeout=seconds)
    _divided(comm, target.flat, operator)
    target.finish()


# -- moves ---------------------------------------------------------------------------------


def broadcast(comm: Communicator, tensor: Tensor, root: int, seconds: float | None) -> None:
    """Give every rank the tensor of ``root``."""
    if comm.rank == root:
        comm.broadcast(_flat(tensor), root=root, timeout=seconds)
        return
    target = _Target(tensor)
    comm.broadcast(target.flat, root=root, out=target.flat, timeout=seconds)
    target.finish()


def all_gather(
    comm: Communicator, outputs: Sequence[Tensor], tensor: Tensor, seconds: float | None
) -> None:
    """Give every rank the ranks' tensors, as a list."""
    flat, counts = _flat(tensor), _lengths(comm, "all_gather", outputs, tensor)
    if counts[comm.rank] != flat.numel():
        _refuse_lengths(comm, "all_gather", flat.numel(), counts[comm.rank])
    _unpack(comm.all_gather(flat, counts=counts, timeout=seconds), outputs)


def all_gather_single(
    comm: Communicator, output: Tensor, tensor: Tensor, seconds: float | None
) -> None:
    """Give every rank the ranks' tensors, one after another in a single tensor."""
    _check_alike(comm, "all_gather", output, tensor)
    if output.numel() != tensor.numel() * comm.size:
        _refuse_lengths(comm, "all_gather", tensor.numel(), Fraction(output.numel(), comm.size))
    target, flat = _Target(output), _flat(tensor)
    comm.all_gather(flat, counts=[flat.numel()] * comm.size, out=target.flat, timeout=seconds)
    target.finish()


def gather(
    comm: Communicator,
    outputs: Sequence[Tensor],
    tensor: Tensor,
    root: int,
    seconds: float | None,
) -> None:
    """Give ``root`` the ranks' tensors, as a list."""
    expects = _lengths(comm, "gather", outputs, tensor) if comm.rank == root else []
    flat = _flat(tensor)
    if comm.rank == root and expects[root] != flat.numel():
        _refuse_lengths(comm, "gather", flat.numel(), expects[root])
    joined = _compared(comm, partial(comm.gather, flat, root=root), expects, flat.numel(), seconds)
    if joined is not None:
        _unpack(joined, outputs)


def scatter(
    comm: Communicator,
    output: Tensor,
    inputs: Sequence[Tensor],
    root: int,
    seconds: float | None,
) -> None:
    """Give each rank its entry of the list of ``root``."""
    target = _Target(output)
    joined: Tensor | None = None
    counts: Sequence[int] = ()
    if comm.rank == root:
        counts = _lengths(comm, "scatter", inputs, output)
        if counts[root] != target.flat.numel():
            _refuse_lengths(comm, "scatter", counts[root], target.flat.numel())
        joined = _joined(inputs)
    call = partial(comm.scatter, joined, root=root, counts=_uneven(counts), out=target.flat)
    _compared(comm, call, [], None, seconds)
    target.finish()


def all_to_all(
    comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], seconds: float | None
) -> None:
    """Give each rank its entry of every rank's list."""
    counts = _lengths(comm, "all_to_all", inputs)
    expects = _lengths(comm, "all_to_all", outputs, inputs[0])
    _unpack(_exchange(comm, _joined(inputs), counts, expects, None, seconds), outputs)


def all_to_all_single(
    comm: Communicator,
    output: Tensor,
    tensor: Tensor,
    receives: Sequence[int],
    sends: Sequence[int],
    seconds: float | None,
) -> None:
    """Cut every rank's tensor along its first dimension and give each rank its pieces.

    Args:
        receives, sends: lengths of the pieces along that dimension; if empty, the pieces have
            equal lengths.

    Raises:
        InvalidArgumentError: the lengths do not add up to the dimension, or the dimension cannot be
            cut into equal pieces.
    """
    _check_alike(comm, "all_to_all", output, tensor)
    expects = _widths(comm, "output", output, receives)
    counts = _widths(comm, "input", tensor, sends)
    target = _Target(output)
    _exchange(comm, _flat(tensor), counts, expects, target.flat, seconds)
    target.finish()


def _exchange(
    comm: Communicator, flat: Tensor, counts: Sequence[int], expects: Sequence[int],
    out: Tensor | None, seconds: float | None,
) -> Any:  # fmt: skip
    if counts[comm.rank] != expects[comm.rank]:
        _refuse_lengths(comm, "all_to_all", counts[comm.rank], expects[comm.rank])
    uneven = _uneven(counts)
    call = partial(comm.all_to_all, flat, counts=uneven, out=out)
    return _compared(comm, call, expects, counts[0] if uneven is None else None, seconds)


def _widths(comm: Communicator, name: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
    """Return the number of elements in each rank's piece."""
    length = tensor.shape[0] if tensor.ndim else 1
    if not splits:
        if length % comm.size:
            raise InvalidArgumentError(
                f"all_to_all_single: {name} has shape {tuple(tensor.shape)}, whose first dimension "
                f"cannot be cut into {comm.size} equal parts [rank {comm.rank} of {comm.size}]. "
                f"Pass {name}_split_sizes."
            )
        splits = [length // comm.size] * comm.size
    if len(splits) != comm.size or sum(splits) != length:
        raise InvalidArgumentError(
            f"all_to_all_single: {name}_split_sizes is {list(splits)} (expected {comm.size} "
            f"numbers that add up to {length}, the first dimension of {name}) "
            f"[rank {comm.rank} of {comm.size}]."
        )
    width = math.prod(tensor.shape[1:]) * (1 if tensor.dtype in _KNOWN else tensor.element_size())
    return [rows * width for rows in splits]


def monitored_barrier(comm: Communicator, everyone: bool, seconds: float | None) -> None:
    """Wait for all ranks; the error has Gloo's text for this rank.

    Args:
        everyone: if true, the text begins with all missing ranks; if false, with the first.

    Raises:
        CollectiveTimeoutError: ranks are missing; its ``ranks`` are all of them.
    """
    try:
        comm.barrier(timeout=seconds)
    except CollectiveTimeoutError as error:
        if not error.ranks:
            raise
        who = f"Ranks {', '.join(map(str, error.ranks))}" if everyone else f"Rank {error.ranks[0]}"
        state = "timed out in monitoredBarrier"
        if comm.rank != 0:
            state = "successfully reached monitoredBarrier, but received errors while waiting for "
            state += "send/recv from rank 0"
        raise CollectiveTimeoutError(
            f"Rank {comm.rank} {state}: {who} failed to pass monitoredBarrier: {error}",
            error.ranks,
        ) from error


# -- messages ------------------------------------------------------------------------------


def send(comm: Communicator, tensor: Tensor, dst: int, tag: int) -> None:
    """Send a tensor to rank ``dst``."""
    comm.send(_flat(tensor), dst, tag=tag)


def recv(
    comm: Communicator, tensor: Tensor, src: int, tag: int, status: Status | None = None
) -> None:
    """Receive a tensor of the size of ``tensor`` from rank ``src``, or from any rank."""
    target = _Target(tensor)
    comm.recv(target.flat, src, tag=tag, status=status)
    target.finish()


def recv_own(comm: Communicator, sent: Tensor, tensor: Tensor) -> None:
    """Copy a message of this rank to itself into a tensor.

    The tensor must have the size and type of the message.
    """
    target = _Target(tensor)
    comm.sendrecv(_flat(sent), comm.rank, comm.rank, out=target.flat)
    target.finish()
