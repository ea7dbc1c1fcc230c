"""Programs whose ranks fork: the end of a child, of any kind, does not affect the ranks."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from collective.communicator import Communicator
from collective.testing import run_ranks
from tests import warm
from tests.support.interpreter import run_python
from tests.support.mpi_launches import REPEATED, VENDORS, mpirun
from tests.support.selection import in_whole

# Enough for several imports of PyTorch on a busy machine; a hang lasts minutes.
ENDS_S = 120

PROGRAM = """
import multiprocessing, os, subprocess, sys, warnings
import numpy as np
import collective

warnings.simplefilter("ignore", DeprecationWarning)
calls = 0

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def squared(number):
    return number * number

def hold(what):
    global calls
    calls += 1
    found = comm.all_reduce(np.full(4, float(calls)))
    assert found.tolist() == [calls * comm.size] * 4, (what, found)

with collective.init() as comm:
    hold("before")
    CHILDREN
    if comm.rank == 0:
        print("all right")
"""
ENDING_CHILDREN = """
    # One that calls: what it raises leaves the body of the with statement, and the interpreter.
    if (child := os.fork()) == 0:
        try:
            comm.all_reduce(np.full(4, 100.0))
        except collective.CommunicatorClosedError:
            sys.exit(7)
    assert ended(child) == 7
    hold("a child that called")
    # One that ends normally, all exit handlers and destructors included.
    if (child := os.fork()) == 0:
        sys.exit(0)
    assert ended(child) == 0
    hold("a child that ended")
    # One that ends by an error of its own.
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise ValueError("the child's own")
    assert ended(child) == 1
    hold("a child that failed")
    # One that makes a communicator with those of the other ranks, at a place of their own.
    if (child := os.fork()) == 0:
        try:
            collective.init()
        except collective.ConfigError:
            place = {"rank": comm.rank, "size": comm.size, "store": os.path.abspath("children")}
            with collective.init("shm", **place) as mine:
                assert mine.all_reduce(np.ones(2)).tolist() == [mine.size] * 2
            sys.exit(0)
    assert ended(child) == 0
    hold("a child with a communicator")
    # What never calls: pools, programs.
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(squared, range(5)) == [0, 1, 4, 9, 16]
    hold("a pool")
    assert subprocess.run([sys.executable, "-c", ""], preexec_fn=os.getpid).returncode == 0
    hold("a program")
"""
LOADER = """
    import torch
    from torch.utils.data import DataLoader
    loader = DataLoader(list(range(8)), 2, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        hold("a batch")
"""
# The child inherits all open descriptors of its parent, and outlives the parent.
OUTLIVED = """
    try:
        comm.barrier()  # in which the other may still be when this one is gone
        if comm.rank == VICTIM:
            if os.fork() == 0:
                for stream in range(3):
                    os.dup2(os.open(os.devnull, os.O_RDWR), stream)
                import time
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), 9)
        while True:
            hold("until it is noticed")
    except collective.PeerLostError as error:
        print("lost", error.ranks)
"""


def _run(directory: Path, transport: str, children: str, python: str = sys.executable) -> str:
    script = PROGRAM.replace("    CHILDREN", children)
    if transport in VENDORS:
        return mpirun(transport, 2, script, COLLECTIVE_BACKEND="mpi", check=False).stdout
    (directory / "program.py").write_text(script)
    command = ["-m", "collective", "run", "-n", "2", "--backend", transport, "program.py"]
    done = run_python(*command, python=python, cwd=directory, merged=True, timeout=ENDS_S)
    return done.stdout


@pytest.mark.whole
@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo", *REPEATED])
def test_fork_children_may_end_while_ranks_go_on(tmp_path: Path, transport: str) -> None:
    _needs_torch(transport)
    # Over shm the ranks run plain Python. Over Gloo the test is about threads and sockets, so a
    # warm Python will do.
    python = warm.python() if transport == "gloo" else sys.executable
    output = _run(tmp_path, transport, ENDING_CHILDREN, python)
    assert "all right" in output, output


@pytest.mark.parametrize("transport", ["shm", in_whole("tcp"), in_whole("gloo")])
def test_data_loader_may_fork_workers(tmp_path: Path, transport: str) -> None:
    _needs_torch("gloo")
    output = _run(tmp_path, transport, LOADER, warm.python())
    assert "all right" in output, output


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("transport", ["shm", in_whole("tcp"), in_whole("gloo")])
def test_fork_child_does_not_hide_death_of_parent(
    tmp_path: Path, transport: str, victim: int
) -> None:
    _needs_torch(transport)
    output = _run(tmp_path, transport, OUTLIVED.replace("VICTIM", str(victim)), warm.python())
    assert f"lost ({victim},)" in output, output


def _needs_torch(transport: str) -> None:
    if transport == "gloo":
        pytest.importorskip("torch", reason="the gloo transport stands on PyTorch")


def _collects(comm: Communicator) -> int:
    """Return the exit code of a child that collects the garbage of its parent."""
    gc.disable()
    for _ in range(3):
        group = comm.dup()
        cycle: list[Any] = [group.inner.transport._group]  # type: ignore[attr-defined]
        cycle.append(cycle)
        group.close()
    del group, cycle
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_fork_child_may_collect_garbage_of_parent() -> None:
    _needs_torch("gloo")
    assert run_ranks(2, _collects, backend="gloo") == [7, 7]
