"""The calls between two ranks: send, recv, sendrecv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import numpy as np

from collective.contract.backend import ANY_SOURCE, SpecialRank
from collective.contract.work import Work
from collective.deadline import Deadline
from collective.errors import InvalidArgumentError, RankError, UnsupportedError
from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.memory.overlap import shares_memory
from collective.native import NOBODY

from ..listener import CallEvent
from ..path import Path
from ..posted import PostedWork, Steps, post_receive, post_send
from ..results import compare_messages
from ..streams import Near, settle, stream_work, with_site, within
from .heads import OBJECT, WORDS, Head, build_result, check_out, message_of, read_words, room_for
from .views import adapter_for

_TAGS = 2**31

#: Operation, dst, src and tag. Messages of one direction are received in the order in which they
#: were sent.
Direction = tuple[str, "int | None", "int | None", int]


#: Null rank: a message to it is not sent, and a receive from it receives nothing. Arithmetic with
#: ranks cannot produce this number by accident, as it could produce -2 (``comm.rank - 2``).
NULL: int = SpecialRank(-(2**30), "NULL")


class Status:
    """Status of a received message, which ``recv`` fills in.

    Attributes:
        source: rank that sent the message; ``ANY_SOURCE`` until the message has arrived, ``NULL``
            if it was received from ``NULL``.

    See Also:
        MPI_Status.
    """

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = ANY_SOURCE

    def __repr__(self) -> str:
        return f"Status(source={self.source})"


class PointToPointCall:
    """One call between two ranks.

    The native core makes plain calls (:meth:`try_in_c`). The other calls are made in Python, at
    once or in the lane of their direction, peer and tag (:meth:`make_in_python`).

    Attributes:
        path: path of the communicator.
        tag: tag that the caller passed, unchecked.
    """

    path: Path
    tag: Any

    def try_in_c(self, seconds: float) -> Any:
        """Exchange plain arrays in C, by the transport; return the call's result.

        Return ``NotImplemented`` if nothing was done; see :func:`collective.native.messages`.
        """
        return NotImplemented

    def make_in_python(self, seconds: float, async_op: bool) -> Any:
        """Make the call in Python; return its result, or a ``Work``."""
        raise NotImplementedError

    def in_c(
        self, x: Any, dst: Any, out: Any, src: Any, deadline: Deadline, heads: int = True
    ) -> Any:
        """Exchange plain arrays in C, unless there are listeners or earlier messages in flight.

        Args:
            heads: as in :func:`collective.native.messages`; functions in Python take only True.

        Returns:
            The sender; ``NotImplemented``, if nothing was done; or the deadline, if Python must
            receive the message. See :func:`collective.native.messages`.
        """
        path = self.path
        exchange = path.exchange
        if exchange is None or (path.lanes and not _is_free(path, dst, src, self.tag)):
            return NotImplemented
        if heads is not True and type(exchange) is not BuiltinFunctionType:
            return NotImplemented
        try:
            return exchange(x, dst, out, src, self.tag, deadline, heads)
        except BaseException as error:
            path.note_failure(error)
            raise

    def result_of_nobody(self, what: str, out: Any, async_op: bool) -> Any:
        """Make a call whose peer is NULL: send and receive nothing, and return ``out`` unchanged.

        A wrong argument or a broken communicator is an error, as with any other peer.
        """
        path = self.path
        _check_tag(self.tag)
        check_out(path, what, out)
        path.backend.refuse_broken(what)
        if path.broken is not None:
            path.refuse_broken(what)
        return Work.finished(what, out) if async_op else out


class Send(PointToPointCall):
    """See :meth:`Communicator.send`.

    Args:
        result: object that the call returns.
        hosted: as in :func:`.views.view`.
        what: the communicator's method that the program called, for errors and listeners.
    """

    def __init__(
        self, path: Path, x: Any, dst: Any, tag: Any, result: Any = None, hosted: str = "",
        what: str = "send",
    ) -> None:  # fmt: skip
        self.path = path
        self.x = x
        self.dst = dst
        self.tag = tag
        self._result = result
        self._hosted = hosted
        self._what = what

    def try_in_c(self, seconds: float) -> Any:
        heads = OBJECT if self._hosted == "object" else True
        done = self.in_c(self.x, self.dst, None, NOBODY, Deadline(seconds), heads)
        return NotImplemented if done is NotImplemented else self._result

    def make_in_python(self, seconds: float, async_op: bool) -> Any:
        path, what = self.path, self._what
        if is_null(self.dst):
            return self.result_of_nobody(what, self._result, async_op)
        dst, tag = _check_peer(path, what, "dst", self.dst), _check_tag(self.tag)
        head, payload, near = message_of(path, what, self.x, self._hosted)
        if async_op and path.posts(near):
            sending = _sending(path, head, payload, dst, tag, self._result)
            return PostedWork(path, f"{what}(tag={tag})", tag, sending, False, seconds)
        run = partial(_send, path, head, payload, dst, tag, seconds, self._result)
        key: Direction = "send", dst, None, tag
        return _post(path, what, key, run, async_op, near, int(head.words[2]))


class Recv(PointToPointCall):
    """See :meth:`Communicator.recv`.

    Args:
        what: the communicator's method that the program called, for errors and listeners.
        heard: whether the listeners are notified already.
        hosted: as in :func:`.views.view`.
    """

    def __init__(
        self, path: Path, out: Any, src: Any, tag: Any, like: Any, status: Status | None,
        what: str = "recv", heard: bool = False, hosted: str = "",
    ) -> None:  # fmt: skip
        self.path = path
        self.out = out
        self.src = src
        self.tag = tag
        self.like = like
        self._status = status
        self._what = what
        self._heard = heard
        self._hosted = hosted

    @classmethod
    def rest(cls, path: Path, x: None, out: Any, src: Any, tag: Any) -> Recv:
        """Return the call that receives a message that does not fit ``out``, and raises that."""
        return cls(path, out, src, tag, None, None)

    def try_in_c(self, seconds: float) -> Any:
        if self._hosted == "object":
            return self._object_in_c(Deadline(seconds))
        if self.out is None or self.like is not None:
            return NotImplemented
        source = self.in_c(None, NOBODY, self.out, self.src, Deadline(seconds))
        if source is NotImplemented:
            return source
        if isinstance(source, Deadline):
            return self.make_in_python(source, False)
        if self._status is not None:
            self._status.source = source
        return self.out

    def _object_in_c(self, deadline: Deadline) -> Any:
        """Receive the head of an object in C, and the rest as any message's."""
        if type(self.tag) is not int or not 0 <= self.tag < _TAGS:
            return NotImplemented
        head = Head(WORDS)
        source = self.in_c(None, NOBODY, head.buffer.array, self.src, deadline, False)
        if source is NotImplemented:
            return source
        kind, _, nbytes = head.words[:3].tolist()
        if kind != OBJECT or not 0 <= nbytes <= head.room:
            return self._rest(head, source, deadline, None)
        if self._status is not None:
            self._status.source = source
        return head.inline(nbytes)

    def make_in_python(self, limit: float | Deadline, async_op: bool) -> Any:
        """Make the call in Python; return its result, or a ``Work``.

        Args:
            limit: seconds from the call's turn on, or the deadline of a call that C has begun.
        """
        path, what, src = self.path, self._what, self.src
        if is_null(src):
            if self._status is not None:
                self._status.source = NULL
            return self.result_of_nobody(what, self.out, async_op)
        if src != ANY_SOURCE:
            src = _check_peer(path, what, "src", src)
        elif not path.capabilities.any_source:
            raise UnsupportedError(
                f"recv: ANY_SOURCE is not supported by backend {path.backend.name!r} "
                f"{path.who}. Name the source, or use backend='shm' or 'threads'."
            )
        tag = _check_tag(self.tag)
        near = check_out(path, what, self.out)
        adapter_for(self.like)
        if (async_op or path.receives) and path.posts(near):
            steps = self._receiving(src, tag, near)
            work = PostedWork(path, f"{what}(tag={tag})", tag, steps, True, limit)
            return work if async_op else work.finish(limit)
        if path.lanes:
            _refuse_overlap(path, src, tag)
        run = partial(self._receive, src, tag, limit, near)
        key: Direction = "recv", None, src, tag
        return _post(path, what, key, run, async_op, near, heard=self._heard)

    def _receive(self, src: int, tag: int, limit: float | Deadline, near: Near | None) -> Any:
        path, deadline = self.path, Deadline.of(limit)
        head = Head(WORDS)
        source = path.transfer(path.backend.recv, head.buffer, src, tag, deadline)
        return self._rest(head, source, deadline, near)

    def _rest(self, head: Head, source: int, deadline: Deadline, near: Near | None) -> Any:
        """Receive what follows a head; return the result."""
        path, tag = self.path, int(self.tag)
        words, payload, follows, direct = self._room(head, source)
        if follows:
            path.transfer(path.backend.recv, payload, source, tag + path.payload_tag, deadline)
        if path.results is not None:
            received = head, payload if follows else None
            compare_messages(path, "recv", None, received, None, source, tag, deadline)
        return self._result(source, words, payload, direct, near, deadline)

    def _receiving(self, src: int, tag: int, near: Near | None) -> Steps:
        """Receive the message in steps, without waiting."""
        path, head = self.path, Head(WORDS)
        first = post_receive(path, head.buffer.array, src, tag)
        yield (first,)
        words, payload, follows, direct = self._room(head, first.source)
        if follows:
            yield (post_receive(path, payload.array, first.source, tag + path.payload_tag),)
        return self._result(first.source, words, payload, direct, near, Deadline(path.timeout))

    def _room(self, head: Head, source: int) -> tuple[Sequence[int], Buffer, bool, bool]:
        """Return the words of a head, and what :func:`room_for` returns for them."""
        if self._status is not None:
            self._status.source = source
        words = read_words(self._what, head)
        like = self.like if self.out is None else self.out
        return words, *room_for(self.path, head, words, self.out, like)

    def _result(
        self, source: int, words: Sequence[int], payload: Buffer, direct: bool,
        near: Near | None, deadline: Deadline,
    ) -> Any:  # fmt: skip
        path, out = self.path, self.out
        result = out
        if not direct:
            result = build_result(
                path, self._what, source, words, payload, out, self.like, self._hosted
            )
        if near is None:
            settle(path, self._what, payload.array, deadline)
        return result


