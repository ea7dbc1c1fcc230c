"""Messages over Gloo's process groups, and waiting for Gloo's calls."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from collective.algorithms import sendrecv
from collective.backends.peers.channel import Channel
from collective.backends.peers.monitored import Monitored
from collective.contract.backend import ANY_SOURCE, COLLECTIVE_TAG
from collective.contract.waits import MessageCall
from collective.deadline import Deadline
from collective.errors import CollectiveError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

from .engine import CUT_TAG, cut, ended, seconds
from .exchanges import Message
from .tensors import as_bytes
from .waiting import Blocked, Elsewhere, watched

if TYPE_CHECKING:
    from collective.request import Request

__all__ = ["Messenger", "limit"]

_UINT8 = BY_NAME["uint8"]

# Our own deadline expires first, because our error can name the absent ranks. Gloo's time limit is
# later by this many seconds.
_SLACK_S = 5.0
# Seconds for which a call waits at first; after that it waits in slices, with a check after each.
_FIRST_S = 0.1
# Messages up to this length almost always arrive completely or not at all; see Messenger._move.
_DIRECT_BYTES = 32 << 10
# Gloo's tags have 31 bits. These are the tags of the first process group, which is for collectives.
# Comparisons of calls use _COMPARED. Messages with the user's tag CUT_TAG use _LAST, because the
# second group reserves that tag for cutting. From _HASHED on, the tags are hashes: of the call to
# which a message belongs, or of a user's tag that does not fit into 31 bits.
_COMPARED, _LAST, _HASHED = 0, 1, 2


@lru_cache(maxsize=256)
def limit(patience: float) -> Any:
    """Return Gloo's time limit for a call whose own deadline is ``patience`` seconds in all."""
    return seconds(patience + _SLACK_S)


def _hashed(number: int) -> int:
    return _HASHED + number % (CUT_TAG - _HASHED)


