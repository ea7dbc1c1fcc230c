"""The ``gloo`` transport: connecting, closing, messages, and waiting for Gloo's calls."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from collective.algorithms.messages import sendrecv
from collective.backends.peers.channel import Channel
from collective.backends.peers.monitored import Paired, Pairing
from collective.contract.backend import ANY_SOURCE, COLLECTIVE_TAG, Capabilities, Plan
from collective.contract.waits import MessageCall
from collective.deadline import Deadline
from collective.memory.buffer import Buffer

from .connecting import Connector
from .engine import CUT_TAG, cut, device, seconds
from .waiting import Elsewhere

if TYPE_CHECKING:
    from collective.contract.world import World
    from collective.request import Request

# Our own deadline expires first, because our error can name the absent ranks. Gloo's time limit is
# later by this many seconds.
_SLACK_S = 5.0
# Seconds for which a call waits before it makes a Wait, which most calls do not need.
_FIRST_S = 0.05
# Gloo's tags have 31 bits. A user's tag below _HASHED is Gloo's tag. From _HASHED on, the tags are
# hashes: of the collective call to which a message belongs, or of any other tag. The last two tags
# are those of the comparisons of calls and of cutting.
_HASHED, _COMPARED = 1 << 30, CUT_TAG - 1


@functools.lru_cache(maxsize=256)
def _limit(patience: float) -> Any:
    """Return Gloo's time limit for a call whose own deadline is ``patience`` seconds in all."""
    return seconds(patience + _SLACK_S)


def _hashed(number: int) -> int:
    return _HASHED + number % (_COMPARED - _HASHED)