class SendRecv(PointToPointCall):
    """See :meth:`Communicator.sendrecv`."""

    def __init__(
        self, path: Path, x: Any, dst: Any, src: Any, out: Any, tag: Any, like: Any
    ) -> None:
        self.path = path
        self.x = x
        self.dst = dst
        self.src = src
        self.out = out
        self.tag = tag
        self.like = like

    @classmethod
    def rest(cls, path: Path, x: Any, out: Any, src: Any, tag: Any) -> Recv:
        """Return the call that receives the message of a ``sendrecv`` whose ``x`` C has sent."""
        return Recv(path, out, src, tag, next(iter(nested.flatten(x))), None, "sendrecv")

    def try_in_c(self, seconds: float) -> Any:
        if self.like is not None or self.src == ANY_SOURCE:
            return NotImplemented
        deadline = Deadline(seconds)
        source = self.in_c(self.x, self.dst, self.out, self.src, deadline)
        if isinstance(source, Deadline):
            return self.path.receive_rest(type(self), self.x, self.out, self.src, self.tag, source)
        return source if source is NotImplemented else self.out

    def make_in_python(self, seconds: float, async_op: bool) -> Any:
        path, what = self.path, "sendrecv"
        if is_null(self.dst) or is_null(self.src):
            return self._one_way(seconds, async_op)
        dst = path.check_rank(what, "dst", self.dst)
        src = path.check_rank(what, "src", self.src)
        if (dst == path.rank) != (src == path.rank):
            raise RankError(
                f"sendrecv: dst {dst}, src {src}; a rank that sends to itself must also receive "
                f"from itself {path.who}."
            )
        tag = _check_tag(self.tag)
        check_out(path, what, self.out)
        head, payload, near = message_of(path, what, self.x)
        like = self._like_of_result()
        adapter_for(like)
        send: Direction = "send", dst, None, tag
        recv: Direction = "recv", None, src, tag
        key, nbytes = (what, dst, src, tag), int(head.words[2])
        busy = async_op or path.receives or _is_busy(path, send) or _is_busy(path, recv)
        if dst == path.rank or not busy:
            run = partial(self._both_ways, head, payload, dst, src, tag, like, seconds)
            return _post(path, what, key, run, async_op, near, nbytes)
        # Each half waits for its turn among the messages that are in flight already, so the
        # receive may write to `out` before the send has read `x`. The listeners get one event,
        # that of both halves.
        if payload is not None and self.out is not None and shares_memory(payload.array, self.out):
            payload = Buffer(payload.array.copy(), payload.dtype)
        receive = Recv(path, self.out, src, tag, like, None, what, heard=True)
        if path.posts(near) and check_out(path, what, self.out) is None:
            both = _both(path, head, payload, dst, tag, receive._receiving(src, tag, None))
            work = PostedWork(path, f"{what}(tag={tag})", tag, both, True, seconds)
            return work if async_op else work.finish(seconds)
        sending = partial(_send, path, head, payload, dst, tag, seconds, None)
        sent = _post(path, what, send, sending, True, near, heard=True)
        received = path.post(receive, seconds, True)

        def wait_for_both() -> Any:
            sent.wait()
            return received.wait()

        return _post(path, what, key, wait_for_both, async_op, None, nbytes)

    def _like_of_result(self) -> Any:
        """Return the model of the result where ``out`` is None: ``like``, or x's first array."""
        return self.like if self.like is not None else next(iter(nested.flatten(self.x)), None)

    def _one_way(self, seconds: float, async_op: bool) -> Any:
        """Make the half of the call whose rank is not NULL, if any."""
        path = self.path
        if is_null(self.src):
            check_out(path, "sendrecv", self.out)
            send = Send(path, self.x, self.dst, self.tag, self.out, what="sendrecv")
            return path.post(send, seconds, async_op)
        path.check_rank("sendrecv", "src", self.src)  # refuses ANY_SOURCE, which recv would accept
        recv = Recv(path, self.out, self.src, self.tag, self._like_of_result(), None, "sendrecv")
        return path.post(recv, seconds, async_op)

    def _both_ways(
        self, head: Head, payload: Buffer | None, dst: int, src: int, tag: int, like: Any,
        seconds: float,
    ) -> Any:  # fmt: skip
        """Send a message and receive one; return what arrived."""
        path, backend, out = self.path, self.path.backend, self.out
        deadline = Deadline(seconds)
        coming = Head(WORDS)
        path.transfer(backend.sendrecv, head.buffer, dst, coming.buffer, src, tag, deadline)
        words = read_words("sendrecv", coming)
        # Receive into new memory: `out` may overlap `x`, which has not been sent completely.
        received, follows, _ = room_for(path, coming, words, None, like if out is None else out)
        second = tag + path.payload_tag
        if payload is not None and follows:
            path.transfer(backend.sendrecv, payload, dst, received, src, second, deadline)
        elif payload is not None:  # no empty payload is exchanged: a peer in recv expects none
            path.transfer(backend.send, payload, dst, second, deadline)
        elif follows:
            path.transfer(backend.recv, received, src, second, deadline)
        if path.results is not None:
            arrivals = coming, received if follows else None
            compare_messages(path, "sendrecv", (head, payload), arrivals, dst, src, tag, deadline)
        return build_result(path, "sendrecv", src, words, received, out, like)