class Messenger(Monitored):
    """Part of the transport that sends, receives and waits."""

    def __init__(self, channel: Channel) -> None:
        self.rank = channel.rank
        self.size = channel.size
        self.channel = channel
        # One group for collectives and one for the user's messages: both may run at the same time.
        self._groups: tuple[Any, ...] = ()
        # The running collective call, for errors, and the tag of its messages.
        self._running: object = "connect"
        self._slot = _COMPARED
        # Gloo's own collective that is running or has failed.
        self._work: Any = None
        self._cutting = threading.Lock()

    def _cut(self) -> None:
        """End all running calls, here and at the peers, whose monitors give them the reason."""
        with self._cutting:
            for group in self._groups:
                cut(group, self.rank, self.size)

    def _begin(self, request: Request, comparing: bool = False) -> None:
        """Record the collective call that is about to run or, if ``comparing``, to be compared.

        The call's messages get a tag that depends on the call, so messages of different calls
        never match: Gloo ends the process when a message is longer than its receiver expects.
        Ranks in different calls wait instead, and after a second the monitor has the calls
        compared.
        """
        if self.channel.failure is not None:  # spares most calls a Python call, which costs 60 ns
            self.refuse_broken(request)
        self._running = request
        self._slot = _COMPARED if comparing else _hashed(request.digest)

    # -- point to point -------------------------------------------------------------------

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        blocked = self._blocked(MessageCall("send", tag, dst, None), (dst,), deadline)
        self._move(blocked, *self._route(tag), (), [([as_bytes(src)], dst)], src.nbytes)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        if src == ANY_SOURCE:
            return self._recv_any(dst, tag, deadline)
        blocked = self._blocked(MessageCall("recv", tag, None, src), (src,), deadline)
        self._move(blocked, *self._route(tag), [([as_bytes(dst)], src)], (), dst.nbytes)
        return src

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        if self.rank in (to, source):
            sendrecv.sendrecv(self, src, to, dst, source, tag, deadline)
            return
        call = MessageCall("sendrecv", tag, to, source)
        blocked = self._blocked(call, call.peers, deadline)
        coming, going = [([as_bytes(dst)], source)], [([as_bytes(src)], to)]
        self._move(blocked, *self._route(tag), coming, going, max(src.nbytes, dst.nbytes))

    def _exchange(
        self,
        deadline: Deadline,
        coming: Sequence[tuple[Buffer, int]],
        going: Sequence[tuple[Buffer, int]],
    ) -> None:
        """Receive and send the messages of a collective, all at once."""
        self._exchange_tensors(
            deadline,
            # All ranks know the lengths, so no rank sends an empty message or waits for one.
            [([as_bytes(buffer)], rank) for buffer, rank in coming if buffer.count],
            [([as_bytes(buffer)], rank) for buffer, rank in going if buffer.count],
            max(buffer.nbytes for buffer, _ in (*coming, *going)),
        )

    def _exchange_tensors(
        self, deadline: Deadline, coming: Sequence[Message], going: Sequence[Message], nbytes: int
    ) -> None:
        """Receive and send tensors of a collective, all at once; the longest has ``nbytes``."""
        blocked = Blocked(self.channel, self._running, deadline, None)
        self._move(blocked, self._groups[0], self._slot, coming, going, nbytes)

    def _recv_any(self, dst: Buffer, tag: int, deadline: Deadline) -> int:
        """Receive from the rank whose message arrives first.

        A cut does not end such a receive in Gloo. So it runs in another thread.
        """
        where = MessageCall("recv", tag, None, ANY_SOURCE)
        group, slot = self._route(tag)
        sources: list[int] = []

        def receive() -> None:
            work = group.recv_anysource([as_bytes(dst)], slot)
            work.wait(limit(deadline.seconds))
            sources.append(int(work._source_rank()))

        others = [rank for rank in range(self.size) if rank != self.rank]
        wait = self.channel.wait(where, deadline, others, any_of=True)
        self.channel.check(where, ())
        elsewhere = Elsewhere(receive)
        while not elsewhere.over.acquire(timeout=wait.slice()):
            wait.check()
        if elsewhere.error is not None:
            original = elsewhere.error
            raise self.channel.explain(where, original, others, any_of=True) from original
        return sources[0]

    def _route(self, tag: int) -> tuple[Any, int]:
        """Return the process group and the Gloo tag for messages with ``tag``."""
        groups = self._groups
        if tag == COLLECTIVE_TAG:
            return groups[0], self._slot
        if 0 <= tag < CUT_TAG:
            return groups[1], tag
        if tag == CUT_TAG:
            return groups[0], _LAST
        digest = hashlib.blake2b(str(tag).encode(), digest_size=8).digest()
        return groups[0], _hashed(int.from_bytes(digest, "little"))

    # -- waiting --------------------------------------------------------------------------

    def _blocked(self, call: MessageCall, peers: Sequence[int], deadline: Deadline) -> Blocked:
        self.refuse_broken(call)
        if call.tag == COLLECTIVE_TAG:
            # A peer that has left may have done its part: this depends on the whole collective
            # call, not on one message. So the wait names no single peer.
            return Blocked(self.channel, self._running, deadline, None)
        return Blocked(self.channel, call, deadline, peers)

    def _move(
        self,
        blocked: Blocked,
        group: Any,
        slot: int,
        coming: Sequence[Message],
        going: Sequence[Message],
        nbytes: int,
    ) -> None:
        """Receive and send tensors, and wait for them; the longest has ``nbytes``.

        This thread waits inside Gloo, where only :func:`cut` can interrupt it. Even a cut does
        not help if the sender dies when a part of its message has been read: then Gloo forgets
        that a thread is waiting for the rest. So another thread waits for long messages.
        """
        works = []
        try:
            for tensors, rank in coming:
                works.append(group.recv(tensors, rank, slot))
            for tensors, rank in going:
                works.append(group.send(tensors, rank, slot))
            until = limit(blocked.deadline.seconds)
            if nbytes > _DIRECT_BYTES:
                self._wait_elsewhere(blocked, lambda: [work.wait(until) for work in works])
                return
            watched.add(blocked)
            try:
                for work in works:
                    work.wait(until)
            finally:
                watched.remove(blocked)
        except CollectiveError:
            raise  # the wait's check has raised it, so it is explained already
        except RuntimeError as error:
            raise self._explained(blocked, error) from error

    def _wait_elsewhere(self, blocked: Blocked, function: Callable[[], object]) -> None:
        elsewhere = Elsewhere(function)
        pause, wait = blocked.deadline.at_most(_FIRST_S), None
        try:
            while not elsewhere.over.acquire(timeout=pause):
                wait = wait or blocked.wait()
                wait.check()
                pause = wait.slice()
        except CollectiveError:
            self._cut()  # otherwise Gloo would go on using an array that the caller has back
            raise
        if elsewhere.error is not None:
            raise elsewhere.error

    def _explained(self, blocked: Blocked, error: RuntimeError) -> BaseException:
        explained = blocked.error or self.channel.explain(blocked.where, error, blocked.awaited)
        self._cut()
        return explained

    def _meet(self, deadline: Deadline) -> None:
        """Wait until the ranks are in the same call.

        Gloo matches its collectives by their kind and a running number alone. So each rank first
        receives a message from the rank before it. Gloo's reductions move data around the same
        ring, so a rank that is in another call than its neighbour stops them. Gloo's broadcast
        moves data along a tree. Before a broadcast the communicator sends a head along a tree of
        its own, and a rank in another call does not get the head.
        """
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        coming, going = Buffer.empty(1, _UINT8), Buffer.empty(1, _UINT8)
        self._exchange(deadline, [(coming, before)], [(going, after)])

    def _run(self, start: Callable[..., Any], *args: Any, deadline: Deadline) -> None:
        """Run one of Gloo's own collectives, and wait for it in slices."""
        try:
            self._work = start(*args)
            self._complete(self._work, deadline)
        except CollectiveError:  # must precede RuntimeError, its base class
            # Once this is raised the caller has its array back, so Gloo must stop using it.
            self._cut()
            ended(self._work)
            raise
        except RuntimeError as error:
            raise self.channel.explain(self._running, error) from error
        self._work = None

    def _complete(self, work: Any, deadline: Deadline) -> None:
        pause, wait = deadline.at_most(_FIRST_S), None
        while True:
            try:
                work.wait(seconds(pause))
                return
            except RuntimeError:
                # The call has failed, is still running, or has completed just after the timeout.
                if work.is_completed():
                    work.wait()
                    return
            if wait is None:
                wait = self.channel.wait(self._running, deadline)
            wait.check()
            pause = wait.slice()
