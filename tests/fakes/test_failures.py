"""The ABI fake's failures: blocked operations, dead ranks, differing calls and bad arguments."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.fakes import POISON, FakeArray, compiler
from tests.fakes.raw import (
    DTYPES,
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    REMOTE_ERROR,
    SUCCESS,
    SUM,
    NcclError,
    Rank,
    in_processes,
    in_threads,
)
from tests.support.interpreter import ROOT
from tests.support.nccl_raw import DIED, FLOAT64, leftovers, nccl, sums

__all__ = ["nccl"]  # a fixture

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

# Waiting for peers


def test_first_use_of_connection_waits_for_peer(nccl):
    """On a non-blocking communicator the operation is on the stream only after success."""
    identity = nccl.unique_id()
    ranks = [Rank(nccl, identity, r, 2, r).init(blocking=False) for r in range(2)]
    assert [r.poll() for r in ranks] == [SUCCESS] * 2
    sent, received = ranks[0].array(np.arange(4.0)), ranks[1].array(np.zeros(4))
    ranks[1].synchronize()
    ranks[0].call("Send", sent, 4, FLOAT64, 1)
    assert nccl.state(ranks[0].comm) == IN_PROGRESS
    ranks[0].synchronize()  # the stream is still empty
    ranks[1].call("Recv", received, 4, FLOAT64, 0)
    assert [r.poll() for r in ranks] == [SUCCESS] * 2
    assert received.get().tolist() == [0.0, 1.0, 2.0, 3.0]
    ranks[0].call("Send", sent, 4, FLOAT64, 1)
    assert nccl.state(ranks[0].comm) == SUCCESS  # the ranks are connected by now
    ranks[0].abort()
    ranks[1].abort()


@pytest.mark.parametrize("lonely", ["AllReduce", "Send"])
def test_blocked_operation_holds_stream_until_abort(nccl, lonely):
    nccl.knob("lazy_connect", 0)
    identity = nccl.unique_id()
    ranks = [Rank(nccl, identity, r, 2, r).init(blocking=False) for r in range(2)]
    assert [r.poll() for r in ranks] == [SUCCESS] * 2
    rank = ranks[0]
    array = rank.array(np.ones(3))
    result = rank.array(np.zeros(3))
    rank.synchronize()
    if lonely == "Send":
        rank.call("Send", array, 3, FLOAT64, 1)
    else:
        rank.call("AllReduce", array, result, 3, FLOAT64, SUM)
    after = rank.array(np.ones(3))
    assert (after.peek().view(np.uint8) == POISON).all()
    assert nccl.library.cuStreamQuery(ctypes.c_void_p(rank.stream))
    assert nccl.state(rank.comm) == SUCCESS
    rank.abort()
    assert after.get().tolist() == [1.0] * 3
    assert (result.peek().view(np.uint8) == POISON).all() == (lonely == "AllReduce")
    with pytest.raises(NcclError) as caught:
        rank.call("AllReduce", array, result, 3, FLOAT64, SUM)
    assert caught.value.code == INVALID_ARGUMENT
    ranks[1].abort()


def test_abort_from_another_thread_ends_blocking_call(nccl):
    def work(rank):
        if rank.rank:
            return None
        array = rank.array(np.ones(3))
        threading.Timer(0.05, rank.abort).start()
        with pytest.raises(NcclError):
            rank.call("Send", array, 3, FLOAT64, 1)
        return True

    assert in_threads(2, work)[0]


def die_at_the_third(rank):
    if rank.rank == 1:
        rank.nccl.knob("die_at", 3)
    results = [sums(rank), sums(rank)]
    array = rank.array(np.ones(3))
    rank.call("AllReduce", array, array, 3, FLOAT64, SUM)
    query = rank.nccl.library.cuStreamQuery
    if rank.rank == 1:
        rank.synchronize()
    busy = query(ctypes.c_void_p(rank.stream))
    rank.abort()
    rank.synchronize()
    return results, busy


def test_dead_process_leaves_other_ranks_blocked(nccl):
    first, second = in_processes(2, die_at_the_third)
    assert first == ([3.0, 3.0], 600)
    assert second.code == DIED
    assert not leftovers()


def test_files_of_killed_rank_are_removed_by_next_user(nccl):
    script = "import sys; sys.path.insert(0, sys.argv[1]); from tests.fakes.raw import *\n"
    script += "n = Nccl(); n.context(0); r = Rank(n, n.unique_id(), 0, 2, 0).init(blocking=False)\n"
    script += "import os, time\n"
    script += "while not os.path.exists('/dev/shm/' + r.identity.split(b'\\0')[0].decode()):\n"
    script += "    time.sleep(0.001)\n"
    script += "print('waits', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waits\n"
        assert leftovers(process.pid)
        nccl.unique_id()
        assert leftovers(process.pid)  # the file is still in use
        process.send_signal(signal.SIGKILL)
    nccl.unique_id()
    assert not leftovers(process.pid)


# Errors


MISMATCHES = {
    "count": lambda r: ("AllReduce", 10 - r.rank, FLOAT64, SUM),
    "type": lambda r: ("AllReduce", 10, (FLOAT64, DTYPES["int64"])[r.rank], SUM),
    "operator": lambda r: ("AllReduce", 10, FLOAT64, (SUM, MAX)[r.rank]),
    "root": lambda r: ("Broadcast", 10, FLOAT64, r.rank),
    "call": lambda r: (("AllReduce", 5, FLOAT64, SUM), ("AllGather", 5, FLOAT64))[r.rank],
}
TEXTS = {
    "count": r"rank 0 called AllReduce\(count=10, .*, rank 1 AllReduce\(count=9,",
    "type": "datatype=float64, .* datatype=int64",
    "operator": "op=sum, .* op=max",
    "root": r"root=0\), rank 1 .* root=1",
    "call": r"rank 0 called AllReduce\(.*, rank 1 AllGather\(",
}


@pytest.mark.parametrize("difference", MISMATCHES)
def test_differing_calls_are_reported_on_all_ranks(difference):
    def work(rank):
        name, *rest = MISMATCHES[difference](rank)
        send, recv = rank.array(np.zeros(20)), rank.empty(20, "f8")
        rank.call(name, send, recv, *rest)
        state = rank.until_error()
        text = rank.nccl.last_error(rank.comm)
        with pytest.raises(NcclError):
            rank.call(name, send, recv, *rest)
        rank.abort()
        rank.synchronize()
        return state, text

    (state, text), (other_state, other_text) = in_threads(2, work)
    assert state == other_state == INVALID_USAGE
    assert text == other_text
    assert re.search(TEXTS[difference], text), text


def test_message_of_other_count_is_an_error():
    def work(rank):
        array = rank.array(np.zeros(20))
        rank.call(("Send", "Recv")[rank.rank], array, 10 - rank.rank, FLOAT64, 1 - rank.rank)
        state = rank.until_error()
        text = rank.nccl.last_error(rank.comm)
        rank.abort()
        return state, "count=10" in text and "count=9" in text

    assert in_threads(2, work) == [(INVALID_USAGE, True)] * 2


def test_invalid_arguments_are_refused_at_call(nccl):
    rank = Rank(nccl, nccl.unique_id(), 0, 1, 0).init()
    here, there = rank.array(np.zeros(4)), FakeArray.of(np.zeros(4), device=1)
    host = np.zeros(4)
    bad = {
        "NULL": (None, here, 4, FLOAT64, SUM),
        "device 1 mismatched": (there, here, 4, FLOAT64, SUM),
        "not a valid pointer": (here, host.ctypes.data, 4, FLOAT64, SUM),
        "behind its memory": (here, here, 5, FLOAT64, SUM),
        "invalid type 12": (here, here, 4, 12, SUM),
        "reduction operation 77": (here, here, 4, FLOAT64, 77),
        "count": (here, here, 1 << 60, FLOAT64, SUM),
    }
    for text, arguments in bad.items():
        with pytest.raises(NcclError, match=text) as caught:
            rank.call("AllReduce", *arguments)
        assert caught.value.code == INVALID_ARGUMENT
    for call, arguments in {
        "Broadcast": (here, here, 4, FLOAT64),
        "Send": (here, 4, FLOAT64),
    }.items():
        for root in (-1, 1):
            with pytest.raises(NcclError, match=r"invalid (root or )?peer"):
                rank.call(call, *arguments, root)
    with pytest.raises(NcclError, match="invalid resource handle"):
        rank.call("AllReduce", here, here, 4, FLOAT64, SUM, stream=there.stream)
    with pytest.raises(NcclError, match="without a matching recv"):
        rank.call("Send", here, 4, FLOAT64, 0)
    rank.call("AllReduce", None, None, 0, FLOAT64, SUM)  # an empty collective is valid
    with pytest.raises(NcclError, match="not in a group"):
        nccl.call("GroupEnd")
    rank.destroy()


def test_error_in_group_drops_whole_group(nccl):
    rank = Rank(nccl, nccl.unique_id(), 0, 1, 0).init()
    send, recv = rank.array(np.ones(4)), rank.array(np.zeros(4))
    rank.synchronize()
    nccl.call("GroupStart")
    rank.call("AllReduce", send, recv, 4, FLOAT64, SUM)
    with pytest.raises(NcclError):
        rank.call("AllReduce", None, recv, 4, FLOAT64, SUM)
    with pytest.raises(NcclError) as caught:
        nccl.call("GroupEnd")
    assert caught.value.code == INVALID_ARGUMENT
    assert recv.get().tolist() == [0.0] * 4
    assert sums(rank) == 1.0


def test_remote_error_sets_state_and_blocks_operation(nccl):
    nccl.knob("fault_rank", 1)
    nccl.knob("remote_error_at", 2)

    def work(rank):
        assert sums(rank) == 3.0
        array = rank.array(np.ones(3))
        rank.call("AllReduce", array, array, 3, FLOAT64, SUM)
        state = rank.until_error() if rank.rank else rank.nccl.state(rank.comm)
        busy = rank.nccl.library.cuStreamQuery(ctypes.c_void_p(rank.stream))
        rank.abort()
        rank.synchronize()
        return state, busy

    assert in_threads(2, work) == [(SUCCESS, 600), (REMOTE_ERROR, 600)]
