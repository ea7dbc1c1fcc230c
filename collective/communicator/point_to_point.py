"""The calls between two ranks: send, recv, sendrecv."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collective.contract.backend import ANY_SOURCE
from collective.contract.work import Work
from collective.errors import (
    InvalidArgumentError,
    RankError,
    UnsupportedError,
)
from collective.memory import nested
from collective.memory.arrays import Adapter
from collective.memory.buffer import Buffer
from collective.memory.overlap import shares_memory
from collective.native import NOBODY

from .deadline import Deadline
from .gpu_calls import with_site, within
from .heads import Head
from .listener import CallEvent
from .message_contents import WORDS, MessageContents, arriving

__all__ = ["NULL", "MessageCalls", "Status"]

#: In place of a rank: nobody, to whom nothing is sent and from whom nothing is received.
#: No arithmetic with ranks ends there by accident, as it could at -2 (``comm.rank - 2``).
NULL = -(2**30)

_TAGS = 2**31
# Lanes that are kept for further messages; each may have a thread for some seconds.
_LANES = 64

#: Messages of one are received in the order in which they were sent: operation, dst, src, tag.
Direction = tuple[str, "int | None", "int | None", int]


class Status:
    """What a receive tells of its message beside the array.

    Attributes:
        source: the rank that sent it; ``ANY_SOURCE`` until it has come, ``NULL`` where none does.

    See Also:
        MPI_Status.
    """

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = ANY_SOURCE

    def __repr__(self) -> str:
        return f"Status(source={self.source})"


class MessageCalls(MessageContents):
    """The part of a communicator for messages between two ranks."""

    def send(
        self,
        x: Any,
        dst: int,
        *,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send an array to rank ``dst``; return when ``x`` may be changed.

        The receiver may have to ask for it first. Messages to one rank with one tag
        arrive in the order in which they were sent.

        Args:
            x: an array of at most 12 dimensions, or a nested list, tuple or dict of
                arrays, which is one message.
            dst: another rank, or ``collective.NULL``: nothing is sent then.
            tag: an integer from 0 to 2**31 - 1 that the receiver has to give too.
            timeout, async_op: as in :meth:`all_reduce`.

        Raises:
            RankError, InvalidArgumentError: refused; nothing was sent.
            CollectiveTimeoutError, PeerLostError, PeerFailedError: it may have arrived.

        See Also:
            MPI_Send.
        """
        if not async_op and self._in_c(x, dst, None, NOBODY, tag, timeout) is not NotImplemented:
            return None
        return self._send(x, dst, tag, timeout, async_op, None)

    def _send(
        self, x: Any, dst: int, tag: int, timeout: float | None, async_op: bool, result: Any
    ) -> Any:
        """Send an array in Python, and return ``result`` when it is sent."""
        if _is_null(dst):
            return self._nothing("send", result, tag, timeout, async_op)
        dst, tag, seconds = self._peer("send", "dst", dst), _tag(tag), self._seconds(timeout)
        head, payload, near = self._message("send", x)
        run = partial(self._send_message, head, payload, dst, tag, seconds, result)
        key = "send", dst, None, tag
        return self._post(key, run, async_op, *near, nbytes=int(head.words[2]))

    def _send_message(
        self, head: Head, payload: Buffer | None, dst: int, tag: int, seconds: float, result: Any
    ) -> Any:
        """Send a head and the payload that follows it, if any; return ``result``."""
        deadline = Deadline(seconds)
        self._transport(self._backend.send, head.buffer, dst, tag, deadline.left())
        if payload is not None:
            self._transport(self._backend.send, payload, dst, tag, deadline.left())
        return result

    def recv(
        self,
        out: Any,
        src: int,
        *,
        tag: int = 0,
        like: Any = None,
        status: Status | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive an array from rank ``src``.

        Args:
            out: where it goes, of the sender's shape and dtype (or a structure like the
                sender's); or None, to take whatever comes.
            src: another rank, ``collective.ANY_SOURCE``, or ``collective.NULL``: nothing is
                received then, and ``out`` stays as it is.
            tag: the sender's.
            like: the framework of the result where ``out`` is None: its name, or an array.
            status: is told who sent the message.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array; None where both ``out`` is None and ``src`` is NULL.

        Raises:
            ShapeError, DtypeError: what came does not fit ``out``. The message is gone,
                ``out`` is untouched, the communicator stays usable.

        See Also:
            MPI_Recv.
        """
        if not async_op and out is not None and like is None:
            found = self._in_c(None, NOBODY, out, src, tag, timeout)
            if found is not NotImplemented:
                if status is not None:
                    status.source = found
                return out
        if _is_null(src):
            if status is not None:
                status.source = NULL
            return self._nothing("recv", out, tag, timeout, async_op)
        if src != ANY_SOURCE:
            src = self._peer("recv", "src", src)
        elif not self.capabilities.any_source:
            raise UnsupportedError(
                f"recv: ANY_SOURCE is not supported by backend {self._backend.name!r} "
                f"{self._who}. Name the source, or use backend='shm' or 'threads'."
            )
        tag, seconds = _tag(tag), self._seconds(timeout)
        near = self._check_out("recv", out)
        self._adapter(like)
        if self._lanes:
            self._refuse_overlap(src, tag)

        def run() -> Any:
            deadline = Deadline(seconds)
            head = Head(WORDS)
            source = self._transport(self._backend.recv, head.buffer, src, tag, deadline.left())
            if status is not None:
                status.source = source
            words = arriving("recv", head)
            payload, follows, direct = self._payload_room(
                head, words, out, like if out is None else out
            )
            if follows:
                self._transport(self._backend.recv, payload, source, tag, deadline.left())
            result = out if direct else self._arrived(words, payload, out, like)
            if not near:
                self._settle("recv", payload.array, seconds)
            return result

        return self._post(("recv", None, src, tag), run, async_op, *near)

    def sendrecv(
        self,
        x: Any,
        dst: int,
        src: int,
        *,
        out: Any = None,
        tag: int = 0,
        like: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send ``x`` to rank ``dst`` and receive from rank ``src``, neither waiting for the other.

        The ranks that take part all call ``sendrecv``, so that everyone who sends is
        received from. A rank may exchange with itself, and either side may be
        ``collective.NULL``: at the edge of a grid nothing goes there, and nothing comes.

        Args:
            x, dst, tag: as in :meth:`send`.
            src, out: as in :meth:`recv`, without ANY_SOURCE. ``out`` may be ``x``, or overlap it:
                what is sent is what ``x`` held when the call was made.
            like: the framework of the result where ``out`` is None; that of ``x`` by default.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array; None where both ``out`` is None and ``src`` is NULL.

        See Also:
            MPI_Sendrecv.
        """
        if not async_op and like is None and src != ANY_SOURCE:
            deadline = Deadline(self._seconds(timeout))
            found = self._in_c(x, dst, out, src, tag, deadline.left())
            if found is None:
                return self._receive_rest(x, out, src, tag, deadline.left())
            if found is not NotImplemented:
                return out
        if _is_null(dst) or _is_null(src):
            return self._one_way(x, dst, src, out, tag, like, timeout, async_op)
        dst, src = self._rank("sendrecv", "dst", dst), self._rank("sendrecv", "src", src)
        if (dst == self.rank) != (src == self.rank):
            raise RankError(
                f"sendrecv: dst {dst}, src {src}; a rank that sends to itself receives from "
                f"itself {self._who}."
            )
        tag, seconds = _tag(tag), self._seconds(timeout)
        self._check_out("sendrecv", out)
        head, payload, near = self._message("sendrecv", x)
        if like is None:
            like = next(iter(nested.flatten(x)), None)
        self._adapter(like)
        send, recv = ("send", dst, None, tag), ("recv", None, src, tag)
        key, nbytes = ("sendrecv", dst, src, tag), int(head.words[2])
        if dst != self.rank and (async_op or self._busy(send) or self._busy(recv)):
            # Each half waits for its turn among the messages that are in flight already, so the
            # receive may write to `out` before the send has read `x`.
            if payload is not None and out is not None and shares_memory(payload.array, out):
                payload = Buffer(payload.array.copy(), payload.dtype)
            sending = partial(self._send_message, head, payload, dst, tag, seconds, None)
            sent = self._post(send, sending, True, *near, nbytes=nbytes)
            received = self.recv(out, src, tag=tag, like=like, timeout=timeout, async_op=True)

            def both() -> Any:
                sent.wait()
                return received.wait()

            return self._post(key, both, async_op, nbytes=nbytes)

        run = partial(self._both_ways, head, payload, dst, src, out, tag, like, seconds)
        return self._post(key, run, async_op, *near, nbytes=nbytes)

    def _both_ways(
        self, head: Head, payload: Buffer | None, dst: int, src: int, out: Any, tag: int, like: Any,
        seconds: float,
    ) -> Any:  # fmt: skip
        """Send a message and receive one; return what arrived."""
        deadline = Deadline(seconds)
        coming = Head(WORDS)
        self._transport(
            self._backend.sendrecv, head.buffer, dst, coming.buffer, src, tag, deadline.left()
        )
        words = arriving("sendrecv", coming)
        # What is sent still may be what it would be received over.
        received, follows, _ = self._payload_room(coming, words, None, like if out is None else out)
        rest = deadline.left()
        if payload is not None and follows:
            self._transport(self._backend.sendrecv, payload, dst, received, src, tag, rest)
        elif payload is not None:  # nothing is sent for nothing: the peer may be in recv
            self._transport(self._backend.send, payload, dst, tag, rest)
        elif follows:
            self._transport(self._backend.recv, received, src, tag, rest)
        return self._arrived(words, received, out, like)

    # -- with nobody ----------------------------------------------------------------------

    def _nothing(self, what: str, out: Any, tag: int, timeout: float | None, async_op: bool) -> Any:
        """Send nothing to NULL, or receive nothing from it: return ``out`` as it is.

        What is wrong with the call, or the communicator, is an error as with any other rank.
        """
        _tag(tag)
        self._seconds(timeout)
        self._check_out(what, out)
        self._backend.refuse_broken(what)
        if self._broken is not None:
            self._refuse_broken(what)
        if not async_op:
            return out
        work: Work[Any] = Work(what)
        work._run(lambda: out)
        return work

    def _one_way(
        self, x: Any, dst: int, src: int, out: Any, tag: int, like: Any, timeout: float | None,
        async_op: bool,
    ) -> Any:  # fmt: skip
        """Make the half of a ``sendrecv`` whose rank is not NULL, if any."""
        if _is_null(src):
            self._check_out("sendrecv", out)
            return self._send(x, dst, tag, timeout, async_op, out)
        self._rank("sendrecv", "src", src)  # one by name
        if like is None:
            like = next(iter(nested.flatten(x)), None)
        return self.recv(out, src, tag=tag, like=like, timeout=timeout, async_op=async_op)

    # -- shared ---------------------------------------------------------------------------

    def _in_c(self, x: Any, dst: int, out: Any, src: int, tag: int, timeout: float | None) -> Any:
        """Have the transport exchange plain arrays in C; see :func:`collective.native.messages`.

        Returns:
            What that does: ``NotImplemented``, too, where somebody listens, or messages that come
            first are still in the background.
        """
        exchange = self._door_of_messages
        if exchange is None or (self._lanes and not self._free(dst, src, tag)):
            return NotImplemented
        seconds = self.timeout if timeout is None else self._seconds(timeout)
        try:
            return exchange(x, dst, out, src, tag, seconds, True)
        except BaseException as error:
            self._note_failure(error)
            raise

    def _receive_rest(self, x: Any, out: Any, src: int, tag: int, left: float) -> Any:
        """Receive what a ``sendrecv`` has to, of which C has sent ``x``."""
        like = next(iter(nested.flatten(x)))
        return self.recv(out, src, tag=tag, like=like, timeout=max(1e-3, left))

    def _free(self, dst: int, src: int, tag: int) -> bool:
        """Return whether no message in the background comes before one to and from these."""
        if not all(type(each) is int for each in (dst, src, tag)):
            return False
        if src not in (NOBODY, NULL):
            self._refuse_overlap(src, tag)
        return not (self._busy(("send", dst, None, tag)) or self._busy(("recv", None, src, tag)))

    def _peer(self, what: str, name: str, rank: Any) -> int:
        rank = self._rank(what, name, rank)
        if rank == self.rank:
            raise RankError(
                f"{what}: {name} {rank} is this rank itself; it would wait for ever {self._who}. "
                "Use sendrecv, or an assignment."
            )
        return int(rank)

    def _busy(self, key: Direction) -> bool:
        lane = self._lanes.get(key)
        return lane is not None and not lane.idle

    def _post(
        self,
        key: Direction,
        run: Callable[[], Any],
        async_op: bool,
        near: Any = None,
        adapter: Adapter | None = None,
        *,
        nbytes: int = -1,
    ) -> Any:
        """Run a message now or in its lane: one a direction, peer and tag, in order.

        Args:
            near, adapter: an array on a GPU, if the message has one, and its adapter.
            nbytes: of what is sent; -1 if nothing is.
        """
        operation, dst, src, tag = key
        if self._broken is not None:
            run, adapter = partial(self._refuse_broken, f"{operation}(tag={tag})"), None
        if self._listeners:
            run = partial(self._heard, CallEvent(operation, nbytes, dst=dst, src=src, tag=tag), run)
        if not async_op and not self._busy(key):
            return run()
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= _LANES:  # a program may never use a tag twice
                for idle in [k for k, kept in self._lanes.items() if kept.idle]:
                    del self._lanes[idle]
            ends = "-".join(str(end) for end in (dst, src) if end is not None)
            name = f"collective-{operation}-{ends}-{tag}"
            lane = self._lanes[key] = self._new_lane(name)
        what = f"{operation}(tag={tag})"
        if adapter is None or not self._enqueues:
            work = lane.submit(what, with_site(run))
        else:
            # Beside the caller's stream, and beside those of other directions, peers and tags.
            # What it waits for is known now; it does not wait before its turn, or it would hold
            # up the messages before it.
            side = self._backend.side_stream(near.device, key)
            work = self._stream_work(what, side, near.stream, adapter)
            ready = near.stream.record()

            def turn() -> Any:
                side.wait(ready)
                return within(side, run)()

            lane.submit(what, with_site(turn), work)
        return work if async_op else work.wait()

    def _refuse_overlap(self, src: int, tag: int) -> None:
        """Keep a receive from anybody apart from others of its tag: they'd share messages."""
        for (operation, _, source, other), lane in self._lanes.items():
            named = (operation, other) == ("recv", tag) and source != src
            if named and ANY_SOURCE in (source, src) and not lane.idle:
                raise InvalidArgumentError(
                    f"recv: ANY_SOURCE and a source by name, with tag {tag}, at once "
                    f"{self._who}. Wait for the first, or use another tag."
                )


def _is_null(rank: Any) -> bool:
    return isinstance(rank, (int, np.integer)) and rank == NULL


def _tag(tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag < _TAGS:
        raise InvalidArgumentError(f"tag: {tag!r}; an integer from 0 to {_TAGS - 1}.")
    return int(tag)
