"""How far a call walks through the house: calls of our functions, and the files they are in.

What is counted is what a reader has to follow, and most of what Python's share of a small call
costs. The ceilings are what it takes today: lower them when a call gets shorter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import collective
from collective import native
from collective.communicator import Communicator
from collective.testing import run_ranks

HOUSE = collective.__file__.removesuffix("__init__.py")


def walk(call: Callable[[], Any]) -> tuple[int, int]:
    """Return how many functions of ours a call takes, and in how many files."""
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
    x = np.ones(1024, np.float32)
    y = np.empty_like(x)
    first = [walk(lambda: comm.all_reduce(x))]
    again = [walk(lambda: comm.all_reduce(x)) for _ in range(20)]
    wide, counts = np.empty((comm.size, *x.shape), np.float32).ravel(), [x.size] * comm.size
    calls: dict[str, Callable[[], Any]] = {
        "out": lambda: comm.all_reduce(x, out=y),
        "counts": lambda: comm.all_gather(x, counts=counts, out=wide),
        "broadcast": lambda: comm.broadcast(x, out=x),
    }
    found = {"first": first, "again": again}
    for name, call in calls.items():
        call()
        found[name] = [walk(call) for _ in range(20)]
    return found


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@pytest.mark.parametrize(
    ("backend", "ceilings"),
    [
        ("shm", {"first": (29, 13), "again": (1, 1), "out": (0, 0), "counts": (0, 0)}),
        (
            "gloo",
            {
                "first": (63, 19),
                "again": (17, 6),
                "out": (16, 6),
                "counts": (41, 11),
                "broadcast": (74, 22),
            },
        ),
    ],
)
def test_a_call_walks_no_further(backend: str, ceilings: dict[str, tuple[int, int]]) -> None:
    if backend == "gloo":
        pytest.importorskip("torch")
    ranks = run_ranks(2, walks, backend=backend)
    for what, ceiling in ceilings.items():
        # Whoever comes last waits for nobody, and so walks no loops of waiting.
        calls, files = zip(*(each for rank in ranks for each in rank[what]))
        assert min(calls) <= ceiling[0], what
        assert min(files) <= ceiling[1], what