def _send(
    path: Path, head: Head, payload: Buffer | None, dst: int, tag: int, seconds: float, result: Any
) -> Any:
    """Send a head and the payload that follows it, if any; return ``result``."""
    deadline = Deadline(seconds)
    path.transfer(path.backend.send, head.buffer, dst, tag, deadline)
    if payload is not None:
        path.transfer(path.backend.send, payload, dst, tag + path.payload_tag, deadline)
    if path.results is not None:
        compare_messages(path, "send", (head, payload), None, dst, None, tag, deadline)
    return result


def _sending(
    path: Path, head: Head, payload: Buffer | None, dst: int, tag: int, result: Any
) -> Steps:
    """Send a message in steps, without waiting; see :func:`_send`."""
    items = [post_send(path, head.buffer.array, dst, tag)]
    if payload is not None:
        content = payload.array.view(np.uint8)
        items.append(post_send(path, content, dst, tag + path.payload_tag))
    yield items
    return result


def _both(
    path: Path, head: Head, payload: Buffer | None, dst: int, tag: int, receiving: Steps
) -> Steps:
    """Send a message and receive one in steps, without waiting."""
    first = next(receiving)
    sent = next(_sending(path, head, payload, dst, tag, None))
    yield first
    result = yield from receiving
    yield sent  # a long message is received only once its receiver has seen the head
    return result


