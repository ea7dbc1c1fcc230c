"""Calls over the gloo transport, and its errors when ranks disagree or do not come."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.contract.backend import COLLECTIVE_TAG
from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, CommunicatorAbortedError, MismatchError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.testing.survivors import await_files
from tests.support.on_ranks import on_ranks, ranks_of

pytest.importorskip("torch", reason="the gloo transport needs PyTorch")

two, three = (ranks_of(("gloo", size), timeout=40.0) for size in (2, 3))

# -- threads, tags --------------------------------------------------------------------------


@on_ranks("two")
def test_threads_exchange_messages_while_collectives_run(comm: Any) -> None:
    other, wrong = 1 - comm.rank, []

    def talk(tag: int) -> None:
        for turn in range(20):
            x = np.full(1000 * (turn % 5) + 1, 100.0 * tag + turn)
            sent = comm.send(x, other, tag=tag, async_op=True)
            if not (comm.recv(None, other, tag=tag) == x).all():
                wrong.append((tag, turn))
            sent.wait()

    talkers = [threading.Thread(target=talk, args=(tag,)) for tag in (1, 2)]
    for thread in talkers:
        thread.start()
    for turn in range(20):
        work = comm.all_reduce(np.full(50_000, turn), async_op=True)
        assert (work.wait() == 2 * turn).all()
    for thread in talkers:
        thread.join(30)
        assert not thread.is_alive()
    assert not wrong


TAGS = (0, 5, 2**31 - 1, 2**31 - 2, 2**31, -2, 2**62 + 1, -(2**63), COLLECTIVE_TAG)


@on_ranks("two")
def test_messages_of_different_tags_stay_separate(comm: Any) -> None:
    backend = comm.inner.transport
    numbers = [Buffer(np.array([n]), BY_NAME["int64"]) for n in range(len(TAGS))]
    if comm.rank == 0:
        threads = [
            threading.Thread(target=backend.send, args=(number, 1, tag, Deadline(20.0)))
            for number, tag in zip(numbers, TAGS, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    for number, tag in reversed(list(enumerate(TAGS))):
        out = Buffer.empty(1, BY_NAME["int64"])
        assert backend.recv(out, 0, tag, Deadline(20.0)) == 0
        assert out.array[0] == number


@on_ranks("two")
def test_read_only_arrays_are_sent_without_warning(comm: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = np.frombuffer(np.full(400_000, comm.rank + 1.0).tobytes())
        assert not x.flags.writeable
        other = 1 - comm.rank
        received = comm.sendrecv(x, other, other)
        total = comm.all_reduce(x)
        gathered = comm.all_gather(x[:3])
    assert (received == other + 1.0).all()
    assert (total == 3.0).all()
    assert gathered.tolist() == [1.0] * 3 + [2.0] * 3


# -- differing calls and missing ranks --------------------------------------------------------


@pytest.mark.parametrize(
    "calls",
    [
        [("all_reduce", 1 << 20, {}), ("all_reduce", (1 << 20) + 1, {})],
        [("all_reduce", 1 << 20, {"op": "sum"}), ("all_reduce", 1 << 20, {"op": "prod"})],
    ],
    ids=["length", "op"],
)
@on_ranks("two")
def test_differing_calls_raise_mismatch(comm: Any, calls: Any) -> None:
    """Without a tag of each call, Gloo would end the process or ranks would get wrong numbers."""
    name, count, options = calls[comm.rank]
    x = np.full(count, comm.rank + 1.0)
    with pytest.raises(MismatchError, match=r"different calls(?s:.*)test_calls\.py"):
        getattr(comm, name)(x, **options)
    assert (x == comm.rank + 1.0).all()


@on_ranks("three")
def test_timeout_names_absent_rank_and_its_last_call(comm: Any, tmp_path: Path) -> None:
    comm.all_reduce(np.ones(2))
    late = comm.rank == 2
    if late:
        await_files(tmp_path / "0", tmp_path / "1")
    expected = CommunicatorAbortedError if late else CollectiveTimeoutError
    with pytest.raises(expected, match=r"waited 0\.3 s for rank 2") as caught:
        comm.all_reduce(np.ones(3), timeout=0.3)
    (tmp_path / str(comm.rank)).touch()
    if not late:
        assert isinstance(caught.value, CollectiveTimeoutError)
        assert caught.value.ranks == (2,)
        assert "rank 2 last did its call 1, all_reduce(float64[2]" in str(caught.value)


@on_ranks("two")
def test_timeout_of_sendrecv_with_one_peer_names_it_once(comm: Any, tmp_path: Path) -> None:
    if comm.rank == 1:
        await_files(tmp_path / "0")
        return
    with pytest.raises(CollectiveTimeoutError) as caught:
        comm.sendrecv(np.ones(2), 1, 1, timeout=0.3)
    (tmp_path / "0").touch()
    assert caught.value.ranks == (1,)


@on_ranks("two")
def test_recv_from_any_source_ends_when_communicator_aborts(comm: Any) -> None:
    if comm.rank == 0:
        with pytest.raises(CommunicatorAbortedError, match="out of patience"):
            comm.recv(None, -1)
    else:
        time.sleep(0.3)
        comm.abort("out of patience")
