"""The rings of shm, both ends in one process: nothing waits, so every interleaving can be made."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.backends.shm.control import Control
from collective.backends.shm.layout import Layout
from collective.backends.shm.ring import MessageRing, Receiving, Sending
from collective.backends.shm.segment import Segment
from collective.errors import BackendError, CommunicatorAbortedError


def _fetch(rank: int, region: tuple[int, int, int], out: np.ndarray) -> None:
    """Copy from the peer's memory, which is this process's."""
    ctypes.memmove(out.__array_interface__["data"][0], region[0], out.nbytes)


class Pair:
    """The ring from rank 0 to rank 1, seen from either."""

    def __init__(self) -> None:
        self.segment = Segment.create(Layout(2).nbytes)
        self.ends = [Control(self.segment, rank, 2) for rank in (0, 1)]
        self.sender, self.receiver = (MessageRing(control, 0, 1, _fetch) for control in self.ends)

    def send(self, data: np.ndarray, tag: int = 0, remote: bool = False) -> Sending:
        address = data.__array_interface__["data"][0]
        return Sending(self.sender, data, tag, (address, 0, 0) if remote else None)

    def receive(self, length: int, tag: int = 0) -> Receiving:
        return Receiving([self.receiver], np.full(length, 255, np.uint8), tag)

    def move_to(self, position: int) -> None:
        """Let both ends be ``position`` bytes further on: where the ring wraps round."""
        chunk = np.zeros(position, np.uint8)
        moved = 0
        while moved < position:
            moved += self.sender.write(chunk[moved:])
            self.receiver.read(np.empty(self.sender.capacity, np.uint8))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.segment.close_descriptor()


def _data(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, 255, length, np.uint8)


def _exchange(pair: Pair, sends: list[Sending], receives: list[Receiving]) -> None:
    for _ in range(10_000):
        done = [message.advance() for message in (*sends, *receives)]
        if all(done):
            return
    raise AssertionError("the messages do not get on")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4095, 4096, 30_000])
@pytest.mark.parametrize("back", [8, 40, 48, 56, 4096])
def test_a_message_across_the_end_of_the_ring(pair, length, back):
    pair.move_to(pair.sender.capacity - back)
    data = _data(length)
    receive = pair.receive(length)
    _exchange(pair, [pair.send(data)], [receive])
    np.testing.assert_array_equal(receive._out, data)


def test_a_message_longer_than_the_ring_streams_through(pair):
    data = _data(5 * pair.sender.capacity + 13)
    receive = pair.receive(data.size)
    _exchange(pair, [pair.send(data)], [receive])
    np.testing.assert_array_equal(receive._out, data)
    assert receive.source == 0


@pytest.mark.parametrize("length", range(18))
def test_what_follows_a_message_of_any_length_is_not_shifted(pair, length):
    sends = [pair.send(_data(n, k)) for k, n in enumerate((length, 11, length))]
    receives = [pair.receive(n) for n in (length, 11, length)]
    for message in sends:
        assert message.advance(), "three small messages have room"
    for k, (message, n) in enumerate(zip(receives, (length, 11, length))):
        assert message.advance()
        np.testing.assert_array_equal(message._out, _data(n, k))
    assert pair.sender.words[0] == pair.sender.words[64], "the ring is not empty"


def test_a_full_ring_takes_nothing_and_loses_nothing(pair):
    capacity = pair.sender.capacity
    assert pair.sender.write(_data(capacity + 100)) == capacity
    assert pair.sender.write(_data(8)) == 0
    assert not pair.sender.announce([0] * 6)
    out = np.empty(16, np.uint8)
    assert pair.receiver.read(out) == 16
    assert pair.sender.write(_data(100)) == 16
    rest = np.empty(2 * capacity, np.uint8)
    assert pair.receiver.read(rest) == capacity


def test_a_header_waits_for_room_for_all_of_it(pair):
    capacity = pair.sender.capacity
    pair.sender.write(np.zeros(capacity - 40, np.uint8))
    sending = pair.send(_data(3), tag=7)
    assert not sending.advance()
    assert not sending.advance()
    pair.receiver.read(np.empty(capacity - 40, np.uint8))
    receive = pair.receive(3, tag=7)
    _exchange(pair, [sending], [receive])
    np.testing.assert_array_equal(receive._out, _data(3))


def test_a_fetched_message_holds_its_sender_until_it_is_fetched(pair):
    data = _data(100_000)
    sending, receive = pair.send(data, tag=2, remote=True), pair.receive(100_000, tag=2)
    other = pair.receive(1, tag=5)
    assert not sending.advance()
    assert not other.advance()  # takes it off the ring, unread
    assert not sending.advance(), "its buffer may not be changed yet"
    data[:] = 9
    assert receive.advance()
    assert (receive._out == 9).all()
    assert sending.advance()


def test_more_fetched_messages_than_acknowledgements(pair):
    count = 150
    sends = [pair.send(_data(10, k), tag=1, remote=True) for k in range(count)]
    for message in sends:
        message.advance()
    receives = [pair.receive(10, tag=1) for _ in range(count)]
    for k, message in enumerate(receives):
        for sending in sends:
            sending.advance()
        assert message.advance(), k
        np.testing.assert_array_equal(message._out, _data(10, k))
    assert all(sending.advance() for sending in sends)
    assert len(pair.sender.free_acks) == 64


def test_unexpected_messages_wait_in_order_beside_each_other(pair):
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
        np.testing.assert_array_equal(receive._out, _data(lengths[k], k))
    assert not any(pair.receiver.unexpected.values())


def test_of_several_rings_the_one_with_a_message_is_taken():
    pairs = [Pair(), Pair()]
    receive = Receiving([p.receiver for p in pairs], np.zeros(4, np.uint8), 0)
    assert not receive.advance()
    assert pairs[1].send(_data(4)).advance()
    assert receive.advance()
    np.testing.assert_array_equal(receive._out, _data(4))


# Length, tag, address (or 0), segment, offset, acknowledgement; the tag that is asked for is 0.
_MEMORY = np.zeros(64, np.uint8)
_ADDRESS = _MEMORY.ctypes.data
DAMAGED = {
    "negative length": [-1, 0, 0, 0, 0, 0],
    "negative length of another tag": [-8, 1, 0, 0, 0, 0],
    "length of another tag that no memory has": [1 << 60, 1, 0, 0, 0, 0],
    "shorter than what is asked for": [8, 0, 0, 0, 0, 0],
    "longer than what is asked for": [24, 0, 0, 0, 0, 0],
    "longer in the sender's memory": [24, 0, _ADDRESS, 0, 0, 0],
    "acknowledgement": [16, 0, _ADDRESS, 0, 0, 64],
    "negative acknowledgement": [16, 0, _ADDRESS, 0, 0, -1],
}


@pytest.mark.parametrize("header", DAMAGED.values(), ids=DAMAGED)
def test_a_header_that_no_sender_writes_breaks_the_communicator(header):
    pair = Pair()
    assert pair.sender.announce(header)
    with pytest.raises(BackendError, match="rank 0's messages to rank 1 are damaged"):
        pair.receive(16).advance()
    with pytest.raises(CommunicatorAbortedError, match="are damaged"):
        pair.ends[0].refuse_broken("send")


@pytest.mark.parametrize("after", [0, 48], ids=["before a header", "after one"])
def test_a_ring_that_holds_more_than_it_can_breaks_the_communicator(after):
    pair = Pair()
    if after:
        assert pair.sender.announce([16, 0, 0, 0, 0, 0])
        receive = pair.receive(16)
        assert not receive.advance()
    else:
        receive = pair.receive(16)
    pair.sender.words[0] = after + pair.sender.capacity + 8
    with pytest.raises(BackendError, match="bytes in a ring of"):
        receive.advance()


MESSAGES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 8, 13, 5_000, 70_003]), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(messages=MESSAGES, start=st.integers(0, 2 << 16), turns=st.randoms(use_true_random=False))
def test_any_interleaving_delivers_every_message_once_and_in_order(messages, start, turns):
    """Sends and receives of three tags, each tag in its order, advanced in any order."""
    pair = Pair()
    pair.move_to(start - start % 8)
    sends: list[tuple[Sending, int]] = []
    receives: list[tuple[Receiving, int, int]] = []
    kept = []
    for k, (tag, length, remote) in enumerate(messages):
        data = _data(length, k)
        kept.append(data)
        sends.append((pair.send(data, tag, remote and length > 0), tag))
        receives.append((pair.receive(length, tag), tag, k))
    to_send, to_receive = list(sends), list(receives)
    for _ in range(100_000):
        if not to_send and not to_receive:
            break
        # Of each tag only the first that is not over: what the communicator's lanes do.
        firsts_out = {tag: message for message, tag in reversed(to_send)}
        firsts_in = {tag: message for message, tag, _ in reversed(to_receive)}
        chosen = turns.choice([*firsts_out.values(), *firsts_in.values()])
        if chosen.advance():
            to_send = [entry for entry in to_send if entry[0] is not chosen]
            to_receive = [entry for entry in to_receive if entry[0] is not chosen]
    assert not to_send, "a send never got through"
    assert not to_receive, "a receive never got its message"
    for message, _, k in receives:
        np.testing.assert_array_equal(message._out, kept[k])
    assert pair.sender.words[0] == pair.sender.words[64], "the ring is not empty"
    assert not any(pair.receiver.unexpected.values())
    assert not pair.sender.sending.locked()
    assert not pair.receiver.receiving.locked()
    pair.segment.close_descriptor()