class GlooBackend(Paired):
    """Transport between ranks on any hosts; see the package's docstring."""

    name = "gloo"
    capabilities = Capabilities(
        across_hosts=True, any_source=True, detects_lost_peers=True, shrinks=True, grows=True
    )

    def __init__(self, world: World, channel: Channel) -> None:
        super().__init__(world, channel)
        # Gloo's process group; None if this rank has no peers.
        self._group: Any = None
        # The tag of the running collective call's messages.
        self._slot = _COMPARED
        self._cutting = threading.Lock()

    # -- life -----------------------------------------------------------------------------

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        device(world)  # find a wrong address before the ranks meet
        return super().connect(world, deadline)

    def _open(self, pairing: Pairing) -> None:
        self._group = Connector(pairing).connect()

    def _cut(self) -> None:
        with self._cutting:
            if self._group is not None:
                cut(self._group, self.rank, self.size)

    def _end(self) -> None:
        self._cut()
        self._group = None

    # -- collectives ----------------------------------------------------------------------

    def plan(self, request: Request) -> Plan:
        return functools.partial(self._run, request, super().plan(request))

    def _run(self, request: Request, plan: Plan, src: Any, dst: Any, deadline: Deadline) -> None:
        self._begin(request)
        plan(src, dst, deadline)

    def agree(self, request: Request, deadline: Deadline) -> None:
        self._begin(request, comparing=True)
        super().agree(request, deadline)

    def _begin(self, request: Request, comparing: bool = False) -> None:
        """Record the collective call that is about to run or, if ``comparing``, to be compared.

        The call's messages get a tag that depends on the call, so messages of different calls
        never match: Gloo ends the process when a message is longer than its receiver expects.
        Ranks in different calls wait instead, and after a second the monitor has the calls
        compared.
        """
        if self.channel.failure is not None:  # spares most calls a Python call, which costs 60 ns
            self.refuse_broken(request)
        self.running = request
        self._slot = _COMPARED if comparing else _hashed(request.digest)

    # -- point to point -------------------------------------------------------------------

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._move(MessageCall("send", tag, dst, None), src, None, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        if src == ANY_SOURCE:
            return self._recv_any(dst, tag, deadline)
        self._move(MessageCall("recv", tag, None, src), None, dst, deadline)
        return src

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        if self.rank in (to, source):
            sendrecv(self, src, to, dst, source, tag, deadline)
        else:
            self._move(MessageCall("sendrecv", tag, to, source), src, dst, deadline)

    def _recv_any(self, dst: Buffer, tag: int, deadline: Deadline) -> int:
        """Receive from the rank whose message arrives first."""
        call = MessageCall("recv", tag, None, ANY_SOURCE)
        self.refuse_broken(call)
        group, slot = self._group, self._slot_of(tag)
        sources: list[int] = []

        def receive() -> None:
            work = group.recv_anysource([_as_bytes(dst)], slot)
            work.wait(_limit(deadline.seconds))
            sources.append(int(work._source_rank()))

        others = [rank for rank in range(self.size) if rank != self.rank]
        self._wait(receive, call, deadline, others, any_of=True)
        return sources[0]

    def _slot_of(self, tag: int) -> int:
        """Return Gloo's tag for messages with ``tag``."""
        if tag == COLLECTIVE_TAG:
            return self._slot
        if 0 <= tag < _HASHED:
            return tag
        digest = hashlib.blake2b(str(tag).encode(), digest_size=8).digest()
        return _hashed(int.from_bytes(digest, "little"))

    # -- waiting --------------------------------------------------------------------------

    def _move(
        self, call: MessageCall, src: Buffer | None, dst: Buffer | None, deadline: Deadline
    ) -> None:
        """Send ``src``, receive ``dst``, or both at once, and wait for it."""
        self.refuse_broken(call)
        group, slot = self._group, self._slot_of(call.tag)

        def move() -> None:
            works = []
            if dst is not None:
                works.append(group.recv([_as_bytes(dst)], call.source, slot))
            if src is not None:
                works.append(group.send([_as_bytes(src)], call.to, slot))
            for work in works:
                work.wait(_limit(deadline.seconds))

        if call.tag == COLLECTIVE_TAG:
            # A peer that has left may have done its part: this depends on the whole collective
            # call, not on one message. So the wait names no single peer.
            self._wait(move, self.running, deadline, None)
        else:
            self._wait(move, call, deadline, call.peers)

    def _wait(
        self,
        function: Callable[[], None],
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None,
        any_of: bool = False,
    ) -> None:
        """Run ``function``, which waits inside Gloo, in another thread until it returns.

        Only :func:`cut` interrupts Gloo, and not always: if the sender dies when a part of its
        message has been read, Gloo forgets that a thread is waiting for the rest. A receive from
        any rank does not notice a cut either. So this thread abandons the other one.

        Args:
            function: posts messages and waits for them.
            where, deadline, awaited, any_of: the call, as in :meth:`Channel.wait`.
        """
        elsewhere = Elsewhere(function)
        try:
            if not elsewhere.over.acquire(timeout=deadline.at_most(_FIRST_S)):
                wait = self.channel.wait(where, deadline, awaited, any_of)
                wait.check()
                while not elsewhere.over.acquire(timeout=wait.slice()):
                    wait.check()
        except BaseException:
            self._cut()  # otherwise Gloo would go on using an array that the caller has back
            raise
        if elsewhere.error is not None:
            explained = self.channel.explain(where, elsewhere.error, awaited, any_of)
            self._cut()
            raise explained from elsewhere.error


class _Plain:
    """Wrapper that presents contiguous bytes as writable, and with a stride of 1.

    torch warns about read-only arrays, even if they are only sent. A read-only array gets here
    only to be sent, and Gloo does not write to it. torch refuses one element of a negative stride.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # an array made from this wrapper keeps the wrapped array alive
        known = array.__array_interface__
        self.__array_interface__ = {**known, "data": (known["data"][0], False), "strides": None}


def _as_bytes(buffer: Buffer) -> torch.Tensor:
    """Return a uint8 tensor over the memory of ``buffer``."""
    array = buffer.array.view(np.uint8)
    if not array.flags.writeable or array.strides != (1,):
        array = np.asarray(_Plain(array))
    return torch.from_numpy(array)
