"""Messages between two GPUs: with any tag, received in any order, in both directions at once.

NCCL has no tags, and runs the operations of a communicator in the order in which they were
issued. So each ordered pair of ranks, a *direction*, has a communicator and a stream of its own,
made with the first message in that direction. The two ranks agree on the order of their messages
over the transport of the host:

1. The sender waits until the caller's stream has reached the call. Then it sends a *note* with the
   message's length, under a tag that belongs to the message's tag.
2. The receiver waits until its caller's stream has reached the call, and receives the note under
   the same tag. It gives the message the next *number* of this direction, and sends the number
   back as a *grant*.
3. Both ranks issue the messages of a direction in the order of their numbers, on the direction's
   stream. Each makes its caller's stream wait for the end of the message.

So the receiver decides the order, and a message is issued only if the receiver has called for it.

The two halves of a ``sendrecv`` do all that independently, in two threads. So a program does not
deadlock if it would not deadlock with blocking sends, which may wait for their receivers (MPI 4.1,
section 3.5):

* A note matches a receive exactly where the message itself would. From then on both sides are
  inside the call. They exchange the grant, each in a thread of its own, and wait for nothing else.
* For its turn, a thread waits only for messages with lower numbers in the same direction. Both
  sides have exchanged the grants of those messages. So the message with the lowest number can
  always be issued, even if both sides must act for it: to make the communicator, or to connect.
* On the GPUs, an issued message waits only for earlier messages in its direction, because both
  callers' streams had reached it. (If it could wait for unfinished work, that work might in turn
  wait for a later message.)
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from collective import cuda
from collective.backends.peers.monitored import inside
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.waits import MessageCall
from collective.contract.work import Lane
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    DeviceError,
    MismatchError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

from .watch import Asked, Pending, Watch, failure_of

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.backends.peers.wait import Wait
    from collective.cuda import Stream

    from .engine import NcclComm

_INT64 = BY_NAME["int64"]
_UINT8 = 1  # ncclUint8
# For a user's tag t, notes have the tag _NOTES + t and grants the tag _GRANTS - t. No other
# messages of the host have these tags: users' tags are 0 to 2**31 - 1, and the tags of algorithms
# are just below 0.
_TAGS, _NOTES, _GRANTS = 2**31, 2**31, -16
# Other tags of 64 bits are hashed to tags from here on.
_OTHERS = 1 << 61


def _tags(tag: int) -> tuple[int, int]:
    """Return the tags of a message's note and grant."""
    if 0 <= tag < _TAGS:
        return _NOTES + tag, _GRANTS - tag
    digest = hashlib.blake2b(str(tag).encode(), digest_size=7).digest()
    hashed = _OTHERS + 2 * int.from_bytes(digest, "little")
    return hashed, hashed + 1


class _Direction:
    """Messages in one direction between this rank and a peer.

    Attributes:
        peer: the other rank.
        pair: sender and receiver.
        comm, stream: NCCL's communicator and the stream; None before the first message.
        granted: how many numbers this rank has given out, if it receives.
        issued: how many messages have been issued.
    """

    def __init__(self, sender: int, receiver: int, peer: int) -> None:
        self.pair = sender, receiver
        self.peer = peer
        self.comm: NcclComm | None = None
        self.stream: Stream | None = None
        self.granted = 0
        self.issued = 0
        self.condition = threading.Condition()

    def number(self) -> int:
        """Give out the next message number."""
        with self.condition:
            number = self.granted
            self.granted = number + 1
        return number

    def await_turn(self, number: int, wait: Wait) -> None:
        """Wait until all messages with lower numbers have been issued."""
        with self.condition:
            while self.issued != number:
                self.condition.wait(wait.slice())
                wait.check()

    def end_turn(self) -> None:
        """Let the next message be issued."""
        with self.condition:
            self.issued += 1
            self.condition.notify_all()


class _StreamedCall:
    """Call on a message: its name in errors, its deadline, the caller's stream, and its peers."""

    __slots__ = ("deadline", "peers", "stream", "where")

    def __init__(
        self, where: MessageCall, deadline: Deadline, stream: Stream, peers: tuple[int, ...]
    ) -> None:
        self.where = where
        self.deadline = deadline
        self.stream = stream
        self.peers = peers


