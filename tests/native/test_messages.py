"""Messages in C, with both ends in one process: sizes, tags, heads, kept and damaged messages."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collective.deadline import Deadline
from tests.support.huge_pages import in_huge_pages, lies_in_huge_pages, needs_huge_pages, page_map

core = pytest.importorskip("collective.native._core", reason="the native core is not built")

Array = np.ndarray[Any, Any]

RINGS, RING_BYTES, PAGE = 4096, 8192, 4096
ANY, NOBODY = -1, -2
HEAD_ROOM, CLAIMED = 896, 64 << 10
# Index of the word in which rank 1 claims a message of rank 0.
CLAIM = RINGS // 8 + 128


class Damaged(Exception):
    """Error that the callback raises."""


class Ends:
    """The ends of the rings of all ranks, in one piece of memory.

    Attributes:
        waits: arguments of each call of ``wait``.
        patient: whether a wait continues; if false, a wait raises.
    """

    def __init__(
        self, size: int = 2, patient: bool = True, pid: int | None = None, claims: bool = True
    ) -> None:
        self.memory = bytearray(RINGS + size * (size - 1) * (PAGE + RING_BYTES))
        self.words = memoryview(self.memory).cast("q")
        self.waits: list[tuple[int, int, int, float]] = []
        self.patient = patient
        self.each = [
            core.make_messages(
                self.memory,
                rank,
                size,
                RINGS,
                RING_BYTES,
                20,
                claims,
                self,
                0,
                pid and [pid] * size,
                page_map(),
            )
            for rank in range(size)
        ]

    def wait(
        self, advance: Callable[[], int], to: int, source: int, tag: int, deadline: Deadline
    ) -> None:
        self.waits.append((to, source, tag, deadline.seconds))
        self.advance = advance
        while advance():
            if not self.patient:
                raise TimeoutError("late")

    def moved(self, to: int, source: int, tag: int) -> None:
        raise Damaged(f"to {to} from {source} tag {tag}: other memory")

    def refuse(self, rank: int, what: str, *call: object) -> None:
        raise Damaged(f"rank {rank}: {what}")

    def send(self, x: Array, tag: int = 0, heads: bool = False, src: int = 0, dst: int = 1) -> Any:
        return self.each[src](x, dst, None, NOBODY, tag, 5.0, heads)

    def receive(
        self, out: Array, tag: int = 0, heads: bool = False, source: int = 0, rank: int = 1
    ) -> Any:
        return self.each[rank](None, NOBODY, out, source, tag, 5.0, heads)


def data(nbytes: int, seed: int = 0) -> Array:
    return np.random.default_rng([nbytes, seed]).integers(0, 255, nbytes, np.uint8)


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


EDGES = [0, 8, HEAD_ROOM, RING_BYTES - 24, RING_BYTES, CLAIMED, 3 * RING_BYTES, 1 << 20]


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("nbytes", [max(0, n + more) for n in EDGES for more in (-1, 0, 1)])
def test_message_of_any_length_arrives(nbytes: int, heads: bool) -> None:
    ends = Ends()
    x, y = data(nbytes), data(nbytes, 1)
    out, back = np.empty_like(x), np.empty_like(x)
    thread = in_thread(lambda: (ends.receive(out, 3, heads), ends.send(y, 4, heads, 1, 0)))
    ends.send(x, 3, heads)
    assert ends.receive(back, 4, heads, 1, 0) == 1
    thread.join()
    assert out.tobytes() == x.tobytes()
    assert back.tobytes() == y.tobytes()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (1, 1, 1, 1, 1, 1, 1, 2), (30, 40)])
@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128", "int8"])
def test_head_describes_array(shape: tuple[int, ...], dtype: str) -> None:
    ends, x = Ends(), (np.random.default_rng(1).random(shape) * 9).astype(dtype)
    x, out = np.asarray(x), np.empty(shape, dtype)
    thread = in_thread(lambda: ends.send(x, heads=True))
    assert ends.receive(out, heads=True) == 0
    thread.join()
    assert out.tobytes() == x.tobytes()


@pytest.mark.parametrize("out", [np.zeros(5), np.zeros(6, np.int64), np.zeros((2, 3))], ids=repr)
@pytest.mark.parametrize("first", [False, True], ids=["on the ring", "kept"])
def test_message_for_unsuitable_output_stays(out: Array, first: bool) -> None:
    ends, x, suitable = Ends(patient=False), np.arange(6.0), np.empty(6)
    ends.send(x, heads=True)
    if first:
        with pytest.raises(TimeoutError):
            ends.receive(np.empty(1), tag=9)  # this receive keeps the message of tag 0
    assert isinstance(ends.receive(out, heads=True), Deadline)
    assert not out.any()
    assert ends.receive(suitable, heads=True) == 0
    assert suitable.tobytes() == x.tobytes()


def test_array_with_head_is_received_as_two_byte_messages() -> None:
    ends, x = Ends(), np.arange(300.0)
    ends.send(x, heads=True)
    head, out = np.empty(1024, np.uint8), np.empty(300)
    assert ends.receive(head) == ends.receive(out, 1 << 31) == 0
    assert head.view(np.int64)[:5].tolist() == [0, 11, 2400, 1, 300]
    assert out.tobytes() == x.tobytes()


def test_messages_of_other_tags_are_kept_in_order() -> None:
    ends = Ends()
    lengths = [5, 3000, 0, RING_BYTES * 3, 3, 64 << 10]
    thread = in_thread(lambda: [ends.send(data(n, k), k % 3) for k, n in enumerate(lengths)])
    last = np.empty(1, np.uint8)
    asking = in_thread(lambda: ends.receive(last, tag=99))
    thread.join()  # the sends complete although no receive asks for these tags
    for k in (2, 5, 0, 3, 1, 4):
        out = np.empty(lengths[k], np.uint8)
        assert ends.receive(out, k % 3) == 0
        assert out.tobytes() == data(lengths[k], k).tobytes(), k
    ends.send(np.full(1, 7, np.uint8), 99)
    asking.join()
    assert last[0] == 7


@pytest.mark.parametrize("heads", [False, True])
def test_any_source_recv_returns_senders(heads: bool) -> None:
    ends, out = Ends(4), np.empty(4)
    for source in (2, 0, 3):
        ends.send(np.full(4, float(source)), 1, heads, source, 1)
    received = [(ends.receive(out, 1, heads, ANY), out[0]) for _ in range(3)]
    assert sorted(received) == [(0, 0.0), (2, 2.0), (3, 3.0)]


@pytest.mark.parametrize("heads", [False, True])
def test_any_source_recv_lets_sources_take_turns(heads: bool) -> None:
    ends, out = Ends(4), np.empty(4)
    for _ in range(3):
        for source in (0, 2, 3):
            ends.send(np.zeros(4), 1, heads, source, 1)
    received = [ends.receive(out, 1, heads, ANY) for _ in range(9)]
    assert received == received[:3] * 3
    assert sorted(received[:3]) == [0, 2, 3]


def test_any_source_turns_of_tag_do_not_depend_on_other_receives() -> None:
    ends, out = Ends(4), np.empty(4)
    for _ in range(6):
        for source in (0, 2, 3):
            for tag in (1, 2) if source == 3 else (1,):
                ends.send(np.zeros(4), tag, src=source)
    sources = []
    for _ in range(3):
        sources.append(ends.receive(out, 1, source=ANY))
        assert ends.receive(out, 2, source=ANY) == 3
        assert ends.receive(out, 1, source=3) == 3
    assert sorted(sources) == [0, 2, 3]


def test_message_that_does_not_fit_leaves_deadline_of_its_wait() -> None:
    ends, deadlines = Ends(), []

    def wait(advance: Callable[[], int], to: int, source: int, tag: int, deadline: Any) -> None:
        deadlines.append(deadline)
        ends.send(np.zeros(2), heads=True)
        assert advance() == 0

    ends.wait = wait  # type: ignore[method-assign]
    left = ends.receive(np.empty(3), heads=True)
    assert [each._end for each in deadlines] == [left._end]


@pytest.mark.parametrize("nbytes", [8, 10_000, 1 << 20])
@pytest.mark.parametrize("kind", ["into", "no out", "in place", "unsuitable out"])
def test_mutual_exchange_does_not_deadlock(kind: str, nbytes: int) -> None:
    ends, outputs, results = Ends(), [np.empty(nbytes, np.uint8) for _ in range(2)], []

    def rank(me: int) -> None:
        x, out = data(nbytes, me), outputs[me]
        sent = out if kind == "in place" else x
        sent[:] = x
        into: Any = {"no out": None, "unsuitable out": np.empty(3)}.get(kind, out)
        results.append(ends.each[me](sent, 1 - me, into, 1 - me, 0, 5.0, True))
        if isinstance(results[-1], Deadline):
            ends.receive(out, 0, True, 1 - me, me)

    other = in_thread(lambda: rank(1))
    rank(0)
    other.join()
    assert all(isinstance(result, Deadline) for result in results) == (kind != "into")
    assert [output.tobytes() for output in outputs] == [
        data(nbytes, 1 - me).tobytes() for me in range(2)
    ]


def written(ends: Ends) -> int:
    """Return the number of bytes that rank 0 has written into its ring to rank 1."""
    return int(ends.words[RINGS // 8])


def send_late(ends: Ends, x: Array) -> None:
    """Write the part of a message that fits into the ring."""
    with pytest.raises(TimeoutError):
        ends.send(x)


@pytest.mark.parametrize("pid", [os.getpid(), (1 << 31) - 1], ids=["fetched", "no-process"])
def test_message_of_stopped_sender_needs_no_sender_if_kernel_copies(pid: int) -> None:
    ends, x = Ends(patient=False, pid=pid), data(1 << 20)
    send_late(ends, x)
    out, fetched = np.zeros_like(x), pid == os.getpid()
    with contextlib.nullcontext() if fetched else pytest.raises(TimeoutError):
        assert ends.receive(out) == 0
    assert (out.tobytes() == x.tobytes()) == fetched


@needs_huge_pages
@pytest.mark.parametrize("claims", [True, False])
def test_message_in_huge_pages_is_fetched_at_once(claims: bool) -> None:
    ends, x = Ends(pid=os.getpid(), claims=claims), in_huge_pages(4 << 20)
    out = np.zeros_like(x)
    sender = in_thread(lambda: ends.send(x))
    assert ends.receive(out) == 0
    sender.join()
    assert out.tobytes() == x.tobytes()
    # The whole message has been claimed.
    assert not lies_in_huge_pages(x) or ends.words[CLAIM] == written(ends)


@needs_huge_pages
def test_message_in_huge_pages_goes_through_ring_if_kernel_refuses() -> None:
    ends, x = Ends(pid=(1 << 31) - 1), in_huge_pages(4 << 20)
    out = np.zeros_like(x)
    sender = in_thread(lambda: ends.send(x))
    assert ends.receive(out) == 0
    sender.join()
    assert out.tobytes() == x.tobytes()
    # The claim has been taken back.
    assert not lies_in_huge_pages(x) or ends.words[CLAIM] == written(ends) - 1


@pytest.mark.parametrize("given_up", ["broken", "withdrawn"])
def test_copy_from_memory_of_rank_that_gave_up_is_no_message(given_up: str) -> None:
    ends: Any = Ends(pid=os.getpid())
    x, out = data(1 << 20), np.zeros(1 << 20, np.uint8)

    def wait(advance: Callable[[], int], to: int, *_: Any) -> None:
        if to != 1:  # the receive
            send_late(ends, x)
            ends.words[0 if given_up == "broken" else CLAIM + 64] = 1
            for _ in range(3):
                assert advance()
        raise TimeoutError("late")

    ends.wait = wait
    with pytest.raises(TimeoutError, match="late"):
        ends.receive(out)
    assert ends.words[CLAIM] % 8 == 7  # taken back


@needs_huge_pages
def test_close_withdraws_messages_that_have_not_left() -> None:
    ends, x = Ends(patient=False, pid=os.getpid()), in_huge_pages(4 << 20)
    messages = ends.each[0].__self__
    messages.send(x, 1, 0)
    messages.end(True)
    x[:] = 0
    with pytest.raises(TimeoutError):
        ends.receive(np.zeros_like(x))


def test_error_in_wait_ends_call() -> None:
    ends = Ends(patient=False)
    with pytest.raises(TimeoutError, match="late"):
        ends.receive(np.empty(1), tag=4)
    with pytest.raises(TimeoutError, match="late"):
        ends.send(data(RING_BYTES), tag=2)
    assert ends.waits == [(NOBODY, 0, 4, 5.0), (1, NOBODY, 2, 5.0)]
    assert ends.advance() == 0, "the abandoned call still makes progress"


def test_send_wakes_only_its_receiver() -> None:
    lines, rings = 4096, 8192
    memory = bytearray(rings + 6 * (PAGE + RING_BYTES))
    words = memoryview(memory).cast("q")
    words[8] = 3  # the number of ranks that nap
    naps = [lines // 8 + 64 * rank + 3 for rank in range(3)]
    for word in naps:
        words[word] = 1
    send = core.make_messages(memory, 1, 3, rings, RING_BYTES, 20, True, None, lines)
    send(np.ones(8), 2, None, NOBODY, 0, 5.0, True)
    assert [words[word] for word in naps] == [1, 1, 0]


def test_send_without_source_returns_no_rank() -> None:
    assert Ends(3).send(np.ones(8), src=1, dst=2) == -1


BOOL: Any = True


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((np.ones(8)[::2], 1, None, NOBODY, 0), id="strides"),
        pytest.param(([1.0], 1, None, NOBODY, 0), id="no array"),
        pytest.param((np.ones(8), 0, None, NOBODY, 0), id="itself"),
        pytest.param((np.ones(8), 2, None, NOBODY, 0), id="no such rank"),
        pytest.param((np.ones(8), ANY, None, NOBODY, 0), id="to any rank"),
        pytest.param((np.ones(8), BOOL, None, NOBODY, 0), id="a bool"),
        pytest.param((np.ones(8), 1 << 70, None, NOBODY, 0), id="rank above 64 bits"),
        pytest.param((np.ones(8), 1, None, NOBODY, 1 << 31), id="tag"),
        pytest.param((np.ones(8), 1, None, NOBODY, -1), id="negative tag"),
        pytest.param((np.ones(8), 1, None, NOBODY, 0.0), id="no integer"),
        pytest.param((None, NOBODY, np.frombuffer(bytes(8)), 1, 0), id="read-only"),
    ],
)
def test_invalid_arguments_are_left_to_python(arguments: tuple[Any, ...]) -> None:
    assert Ends().each[0](*arguments, 5.0, True) is NotImplemented


def test_send_after_failure_writes_nothing() -> None:
    ends = Ends()
    ends.words[0] = 1
    assert ends.send(np.ones(8)) is NotImplemented
    assert not any(ends.words[1:])


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param((-1, 0, 0), id="negative length"),
        pytest.param((-8, 1, 0), id="negative length of another tag"),
        pytest.param((1 << 60, 1, 0), id="length of another tag above all memory"),
        pytest.param((8, 0, 0), id="shorter than the output"),
        pytest.param((24, 0, 0), id="longer than the output"),
    ],
)
def test_invalid_prefix_is_refused(prefix: tuple[int, int, int]) -> None:
    ends = Ends()
    at = (RINGS + PAGE) // 8
    ends.words[at : at + 3] = memoryview(np.array(prefix)).cast("B").cast("q")
    ends.words[RINGS // 8] = 24
    with pytest.raises(Damaged, match="rank 0"):
        ends.receive(np.empty(2))


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(-(897 * 1024 + 40), id="too many elements"),
        pytest.param(-1024, id="no words"),
        pytest.param(-136, id="too many words"),
        pytest.param(-44, id="a part of a word"),
        pytest.param(-(1 << 63), id="beyond all numbers"),
    ],
)
def test_head_of_impossible_lengths_is_refused(lengths: int) -> None:
    ends = Ends()
    at = (RINGS + PAGE) // 8
    ends.words[at : at + 3] = memoryview(np.array((1024, 0, lengths))).cast("B").cast("q")
    ends.words[RINGS // 8] = 24
    with pytest.raises(Damaged, match="impossible lengths"):
        ends.receive(np.empty(128))


@pytest.mark.parametrize("count", [RING_BYTES + 8, 1 << 62])
def test_ring_above_capacity_is_refused(count: int) -> None:
    ends = Ends()
    ends.words[RINGS // 8] = count
    with pytest.raises(Damaged, match="more bytes"):
        ends.receive(np.empty(2))


@pytest.mark.parametrize("end", [0, 64], ids=["sender", "receiver"])
def test_unaligned_ring_count_is_refused(end: int) -> None:
    ends = Ends(patient=False)
    ends.words[RINGS // 8 + end] = 12
    message = data(RING_BYTES)
    with pytest.raises(Damaged, match="no multiple of 8"):
        _ = ends.send(message) if end else ends.receive(message)


def test_read_count_above_sent_count_is_refused() -> None:
    ends = Ends(patient=False)
    ends.words[RINGS // 8 + 64] = 1 << 20
    with pytest.raises(Damaged, match="rank 1"):
        ends.send(data(RING_BYTES))


@pytest.mark.parametrize(
    ("rank", "size", "rings", "ring_bytes"),
    [(2, 2, 4096, 4096), (0, 1, 4096, 4096), (0, 3, 4096, 4096), (0, 2, 4095, 4096),
     (0, 2, 4096, 4000), (0, 2, 8192, 8192), (0, 2, -4096, 4096)],
)  # fmt: skip
def test_rings_outside_segment_are_refused(
    rank: int, size: int, rings: int, ring_bytes: int
) -> None:
    memory = bytearray(4096 + 2 * 8192)
    with pytest.raises(ValueError, match="are not in the segment"):
        core.make_messages(memory, rank, size, rings, ring_bytes, 20, True, None)


@pytest.mark.parametrize("half", ["send", "receive"])
@pytest.mark.parametrize("nbytes", [8, 1 << 20])
def test_message_ends_when_its_array_gets_other_memory(half: str, nbytes: int) -> None:
    ends, x = Ends(), data(nbytes)

    def wait(advance: Callable[[], int], *arguments: Any) -> None:
        x.__setstate__((1, (2 * nbytes,), x.dtype, False, bytes(2 * nbytes)))  # type: ignore[attr-defined]
        advance()

    ends.wait = wait  # type: ignore[method-assign]
    if half == "send":
        nbytes = max(nbytes, RING_BYTES + 8)
        x = data(nbytes)
    with pytest.raises(Damaged, match="tag 3: other memory"):
        ends.send(x, 3) if half == "send" else ends.receive(x, 3)
    assert not x.any()
