"""Shared memory of ``shm`` with damaged values.

Each test has the ends of two ranks in one process, and writes damaged values in place of rank 1.
tests/native tests the memory that C reads, and backends/shm/test_ring.py tests the rings.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collective import native
from collective.backends.shm import ShmBackend
from collective.backends.shm.control import BROKEN, Control
from collective.backends.shm.layout import LINE, Layout
from collective.backends.shm.memory import Heap, _SymmetricSegment
from collective.backends.shm.segment import Segment
from collective.backends.threads import ThreadsBackend
from collective.communicator import Communicator
from collective.contract.failure import Failure
from collective.contract.waits import MessageCall
from collective.deadline import Deadline
from collective.errors import BackendError, CollectiveTimeoutError, CommunicatorAbortedError
from tests.support.on_ranks import on_ranks, ranks_of

two = ranks_of(("shm", 2))
GARBAGE = (1 << 40, -1, (1 << 63) - 1, -(1 << 63))
# Indices of the words in rank 1's line, as in control.py.
_PEER = 2 * LINE
_WAITING, _NOTICE = 24, 38
_STEP, _PID, _PAYLOAD_LENGTH, _FAILURE = _PEER, *(_PEER + at for at in (33, 35, 36))


@pytest.fixture
def control() -> Iterator[Control]:
    layout = Layout(2)
    segment = Segment.create(layout.nbytes)
    yield Control(segment, layout, 0)
    segment.close_descriptor()


@pytest.mark.parametrize("step", GARBAGE)
def test_impossible_step_of_peer_is_refused(control: Control, step: int) -> None:
    control.words[_STEP] = step
    with pytest.raises(BackendError, match="rank 1's words in shared memory are damaged: a count"):
        control.sync(Deadline(5.0))
    assert control.words[BROKEN] == 1


@pytest.mark.parametrize("length", GARBAGE)
def test_payload_longer_than_memory_is_refused(control: Control, length: int) -> None:
    control.words[_STEP], control.words[_PAYLOAD_LENGTH] = 1, length
    with pytest.raises(BackendError, match=f"damaged: a note of {length} bytes"):
        control.share(b"mine", Deadline(5.0))


def test_call_description_without_json_is_refused(control: Control) -> None:
    control.words[_STEP], control.words[_PAYLOAD_LENGTH] = 2, 4
    at = control.layout.payloads[1]
    control.segment.map[at : at + 4] = b"\xff{[}"
    request: Any = type("Call", (), {"header": lambda self: b"{}"})()
    with pytest.raises(BackendError, match="the description of its call is not JSON"):
        control.disagreement(request, Deadline(5.0))


@pytest.mark.parametrize(
    "report",
    [b"\xff\xfe", b"[", b"[]", b"7", b'[1, "lost", "x", 3, ""]', b'[1, "lost", 1, ["x"], ""]'],
)
@pytest.mark.parametrize("version", [2, *GARBAGE])
def test_damaged_failure_report_raises_aborted(
    control: Control, report: bytes, version: int
) -> None:
    at = control.layout.failures[1]
    control.segment.map[at : at + len(report)] = report
    control.words[_FAILURE] = version
    control.words[BROKEN] = 1
    with pytest.raises(CommunicatorAbortedError, match=r"report is damaged|memory is damaged"):
        control.refuse_broken("barrier")


def test_report_of_first_thread_that_fails_stays_whole(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = control.segment.map

    class Memory:
        """The segment's memory; another thread fails as soon as the first has written its text."""

        def __getitem__(self, part: slice) -> bytes:
            return memory[part]

        def __setitem__(self, part: slice, data: bytes) -> None:
            memory[part] = data
            if not others:
                others.append(threading.Thread(target=control.fail, args=(second,)))
                others[0].start()
                others[0].join(0.2)

    others: list[threading.Thread] = []
    monkeypatch.setattr(control, "_core", None)  # C wakes the peers in an mmap only
    monkeypatch.setattr(control._failures, "_map", Memory())
    second = Failure("aborted", 0, "the second reason, which is longer")
    control.fail(Failure("aborted", 0, "the first reason"))
    others[0].join()
    with pytest.raises(CommunicatorAbortedError, match="the first reason"):
        control.refuse_broken("barrier")


def test_broken_communicator_without_report_raises_aborted(control: Control) -> None:
    control.words[BROKEN] = 1
    with pytest.raises(CommunicatorAbortedError, match="shared memory is damaged"):
        control.refuse_broken("barrier")


@pytest.mark.parametrize("notice", [b"\xff[}", b"7", b'{"a": 1}', b'["0", {}]'])
def test_damaged_notice_is_ignored(control: Control, notice: bytes) -> None:
    backend: Any = object.__new__(ShmBackend)
    backend._board = control.notices
    control.words[2 * LINE + _NOTICE] = 2
    at = control.layout.notices[1]
    control.segment.map[at : at + len(notice)] = notice
    assert backend.post({"name": "mine"}, 0) == {0: {"name": "mine"}}


