"""Length of a call's path through this package: number of Python functions called, and of files.

A reader has to follow these functions, and they cause most of Python's cost of a small call. The
ceilings are today's numbers: lower them when a call gets shorter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import collective
from collective import native
from collective.communicator import Communicator
from collective.testing import RankPool
from tests.support.mpi_launches import launch_of, needs
from tests.support.selection import in_whole

#: Stays and returns of ``init()`` of one rank: see :func:`stays`.
CEILINGS_OF_INIT = [("threads", 36, 11), ("shm", 45, 13)]
HOUSE = collective.__file__.removesuffix("__init__.py")


def walk(call: Callable[[], Any]) -> tuple[int, int]:
    """Return how many functions of this package a call runs, and in how many files."""
    files: list[str] = []

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(files), len(set(files))


def walks(comm: Communicator) -> dict[str, list[tuple[int, int]]]:
    x, long = np.ones(1024, np.float32), np.ones(1 << 16, np.float32)
    y, long_out = np.empty_like(x), np.empty_like(long)
    first = [walk(lambda: comm.all_reduce(x))]
    again = [walk(lambda: comm.all_reduce(x)) for _ in range(20)]
    two, eight = collective.Shards(2, comm), collective.Shards(8, comm)
    one, four = np.ones((1, 1024), np.float32), np.ones((4, 1024), np.float32)
    wide, counts = np.empty((comm.size, *x.shape), np.float32).ravel(), [x.size] * comm.size
    calls: dict[str, Callable[[], Any]] = {
        "out": lambda: comm.all_reduce(x, out=y),
        "counts": lambda: comm.all_gather(x, counts=counts, out=wide),
        "broadcast": lambda: comm.broadcast(x, out=x),
        "all_gather": lambda: comm.all_gather(x, out=wide),
        "reduce_scatter": lambda: comm.reduce_scatter(wide, out=y),
        "all_to_all": lambda: comm.all_to_all(x, out=y),
        "barrier": comm.barrier,
        "long": lambda: comm.all_reduce(long, out=long_out),
        "2 shards": lambda: comm.all_reduce(one, out=y, order=two),
        "8 shards": lambda: comm.all_reduce(four, out=y, order=eight),
    }
    paths = {"first": first, "again": again}
    for name, call in calls.items():
        call()
        paths[name] = [walk(call) for _ in range(20)]
    return {**paths, **message_walks(comm)} if comm.backend == "mpi" else paths


def message_walks(comm: Communicator) -> dict[str, list[tuple[int, int]]]:
    """Measure sends and receives, with payloads inside and outside the head of a message.

    Barriers ensure that no call has to wait for its peer.
    """
    peer = 1 - comm.rank
    paths: dict[str, list[tuple[int, int]]] = {}
    for name, x in (("", np.ones(2)), (", long", np.ones(200))):
        send, recv = partial(comm.send, x, peer), partial(comm.recv, np.empty_like(x), peer)
        for turn in range(40):
            sends = turn % 2 == comm.rank
            if sends:
                paths.setdefault(f"send{name}", []).append(walk(send))
            comm.barrier()  # the message has arrived
            if not sends:
                paths.setdefault(f"recv{name}", []).append(walk(recv))
            comm.barrier()
    return paths


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@pytest.mark.parametrize(
    ("backend", "check", "ceilings"),
    [
        (
            "shm",
            "auto",
            {
                "first": (33, 13),
                "again": (0, 0),
                "out": (0, 0),
                "counts": (0, 0),
                "2 shards": (0, 0),
                "8 shards": (27, 6),
            },
        ),
        # The core compares the results of a long all_reduce.
        ("shm", "results", {"long": (0, 0)}),
        # None of these calls is the thousandth, whose results are compared.
        (
            "shm",
            "results:1000",
            dict.fromkeys(["again", "out", "counts", "broadcast", "all_gather"], (0, 0)),
        ),
        in_whole(
            "gloo",
            "auto",
            {
                "first": (70, 21),
                "again": (41, 12),
                "out": (41, 12),
                "counts": (36, 11),
                "broadcast": (66, 18),
            },
        ),
        pytest.param(
            "mpich",
            "auto",
            {
                "out": (5, 3),
                "counts": (4, 2),
                "broadcast": (3, 2),
                "all_gather": (4, 2),
                "reduce_scatter": (4, 3),
                "all_to_all": (3, 2),
                "barrier": (2, 1),
                "send": (3, 1),
                "recv": (3, 1),
                "send, long": (7, 2),
                "recv, long": (7, 2),
            },
            marks=[needs("mpich"), pytest.mark.whole],
        ),
    ],
)
def test_call_path_is_not_longer_than_ceiling(
    backend: str, check: str, ceilings: dict[str, tuple[int, int]]
) -> None:
    if backend == "gloo":
        pytest.importorskip("torch")
    mpiexec = None if backend in ("shm", "gloo") else launch_of(backend)
    with RankPool(2, backend if mpiexec is None else "mpi", mpiexec=mpiexec) as pool:
        ranks = pool.run(walks, check=check)
    for name, ceiling in ceilings.items():
        # The rank that calls last does not wait, so its path has no polling loop.
        calls, files = zip(*(path for rank in ranks for path in rank[name]))
        assert min(calls) <= ceiling[0], name
        assert min(files) <= ceiling[1], name


def stays(call: Callable[[], Communicator]) -> list[str]:
    """Return the file of each stay of a call that returns a communicator, which is closed.

    A stay begins with a function of another file than that of the function called before. A reader
    who follows the call goes to a file for each stay; a return is a stay in a file that was left.
    """
    files: list[str] = []

    def see(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOUSE) and code.co_name[0] != "<":
            files.append(code.co_filename.removeprefix(HOUSE))

    sys.setprofile(see)
    try:
        comm = call()
    finally:
        sys.setprofile(None)
    comm.close()
    return [file for file, _ in groupby(files)]


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@pytest.mark.parametrize(("backend", "most", "most_returns"), CEILINGS_OF_INIT)
def test_init_is_not_longer_than_ceiling(
    backend: str, most: int, most_returns: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # no settings file of this repository
    collective.init(backend).close()  # imports the transport
    walked = stays(lambda: collective.init(backend))
    returns = len(walked) - len(set(walked))
    print(f"init({backend!r}): {len(walked)} stays, {returns} returns")
    assert len(walked) <= most, walked
    assert returns <= most_returns, walked
