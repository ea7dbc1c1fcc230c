"""Reductions over each transport, with a rank whose thread has another floating-point mode.

Short calls are folded by every rank, so the mode of one rank would give other bits on that rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="gloo and hierarchical stand on PyTorch")

import torch

import collective
from collective import Communicator
from collective.testing import RankPool
from tests.support.float_modes import float_mode, needs_float_modes
from tests.support.mpi_launches import INSTALLED, VENDORS, pool_of
from tests.support.simulated_hosts import Pairs

SIZE = 3
_KINDS: dict[str, Any] = {"threads": "threads", "shm": "shm", "gloo": "gloo", "pairs": Pairs}

pytestmark = needs_float_modes


@pytest.fixture(
    scope="module",
    params=[*_KINDS, *INSTALLED],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    name = request.param
    if name in VENDORS:
        with pool_of((name, SIZE), torch) as pool:
            yield pool
        return
    with RankPool(SIZE, _KINDS[name], timeout=60.0) as pool:
        yield pool


def _results(comm: Communicator, x: Any, rows: Any) -> list[bytes]:
    """Return this rank's results of calls that fold an array, and the rows of its shards."""
    results = [
        comm.all_reduce(x),
        comm.all_reduce(x, op="avg", order="rank"),
        comm.all_reduce(x.astype(np.complex64), op="prod"),
        comm.all_reduce(x, op=collective.premul_sum(0.3)),
        comm.all_reduce(x, op=collective.user_op(np.add)),
        comm.all_reduce(rows, order=collective.Shards(4, comm)),
        comm.reduce_scatter(x),
        comm.scan(x),
    ]
    return [result.tobytes() for result in results]


def _compare(comm: Communicator, mode: str, count: int) -> None:
    drawn = np.random.default_rng(comm.rank)
    # Around the smallest normal float32.
    x = np.float32(1e-38) * drawn.standard_normal(count).astype(np.float32)
    rows = drawn.standard_normal((len(collective.Shards(4, comm).mine), count))
    wanted = _results(comm, x, rows)
    with float_mode(mode) if comm.rank == 1 else contextlib.nullcontext():
        found = _results(comm, x, rows)
    assert [a == b for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("count", [12, 60_000])
@pytest.mark.parametrize("mode", ["flushing", "rounding up"])
def test_rank_in_another_float_mode_gets_same_bits(ranks: RankPool, mode: str, count: int) -> None:
    ranks.run(_compare, mode, count)
