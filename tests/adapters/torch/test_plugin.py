"""Collectives of torch.distributed over our transports, compared with expected values."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from collective.errors import DtypeError, InvalidArgumentError, UnsupportedError  # noqa: E402
from tests.support.selection import in_whole  # noqa: E402
from tests.support.torch_groups import in_groups  # noqa: E402

WORLDS = [("shm", 2), ("shm", 3), in_whole(("tcp", 3)), in_whole(("gloo", 3))]
REAL = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
MOVED = (*REAL, *WHOLE, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2fnuz)
# 40,000 elements use symmetric memory from the second call on.
COUNTS = (0, 1, 7, 40_000)


def numbers(rank: int, count: int, dtype: Any) -> Any:
    """Return small numbers whose sums and products are exact in every dtype."""
    return ((torch.arange(count) * 3 + rank) % 4 + (rank == 0)).to(dtype)


def same(result: Any, expected: Any) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    assert torch.equal(result.to(torch.complex128), expected.to(torch.complex128)), (
        result,
        expected,
    )


def folded(op: Any, size: int, count: int, dtype: Any) -> Any:
    stack = torch.stack([numbers(r, count, dtype) for r in range(size)]).to(
        torch.float64 if dtype.is_floating_point else torch.int64
    )
    kind = str(op).rpartition(".")[2]
    if kind in ("SUM", "AVG"):
        total = stack.sum(0) / (size if kind == "AVG" else 1)
    elif kind == "PRODUCT":
        total = stack.prod(0)
    elif kind in ("MIN", "MAX"):
        total = stack.amin(0) if kind == "MIN" else stack.amax(0)
    else:
        total = stack[0]
        for row in stack[1:]:
            total = {"BAND": total & row, "BOR": total | row, "BXOR": total ^ row}[kind]
    return total.to(dtype)


@in_groups(*WORLDS)
def test_all_reduce_applies_every_op_to_every_dtype(rank: int, size: int) -> None:
    op = dist.ReduceOp
    for count in COUNTS:
        for kind in (op.SUM, op.PRODUCT, op.MIN, op.MAX, op.BAND, op.BOR, op.BXOR):
            bitwise = kind in (op.BAND, op.BOR, op.BXOR)
            for dtype in WHOLE if bitwise else (*REAL, *WHOLE) if count < 10 else REAL:
                x = numbers(rank, count, dtype)
                dist.all_reduce(x, kind)
                same(x, folded(kind, size, count, dtype))
        for _ in range(3):
            x = numbers(rank, count, torch.float64)
            dist.all_reduce(x, op.AVG)
            torch.testing.assert_close(x, folded(op.AVG, size, count, torch.float64))
            x = numbers(rank, count, torch.float64)
            dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
            same(x, folded(op.SUM, size, count, torch.float64) * 0.5)


@in_groups(*WORLDS)
def test_all_reduce_of_bool_and_complex_is_right(rank: int, size: int) -> None:
    op = dist.ReduceOp
    truths = torch.tensor([True, rank == 0, False])
    for kind in (op.SUM, op.MAX, op.BOR):
        x = truths.clone()
        dist.all_reduce(x, kind)
        same(x, torch.tensor([True, True, False]))
    for kind in (op.PRODUCT, op.MIN, op.BAND):
        x = truths.clone()
        dist.all_reduce(x, kind)
        same(x, torch.tensor([True, False, False]))
    x = torch.tensor([1 + 2j * rank, 3.0])
    dist.all_reduce(x)
    same(x, torch.tensor([size + 1j * size * (size - 1), 3.0 * size]))
    x = torch.tensor([[True]])
    with pytest.raises(DtypeError):
        dist.all_reduce(x, op.AVG)


@in_groups(*WORLDS)
def test_reductions_average_integers_exactly(rank: int, size: int) -> None:
    op = dist.ReduceOp.AVG
    # The integers exceed the precision of floats, and the number of ranks does not
    # divide all sums.
    expected = torch.tensor([2**60 + 1, -((size - 1) // 2 + 1), 5 // size])
    own = torch.tensor([2**60 + 1, -rank - 1, 5 * (rank == 0)])
    x = own.clone()
    dist.all_reduce(x, op)
    same(x, expected)
    xs = [own.clone(), own[:2].clone()]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x, op)
    same(torch.cat(xs), torch.cat([expected, expected[:2]]))
    x = own.clone()
    dist.reduce(x, dst=1, op=op)
    same(x, expected if rank == 1 else own)
    x = torch.empty_like(own)
    dist.reduce_scatter_tensor(x, own.repeat(size), op=op)
    same(x, expected)
    dist.reduce_scatter(x.zero_(), [own] * size, op=op)
    same(x, expected)
    x = torch.sparse_coo_tensor([[1]], [2**60 + 1 - rank], (3,))
    dist.all_reduce(x, op)
    same(x.to_dense(), torch.tensor([0, 2**60 + 1 - size // 2, 0]))


@in_groups(*WORLDS)
def test_collectives_on_strided_tensors_are_right(rank: int, size: int) -> None:
    base = torch.zeros(6, 8)
    for _ in range(3):
        view = base.t()[1::2]
        view.copy_(torch.arange(24.0).reshape(4, 6) + rank)
        dist.all_reduce(view)
        same(view.contiguous(), torch.arange(24.0).reshape(4, 6) * size + sum(range(size)))
        assert base.t()[::2].abs().sum() == 0
    view = base[:, 1]
    dist.broadcast(view.copy_(torch.arange(6.0) * rank), src=1)
    same(view.clone(), torch.arange(6.0))
    dist.reduce(view, dst=1)
    same(view.clone(), torch.arange(6.0) * (size if rank == 1 else 1))
    whole = torch.zeros(2, 3 * size).t()
    dist.all_gather_into_tensor(whole, torch.full((2, 3), float(rank)).t())
    same(whole.contiguous(), torch.arange(size).repeat_interleave(3)[:, None].expand(-1, 2) * 1.0)


@in_groups(*WORLDS)
def test_data_movement_of_every_dtype_is_right(rank: int, size: int) -> None:
    for dtype in MOVED:
        for count in COUNTS:
            inputs = [numbers(r, count, dtype) for r in range(size)]
            x = inputs[rank].clone()
            dist.broadcast(x, src=size - 1)
            same(x, inputs[-1])
            outs = [torch.empty_like(inputs[0]) for _ in range(size)]
            dist.all_gather(outs, inputs[rank])
            for result, expected in zip(outs, inputs):
                same(result, expected)
            whole = torch.empty(size, count, dtype=dtype)
            dist.all_gather_into_tensor(whole, inputs[rank])
            same(whole, torch.stack(inputs))
            outs = [torch.empty_like(inputs[0]) for _ in range(size)] if rank == 1 else None
            dist.gather(inputs[rank], outs, dst=1)
            for result, expected in zip(outs or (), inputs):
                same(result, expected)
            x = torch.empty_like(inputs[0])
            dist.scatter(x, inputs if rank == 1 else None, src=1)
            same(x, inputs[rank])


@in_groups(*WORLDS)
def test_reduce_and_reduce_scatter_are_right(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in COUNTS:
            x = numbers(rank, count, dtype)
            dist.reduce(x, dst=1, op=dist.ReduceOp.MAX)
            if rank == 1:
                same(x, folded("MAX", size, count, dtype))
            pieces = [numbers(rank, count, dtype) * (r + 1) for r in range(size)]
            expected = folded("SUM", size, count, dtype) * (rank + 1)
            x = torch.empty(count, dtype=dtype)
            dist.reduce_scatter(x, pieces)
            same(x, expected)
            dist.reduce_scatter_tensor(x.zero_(), torch.cat(pieces))
            same(x, expected)
            if dtype.is_floating_point:
                dist.reduce_scatter_tensor(x, torch.cat(pieces), op=dist.ReduceOp.AVG)
                torch.testing.assert_close(x, (expected.double() / size).to(dtype))


@in_groups(*WORLDS)
def test_all_to_all_with_even_and_uneven_splits_is_right(rank: int, size: int) -> None:
    x = torch.arange(2.0 * size).reshape(2 * size, 1) + 100 * rank
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    rows = [[100.0 * r + 2 * rank + i] for r in range(size) for i in range(2)]
    same(out, torch.tensor(rows))
    # Rank r sends r + s + 1 rows to rank s.
    sends = [rank + s + 1 for s in range(size)]
    x = torch.cat([torch.full((n, 2), 10.0 * rank + s) for s, n in enumerate(sends)])
    out = torch.empty(sum(sends), 2)
    dist.all_to_all_single(out, x, sends, sends)
    same(out, torch.cat([torch.full((n, 2), 10.0 * s + rank) for s, n in enumerate(sends)]))
    lists = [torch.full((s + 1,), 10 * rank + s) for s in range(size)]
    outs = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(outs, lists)
    for s, result in enumerate(outs):
        same(result, torch.full((rank + 1,), 10 * s + rank))
    with pytest.raises(InvalidArgumentError, match="cannot be cut"):
        dist.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1))


@in_groups(*WORLDS)
def test_coalesced_collectives_are_right(rank: int, size: int) -> None:
    xs = [torch.full((3,), 1.0 * rank), torch.full((2, 2), rank + 1.0)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    total = sum(range(size))
    same(xs[0], torch.full((3,), 1.0 * total))
    same(xs[1], torch.full((2, 2), 1.0 * total + size))
    outs = [torch.empty(size * 2), torch.empty(size)]
    with dist._coalescing_manager(async_ops=True) as together:
        for out, count in zip(outs, (2, 1)):
            dist.all_gather_into_tensor(out, torch.full((count,), 1.0 * rank))
    together.wait()
    same(outs[0], torch.arange(1.0 * size).repeat_interleave(2))
    same(outs[1], torch.arange(1.0 * size))
    outs = [torch.empty(1), torch.empty(2)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for out in outs:
            dist.reduce_scatter_tensor(out, torch.ones(size * out.numel()))
    same(torch.cat(outs), torch.full((3,), 1.0 * size))
    lists = [[torch.empty(2), torch.empty(1)] for _ in range(size)]
    mine = [torch.full((2,), 1.0 * rank), torch.full((1,), -1.0 * rank)]
    dist.all_gather_coalesced(lists, mine)
    for r, (first, second) in enumerate(lists):
        same(torch.cat([first, second]), torch.tensor([r, r, -r]) * 1.0)


@in_groups(*WORLDS)
def test_all_reduce_of_sparse_tensors_is_right(rank: int, size: int) -> None:
    # All ranks have an element at index 0. Each rank has two elements at an index of its own.
    x = torch.sparse_coo_tensor([[0, rank + 1, rank + 1]], [1.0, 2.0, 3.0], (size + 1,))
    dist.all_reduce(x)
    same(x.to_dense(), torch.tensor([size * 1.0] + [5.0] * size))
    with pytest.raises(UnsupportedError, match="to_dense"):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.barrier()


@in_groups(*WORLDS)
def test_object_collectives_are_right(rank: int, size: int) -> None:
    outs: list[Any] = [None] * size
    dist.all_gather_object(outs, {"rank": rank, "more": "x" * rank * 1000})
    assert [out["rank"] for out in outs] == list(range(size))
    both = [rank, {"r": rank}] if rank == 1 else [None, None]
    dist.broadcast_object_list(both, src=1)
    assert both == [1, {"r": 1}]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"to {r}" for r in range(size)] if rank == 1 else None, src=1)
    assert got == [f"to {rank}"]
    outs = [None] * size
    dist.gather_object((rank, "x"), outs if rank == 1 else None, dst=1)
    assert rank != 1 or outs == [(r, "x") for r in range(size)]
    if rank == 0:
        dist.send_object_list(["a", {1, 2}], dst=1)
    elif rank == 1:
        both = [None, None]
        dist.recv_object_list(both, src=0)
        assert both == ["a", {1, 2}]