#: Function that makes the communicator of two ranks: ``(sender, receiver, where, deadline)``.
Open = Callable[[int, int, object, Deadline], "NcclComm"]


class NcclMessages:
    """Messages of GPU memory, to and from any rank; see the module's docstring."""

    def __init__(self, host: Backend, channel: Channel, watch: Watch, open_pair: Open) -> None:
        self._host = host
        self._channel = channel
        self._watch = watch
        self._open_pair = open_pair
        self._rank = host.rank
        self._directions: dict[tuple[int, int], _Direction] = {}
        # The idle threads for the receiving halves of sendrecv.
        self._lanes: list[Lane] = []

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        """Send ``src``; work enqueued later on its stream may change it."""
        where = MessageCall("send", tag, dst, None)
        call = _StreamedCall(where, deadline, src.stream, (dst,))
        self._wait_for_stream(call)
        self._send(src, dst, tag, call)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        """Receive into ``dst`` and return the source; work enqueued later may read ``dst``."""
        peers = (src,) if src >= 0 else tuple(r for r in range(self._host.size) if r != self._rank)
        where = MessageCall("recv", tag, None, src)
        call = _StreamedCall(where, deadline, dst.stream, peers)
        self._wait_for_stream(call)
        return self._recv(dst, src, tag, call)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        """Send ``src`` to rank ``to`` and receive ``dst`` from rank ``source``, both at once."""
        if to == self._rank:
            src.stream.wait_for(dst.stream)
            cuda.copy(dst.address, src.address, src.nbytes, src.stream)
            dst.stream.wait_for(src.stream)
            return
        where = MessageCall("sendrecv", tag, to, source)
        going, coming = (
            _StreamedCall(where, deadline, buffer.stream, where.peers) for buffer in (src, dst)
        )
        self._wait_for_stream(going)
        self._wait_for_stream(coming)
        lane = self._lanes.pop() if self._lanes else Lane("collective-nccl-sendrecv")
        work = lane.submit(str(where), lambda: self._recv(dst, source, tag, coming))
        try:
            self._send(src, to, tag, going)
        except Exception:
            # The other half ends as well: by the same failure, or at the deadline.
            with contextlib.suppress(CollectiveError):
                work.wait()
            raise
        else:
            work.wait()
        finally:
            if lane.idle:
                self._lanes.append(lane)
            else:  # interrupted
                lane.close(Deadline(0.0))

    def close(self) -> None:
        """End the threads of ``sendrecv``."""
        while self._lanes:
            self._lanes.pop().close(Deadline(0.0))

    def streams(self) -> list[Stream]:
        """Return the streams of all directions."""
        streams = [direction.stream for direction in list(self._directions.values())]
        return [stream for stream in streams if stream is not None]

    # -- the host's part ------------------------------------------------------------------

    def _send(self, src: Buffer, dst: int, tag: int, call: _StreamedCall) -> None:
        note_tag, grant_tag = _tags(tag)
        grant = _words(0)
        with inside(self._channel, call.where, call.deadline, call.peers):
            self._host.send(_words(src.nbytes), dst, note_tag, call.deadline)
            if src.nbytes:
                self._host.recv(grant, dst, grant_tag, call.deadline)
        if src.nbytes:
            direction = self._direction(self._rank, dst)
            self._issue(direction, int(grant.array[0]), src, call)

    def _recv(self, dst: Buffer, src: int, tag: int, call: _StreamedCall) -> int:
        note_tag, grant_tag = _tags(tag)
        note = _words(0)
        with inside(self._channel, call.where, call.deadline, call.peers):
            source = self._host.recv(note, src, note_tag, call.deadline)
        self._check_length(note, dst, source, call)
        if dst.nbytes:
            direction = self._direction(source, self._rank)
            number = direction.number()
            with inside(self._channel, call.where, call.deadline, call.peers):
                self._host.send(_words(number), source, grant_tag, call.deadline)
            self._issue(direction, number, dst, call)
        return source

    def _wait_for_stream(self, call: _StreamedCall) -> None:
        """Wait until the caller's stream has reached this call."""
        self._channel.check(call.where, call.peers, any_of=True)
        if call.stream.query():
            return
        event = call.stream.record()
        # The wait has no deadline: the check below raises an error that blames this rank's stream
        # and not the peers.
        wait = self._channel.wait(call.where, Deadline.never(), call.peers, any_of=True)
        while not event.query():
            wait.turn()
            if call.deadline.expired:
                work = f"the work enqueued earlier on rank {self._rank}'s stream, which is not done"
                failure = Failure.timed_out(self._rank, call.deadline.seconds, work, (self._rank,))
                self._channel.abort(failure)
                raise CollectiveTimeoutError(
                    f"{call.where}: {failure.text} [rank {self._rank}]", failure.ranks
                )
        event.release()

    def _check_length(self, note: Buffer, dst: Buffer, source: int, call: _StreamedCall) -> None:
        nbytes = int(note.array[0])
        if nbytes != dst.nbytes:
            text = (
                f"rank {source} sends {nbytes} bytes, but rank {self._rank} receives {dst.nbytes}"
            )
            # Break the communicator: the sender waits for a grant that does not come.
            self._channel.abort(Failure("mismatch", self._rank, text))
            raise MismatchError(f"{call.where}: {text} [rank {self._rank}]")

    def _direction(self, sender: int, receiver: int) -> _Direction:
        pair = sender, receiver
        direction = self._directions.get(pair)
        if direction is None:
            peer = receiver if sender == self._rank else sender
            # If two threads get here, setdefault() gives both of them the same object.
            direction = self._directions.setdefault(pair, _Direction(sender, receiver, peer))
        return direction

    # -- NCCL's part ----------------------------------------------------------------------

    def _issue(
        self, direction: _Direction, number: int, buffer: Buffer, call: _StreamedCall
    ) -> None:
        """Enqueue a message that has its number on the direction's stream, in its turn."""
        wait = self._channel.wait(call.where, call.deadline, (direction.peer,))
        direction.await_turn(number, wait)
        if direction.comm is None:
            self._open(direction, call)
        self._enqueue(direction, buffer, call)
        # After an error the turn does not end: the error has broken the channel, so the threads
        # that wait for their turns raise.
        direction.end_turn()

    def _open(self, direction: _Direction, call: _StreamedCall) -> None:
        try:
            comm = self._open_pair(*direction.pair, call.where, call.deadline)
        except (BackendUnavailableError, DeviceError):
            # Both ranks get this error, and neither issues the message. Later messages may fail in
            # the same way, or not.
            direction.end_turn()
            raise
        except CollectiveError as error:
            # Break the channel: this message has a number, and later messages wait for it.
            self._channel.abort(failure_of(error, self._rank))
            raise
        direction.stream = call.stream.device.new_stream()
        direction.comm = comm

    def _enqueue(self, direction: _Direction, buffer: Buffer, call: _StreamedCall) -> None:
        comm, stream, watch = direction.comm, direction.stream, self._watch
        assert comm is not None
        assert stream is not None
        # In the communicator of a direction, the sender is rank 0.
        sending = direction.pair[0] == self._rank
        function, peer = (comm.send, 1) if sending else (comm.recv, 0)
        asked = Asked(call.where, call.deadline, (direction.peer,), None)
        watch.inside[direction] = asked
        if watch.asleep:
            watch.wake()
        try:
            self._channel.check(call.where, ())
            function(buffer.address, buffer.nbytes, _UINT8, peer, stream.handle)
            event = stream.record()
            call.stream.wait(event)
            watch.add(Pending(event, stream, asked))
        except BackendError as error:
            raise self._channel.explain(call.where, error, (direction.peer,)) from error
        except CommunicatorAbortedError:
            self._channel.check(call.where, ())  # raises the reason for the abort
            raise
        finally:
            watch.inside[direction] = None


def _words(value: int) -> Buffer:
    return Buffer(np.array([value], np.int64), _INT64)
