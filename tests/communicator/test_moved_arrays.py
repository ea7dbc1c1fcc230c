"""Repeated calls on arrays whose elements move to other memory between the calls."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from collective import Communicator, native
from collective.errors import ShapeError
from tests.support.on_ranks import on_ranks, ranks_of

pair, each = ranks_of(("threads", 2)), ranks_of(("threads", 2), ("shm", 2))

CALLS: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "max"},
    "reduce": {"root": 1},
    "reduce_scatter": {},
    "scan": {},
    "broadcast": {"root": 1},
    "gather": {"root": 0},
    "all_gather": {},
    "scatter": {"root": 1},
    "all_to_all": {},
}
TURNS = 3


def numbers(rank: int, turn: int) -> np.ndarray[Any, Any]:
    return np.arange(8.0) * (rank + 1) + 100 * turn


def with_core(comm: Communicator, on: bool) -> Communicator:
    """Return a duplicate of ``comm`` that uses the native core, or Python if ``on`` is false."""
    comm.barrier()  # ranks that are threads share the switch
    native.switch(on)
    duplicate = comm.dup()
    native.switch(True)
    comm.barrier()
    return duplicate


def move(x: np.ndarray[Any, Any]) -> None:
    """Make NumPy move an array's elements to other memory, and fill the old memory with -1."""
    before, shape = x.ctypes.data, x.shape
    for attempt in range(400):
        # These lengths live on the heap. An array that has grown and shrunk leaves a gap behind
        # it. The arrays that fill the gap keep it from growing in place the next time.
        length = 64 << attempt % 8
        x.resize(length, refcheck=False)
        KEPT.extend(np.full(shape, -1.0) for _ in range(20))
        x.resize(shape, refcheck=False)
        KEPT.append(np.full(length - 2 * shape[0], -1.0))
        if x.ctypes.data != before:
            return
    raise AssertionError("realloc() did not move the array")


KEPT: list[Any] = []
cores = pytest.mark.parametrize("core", [True, False], ids=["core", "python"])
ways = pytest.mark.parametrize("async_op", [False, True], ids=["now", "async"])


def call(comm: Communicator, operation: str, *args: Any, async_op: bool, **options: Any) -> Any:
    result = getattr(comm, operation)(*args, async_op=async_op, **options)
    return result.wait() if async_op else result


def move_and_call(comm: Communicator, async_op: bool) -> None:
    """Make each call repeatedly, on an array that moves before every repetition."""
    for operation, options in CALLS.items():
        x = numbers(comm.rank, 0)
        for turn in range(TURNS):
            x[:] = numbers(comm.rank, turn)
            again = call(comm, operation, x, async_op=async_op, **options)
            fresh = getattr(comm, operation)(numbers(comm.rank, turn), **options)
            np.testing.assert_array_equal(again, fresh)
            del again  # the root's result of a broadcast is the array itself
            move(x)
    comm.barrier()  # ranks that are threads share KEPT
    assert all(np.all(filler == -1) for filler in KEPT)


@cores
@ways
@on_ranks("each")
def test_repeated_call_follows_array_moved_by_numpy(
    comm: Communicator, async_op: bool, core: bool
) -> None:
    move_and_call(with_core(comm, core), async_op)


@cores
@ways
@on_ranks("each")
def test_repeated_call_follows_its_output(comm: Communicator, async_op: bool, core: bool) -> None:
    comm = with_core(comm, core)
    x, out = np.full(8, comm.rank + 1.0), np.empty(8)
    for _ in range(TURNS):
        assert call(comm, "all_reduce", x, out=out, async_op=async_op) is out
        assert out.tolist() == [3.0] * 8
        move(out)
    comm.barrier()
    assert all(np.all(filler == -1) for filler in KEPT)


@cores
@ways
@pytest.mark.parametrize("how", ["set_", "data", "resize_"])
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about tensors")
@on_ranks("each")
def test_repeated_call_follows_tensor_with_new_storage(
    comm: Communicator, how: str, async_op: bool, core: bool
) -> None:
    import torch

    comm = with_core(comm, core)
    x, out = torch.full((8,), comm.rank + 1.0), torch.empty(8)
    old = x.view(-1)
    assert call(comm, "all_reduce", x, out=out, async_op=async_op).tolist() == [3.0] * 8
    for array, value in ((x, 10.0 * (comm.rank + 1)), (out, -1.0)):
        new = torch.full((8,), value)
        if how == "set_":
            array.set_(new)
        elif how == "data":
            array.data = new
        else:  # NumPy has a view of the storage, so only a fresh storage can be resized
            array.set_(torch.empty(0))
            array.resize_(8).copy_(new)
    result = call(comm, "all_reduce", x, out=out, async_op=async_op)
    assert result.tolist() == [30.0] * 8
    assert old.tolist() == [comm.rank + 1.0] * 8
    with pytest.raises(ShapeError):
        call(comm, "all_reduce", torch.ones(6), out=out, async_op=async_op)


class OnlyDLPack:
    """Array that has the methods of DLPack and no other attribute of arrays."""

    def __init__(self, length: int) -> None:
        self.array = np.ones(length)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@on_ranks("pair")
def test_repeated_call_follows_array_with_dlpack_only(comm: Communicator) -> None:
    x, out = OnlyDLPack(3), np.empty(3)
    assert comm.all_reduce(x, out=out).tolist() == [2.0] * 3
    x.array = np.full(3, 5.0)
    assert comm.all_reduce(x, out=out).tolist() == [10.0] * 3


@pytest.mark.parametrize("counts", [3, [[1], [2]], ["a", "b"]])
@on_ranks("pair")
def test_all_gather_with_invalid_counts_raises_shape_error(comm: Communicator, counts: Any) -> None:
    with pytest.raises(ShapeError, match="one non-negative integer for each of 2 ranks"):
        comm.all_gather(np.ones(2), counts=counts)