# -- lanes ----------------------------------------------------------------------------------------


def _post(
    path: Path, name: str, key: Direction, run: Callable[[], Any], async_op: bool,
    near: Near | None = None, nbytes: int = -1, heard: bool = False,
) -> Any:  # fmt: skip
    """Run a message at once or in its lane.

    Each direction, peer and tag has one lane, which runs its messages in order.

    Args:
        name: the communicator's method that the program called.
        near: the message's array on a GPU, if it has one.
        nbytes: number of bytes that are sent; -1 if the call sends nothing.
        heard: whether the listeners are notified already.
    """
    operation, dst, src, tag = key
    what = f"{name}(tag={tag})"
    if path.broken is not None:
        run, near = partial(path.refuse_broken, what), None
    if path.listeners.all and not heard:
        event = CallEvent(name, nbytes, dst=dst, src=src, tag=tag)
        run = partial(path.listeners.around, event, run, path.tell_failure)
    if not async_op and not _is_busy(path, key):
        return run()
    ends = "-".join(str(end) for end in (dst, src) if end is not None)
    lane = path.lane_of(key, f"collective-{operation}-{ends}-{tag}")
    if near is None or not path.enqueues:
        work = lane.submit(what, with_site(run))
    else:
        # The message runs on its own stream, beside the caller's stream and those of other
        # directions, peers and tags. The event to wait for is recorded now. The side stream waits
        # for it only when the message's turn has come; otherwise it would delay earlier messages.
        side = path.backend.side_stream(near.array.device, key)
        work = stream_work(path, what, side, near.array.stream, near.adapter)
        ready = near.array.stream.record()

        def run_in_turn() -> Any:
            side.wait(ready)
            return within(side, run)()

        lane.submit(what, with_site(run_in_turn), work)
    return work if async_op else work.wait()


