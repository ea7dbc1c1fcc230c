"""Collectives over shared memory in C: under the sanitizers, and with their callbacks to Python.

The conformance kit and test_shm_in_c check the results for every type, operation and length.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collective.deadline import Deadline
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from tests.support.huge_pages import (
    in_huge_pages,
    lies_in_huge_pages,
    needs_huge_pages,
    page_map,
)  # fmt: skip
from tests.support.interpreter import run_python

core = pytest.importorskip("collective.native._core", reason="the native core is not built")

AREA_BYTES = 4096
CALLS, CALL_BYTES = 64, 256
LINE_BYTES = 512
FLOAT32, UINT8 = BY_NAME["float32"], BY_NAME["uint8"]
ALL_REDUCE, BROADCAST, ALL_GATHER = 1, 3, 4  # as in collective/native/shared.h
DIGEST, LOCATION, LAST_CALL, DESCRIBED, POSTED, FOLDED, READ = 1, 8, 34, 39, 40, 48, 56


@pytest.mark.whole
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize(
    ("program", "ranks", "areas"),
    [
        ("shared", "2 3 5", "1024 4096"),
        ("messages", "2 3", "0 4096"),
        ("claims", "2 3", "1024 4096"),
        ("frames", "2 3", "0"),
        ("xla", "2 3", "64 4096"),
    ],
    ids=["shared", "messages", "claims", "frames", "xla"],
)
def test_sanitizers_report_no_error(program: str, ranks: str, areas: str, sanitizer: str) -> None:
    # The same as `make sanitize`, but shorter.
    few = ["--calls", "150", "--ranks", *ranks.split(), "--areas", *areas.split()]
    few += ["--programs", program]
    result = run_python(
        "-m", "tests.native.threads", *few, "--sanitizers", sanitizer, merged=True, timeout=110
    )
    if "there is no compiler" in result.stdout:
        pytest.skip(result.stdout)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("150 calls of") == len(ranks.split()) * len(areas.split())


class Damaged(Exception):
    """Error that the callback raises."""


class Host:
    """Rank 0 of two ranks; its peer acts as the test defines when rank 0 waits.

    Args:
        peer: the peer's process; the kernel reads no memory of process 0.

    Attributes:
        asked: request, seconds and word of each wait.
        deadlines: deadline of each wait, and of comparing calls that differ.
    """

    def __init__(self, peer: int = 0) -> None:
        self.deadlines: list[Deadline] = []
        areas = 64 + 2 * LINE_BYTES
        self.calls = calls = areas + 4 * AREA_BYTES
        self.memory = bytearray(calls + CALLS * CALL_BYTES)
        self.words = memoryview(self.memory)[64:].cast("Q")
        self.peer = self.words[LINE_BYTES // 8 :]
        self.asked: list[tuple[Any, ...]] = []
        self.meanwhile: Any = None
        self.shared = core.Shared(
            self.memory, 0, 2, 64, calls, areas, AREA_BYTES, AREA_BYTES // 32 * 3, False, self,
            [os.getpid(), peer], page_map(),
        )  # fmt: skip

    def plan(
        self, operation: int, op: str | None, description: bytes = b"", elements: Any = ()
    ) -> Any:
        return self.shared.plan(
            operation, 7, 0, elements or None, op, FLOAT32.code, False, "request", description,
            self.otherwise,
        )  # fmt: skip

    def last_call(self) -> bytes:
        at = self.calls + self.words[LAST_CALL] % CALLS * CALL_BYTES
        return bytes(self.memory[at : at + CALL_BYTES]).rstrip(b"\0")

    def otherwise(self, plan: Any, src: Any, dst: Any, seconds: float) -> None:
        raise NotImplementedError

    def wait(self, request: Any, deadline: Deadline, *word: int) -> None:
        self.asked.append((request, deadline.seconds, *word))
        self.deadlines.append(deadline)
        if self.meanwhile is not None:
            self.meanwhile()

    def differ(self, request: Any, deadline: Deadline) -> None:
        self.deadlines.append(deadline)
        raise LookupError(f"{request} differs")

    def fail(self, request: Any) -> None:
        raise ConnectionError(f"{request} is broken")

    def refuse(self, request: Any, rank: int, what: str) -> None:
        raise Damaged(f"{request}: rank {rank}: {what}")

    def unreadable(self, request: Any, rank: int) -> None:
        raise PermissionError(f"{request}: rank {rank}")

    def moved(self, request: Any) -> None:
        raise MemoryError(f"{request} has lost its array")

    def arrives(self, digest: int = 7) -> None:
        """Let the peer make its next step."""
        self.peer[DIGEST + (self.peer[0] + 1 & 1)] = digest
        self.peer[0] += 1


def floats(count: int, value: float = 1.0) -> Buffer:
    return Buffer(np.full(count, value, np.float32), FLOAT32)


def late() -> None:
    raise TimeoutError("late")


def test_error_in_wait_callback_ends_call() -> None:
    host = Host()
    host.meanwhile = late
    with pytest.raises(TimeoutError, match="late"):
        host.plan(ALL_REDUCE, "sum")(floats(5), floats(5), 1.5)
    assert host.asked == [("request", 1.5, 1, 64 + LINE_BYTES, 1, 2)]


def test_call_waits_for_block_of_peer() -> None:
    host = Host()

    def arrives_and_is_late() -> None:
        if len(host.asked) == 2:
            raise TimeoutError("late")
        host.arrives()

    host.meanwhile = arrives_and_is_late
    with pytest.raises(TimeoutError, match="late"):
        host.plan(ALL_REDUCE, "sum")(floats(5000), floats(5000), 1.5)
    assert host.asked[1][:-1] == ("request", 1.5, 1, 64 + LINE_BYTES + 8 * POSTED, 1)


@needs_huge_pages
@pytest.mark.parametrize("fails", [None, PermissionError, TimeoutError])
def test_call_fetches_input_that_peer_leaves(fails: type[Exception] | None) -> None:
    host = Host(0 if fails else os.getpid())
    x, theirs = in_huge_pages(1 << 20), np.arange(1 << 20, dtype=np.uint8)
    out = np.zeros(2 << 20, np.uint8)

    def leaves() -> None:
        at = LOCATION + 8 * (host.peer[0] + 1 & 1)
        host.peer[at], host.peer[at + 1] = (1 << 64) - 1, theirs.ctypes.data
        if fails is TimeoutError and host.peer[0]:
            raise TimeoutError("the peer has died")
        host.arrives()

    host.meanwhile = leaves
    plan = host.plan(ALL_GATHER, None, elements=(1 << 20, 1 << 20))
    with contextlib.nullcontext() if fails is None else pytest.raises(fails):
        plan(Buffer(x, UINT8), Buffer(out, UINT8), 1.5)
    if not lies_in_huge_pages(x):
        pytest.skip("the kernel had no huge pages left")
    assert fails is not None or out.tobytes() == x.tobytes() + theirs.tobytes()


def test_waits_of_call_have_one_deadline() -> None:
    host = Host()

    def arrives() -> None:
        if len(host.asked) == 1:
            host.arrives()
            host.peer[POSTED], host.peer[FOLDED] = 5, 5
        host.peer[READ] = 5 * (len(host.asked) - 1)

    host.meanwhile = arrives
    host.plan(ALL_REDUCE, "sum")(floats(5000), floats(5000), 1.5)
    waits = [(place - 64 - LINE_BYTES) // 8 for *_, place, _, _ in host.asked]
    assert waits == [0, READ], "the call waits for other words than the test expects"
    assert len({deadline._end for deadline in host.deadlines}) == 1


def test_comparing_of_differing_calls_keeps_deadline_of_wait() -> None:
    host = Host()
    host.meanwhile = lambda: host.arrives(digest=8)
    with pytest.raises(LookupError):
        host.plan(ALL_REDUCE, "sum")(floats(5), floats(5), 1.0)
    waited, compared = host.deadlines
    assert waited._end == compared._end


def test_each_call_has_its_own_deadline() -> None:
    host = Host()
    host.meanwhile = host.arrives
    plan = host.plan(ALL_REDUCE, "sum")
    for _ in range(2):
        plan(floats(5), floats(5), 1.0)
    first, second = host.deadlines
    assert first._end < second._end


def test_differing_calls_raise_and_write_nothing() -> None:
    host, out = Host(), floats(5, 3.0)
    host.meanwhile = lambda: host.arrives(digest=8)
    with pytest.raises(LookupError, match="request differs"):
        host.plan(ALL_REDUCE, "sum")(floats(5), out, 1.0)
    assert out.array.tolist() == [3.0] * 5


def test_call_on_broken_communicator_leaves_areas_alone() -> None:
    host = Host()
    host.memory[0] = 1
    with pytest.raises(ConnectionError, match="request is broken"):
        host.plan(BROADCAST, None)(floats(5), floats(5), 1.0)
    assert not any(host.memory[64 + 2 * LINE_BYTES : 64 + 2 * LINE_BYTES + 4 * AREA_BYTES])
    assert host.words[0] == 0, "the call has made a step"


@pytest.mark.parametrize(
    ("operation", "most"), [(ALL_REDUCE, 95), (ALL_GATHER, 640)], ids=["short", "written ahead"]
)
def test_call_keeps_area_of_previous_call_intact(operation: int, most: int) -> None:
    host = Host()
    host.peer[DIGEST], host.peer[DIGEST + 1] = 7, 7
    gathers, drawn = operation == ALL_GATHER, np.random.default_rng(0)
    last, at = b"", 0
    for call in range(2000):
        host.peer[0] = call + 1  # the peer has arrived already, but has not read anything yet
        count = int(drawn.integers(1, most + 1 if drawn.integers(2) else 20))
        plan = host.plan(operation, None if gathers else "sum", elements=[count] * 2 * gathers)
        x = floats(count, call + 1.0)
        plan(x, floats(count * (1 + gathers)), 1.0)
        assert host.memory[at : at + len(last)] == last, f"call {call} of {len(x.array)} elements"
        last = x.array.tobytes()
        at = host.memory.index(last)


@pytest.mark.parametrize("count", [400, 4000], ids=["one piece", "several"])
def test_memory_returned_to_peer_is_not_written(count: int) -> None:
    host = Host()
    memory = np.ones(2 * count, np.float32)
    own_half, peer_half = memory[:count], memory[count:]
    addresses = [part.__array_interface__["data"][0] for part in (own_half, peer_half)]
    assert host.shared.know(5, own_half.nbytes, addresses)

    def arrives_and_gives_up() -> None:
        for location in (LOCATION, LOCATION + 2, LOCATION + 8, LOCATION + 10):
            host.peer[location] = 5
        host.arrives()
        host.memory[0] = 1

    host.meanwhile = arrives_and_gives_up
    with pytest.raises(ConnectionError, match="request is broken"):
        host.plan(ALL_REDUCE, "sum")(Buffer(own_half, FLOAT32), Buffer(own_half, FLOAT32), 1.0)
    assert peer_half.tolist() == [1.0] * count


@pytest.mark.parametrize("location", [LOCATION, LOCATION + 2], ids=["input", "output"])
@pytest.mark.parametrize("offset", [1600, 4, 1 << 40, (1 << 64) - 1600, 2])
def test_peer_offset_outside_segment_is_refused(location: int, offset: int) -> None:
    host, count = Host(), 400
    memory = np.ones(2 * count, np.float32)
    mine = Buffer(memory[:count], FLOAT32)
    start = memory.__array_interface__["data"][0]
    assert host.shared.know(5, mine.nbytes, [start, start + mine.nbytes])

    def arrives() -> None:
        for which in (LOCATION, LOCATION + 2, LOCATION + 8, LOCATION + 10):
            host.peer[which] = 5
        for parity in (0, 8):
            host.peer[location + parity + 1] = offset
        host.arrives()

    host.meanwhile = arrives
    with pytest.raises(Damaged, match="request: rank 1: an array's place"):
        host.plan(ALL_REDUCE, "sum")(mine, mine, 1.0)
    assert memory.tolist() == [1.0] * 2 * count


@pytest.mark.parametrize("step", [3, 1 << 40, (1 << 64) - 1])
def test_impossible_step_of_peer_is_no_arrival(step: int) -> None:
    host = Host()
    host.peer[0], host.peer[DIGEST], host.peer[DIGEST + 1] = step, 7, 7

    def refuse() -> None:
        raise Damaged

    host.meanwhile = refuse
    with pytest.raises(Damaged):
        host.plan(ALL_REDUCE, "sum")(floats(5), floats(5), 1.0)


@pytest.mark.parametrize("word", [POSTED, FOLDED, READ])
def test_impossible_block_of_peer_is_not_accepted(word: int) -> None:
    host = Host()

    def arrives_and_is_damaged() -> None:
        if len(host.asked) > 1:
            raise Damaged
        host.arrives()
        for counter in (POSTED, FOLDED, READ):
            host.peer[counter] = 5
        host.peer[word] = 6

    host.meanwhile = arrives_and_is_damaged
    with pytest.raises(Damaged):
        host.plan(ALL_REDUCE, "sum")(floats(5000), floats(5000), 1.0)
    assert host.asked[1][-1] == 5, "the call uses other blocks than the test"


def test_segment_in_use_is_not_forgotten() -> None:
    host, memory = Host(), np.ones(800, np.float32)
    start = memory.__array_interface__["data"][0]
    for number, at in ((5, start), (6, 4096)):
        assert host.shared.know(number, 1600, [at, at + 1600])

    def forgets() -> None:
        assert host.shared.know(6), "a segment that the call does not use cannot be forgotten"
        host.shared.know(5)

    host.meanwhile = forgets
    mine = Buffer(memory[:400], FLOAT32)
    with pytest.raises(RuntimeError, match="a running call uses segment 5"):
        host.plan(ALL_REDUCE, "sum")(mine, mine, 1.0)
    assert host.shared.know(5)


def test_short_call_uses_no_segment() -> None:
    host, memory = Host(), np.ones(800, np.float32)
    start = memory.__array_interface__["data"][0]
    assert host.shared.know(5, 1600, [start, start + 1600])
    mine = Buffer(memory[:400], FLOAT32)
    host.meanwhile = host.arrives
    host.plan(BROADCAST, None)(mine, mine, 1.0)

    def forgets() -> None:
        assert host.shared.know(5)
        host.arrives()

    host.meanwhile = forgets
    host.plan(ALL_REDUCE, "sum")(floats(5), floats(5), 1.0)


def test_arrays_of_other_lengths_are_refused() -> None:
    host = Host()
    with pytest.raises(ValueError, match="other lengths"):
        host.plan(ALL_REDUCE, "sum")(floats(8), floats(7), 1.0)
    assert not any(host.words)


def test_nested_call_is_refused() -> None:
    host = Host()
    plan = host.plan(ALL_REDUCE, "sum")
    host.meanwhile = lambda: plan(floats(5), floats(5), 1.0)
    with pytest.raises(RuntimeError, match="another thread of this rank is in a call"):
        plan(floats(5), floats(5), 1.0)


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param(lambda x: (x[:8], x[1:9]), id="overlapping"),
        pytest.param(lambda x: (x[:16:2], x[20:28]), id="strided"),
        pytest.param(lambda x: (x.view(np.uint8)[1:33].view(np.float32), x[20:28]), id="unaligned"),
        pytest.param(lambda x: (x[:8], np.frombuffer(bytes(32), np.float32)), id="read-only"),
        pytest.param(lambda x: (x[:8].view(np.recarray), x[20:28]), id="subclass"),
    ],
)
def test_unsuitable_arrays_are_handed_over_before_any_step(arrays: Any) -> None:
    host = Host()
    src, dst = (Buffer(array, FLOAT32) for array in arrays(np.ones(40, np.float32)))
    with pytest.raises(NotImplementedError):
        host.plan(ALL_REDUCE, "sum")(src, dst, 1.0)
    assert not any(host.words)


@pytest.mark.parametrize(
    ("lines", "calls", "areas"),
    [
        (-8, 16 << 10, 1088), (4, 16 << 10, 1088), (32_000, 16 << 10, 1088), (64, 16 << 10, 1092),
        (64, 16 << 10, 1 << 20), (64, -8, 1088), (64, (16 << 10) + 8, 1088), (64, 1 << 20, 1088),
    ],
)  # fmt: skip
def test_offsets_outside_segment_are_refused(lines: int, calls: int, areas: int) -> None:
    with pytest.raises(ValueError, match="not in the segment"):
        core.Shared(bytearray(32 << 10), 0, 2, lines, calls, areas, 1024, 96, False, print)


def test_arrays_of_hundreds_of_segments_are_found_until_forgotten() -> None:
    host, memory = Host(), np.ones((300, 1024), np.float32)
    starts = [row.__array_interface__["data"][0] for row in memory]
    rows = np.random.default_rng(0).permutation(300).tolist()
    for row in rows:
        assert host.shared.know(row + 1, 4096, [starts[row], 4096])
    for row in rows[::3]:
        assert host.shared.know(row + 1)
        assert not host.shared.know(row + 1)
    host.meanwhile = late
    for row in range(300):
        part = Buffer(memory[row, 24:], FLOAT32)
        with pytest.raises(TimeoutError):
            host.plan(ALL_REDUCE, "sum")(part, part, 1.0)
        at = LOCATION + 8 * (host.words[0] & 1)
        known = (0, 0) if row in rows[::3] else (row + 1, 96)
        assert tuple(host.words[at : at + 2])[: 1 + (known[0] > 0)] == known[: 1 + (known[0] > 0)]


@pytest.mark.parametrize("segment", [(0, 64), (1, -1)])
def test_impossible_segment_is_refused(segment: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="know: the number or the length"):
        Host().shared.know(*segment, [4096, 8192])


def test_peers_can_read_every_call_of_a_hundred_in_turn() -> None:
    host = Host()
    host.peer[DIGEST], host.peer[DIGEST + 1] = 7, 7
    plans = [host.plan(ALL_REDUCE, "sum", b"call %d" % number) for number in range(100)]
    for call in range(300):
        host.peer[0] = call + 1
        plans[call % 100](floats(5), floats(5), 1.0)
        assert host.last_call() == b"call %d" % (call % 100)
        assert host.words[DESCRIBED] == call + 1


def test_call_that_is_still_described_is_not_described_again() -> None:
    host = Host()
    host.peer[DIGEST], host.peer[DIGEST + 1] = 7, 7
    plans = [host.plan(ALL_REDUCE, "sum", b"call %d" % number) for number in range(64)]
    for call in range(200):
        host.peer[0] = call + 1
        plans[call % 64](floats(5), floats(5), 1.0)
        assert host.last_call() == b"call %d" % (call % 64)
    assert host.words[DESCRIBED] == 64


def _new_memory(array: Any) -> None:
    """Give an array other memory, as unpickling does."""
    array.__setstate__((1, (2 * array.size,), array.dtype, False, 2 * array.tobytes()))


@pytest.mark.parametrize("count", [5, 5000, 50_000], ids=["short", "staged", "without the lock"])
@pytest.mark.parametrize("which", [0, 1], ids=["input", "output"])
def test_array_that_gets_other_memory_in_a_wait_ends_the_call(count: int, which: int) -> None:
    host, buffers = Host(), (floats(count), floats(count))

    def arrives_late() -> None:
        host.arrives()
        _new_memory(buffers[which].array)

    host.meanwhile = arrives_late
    with pytest.raises(MemoryError, match="request has lost its array"):
        host.plan(ALL_REDUCE, "sum")(*buffers, 1.0)
    assert buffers[which].array.tolist() == [1.0] * 2 * count


@pytest.mark.parametrize("owner", [bytearray, "shared memory"], ids=str)
def test_owner_of_an_array_cannot_free_its_memory_in_a_wait(owner: Any) -> None:
    host, x = Host(), floats(5)
    block = bytearray(20) if owner is bytearray else mmap.mmap(-1, 20)
    out: Any = np.ndarray(5, np.float32, buffer=block)
    refusals = []

    def arrives_late() -> None:
        try:
            block.append(1) if isinstance(block, bytearray) else block.close()
        except BufferError as error:
            refusals.append(error)
        host.arrives()

    host.meanwhile = arrives_late
    host.plan(BROADCAST, None)(x, Buffer(out, FLOAT32), 1.0)
    assert len(refusals) == 1
    del out
    block.append(1) if isinstance(block, bytearray) else block.close()


def test_no_call_begins_while_the_ranks_share_their_calls() -> None:
    host, refusals = Host(), []
    host.meanwhile = lambda: host.arrives(digest=8)

    def differ(request: Any, deadline: Deadline) -> None:
        with pytest.raises(
            RuntimeError, match="another thread of this rank is in a call"
        ) as caught:
            host.plan(ALL_REDUCE, "sum")(floats(5), floats(5), 1.0)
        refusals.append(caught.value)
        raise LookupError

    host.differ = differ  # type: ignore[method-assign]
    with pytest.raises(LookupError):
        host.plan(ALL_REDUCE, "sum")(floats(5), floats(5), 1.0)
    assert len(refusals) == 1


@pytest.fixture(name="torch", scope="module")
def _torch() -> Any:
    torch = pytest.importorskip("torch")
    adapter_of(torch.zeros(1))
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this version of torch does not let C view tensors")
    return torch


@pytest.mark.parametrize("count", [5, 50_000], ids=["short", "without the lock"])
def test_tensor_can_be_resized_only_before_and_after_a_call(torch: Any, count: int) -> None:
    host, x, out = Host(), floats(count), torch.zeros(count + 1).resize_(count)

    def arrives_late() -> None:
        # A resize_() that fails leaves the shape of a tensor wrong, so this resizes no tensor but a
        # view, and the storage.
        for resizable in (out.view(torch.int32), out.untyped_storage()):
            with pytest.raises(RuntimeError, match="not resizable"):
                resizable.resize_(80 * count)
        host.arrives()
        host.meanwhile = late  # a long call waits once more

    host.meanwhile = arrives_late
    if count > 5:
        with pytest.raises(TimeoutError):
            host.plan(ALL_REDUCE, "sum")(x, SimpleNamespace(array=out), 1.0)
    else:
        host.plan(BROADCAST, None)(x, SimpleNamespace(array=out), 1.0)
        assert out.tolist() == [1.0] * 5
    out.resize_(10 * count)
    assert len(out) == 10 * count


def test_storage_stays_held_until_the_last_of_its_calls_ends(torch: Any) -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    first, second = core.hold([tensor[:2]]), core.hold({"b": (tensor[2:],)})
    del first
    assert not storage.resizable()
    del second
    assert storage.resizable()
    tensor.numpy()  # forbids it for ever
    held = core.hold([tensor])
    del held
    assert not storage.resizable()


def test_storage_that_gets_other_memory_in_a_wait_ends_the_call(torch: Any) -> None:
    host, out = Host(), torch.zeros(5)

    def arrives_late() -> None:
        host.arrives()
        out.share_memory_()

    host.meanwhile = arrives_late
    with pytest.raises(MemoryError, match="request has lost its array"):
        host.plan(BROADCAST, None)(floats(5), SimpleNamespace(array=out), 1.0)
    assert out.tolist() == [0.0] * 5


def test_tensor_that_gets_another_storage_in_a_wait_leaves_the_old_one_to_the_call(
    torch: Any,
) -> None:
    host, out = Host(), torch.zeros(5)
    old = out.view(5)

    def arrives_late() -> None:
        host.arrives()
        out.set_(torch.zeros(5))

    host.meanwhile = arrives_late
    host.plan(BROADCAST, None)(floats(5), SimpleNamespace(array=out), 1.0)
    assert old.tolist() == [1.0] * 5
    assert out.tolist() == [0.0] * 5
