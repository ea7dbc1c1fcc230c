"""Messages in Python over the rings of shm, with all ends in one process.

No step waits, so a test can choose every interleaving.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.backends.matching import Exchange
from collective.backends.shm.control import Control
from collective.backends.shm.layout import Layout
from collective.backends.shm.messages import RingMessages
from collective.backends.shm.ring import RingPrefix
from collective.backends.shm.segment import Segment
from collective.contract.backend import ANY_SOURCE
from collective.errors import BackendError, CommunicatorAbortedError
from collective.native import NOBODY

pytestmark = pytest.mark.quick


def _fetch(rank: int, address: int, out: np.ndarray) -> None:
    """Copy from the memory of a rank, which is the memory of this process."""
    ctypes.memmove(out.ctypes.data, address, out.nbytes)


class Step:
    """A message in flight; call ``advance`` until the message is ``over``.

    Attributes:
        out: array that receives the message.
        source: rank that sent the message, once the message is over.
    """

    def __init__(self, make: Callable[[], Exchange], out: np.ndarray | None = None) -> None:
        self._make = make
        self._exchange: Exchange | None = None
        self.out: Any = out
        self.over = False
        self.source: int | None = None

    def advance(self) -> bool:
        if self._exchange is None:  # the caller comes to the message now
            self._exchange = self._make()
        if not self.over:
            self.over = self._exchange.advance() == 0
            self.source = self._exchange.sender
        return self.over


class Ends:
    """The message ends of all ranks, and the ring from rank 0 to rank 1."""

    def __init__(self, size: int = 2, single_copy: bool = False) -> None:
        layout = Layout(size)
        self.segment = Segment.create(layout.nbytes)
        self.controls: list[Any] = [Control(self.segment, layout, rank) for rank in range(size)]
        for control in self.controls:
            control.fetch = _fetch
        self.ranks = [RingMessages(control, single_copy) for control in self.controls]
        self.sender = self.ranks[0].carriers[1].outgoing
        self.receiver = self.ranks[1].carriers[0].incoming
        self.lock = self.ranks[1].carriers[0].receiving
        self.kept = self.ranks[1].engine._inboxes[0]._kept

    @property
    def is_empty(self) -> bool:
        return not self.sender.filled()

    def send(self, data: np.ndarray, tag: int = 0, src: int = 0, dst: int = 1) -> Step:
        engine = self.ranks[src].engine
        return Step(lambda: engine.exchange(data, dst, None, NOBODY, tag))

    def receive(self, length: int, tag: int = 0, rank: int = 1, source: int = 0) -> Step:
        out = np.full(length, 255, np.uint8)
        engine = self.ranks[rank].engine
        return Step(lambda: engine.exchange(None, NOBODY, out, source, tag), out)

    def move_to(self, position: int) -> None:
        """Move both ends ``position`` bytes ahead, so that the ring wraps around."""
        self.sender._counts[0] = self.sender._counts[64] = position


@pytest.fixture
def pair() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.segment.close_descriptor()


@pytest.fixture
def reading() -> Iterator[Ends]:
    """Return the ends of two ranks that read each other's memory."""
    ends = Ends(single_copy=True)
    yield ends
    ends.segment.close_descriptor()


def _data(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, 255, length, np.uint8)


def _exchange(*messages: Step) -> None:
    for _ in range(10_000):
        states = [message.advance() for message in messages]
        if all(states):
            return
    raise AssertionError("the messages make no progress")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4095, 4096, 30_000])
@pytest.mark.parametrize("back", [8, 16, 24, 32, 48, 4096])
def test_message_across_ring_end_arrives(pair, length, back):
    pair.move_to(pair.sender.capacity - back)
    data = _data(length)
    receive = pair.receive(length)
    _exchange(pair.send(data), receive)
    np.testing.assert_array_equal(receive.out, data)


def test_message_longer_than_ring_arrives(pair):
    data = _data(5 * pair.sender.capacity + 13)
    receive = pair.receive(data.size)
    _exchange(pair.send(data), receive)
    np.testing.assert_array_equal(receive.out, data)
    assert receive.source == 0


@pytest.mark.parametrize("length", range(18))
def test_message_after_any_length_is_not_shifted(pair, length):
    sends = [pair.send(_data(n, k)) for k, n in enumerate((length, 11, length))]
    receives = [pair.receive(n) for n in (length, 11, length)]
    for message in sends:
        assert message.advance(), "three small messages have room"
    for k, (message, n) in enumerate(zip(receives, (length, 11, length))):
        assert message.advance()
        np.testing.assert_array_equal(message.out, _data(n, k))
    assert pair.is_empty