@pytest.mark.parametrize(
    "wait",
    [b"\xff[}", b"7", b'{"a": 1}', b"[[]]", b'[["recv", "", false, [-1], null]]', b"[" * 5000],
)
@pytest.mark.parametrize("version", [2, *GARBAGE])
def test_damaged_description_of_a_wait_leaves_the_timeout_as_it_is(
    control: Control, wait: bytes, version: int
) -> None:
    control.words[2 * LINE + _WAITING] = version
    at = control.layout.waits[1]
    control.segment.map[at : at + len(wait)] = wait
    with pytest.raises(
        CollectiveTimeoutError, match="for rank 1: rank 1 has made no collective call"
    ):
        control._late([1], MessageCall("recv", 0, None, 1), Deadline(0.0))


@pytest.mark.parametrize("offset", [*GARBAGE, 4096 - 8, 4])
def test_offset_outside_symmetric_memory_is_refused(control: Control, offset: int) -> None:
    heap, root = Heap(control), np.zeros(2 * 4096, np.uint8)
    heap._know(_SymmetricSegment(1, root, 0, 4096), root)
    with pytest.raises(BackendError, match="rank 1's words in shared memory are damaged: 16 bytes"):
        heap.view(1, 1, offset, np.dtype(np.float64), 2)


@on_ranks("two")
def test_pid_of_rank_is_that_of_joined_process(comm: Communicator) -> None:
    control = comm.inner.transport._control  # type: ignore[attr-defined]
    pids = comm.all_gather(np.array([os.getpid()]))
    before = control.words[(1 + comm.rank) * LINE + 33]
    control.words[(1 + comm.rank) * LINE + 33] = 1
    comm.barrier()
    assert [control.pid(rank) for rank in range(2)] == pids.tolist()
    control.words[(1 + comm.rank) * LINE + 33] = before


@pytest.mark.parametrize("core", [True, False], ids=["in C", "in Python"])
@on_ranks("two")
def test_rank_with_damaged_words_is_named_on_both_ranks(comm: Communicator, core: bool) -> None:
    native.switch(core and native.chosen.extension is not None)
    group = comm.dup()
    native.switch(True)
    control = group.inner.transport._control  # type: ignore[attr-defined]
    group.barrier()
    comm.barrier()  # both ranks have left the barrier of the group
    if comm.rank == 1:
        control.words[_STEP] = 1 << 40
        comm.barrier()
        with pytest.raises(CommunicatorAbortedError, match="rank 1's words in shared memory"):
            group.barrier()
        return
    comm.barrier()
    with pytest.raises(BackendError, match=r"rank 1's words in shared memory .* \[rank 0\]"):
        group.barrier()


@pytest.mark.parametrize(
    ("offsets", "count"),
    [([-4, 0, 8], 4), ([0, 5, 8], 4), ([0, 4, 3], 4), ([1 << 40, 1 << 41, 1 << 42], 4)],
)
def test_impossible_pieces_of_peer_are_refused(offsets: list[int], count: int) -> None:
    aborted: list[Failure] = []
    backend: Any = object.__new__(ThreadsBackend)
    backend.rank, backend.size, backend.abort = 0, 2, aborted.append
    with pytest.raises(BackendError, match="all_to_all: rank 1 announces elements"):
        backend._start_of_piece(np.array(offsets), 1, count)
    assert aborted[0].kind == "aborted"


# -- the length of a segment -----------------------------------------------------------------


_SHORTENS = """
import os, sys
with open(sys.argv[1], "r+b") as file:
    for length in (0, int(sys.argv[2])):
        try:
            os.ftruncate(file.fileno(), length)
        except OSError as error:
            print(error.errno, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="segments are files")
@pytest.mark.parametrize("kind", ["control", "symmetric"])
def test_segment_length_is_sealed_against_other_processes(kind: str) -> None:
    nbytes = Layout(2).nbytes if kind == "control" else 8192
    segment = Segment.create(nbytes)
    command = [sys.executable, "-c", _SHORTENS, segment.path, str(2 * nbytes)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.split() == ["1", "1"], "expected EPERM twice"
    segment.map[nbytes - 1] = 1  # a shorter segment would raise SIGBUS
    segment.close_descriptor()


def test_too_short_segment_is_not_opened() -> None:
    segment = Segment.create(8192)
    with pytest.raises(OSError, match="shorter than 8193 bytes"):
        Segment.open(segment.path, 8193)
    segment.close_descriptor()


def test_segment_is_created_without_seal_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, seals: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    segment = Segment.create(8192)
    assert len(segment.map) == 8192
    segment.close_descriptor()
