"""Arrays whose memory another thread tries to replace while a call works on them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from collective import Communicator, InvalidArgumentError, MismatchError, native
from collective.testing import RankPool
from tests.support.interpreter import printed
from tests.support.mpi_launches import REPEATED, VENDORS, launch_of
from tests.support.selection import in_whole

Array = np.ndarray[Any, Any]
WAIT_S = 60.0
MORE = 1 << 20

#: Calls on an array of at least 64 elements that return only when the other ranks make them, too.
CALLS: dict[str, Callable[[Communicator, Any, bool], Any]] = {
    "all_reduce": lambda comm, x, later: comm.all_reduce(x, out=x, async_op=later),
    "all_reduce of a dict": lambda comm, x, later: comm.all_reduce({"a": [x]}, async_op=later),
    "all_gather": lambda comm, x, later: comm.all_gather(x, async_op=later),
    "reduce_scatter": lambda comm, x, later: comm.reduce_scatter(x, async_op=later),
    "gather": lambda comm, x, later: comm.gather(x, async_op=later),
    "sendrecv": lambda comm, x, later: comm.sendrecv(
        x.copy(), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, out=x, async_op=later
    ),
}
LENGTHS = {"short": 64, "long": 1 << 17}


def refused(x: Array) -> None:
    """Check that NumPy refuses to resize an array, because a call holds a view of it."""
    with pytest.raises(ValueError, match="cannot resize"):
        x.resize(MORE, refcheck=False)


def while_it_runs(x: Array, notify: Callable[[], object]) -> threading.Thread:
    """Start a thread that tries to resize an array once a call holds it, then calls ``notify``.

    The thread's attribute ``seen`` is not empty if NumPy refused.
    """

    def run() -> None:
        end = time.monotonic() + WAIT_S
        while not weakref.getweakrefcount(x) and time.monotonic() < end:
            time.sleep(1e-4)
        try:
            refused(x)
            seen.append(True)
        finally:
            notify()

    seen: list[bool] = []
    thread = threading.Thread(target=run)
    thread.seen = seen  # type: ignore[attr-defined]
    thread.start()
    return thread


def tell(signals: Communicator) -> None:
    """Signal the other ranks to make the call."""
    for other in range(1, signals.size):
        signals.send(np.zeros(1), other)


def hold(comm: Communicator, name: str, length: int, later: bool) -> None:
    """Make a call in which rank 0 waits until another thread has tried to resize its array."""
    call, signals = CALLS[name], comm.dup()
    whole = np.ones(length)
    x = whole[: length // 2] if length == LENGTHS["short"] else whole  # the short x is a view
    call(comm, x.copy(), False)  # does the preparations that only the first call needs
    signals.barrier()
    if comm.rank:
        signals.recv(np.zeros(1), 0)
        call(comm, x, False)
    elif later:
        work = call(comm, x, True)
        refused(whole)
        tell(signals)
        work.wait()
    else:
        thread: Any = while_it_runs(whole, functools.partial(tell, signals))
        call(comm, x, False)
        thread.join()
        assert thread.seen, f"{name} of {length} elements held nothing"
    signals.barrier()
    del x
    whole.resize(MORE, refcheck=False)  # after the call nothing holds the array


def hold_all(comm: Communicator, later: bool) -> None:
    for core in (True, False) if comm.backend != "threads" else (True,):
        native.switch(core)
        group = comm.dup()
        native.switch(True)
        for name in CALLS:
            for length in LENGTHS.values():
                hold(group, name, length, later)
        group.close()


def storages_with_slow_looks(comm: Communicator, later: bool) -> None:
    """Call :func:`storages` while ``is_neg``, which releases the interpreter lock, takes long."""
    import torch

    def is_neg(tensor: torch.Tensor) -> bool:
        time.sleep(1e-3)
        return plain_is_neg(tensor)

    plain_is_neg = torch.Tensor.is_neg
    # Where ranks are threads, they share the class.
    looks = mock.patch.object(torch.Tensor, "is_neg", is_neg)
    with looks if comm.rank == 0 else contextlib.nullcontext():
        storages(comm, later)


def storages(comm: Communicator, later: bool) -> None:
    """Replace the storages of tensors during a call; check that the old ones outlive the call."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    def uses(tensor: torch.Tensor) -> int:
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    def in_use() -> bool:
        # Where the plan is written in Python, C first records the call, and then has the tensors
        # viewed. Over shm the plan is in C, or the call is recorded after the views.
        viewed = comm.backend == "shm" or (uses(x) > uses_before[0] and uses(y) > uses_before[1])
        return comm.recorder.started != before and viewed

    def replace() -> None:
        end = time.monotonic() + WAIT_S
        try:
            while not in_use():
                assert time.monotonic() < end, "the call has not viewed the tensors"
                time.sleep(1e-4)
            x.set_(torch.empty(0))
            y.data = torch.empty(0)
            alive.append(not any(storage.expired() for storage in weak_storages))
        finally:
            tell(signals)

    signals = comm.dup()
    for length in LENGTHS.values():
        x, y = torch.ones(length), torch.ones(length)
        comm.all_reduce(x, out=y)  # does the preparations that only the first call needs
        x, y, alive = torch.ones(length), torch.ones(length), []
        if comm.rank:
            signals.recv(np.zeros(1), 0)
            comm.all_reduce(x, out=y)
        else:
            before = comm.recorder.started
            uses_before = uses(x), uses(y)
            weak_storages = [StorageWeakRef(storage.untyped_storage()) for storage in (x, y)]
            thread = threading.Thread(target=replace)
            if later:
                work = comm.all_reduce(x, out=y, async_op=True)
                thread.start()
                work.wait()
                del work
            else:
                thread.start()
                comm.all_reduce(x, out=y)
            thread.join()
            assert alive == [True]
        comm.barrier()


