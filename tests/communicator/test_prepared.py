"""Prepared calls: ``comm.plan(operation, …)``."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest

import collective
from collective import Communicator, native
from collective.errors import (
    CommunicatorClosedError,
    DtypeError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
)
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


@pytest.mark.parametrize("operation", CALLS)
@on_ranks("each")
def test_prepared_call_matches_plain_call_on_current_values(
    comm: Communicator, operation: str
) -> None:
    x = numbers(comm.rank, 0)
    step = comm.plan(operation, x, **CALLS[operation])
    for turn in range(TURNS):
        x[:] = numbers(comm.rank, turn)
        planned = step()
        plain = getattr(comm, operation)(numbers(comm.rank, turn), **CALLS[operation])
        np.testing.assert_array_equal(planned, plain)


@on_ranks("pair")
def test_prepared_call_meets_plain_call_of_peer(comm: Communicator) -> None:
    x = np.ones(3)
    step = comm.plan("all_reduce", x, out=x)
    for _ in range(TURNS):
        if comm.rank:
            comm.all_reduce(x, out=x)
        else:
            assert step() is x
    comm.plan("barrier")()
    assert x.tolist() == [2.0**TURNS] * 3


@on_ranks("pair")
def test_prepared_calls_in_background_keep_order(comm: Communicator) -> None:
    x, y = np.full(2, comm.rank + 1.0), np.empty(2)
    step = comm.plan("all_reduce", x, out=y)
    first = step(async_op=True)
    second = step(async_op=True)
    assert first.wait() is y
    assert second.wait() is y
    assert y.tolist() == [3.0, 3.0]


@on_ranks("pair")
def test_prepared_call_reports_mismatch_when_called(comm: Communicator) -> None:
    step = comm.plan("all_reduce", np.ones(2 + comm.rank))
    with pytest.raises(MismatchError, match=r"float64\[2\]"):
        step()


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


def run_step(step: Any, async_op: bool) -> Any:
    return step(async_op=True).wait() if async_op else step()


def move_and_call(comm: Communicator, async_op: bool) -> None:
    """Make each call repeatedly, on an array that moves before every repetition."""
    for operation, options in CALLS.items():
        x = numbers(comm.rank, 0)
        step = comm.plan(operation, x, **options)
        for turn in range(TURNS):
            move(x)
            x[:] = numbers(comm.rank, turn)
            planned = run_step(step, async_op)
            plain = getattr(comm, operation)(numbers(comm.rank, turn), **options)
            np.testing.assert_array_equal(planned, plain)
    comm.barrier()  # ranks that are threads share KEPT
    assert all(np.all(filler == -1) for filler in KEPT)


@cores
@ways
@on_ranks("each")
def test_prepared_call_follows_array_moved_by_numpy(
    comm: Communicator, async_op: bool, core: bool
) -> None:
    move_and_call(with_core(comm, core), async_op)


@cores
@ways
@on_ranks("each")
def test_prepared_call_follows_its_output(comm: Communicator, async_op: bool, core: bool) -> None:
    comm = with_core(comm, core)
    x, out = np.full(8, comm.rank + 1.0), np.empty(8)
    for step in (comm.plan("all_reduce", x, out=out), comm.plan("all_reduce", x)):
        first = run_step(step, async_op)
        for _ in range(TURNS):
            move(first)
            assert run_step(step, async_op) is first
            assert first.tolist() == [3.0] * 8
    comm.barrier()
    assert all(np.all(filler == -1) for filler in KEPT)


@cores
@on_ranks("each")
def test_prepared_call_returns_same_array_after_input_moves(comm: Communicator, core: bool) -> None:
    comm = with_core(comm, core)
    x = np.full(8, comm.rank + 1.0)
    step = comm.plan("all_reduce", x)
    first = step()
    first[:] = 0
    move(x)
    x[:] = 2.0
    assert step() is first
    assert first.tolist() == [4.0] * 8


@cores
@ways
@on_ranks("each")
def test_prepared_call_with_changed_shape_or_dtype_raises(
    comm: Communicator, async_op: bool, core: bool
) -> None:
    comm = with_core(comm, core)
    x, out = np.ones(8), np.empty(8)
    for step in (comm.plan("all_reduce", x, out=out), comm.plan("all_gather", x)):
        x.resize(6, refcheck=False)
        with pytest.raises(ShapeError, match=r"x has shape \(6,\) now .*\(8,\)"):
            run_step(step, async_op)
        x.resize(8, refcheck=False)
        x[:] = 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            x.dtype = np.dtype("int64")  # type: ignore[misc]
            with pytest.raises(DtypeError, match=r"x has dtype int64 now .*float64"):
                run_step(step, async_op)
            x.dtype = np.dtype("float64")  # type: ignore[misc]
        assert np.sum(run_step(step, async_op)) == 16
    step = comm.plan("all_reduce", x, out=out)
    out.resize(6, refcheck=False)
    with pytest.raises(ShapeError, match=r"out has shape \(6,\)"):
        run_step(step, async_op)
    assert comm.all_reduce(1) == 2


@cores
@ways
@pytest.mark.parametrize("how", ["set_", "data", "resize_"])
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about tensors")
@on_ranks("each")
def test_prepared_call_follows_tensor_with_new_storage(
    comm: Communicator, how: str, async_op: bool, core: bool
) -> None:
    import torch

    comm = with_core(comm, core)
    x, out = torch.full((8,), comm.rank + 1.0), torch.empty(8)
    for step in (comm.plan("all_reduce", x, out=out), comm.plan("all_reduce", x)):
        old = x.view(-1)
        assert run_step(step, async_op).tolist() == [3.0] * 8
        for array, value in ((x, 10.0 * (comm.rank + 1)), (out, -1.0)):
            new = torch.full((8,), value)
            if how == "set_":
                array.set_(new)
            elif how == "data":
                array.data = new
            else:  # NumPy has a view of the storage, so only a fresh storage can be resized
                array.set_(torch.empty(0))
                array.resize_(8).copy_(new)
        result = run_step(step, async_op)
        assert result.tolist() == [30.0] * 8
        assert old.tolist() == [comm.rank + 1.0] * 8
        x.set_(torch.ones(6))
        with pytest.raises(ShapeError, match=r"x has shape"):
            run_step(step, async_op)
        x.set_(torch.full((8,), comm.rank + 1.0))


X = np.ones(4)
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("all_reduce", {"a": X}), {}, "of a structure; expected one array"),
    (("all_reduce", np.ones((4, 4))[:, ::2]), {}, "x has strides"),
    (("all_gathers", X), {}, "operation 'all_gathers'; one of all_reduce"),
    (("all_reduce", X), {"out": X[::-1]}, "out has strides"),
    (("all_reduce", X), {"async_op": True}, "pass it when you make the call"),
    (("all_reduce", X[:2]), {"out": X[1:3]}, "out overlaps x"),
    (("all_gather", np.ones((2, 2))), {"axis": 1}, "axis 1; expected the first axis"),
    *(
        (("all_reduce", number), {"op": "max"}, f"x is the number {number}; expected an array")
        for number in (3, 2.5, True, np.float32(3))
    ),
]


@pytest.mark.parametrize(("arguments", "options", "says"), REFUSED)
def test_plan_with_unusable_argument_raises_invalid_argument(
    arguments: Any, options: Any, says: str
) -> None:
    with collective.init() as comm, pytest.raises(InvalidArgumentError, match=says):
        comm.plan(*arguments, **options)


def test_plan_with_lazily_conjugated_tensor_raises_invalid_argument() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, dtype=torch.complex64).conj()
    with collective.init() as comm, pytest.raises(InvalidArgumentError, match="x is a lazily conj"):
        comm.plan("all_reduce", x)


class OnlyDLPack:
    """Array that has the methods of DLPack and no other attribute of arrays."""

    def __init__(self, length: int) -> None:
        self.array = np.ones(length)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_prepared_call_accepts_array_with_dlpack_only() -> None:
    with collective.init() as comm:
        x, out = OnlyDLPack(3), np.empty(3)
        step = comm.plan("all_reduce", x, out=out)
        assert step().tolist() == [1.0] * 3
        x.array = np.full(3, 5.0)
        assert step().tolist() == [5.0] * 3


def test_plan_accepts_array_without_dimensions() -> None:
    with collective.init() as comm:
        assert comm.plan("all_reduce", np.array(3), op="max")() == 3


@on_ranks("pair")
def test_prepared_call_of_closed_communicator_raises_closed_error(comm: Communicator) -> None:
    mine, x = comm.dup(), np.ones(2)
    steps = [mine.plan("all_reduce", x), mine.plan("all_reduce", x, out=np.empty(2))]
    mine.close()
    for _ in range(2):
        for step in steps:
            with pytest.raises(CommunicatorClosedError, match="all_reduce"):
                step()
        move(x)


@pytest.mark.parametrize("counts", [3, [[1], [2]], ["a", "b"]])
@on_ranks("pair")
def test_all_gather_with_invalid_counts_raises_shape_error(comm: Communicator, counts: Any) -> None:
    with pytest.raises(ShapeError, match="one non-negative integer for each of 2 ranks"):
        comm.all_gather(np.ones(2), counts=counts)