def _is_busy(path: Path, key: Direction) -> bool:
    lane = path.lanes.get(key)
    return lane is not None and not lane.idle


def _is_free(path: Path, dst: Any, src: Any, tag: Any) -> bool:
    """Return whether no background message must precede a message with these peers and tag."""
    if not all(type(number) in (int, SpecialRank) for number in (dst, src, tag)):
        return False
    if src not in (NOBODY, NULL):
        _refuse_overlap(path, src, tag)
    return not (
        _is_busy(path, ("send", dst, None, tag)) or _is_busy(path, ("recv", None, src, tag))
    )


def _refuse_overlap(path: Path, src: int, tag: int) -> None:
    """Refuse a receive from ANY_SOURCE while a receive from a named rank with its tag is pending.

    The reverse is refused, too: one of the two receives could take the message of the other.
    """
    for (operation, _, source, other), lane in path.lanes.items():
        named = (operation, other) == ("recv", tag) and source != src
        if named and ANY_SOURCE in (source, src) and not lane.idle:
            raise InvalidArgumentError(
                f"recv: two receives with tag {tag} are in flight, one from ANY_SOURCE and one "
                f"from a named source {path.who}. Wait for the first, or use another tag."
            )


# -- arguments ------------------------------------------------------------------------------------


def is_null(rank: Any) -> bool:
    """Return whether a rank is ``collective.NULL``."""
    return isinstance(rank, (int, np.integer)) and rank == NULL


def _check_peer(path: Path, what: str, name: str, rank: Any) -> int:
    peer = path.check_rank(what, name, rank)
    if peer == path.rank:
        raise RankError(
            f"{what}: {name} {peer} is this rank itself; the call would never return {path.who}. "
            "Use sendrecv, or an assignment."
        )
    return peer


def _check_tag(tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag < _TAGS:
        raise InvalidArgumentError(f"tag: {tag!r}; expected an integer from 0 to {_TAGS - 1}.")
    return int(tag)
