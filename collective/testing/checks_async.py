"""Checks of calls in the background."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from collective import CollectiveTimeoutError, Communicator, Work

from .checks import RankFactory, check, on_each_rank
from .samples import LARGE, assert_same, expected, values


@on_each_rank()
def check_async(comm: Communicator) -> None:
    """Check that several calls with async_op=True give the same results, in any order of waits."""
    for count in (6, 6000, LARGE):
        count -= count % comm.size
        inputs = [values("float32", count, rank, 70) for rank in range(comm.size)]
        mine, total = inputs[comm.rank], expected("sum", inputs)
        out = np.zeros(count, np.float32)
        works = {
            "all_reduce": comm.all_reduce(mine, async_op=True),
            "broadcast": comm.broadcast(mine, root=comm.size - 1, async_op=True),
            "all_gather": comm.all_gather(mine, async_op=True),
            "out": comm.all_reduce(mine, out=out, async_op=True),
            "barrier": comm.barrier(async_op=True),
            "reduce_scatter": comm.reduce_scatter(mine, async_op=True),
        }
        # A call without async_op runs in its turn, after the calls in flight.
        assert_same(comm.scan(mine), expected("sum", inputs[: comm.rank + 1]), "scan in between")
        wanted = {
            "reduce_scatter": np.split(total, comm.size)[comm.rank],
            "out": total,
            "all_gather": np.concatenate(inputs),
            "broadcast": inputs[-1],
            "all_reduce": total,
        }
        for name, result in wanted.items():
            assert_same(works[name].wait(), result, f"{name} in the background, {count} elements")
        assert works["out"].wait() is out, "out= is not what wait() returned"
        assert works["barrier"].wait() is None
        for name, work in works.items():
            assert work.done(), f"{name}: not done after wait()"
            assert work.exception() is None, f"{name}: {work.exception()!r} after it went well"


@on_each_rank()
def check_async_many(comm: Communicator) -> None:
    """Check that fifty calls in flight run in the order in which the program issued them."""
    works = [comm.all_reduce(np.array([turn * comm.size]), async_op=True) for turn in range(50)]
    results = [int(work.wait()[0]) for work in works]
    assert results == [turn * comm.size**2 for turn in range(50)], f"results in order: {results}"
    x = np.full(10, comm.rank + 1)
    steps = [comm.all_reduce(x, out=x, async_op=True) for _ in range(3)]
    for work in steps:
        work.wait()
    first = comm.size * (comm.size + 1) // 2
    assert_same(x, np.full(10, first * comm.size**2), "three calls in place, one after another")


@check(at_least=2)
def check_wait_timeout(factory: RankFactory, size: int) -> None:
    """Check that a wait that times out cancels nothing: done() is False, a later wait succeeds."""
    with tempfile.TemporaryDirectory(prefix="collective-testing-") as marks:
        factory.run(size, _wait_timeout, marks)


def _wait_timeout(comm: Communicator, marks: str) -> None:
    late = comm.size - 1
    for _ in range(3):
        # A transport may connect the ranks in its first calls. Those calls wait for all ranks.
        comm.all_reduce(np.array([0]))
    if comm.rank == late:
        # This rank must come late: it waits until the other ranks have seen an unfinished call.
        while len(os.listdir(marks)) < comm.size - 1:
            time.sleep(0.002)
    work = comm.all_reduce(np.array([1]), async_op=True)
    if comm.rank != late:
        try:
            _hold_running(work)
        finally:
            Path(marks, str(comm.rank)).touch()
    assert_same(work.wait(), np.array([comm.size]), "a call waited for twice")
    total = comm.all_reduce(np.array([2]))
    assert_same(total, np.array([2 * comm.size]), "the call after a wait that timed out")


def _hold_running(work: Work[Any]) -> None:
    assert not work.done(), "a call is done although a rank has not come"
    try:
        work.wait(0.02)
    except CollectiveTimeoutError as error:
        if "timed out" not in str(error):
            raise AssertionError("wait(0.02) timed out and does not say so") from error
    else:
        raise AssertionError("wait(0.02) returned although a rank has not come")