def test_full_ring_accepts_and_loses_nothing(pair):
    capacity, data = pair.sender.capacity, _data(pair.sender.capacity + 100)
    writing = pair.sender.write(data)
    assert next(writing, "over") is None
    assert pair.sender.filled() == capacity
    assert next(pair.sender.put(RingPrefix(0, 0, 0)), "over") is None
    start, rest = np.empty(16, np.uint8), np.empty(data.size - 16, np.uint8)
    assert next(pair.receiver.read(start), "over") == "over"
    assert next(writing, "over") is None
    assert pair.sender.filled() == capacity
    reading = pair.receiver.read(rest)
    assert next(reading, "over") is None
    assert [*writing, *reading] == []
    np.testing.assert_array_equal(np.concatenate([start, rest]), data)


def test_prefix_waits_for_room_for_whole_prefix(pair):
    filled = pair.sender.capacity - 16
    assert list(pair.sender.write(np.zeros(filled, np.uint8))) == []
    sending = pair.send(_data(3), tag=7)
    assert not sending.advance()
    assert not sending.advance()
    assert pair.sender.filled() == filled
    assert list(pair.receiver.read(np.empty(filled, np.uint8))) == []
    receive = pair.receive(3, tag=7)
    _exchange(sending, receive)
    np.testing.assert_array_equal(receive.out, _data(3))


def test_fetched_message_blocks_sender_until_fetched(reading):
    data = _data(3 << 20)
    sending, receive = reading.send(data, tag=2), reading.receive(data.size, tag=2)
    assert not sending.advance()
    assert not sending.advance(), "the send ended before its data was fetched"
    assert reading.sender.filled() == 24, "the data of the message is in the ring"
    data[:] = 9
    assert receive.advance()
    assert (receive.out == 9).all()
    assert sending.advance()


def test_fetched_message_of_another_tag_is_kept(reading):
    data = _data(3 << 20)
    sending, other = reading.send(data, tag=2), reading.receive(1, tag=5)
    assert not sending.advance()
    assert not other.advance()
    assert sending.advance(), "the sender still waits for its buffer"
    wanted = data.copy()
    data[:] = 9
    receive = reading.receive(data.size, tag=2)
    assert receive.advance()
    np.testing.assert_array_equal(receive.out, wanted)


def test_data_fetched_after_failure_is_not_returned(reading):
    sending, receive = reading.send(_data(3 << 20)), reading.receive(3 << 20)
    assert not sending.advance()
    reading.controls[0].words[0] = 1
    with pytest.raises(CommunicatorAbortedError):
        receive.advance()


def test_many_fetched_messages_arrive_in_order(reading):
    """The ring holds one of them at a time: the next waits until the receiver has read it."""
    length = reading.sender.capacity // 2 + 1
    sends = [reading.send(_data(length, k), tag=1) for k in range(5)]
    receives = [reading.receive(length, tag=1) for _ in range(5)]
    for k, message in enumerate(receives):
        for sending in sends:
            sending.advance()
        assert message.advance(), k
        np.testing.assert_array_equal(message.out, _data(length, k))
    for sending in sends:
        assert sending.advance()


def test_unexpected_messages_are_kept_in_order(pair):
    lengths = (5, 40_000, 0, 3)
    sends = [pair.send(_data(n, k), tag=k % 2) for k, n in enumerate(lengths)]
    late = pair.receive(1, tag=99)
    for _ in range(50):
        for message in sends:
            message.advance()
        assert not late.advance()
    assert all(message.advance() for message in sends), "unexpected messages block the ring"
    for k in (1, 3, 0, 2):
        receive = pair.receive(lengths[k], tag=k % 2)
        assert receive.advance()
        np.testing.assert_array_equal(receive.out, _data(lengths[k], k))
    assert not pair.kept


def test_partly_kept_message_precedes_next_of_its_tag(pair):
    """The first is longer than the ring, so a receive of another tag keeps a part of it."""
    first, second = _data(pair.sender.capacity + 8), _data(4)
    sending, late = pair.send(first, tag=5), pair.receive(1, tag=9)
    assert not sending.advance()
    assert not late.advance()
    assert sending.advance()
    assert pair.send(second, tag=5).advance()
    receives = [pair.receive(first.size, tag=5), pair.receive(second.size, tag=5)]
    for receive, data in zip(receives, (first, second)):
        assert receive.advance()
        np.testing.assert_array_equal(receive.out, data)


def test_any_source_recv_takes_ring_with_message():
    ends = Ends(3)
    receive = ends.receive(4, rank=1, source=ANY_SOURCE)
    assert not receive.advance()
    assert ends.send(_data(4), src=2, dst=1).advance()
    assert receive.advance()
    assert receive.source == 2
    np.testing.assert_array_equal(receive.out, _data(4))
    ends.segment.close_descriptor()


