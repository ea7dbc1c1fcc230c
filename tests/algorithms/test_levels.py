"""Long calls on two levels, replayed by ranks in threads: results, and the ways of the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from collective.algorithms import messages, pieces, schedules
from collective.algorithms.schedules import EXCHANGE, INSIDE, Schedule, record
from collective.contract.backend import Backend
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from tests.algorithms.test_schedules import Call, Marked, move, reduction
from tests.support.algorithm_cases import TIMEOUT
from tests.support.loopback import run

pytestmark = pytest.mark.quick

Hosts = Sequence[Sequence[int]]
# The tag of messages inside a host: those of another host must never arrive.
INSIDE_TAG = -50
HOSTS = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0, 2, 3], [1]],
    [[0, 1, 2], [3, 4, 5]],
    [[0, 1], [2], [3, 4]],
    [[0, 1, 2]],
]
MOVES = ["broadcast", "scatter", "gather", "all_gather", "all_to_all"]


class Inside:
    """Messages between the ranks of one host, numbered by place."""

    def __init__(self, backend: Backend, members: Sequence[int]) -> None:
        self.rank, self.size = members.index(backend.rank), len(members)
        self._backend, self._members = backend, members

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._backend.send(src, self._members[dst], INSIDE_TAG, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> None:
        self._backend.recv(dst, self._members[src], INSIDE_TAG, deadline)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        messages.sendrecv(self, src, to, dst, source, tag, deadline)


def check(call: Call, hosts: Hosts) -> list[Schedule]:
    """Check that a call on two levels gives what it gives on one; return the schedules."""

    def body(backend: Backend) -> Schedule:
        assert isinstance(backend, Marked)
        rank, size = backend.rank, backend.size
        request = call.requests[rank]
        members = next(members for members in hosts if rank in members)
        schedule = record(request, rank, size, call.dtype, call.elements, hosts)
        results = []
        for nested in (False, True):
            src, dst, out = call.arrays(rank)
            if request.operation == "broadcast":
                dst = src = src or dst
            if nested:
                schedule.run(backend, src, dst, Deadline(TIMEOUT), inside=Inside(backend, members))
            else:
                backend.plan(request)(src, dst, Deadline(TIMEOUT))
            if out is not None:
                out.checked()
            results.append(None if dst is None else dst.array)
        if results[0] is not None and results[1] is not None:
            np.testing.assert_array_equal(results[1], results[0])
        return schedule

    return run(len(call.requests), body, Marked)


@pytest.fixture(autouse=True)
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all calls long, and blocks of 64 bytes."""
    monkeypatch.setattr(schedules, "SHORT_BYTES", 0)
    monkeypatch.setattr(pieces, "CHUNK_BYTES", 64)


def _ranks(hosts: Hosts) -> int:
    return sum(map(len, hosts))


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", ["sum", "avg", "compose"])
def test_reduction_on_two_levels_gives_what_one_level_gives(
    operation: str, name: str, hosts: Hosts
) -> None:
    size = _ranks(hosts)
    rng = np.random.default_rng(size)
    dtype = BY_NAME["complex128" if name == "avg" else "int64"]
    for count in (1, 3, 41):
        for root in range(size):
            call = reduction(
                operation, name, dtype, pieces.even(count, size), rng, root=root,
                in_place=bool(root % 2),
            )  # fmt: skip
            if name == "avg":  # whole numbers: their sums do not depend on the order
                call = call._replace(inputs=[np.round(8 * x) for x in call.inputs if x is not None])
            check(call, hosts)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("operation", MOVES)
def test_move_on_two_levels_gives_what_one_level_gives(operation: str, hosts: Hosts) -> None:
    size = _ranks(hosts)
    rng = np.random.default_rng(size)
    for count in (1, 3, 41):
        for root in range(size):
            counts = [count + 3 * rank for rank in range(size)]
            if operation == "all_to_all":
                call = move(operation, BY_NAME["int16"], counts, rng, alike=bool(root % 2))
            else:
                call = move(operation, BY_NAME["int16"], counts, rng, root=root)
            check(call, hosts)


@pytest.mark.parametrize("hosts", [HOSTS[0], HOSTS[1], HOSTS[3]], ids=str)
@pytest.mark.parametrize("operation", [*MOVES, "all_reduce", "reduce", "reduce_scatter"])
def test_nothing_inside_a_host_takes_the_network(operation: str, hosts: Hosts) -> None:
    size = _ranks(hosts)
    rng, counts = np.random.default_rng(size), [40] * size
    if operation in MOVES:
        call = move(operation, BY_NAME["int16"], counts, rng)
    else:
        call = reduction(operation, "sum", BY_NAME["int64"], counts, rng)
    for rank, schedule in enumerate(check(call, hosts)):
        local = next(members for members in hosts if rank in members)
        across = [step for step in schedule.steps if step.kind == EXCHANGE]
        assert not {peer for step in across for peer in (step.to, step.source)} & set(local)
        assert any(step.kind == INSIDE for step in schedule.steps) or rank not in hosts[0]


def test_all_reduce_sends_each_element_across_once_per_host() -> None:
    rng, hosts = np.random.default_rng(0), HOSTS[0]
    call = reduction("all_reduce", "sum", BY_NAME["int64"], [100] * 4, rng)
    sent = [
        sum(step.nleft for step in schedule.steps if step.kind == EXCHANGE)
        for schedule in check(call, hosts)
    ]
    for members in hosts:
        assert sum(sent[rank] for rank in members) == 400 * 8
