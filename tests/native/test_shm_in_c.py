"""``shm`` with its all-reduces in C: beside ranks without it, and when a peer is lost or late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collective import native
from collective.backends.shm.control import SLOT_BYTES
from collective.backends.shm.transport import SYMMETRIC_BYTES
from collective.communicator import Communicator
from collective.errors import CollectiveError
from collective.testing import RankPool, run_ranks

pytest.importorskip("collective.native._core", reason="the native core is not built")

# Elements of float32 around what is small, what is in a slot, and some blocks of pieces.
COUNTS = [nbytes // 4 + more for nbytes in (SYMMETRIC_BYTES, SLOT_BYTES) for more in (-1, 0, 1)] + [
    1,
    3 * SLOT_BYTES // 4,
    1_000_003,
]


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, "shm", timeout=60.0) as ranks:
        yield ranks


def _wrong(comm: Communicator, without: tuple[int, ...]) -> list[str]:
    """Return the calls whose result is wrong when some ranks do without the core."""
    native.switch(comm.rank not in without)
    group = comm.dup()  # which finds out anew what its ranks have
    native.switch(True)
    wrong = []
    if bool(group._backend._staged_bytes) == bool(without):  # type: ignore[attr-defined]
        wrong.append("the ranks did not agree on staging")
    for count in COUNTS:
        x = np.arange(count, dtype=np.float32) % 97 + np.float32(0.5)
        total = x * sum(range(1, comm.size + 1))
        x *= comm.rank + 1
        mean = group.all_reduce(x, op="avg")
        group.all_reduce(x, out=x)
        if x.tobytes() != total.tobytes() or mean.tobytes() != (total / comm.size).tobytes():
            wrong.append(f"{count} elements on rank {comm.rank}")
    return wrong


@pytest.mark.parametrize("without", [(), (0,), (1,)], ids=["all", "not the first", "not another"])
def test_ranks_with_the_core_and_without_it_understand_each_other(
    pool: RankPool, without: tuple[int, ...]
) -> None:
    assert pool.run(_wrong, without) == [[]] * pool.size


def _switched_off_later(comm: Communicator) -> float:
    native.switch(comm.rank != 1)
    return float(comm.all_reduce(np.ones(300_000))[-1])


def test_a_switch_after_connecting_does_not_part_the_ranks() -> None:
    assert run_ranks(2, _switched_off_later, backend="shm") == [2.0, 2.0]


def _stopped_after_arriving(comm: Communicator) -> str:
    """Rank 1 gets no further than its arrival; return what is raised, as text."""
    side, x = comm.dup(), np.ones(300_000)
    if comm.rank == 1:

        def stop(src: Any, dst: Any, timeout: float) -> None:
            side.recv_object(0)  # until the other has given up
            comm._backend.refuse_broken("all_reduce")  # as the first wait would

        in_c: Any = comm._backend._compiled  # type: ignore[attr-defined]
        in_c.large = lambda request: stop
    with pytest.raises(CollectiveError) as caught:
        comm.all_reduce(x, timeout=0.3)
    if comm.rank == 0:
        side.send_object("over", 1)
    return f"{type(caught.value).__name__}: {caught.value}"


# That one is killed at any time is in test_shm.
def test_a_peer_that_is_late_with_a_block_is_named() -> None:
    given_up, late = run_ranks(2, _stopped_after_arriving, backend="shm")
    assert given_up.startswith("CollectiveTimeoutError: ")
    assert "waited 0.3 s for rank 1" in given_up
    assert "waited 0.3 s for rank 1" in late