#: Changes of a tensor of 64 float32 elements, and the elements that it has then.
CHANGES: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "smaller storage": (lambda torch, x: x.set_(torch.ones(3)), "3 of float32"),
    "other shape": (lambda torch, x: setattr(x, "data", torch.ones(8, 9)), "72 of float32"),
    "other dtype": (lambda torch, x: setattr(x, "data", torch.ones(64).char()), "64 of int8"),
}


def change_before_view(comm: Communicator, name: str, operation: str = "all_reduce") -> str:
    """Replace a tensor's memory between C's look at it and the view; return the error's text."""
    import torch

    def run_python_plan(*arguments: Any) -> None:
        change(torch, x)
        type(path).run_python_plan(path, *arguments)

    change, path = CHANGES[name][0], comm._path
    x, out = torch.ones(64), torch.ones(32 if operation == "scatter" else 64)
    call = getattr(comm, operation)
    mine = x if operation == "all_reduce" or comm.rank == 0 else None
    call(mine, out=out)  # the first call makes the plan
    text = ""
    if comm.rank == 0:
        path.run_python_plan = run_python_plan  # as if another thread ran there
        try:
            call(mine, out=out)
        except InvalidArgumentError as error:
            text = str(error)
        del path.run_python_plan
    call(None if mine is None else torch.ones(64), out=out)  # the refused call has sent nothing
    assert out.eq(comm.size if operation == "all_reduce" else 1).all()
    return text


def change_before_hold(comm: Communicator) -> str:
    """Replace a tensor's memory while PyTorch makes the result; return the error's text."""
    import torch

    def new_empty(shape: tuple[int, ...]) -> torch.Tensor:
        x.set_(torch.ones(3))
        return torch.empty(shape)

    x = torch.ones(64)
    comm.all_reduce(x)
    if comm.rank == 0:
        x.new_empty = new_empty
    try:
        comm.all_reduce(x)
    except MismatchError as error:
        return str(error)
    return ""


# Simulates two hosts of two ranks each for the hierarchical transport.
PAIRS = "tests.support.simulated_hosts:Pairs"
TRANSPORTS = [
    "threads", "shm", in_whole("gloo"), PAIRS,
    *REPEATED,
]  # fmt: skip


def run(transport: str, program: Callable[..., None], *arguments: Any) -> None:
    if transport in ("gloo", PAIRS):
        pytest.importorskip("torch", reason="Gloo stands on PyTorch")
    mpiexec = launch_of(transport) if transport in VENDORS else None
    size = 4 if transport == PAIRS else 2
    with RankPool(size, "mpi" if mpiexec else transport, mpiexec=mpiexec, timeout=WAIT_S) as pool:
        pool.run(program, *arguments)


@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_resize_of_array_in_use_is_refused(transport: str, later: bool) -> None:
    run(transport, hold_all, later)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about tensors")
@pytest.mark.parametrize("later", [False, True], ids=["now", "async"])
@pytest.mark.parametrize("transport", ["threads", "shm", in_whole("gloo")])
def test_tensor_storage_lives_until_call_is_over(transport: str, later: bool) -> None:
    run(transport, storages_with_slow_looks, later)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about tensors")
@pytest.mark.skipif(native.holder() is None, reason="only C looks at a tensor before the view")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("transport", ["threads", in_whole("gloo")])
def test_tensor_changed_before_its_view_is_refused(transport: str, name: str) -> None:
    with RankPool(2, transport, timeout=WAIT_S) as pool:
        text, other = pool.run(change_before_view, name)
    assert text.startswith(
        "all_reduce: x had 64 elements of float32 when the call began, and has "
        f"{CHANGES[name][1]} now [rank 0 of 2]. "
    )
    assert other == ""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about tensors")
@pytest.mark.skipif(native.holder() is None, reason="only C looks at a tensor before the view")
def test_tensor_of_scatter_changed_before_its_view_is_refused() -> None:
    with RankPool(2, "threads", timeout=WAIT_S) as pool:
        text, _ = pool.run(change_before_view, "smaller storage", "scatter")
    assert text.startswith("scatter: x had 64 elements when the call began, and has 3 of float32 ")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="it is about tensors")
@pytest.mark.parametrize("transport", ["threads", "shm", in_whole("gloo")])
def test_tensor_changed_before_it_is_held_is_looked_at_again(transport: str) -> None:
    with RankPool(2, transport, timeout=WAIT_S) as pool:
        texts = pool.run(change_before_hold)
    assert ["rank 0: all_reduce(float32[3], op=sum)" in text for text in texts] == [True, True]


WITHOUT_EXTENSION = """
import sys
sys.modules["collective.native._core"] = None
from collective import native
from collective.testing import run_ranks
from tests.memory.test_holding import hold_all
from tests.communicator.test_moved_arrays import move_and_call
assert native.gate() is native.handle() and native.holder() is None
for later in (False, True):
    run_ranks(2, hold_all, later, backend="threads")
    run_ranks(2, move_and_call, later, backend="threads")
print("all right")
"""


def test_arrays_are_held_and_followed_without_extension() -> None:
    assert printed("-c", WITHOUT_EXTENSION) == "all right\n"
