"""How the default algorithms use a transport: exchanges, deadlines, rounds, bytes and scratch."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.algorithms import moves, pieces
from collective.algorithms.messages import COLLECTIVE_TAG
from collective.contract.backend import Backend
from collective.deadline import Deadline
from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    RankError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op
from collective.request import Disagreement, Request
from tests.support.algorithm_cases import CALL, INT64, TIMEOUT, kinds, same
from tests.support.loopback import Loopback, Rendezvous, connect_all, run

# Longer than any wait of these tests on a busy machine.
FAR_S = 60.0

SUM = as_op("sum")
ADDING = Request("all_reduce", op=SUM)
BARRIER = Request("barrier")
UINT8 = BY_NAME["uint8"]


def number(value: int) -> Buffer:
    return Buffer(np.array([value], np.int64), INT64)


# -- sendrecv -----------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("tag", [COLLECTIVE_TAG, 0, 7])
@pytest.mark.parametrize(
    "shift", [pytest.param((n, d), id=f"{n}-by-{d}") for n in (2, 3, 5, 6, 8) for d in range(n)]
)
def test_sendrecv_shifts_by_every_distance(
    kind: type[Backend], tag: int, shift: tuple[int, int]
) -> None:
    size, distance = shift

    def body(backend: Backend) -> int:
        to, source = (backend.rank + distance) % size, (backend.rank - distance) % size
        inbox = number(-1)
        backend.sendrecv(number(backend.rank), to, inbox, source, tag, Deadline(TIMEOUT))
        return int(inbox.array[0])

    assert run(size, body, kind) == [(rank - distance) % size for rank in range(size)]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 9).flatmap(lambda n: st.permutations(range(n))))
def test_sendrecv_of_any_permutation_completes_with_synchronous_send(
    targets: Sequence[int],
) -> None:
    def body(backend: Backend) -> int:
        inbox = number(-1)
        source = targets.index(backend.rank)
        backend.sendrecv(
            number(backend.rank),
            targets[backend.rank],
            inbox,
            source,
            COLLECTIVE_TAG,
            Deadline(TIMEOUT),
        )
        return int(inbox.array[0])

    received = run(len(targets), body, Rendezvous)
    assert received == [targets.index(rank) for rank in range(len(targets))]


@kinds
@pytest.mark.parametrize("first", ["send", "recv"])
@pytest.mark.parametrize("rank", [0, 1])
def test_sendrecv_matches_peer_send_and_recv(kind: type[Backend], first: str, rank: int) -> None:
    def body(backend: Backend) -> int:
        peer, inbox = 1 - backend.rank, number(-1)
        calls: dict[str, Callable[[], Any]] = {
            "send": lambda: backend.send(number(backend.rank), peer, 3, Deadline(TIMEOUT)),
            "recv": lambda: backend.recv(inbox, peer, 3, Deadline(TIMEOUT)),
        }
        if backend.rank == rank:
            backend.sendrecv(number(backend.rank), peer, inbox, peer, 3, Deadline(TIMEOUT))
        else:
            for name in sorted(calls, reverse=first == "send"):
                calls[name]()
        return int(inbox.array[0])

    assert run(2, body, kind) == [1, 0]


@pytest.mark.parametrize(("to", "source"), [(0, 1), (1, 0)])
def test_sendrecv_half_with_self_raises_rank_error(to: int, source: int) -> None:
    backend = connect_all(2)[0]
    with pytest.raises(RankError, match=r"to rank \d, from rank \d; .* \[rank 0 of 2\]"):
        backend.sendrecv(number(1), to, number(2), source, 0, Deadline(TIMEOUT))


def test_sendrecv_raises_error_of_its_send() -> None:
    class Broken(Loopback):
        def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
            super().send(src, dst, tag, deadline)
            raise OSError("the cable is unplugged")

    def body(backend: Backend) -> None:
        backend.sendrecv(
            number(0), 1 - backend.rank, number(0), 1 - backend.rank, 5, Deadline(TIMEOUT)
        )

    with pytest.raises(OSError, match="unplugged"):
        run(2, body, Broken)


# -- agreement ----------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_agree_on_equal_calls_returns(kind: type[Backend], size: int) -> None:
    run(size, lambda b: b.agree(Request("reduce", root=1), Deadline(TIMEOUT)), kind)


@kinds
@pytest.mark.parametrize("odd", [0, 2, 3])
def test_agree_on_different_calls_gives_every_rank_all_headers(
    kind: type[Backend], odd: int
) -> None:
    def body(backend: Backend) -> tuple[list[Any], int]:
        call = Request("reduce", INT64, (3,), root=7 if backend.rank == odd else 1)
        with pytest.raises(Disagreement) as caught:
            backend.agree(call, Deadline(TIMEOUT))
        total = number(0)
        backend.plan(ADDING)(number(1), total, Deadline(TIMEOUT))
        return [header["options"]["root"] for header in caught.value.headers], int(total.array[0])

    roots = [7 if rank == odd else 1 for rank in range(4)]
    assert run(4, body, kind) == [(roots, 4)] * 4


# -- deadlines ----------------------------------------------------------------------

COLLECTIVES: dict[str, Callable[[Backend, Deadline], Any]] = {
    "barrier": lambda b, t: b.plan(BARRIER)(None, None, t),
    "broadcast": lambda b, t: b.plan(Request("broadcast", root=2))(*[number(1)] * 2, t),
    "all_reduce": lambda b, t: b.plan(ADDING)(number(1), number(0), t),
    "all_gather": lambda b, t: b.plan(Request("all_gather", elements=[1] * 3))(
        number(1), Buffer.empty(3, INT64), t
    ),
    "agree": lambda b, t: b.agree(CALL, t),
}


@kinds
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_stop_waiting_for_absent_rank_at_deadline(
    kind: type[Backend], name: str
) -> None:
    ended = threading.Barrier(3)

    def body(backend: Backend) -> float:
        start = time.monotonic()
        if backend.rank != 2:
            with pytest.raises((CollectiveTimeoutError, CommunicatorAbortedError)):
                COLLECTIVES[name](backend, Deadline(0.15))
        ended.wait(FAR_S)
        return time.monotonic() - start

    assert max(run(3, body, kind)) < FAR_S


def test_messages_of_call_share_its_deadline() -> None:
    class Noting(Loopback):
        deadlines: list[Deadline]

        def sendrecv(self, *args: Any) -> None:
            self.__dict__.setdefault("deadlines", []).append(args[-1])
            super().sendrecv(*args)

    def body(backend: Backend) -> None:
        deadline = Deadline(TIMEOUT)
        backend.plan(BARRIER)(None, None, deadline)
        deadlines = backend.__dict__["deadlines"]
        assert len(deadlines) == 3
        assert all(used is deadline for used in deadlines)

    run(8, body, Noting)


def test_recv_after_deadline_returns_arrived_message() -> None:
    def body(backend: Backend) -> int:
        if backend.rank == 0:
            backend.send(number(7), 1, 0, Deadline(TIMEOUT))
        backend.plan(BARRIER)(None, None, Deadline(TIMEOUT))
        inbox = number(0)
        if backend.rank == 1:
            backend.recv(inbox, 0, 0, Deadline(0.0))
        return int(inbox.array[0])

    assert run(2, body) == [0, 7]


# -- rounds, bytes and scratch --------------------------------------------------------


class Counting(Rendezvous):
    """Transport that records the number of bytes of each message that its rank sends."""

    sent: list[int]

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self.__dict__.setdefault("sent", []).append(src.nbytes)
        super().send(src, dst, tag, deadline)


def sent(size: int, body: Callable[[Backend], Any]) -> list[list[int]]:
    def counted(backend: Backend) -> list[int]:
        body(backend)
        return list(backend.__dict__.get("sent", []))

    return run(size, counted, Counting)


def call(operation: str, count: int, ordered: bool = False) -> Callable[[Backend], Any]:
    def body(b: Backend) -> None:
        x, y = Buffer(np.zeros(count, np.uint8), UINT8), Buffer.empty(count, UINT8)
        every = Buffer.empty(count * b.size, UINT8)
        even = [count] * b.size
        buffers = {
            "barrier": (None, None),
            "broadcast": (x, x),
            "all_gather": (x, every),
            "gather": (x, None if b.rank else every),
            "reduce": (x, None if b.rank else y),
        }
        op = SUM if operation in ("all_reduce", "reduce") else None
        request = Request(operation, op=op, ordered=ordered, root=0, elements=even)
        b.plan(request)(*buffers.get(operation, (x, y)), Deadline(TIMEOUT))

    return body


@pytest.mark.parametrize("operation", ["barrier", "all_reduce", "all_gather"])
@pytest.mark.parametrize("ordered", [False, True], ids=["any_order", "ordered"])
@pytest.mark.parametrize("size", [4, 8])
def test_short_collectives_take_log2_size_rounds(operation: str, ordered: bool, size: int) -> None:
    rounds = size.bit_length() - 1
    assert [len(of) for of in sent(size, call(operation, 8, ordered))] == [rounds] * size


@pytest.mark.parametrize("operation", ["gather", "reduce"])
def test_short_gather_and_reduce_send_one_message_per_rank(operation: str) -> None:
    assert [len(of) for of in sent(8, call(operation, 8))] == [0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("ordered", [False, True], ids=["any_order", "ordered"])
def test_long_all_reduce_sends_minimum_of_bytes(ordered: bool) -> None:
    nbytes = 4 << 20
    totals = [sum(of) for of in sent(4, call("all_reduce", nbytes, ordered))]
    assert totals == [2 * nbytes * 3 // 4] * 4


def test_long_broadcast_sends_at_most_twice_its_length_per_rank() -> None:
    nbytes = 4 << 20
    assert max(sum(of) for of in sent(8, call("broadcast", nbytes))) <= 2 * nbytes


@pytest.mark.parametrize("ordered", [False, True], ids=["any_order", "ordered"])
def test_long_all_reduce_scratch_is_bounded(ordered: bool) -> None:
    count = 16 << 20
    data = [(Buffer(np.zeros(count, np.uint8), UINT8), Buffer.empty(count, UINT8)) for _ in "abcd"]

    def body(backend: Backend) -> None:
        src, dst = data[backend.rank]
        backend.plan(Request("all_reduce", op=SUM, ordered=ordered))(src, dst, Deadline(TIMEOUT))

    tracemalloc.start()
    try:
        run(4, body, Rendezvous)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 5 * pieces.CHUNK_BYTES + (1 << 20)


# -- small parts --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 13])
def test_binomial_nodes_form_one_tree(size: int) -> None:
    nodes = [moves.node_at(position, size) for position in range(size)]
    children = sorted(child for node in nodes for child, _ in node.children)
    assert children == list(range(1, size))
    assert all(nodes[child].parent == p for p, n in enumerate(nodes) for child, _ in n.children)
    assert all(nodes[child].stop == stop for n in nodes for child, stop in n.children)
    assert nodes[0].stop == size


def test_copy_onto_itself_writes_nothing() -> None:
    data = np.arange(4)
    data.flags.writeable = False
    pieces.copy(Buffer(data, INT64), Buffer(data[:], INT64))
    same(data, np.arange(4))