def test_receives_of_two_threads_are_not_mixed_up(pair):
    """Two threads receive from one rank; each moves the messages of both."""
    long, short = _data(pair.sender.capacity + 8), _data(5)
    sends = [pair.send(long, tag=1), pair.send(short, tag=2)]
    first, second = pair.receive(long.size, tag=1), pair.receive(short.size, tag=2)
    assert not sends[0].advance()
    assert not first.advance()
    _exchange(*sends, second, first)
    np.testing.assert_array_equal(first.out, long)
    np.testing.assert_array_equal(second.out, short)


# Prefixes are length, tag, and address or 0. The receive asks for tag 0.
_MEMORY = np.zeros(64, np.uint8)
_ADDRESS = _MEMORY.ctypes.data
DAMAGED = {
    "negative length": RingPrefix(-1, 0, 0),
    "negative length of another tag": RingPrefix(-8, 1, 0),
    "length of another tag above all memory": RingPrefix(1 << 60, 1, 0),
    "shorter than the output": RingPrefix(8, 0, 0),
    "longer than the output": RingPrefix(24, 0, 0),
    "longer in the sender's memory": RingPrefix(24, 0, _ADDRESS),
}


@pytest.mark.parametrize("prefix", DAMAGED.values(), ids=DAMAGED)
def test_invalid_prefix_breaks_communicator(pair, prefix):
    assert list(pair.sender.put(prefix)) == []
    with pytest.raises(BackendError, match="rank 0's messages to rank 1 are damaged"):
        pair.receive(16).advance()
    with pytest.raises(CommunicatorAbortedError, match="are damaged"):
        pair.controls[0].refuse_broken("send")


def test_kept_message_of_wrong_length_breaks_communicator(pair):
    assert pair.send(_data(8), tag=1).advance()
    assert not pair.receive(1, tag=2).advance()
    with pytest.raises(BackendError, match="8 bytes in place of 16"):
        pair.receive(16, tag=1).advance()


@pytest.mark.parametrize("after", [0, 24], ids=["before a prefix", "after a prefix"])
def test_ring_above_capacity_breaks_communicator(pair, after):
    receive = pair.receive(16)
    if after:
        assert list(pair.sender.put(RingPrefix(16, 0, 0))) == []
        assert not receive.advance()
    pair.sender._counts[0] = after + pair.sender.capacity + 8
    with pytest.raises(BackendError, match="bytes in a ring of"):
        receive.advance()


@pytest.mark.parametrize("end", [0, 64], ids=["sender", "receiver"])
def test_unaligned_ring_count_breaks_communicator(pair, end):
    pair.move_to(24)
    pair.sender._counts[end] += 4 if end == 0 else -4
    with pytest.raises(BackendError, match="4 bytes in a ring of"):
        pair.receive(16).advance()


def test_partial_prefix_is_not_read(pair):
    pair.sender._counts[0] = 16
    assert not pair.receive(16).advance()
    assert pair.sender.filled() == 16


def test_read_count_above_sent_count_breaks_communicator(pair):
    pair.sender._counts[64] = 8
    with pytest.raises(BackendError, match="rank 1's messages to rank 0 are damaged: -8 bytes"):
        pair.send(_data(4)).advance()


_LENGTHS = [0, 1, 8, 13, 5_000, 70_003, (1 << 20) + 1, 5 << 19]
MESSAGES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(_LENGTHS)), min_size=1, max_size=12
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    messages=MESSAGES,
    start=st.integers(0, 2 << 16),
    single_copy=st.booleans(),
    turns=st.randoms(use_true_random=False),
)
def test_any_interleaving_delivers_each_message_once_in_order(messages, start, single_copy, turns):
    """Advance sends and receives of three tags in any order, but each tag in its own order."""
    ends = Ends(single_copy=single_copy)
    ends.move_to(start - start % 8)
    sends: list[tuple[Step, int]] = []
    receives: list[tuple[Step, int]] = []
    sources = [_data(length, k) for k, (_, length) in enumerate(messages)]
    for (tag, length), data in zip(messages, sources):
        sends.append((ends.send(data, tag), tag))
        receives.append((ends.receive(length, tag), tag))
    to_send, to_receive = list(sends), list(receives)
    for _ in range(100_000):
        if not to_send and not to_receive:
            break
        # Advance only the first open message of each tag, as the communicator's lanes do.
        firsts_out = {tag: message for message, tag in reversed(to_send)}
        firsts_in = {tag: message for message, tag in reversed(to_receive)}
        step = turns.choice([*firsts_out.values(), *firsts_in.values()])
        if step.advance():
            to_send = [entry for entry in to_send if entry[0] is not step]
            to_receive = [entry for entry in to_receive if entry[0] is not step]
    assert not to_send, "a send never got through"
    assert not to_receive, "a receive never got its message"
    for (message, _), data in zip(receives, sources):
        np.testing.assert_array_equal(message.out, data)
    assert ends.is_empty
    assert not ends.kept
    assert ends.lock.take(), "the lock is still held"
    assert not any(ends.ranks[0].engine.queues.values())
    ends.segment.close_descriptor()
