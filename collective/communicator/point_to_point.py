"""The calls between two ranks: send, recv, sendrecv."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collective.contract.backend import ANY_SOURCE
from collective.errors import (
    CollectiveError,
    InvalidArgumentError,
    RankError,
    ShapeError,
    UnsupportedError,
)
from collective.memory import dtypes, nested
from collective.memory.arrays import Adapter, adapter_of
from collective.memory.buffer import Buffer
from collective.native import NOBODY

from . import objects
from .calls import Calls, _with_site
from .deadline import Deadline
from .heads import Head
from .listener import CallEvent
from .output import Output
from .streams import within

__all__ = ["MessageCalls", "Status"]

_UINT8 = dtypes.BY_NAME["uint8"]
# Every message begins with a head: kind, dtype code, bytes, dimensions, shape. What does not
# fit in after that follows in a message of its own, as does what the transport takes from a GPU.
_WORDS = 16
_MAX_DIMENSIONS = _WORDS - 4
_ARRAY, _OBJECT, _FOLLOWING = 0, 1, 2
_TAGS = 2**31
# Lanes that are kept for further messages; each may have a thread for some seconds.
_LANES = 64

#: Messages of one are received in the order in which they were sent: operation, dst, src, tag.
Direction = tuple[str, "int | None", "int | None", int]


class Status:
    """What a receive tells of its message beside the array.

    Attributes:
        source: the rank that sent it; ``ANY_SOURCE`` until it has come.

    See Also:
        MPI_Status.
    """

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source = ANY_SOURCE

    def __repr__(self) -> str:
        return f"Status(source={self.source})"


class MessageCalls(Calls):
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
            dst: another rank.
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
        dst, tag, seconds = self._peer("send", "dst", dst), _tag(tag), self._seconds(timeout)
        head, payload, near = self._message("send", x)

        def run() -> None:
            deadline = Deadline(seconds)
            self._transport(self._backend.send, head.buffer, dst, tag, deadline.left())
            if payload is not None:
                self._transport(self._backend.send, payload, dst, tag, deadline.left())

        key = "send", dst, None, tag
        return self._post(key, run, async_op, *near, nbytes=int(head.words[2]))

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
            src: another rank, or ``collective.ANY_SOURCE``.
            tag: the sender's.
            like: the framework of the result where ``out`` is None: its name, or an array.
            status: is told who sent the message.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array.

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
            head = Head(_WORDS)
            source = self._receive(head.buffer, src, tag, deadline.left())
            if status is not None:
                status.source = source
            words = _arriving("recv", head)
            payload, follows, direct = self._payload_room(
                head, words, out, like if out is None else out
            )
            if follows:
                self._receive(payload, source, tag, deadline.left())
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
        received from. A rank may exchange with itself.

        Args:
            x, dst, tag: as in :meth:`send`.
            src, out: as in :meth:`recv`, without ANY_SOURCE.
            like: the framework of the result where ``out`` is None; that of ``x`` by default.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array.

        See Also:
            MPI_Sendrecv.
        """
        if not async_op and like is None and src != ANY_SOURCE:
            deadline = Deadline(self._seconds(timeout))
            found = self._in_c(x, dst, out, src, tag, deadline.left())
            if found is None:  # that is what is sent
                like = next(iter(nested.flatten(x)))
                return self.recv(out, src, tag=tag, like=like, timeout=deadline.left())
            if found is not NotImplemented:
                return out
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
            # Each half takes its turn among the messages that are on their way already.
            sent = self.send(x, dst, tag=tag, timeout=timeout, async_op=True)
            received = self.recv(out, src, tag=tag, like=like, timeout=timeout, async_op=True)

            def both() -> Any:
                sent.wait()
                return received.wait()

            return self._post(key, both, async_op, nbytes=nbytes)

        def run() -> Any:
            deadline = Deadline(seconds)
            coming = Head(_WORDS)
            self._transport(
                self._backend.sendrecv, head.buffer, dst, coming.buffer, src, tag, deadline.left()
            )
            words = _arriving("sendrecv", coming)
            # What is sent still may be what it would be received over.
            received, follows, _ = self._payload_room(
                coming, words, None, like if out is None else out
            )
            rest = deadline.left()
            if payload is not None and follows:
                self._transport(self._backend.sendrecv, payload, dst, received, src, tag, rest)
            elif payload is not None:  # nothing is sent for nothing: the peer may be in recv
                self._transport(self._backend.send, payload, dst, tag, rest)
            elif follows:
                self._receive(received, src, tag, rest)
            return self._arrived(words, received, out, like)

        return self._post(key, run, async_op, *near, nbytes=nbytes)

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

    def _free(self, dst: int, src: int, tag: int) -> bool:
        """Return whether no message in the background comes before one to and from these."""
        if not all(type(each) is int for each in (dst, src, tag)):
            return False
        if src != NOBODY:
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
            work = lane.submit(what, _with_site(run))
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

            lane.submit(what, _with_site(turn), work)
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

    def _receive(self, buffer: Buffer, src: int, tag: int, seconds: float) -> int:
        sources: list[int] = []

        def receive() -> None:
            sources.append(self._backend.recv(buffer, src, tag, seconds))

        self._transport(receive)
        return sources[0]

    def _message(self, what: str, x: Any) -> tuple[Head, Buffer | None, tuple[Any, ...]]:
        """Return the head of the message that ``x`` is, and what has to follow it.

        And, where that is on a GPU, the array and its adapter.
        """
        head = Head(_WORDS)
        head.words[:] = 0
        if nested.is_tree(x):
            nested.flatten(x)  # refuses keys that cannot be sorted
            payload = Buffer(objects.encode(x), _UINT8)
            head.words[:3] = _OBJECT, 0, payload.count
        else:
            adapter, array, dtype = self._view(what, x)
            if array.ndim > _MAX_DIMENSIONS:
                raise ShapeError(
                    f"{what}: {array.ndim} dimensions; at most {_MAX_DIMENSIONS}. Reshape it."
                )
            on_gpu = not isinstance(array, np.ndarray)
            kind = _FOLLOWING if on_gpu else _ARRAY
            head.words[:4] = kind, dtype.code, array.nbytes, array.ndim
            head.words[4 : 4 + array.ndim] = array.shape
            payload = Buffer(array.ravel(), dtype).bytes()
            if on_gpu:
                return head, payload if payload.count else None, (array, adapter)
        head.put(payload.array)
        return head, payload if payload.count > head.room else None, ()

    def _payload_room(
        self, head: Head, words: Sequence[int], out: Any, like: Any
    ) -> tuple[Buffer, bool, bool]:
        """Return the payload or room for it, whether it has yet to come, and if that is ``out``."""
        nbytes = words[2]
        for listener in self._listeners:
            listener.arrives(nbytes)
        inline = None if words[0] == _FOLLOWING else head.inline(nbytes)
        direct = self._direct(words, out, inline is None)
        if inline is None:
            if direct is not None:
                payload = direct
            elif words[0] == _FOLLOWING and self._enqueues:
                room = self._room(self._gpu_adapter(like), nbytes, self._seen(like))
                payload = Buffer(room, _UINT8)
            else:
                payload = Buffer.empty(nbytes, _UINT8)
            return payload, nbytes > 0, direct is not None
        if direct is None:
            return Buffer(inline, _UINT8), False, False
        direct.array[:] = inline
        return direct, False, True

    def _gpu_adapter(self, like: Any) -> Adapter:
        """Return what allocates on the GPU for a result like ``like``, which may be anything."""
        return self._adapter(None if nested.is_tree(like) else like, on_gpu=True)

    def _check_out(self, what: str, out: Any) -> tuple[Any, ...]:
        """Refuse what cannot be written to; return an array on the GPU, and its adapter."""
        if out is None or nested.is_tree(out):
            return ()
        adapter = adapter_of(out)
        array, _ = adapter.output(out)
        if isinstance(array, np.ndarray):
            if not self._on_host:
                self._view(what, out)
            return ()
        if not self._enqueues:
            return ()
        self._check_device(what, array)
        return array, adapter

    def _direct(self, words: Sequence[int], out: Any, follows: bool) -> Buffer | None:
        """Return ``out`` as bytes, if the message can be received right into it."""
        if out is None or nested.is_tree(out) or words[0] == _OBJECT:
            return None
        array, dtype = adapter_of(out).output(out)
        on_gpu = not isinstance(array, np.ndarray)
        if self._enqueues:
            fits = on_gpu == (words[0] == _FOLLOWING)
        else:
            fits = not on_gpu or (self._on_device and follows)
        if not fits or not array.flags.carray:
            return None
        if _shape(words) != array.shape or dtype.code != words[1]:
            return None
        return Buffer(array.ravel(), dtype).bytes()

    def _arrived(self, words: Sequence[int], payload: Buffer, out: Any, like: Any) -> Any:
        if words[0] == _OBJECT:
            value = objects.decode(payload.array)
            if out is None and like is not None and nested.is_tree(value):
                adapter = self._adapter(like)
                leaves = [_converted(leaf, adapter) for leaf in nested.flatten(value)]
                return nested.rebuild(value, iter(leaves))
            return value if out is None else _fill(out, value)
        if out is not None and nested.is_tree(out):
            raise InvalidArgumentError(
                f"recv: a single array came; out is a structure {self._who}."
            )
        dtype, shape = dtypes.BY_CODE[words[1]], _shape(words)
        array: Any = payload.array
        on_gpu = not isinstance(array, np.ndarray)
        if on_gpu and out is not None and self._seen(out) is None:
            array, on_gpu = array.to_host(), False
        adapter = adapter_of(out) if out is not None else self._adapter(like, on_gpu)
        output = Output("recv", out, adapter, shape, dtype, array)
        output.flat[:] = array.view(dtype.storage)
        return output.finish()


def _arriving(what: str, head: Head) -> list[int]:
    """Return the numbers of a head that a peer sent.

    Raises:
        CollectiveError: they are not what :meth:`MessageCalls._message` writes.
    """
    words: list[int] = head.words.tolist()
    kind, code, nbytes, ndim = words[:4]
    if kind == _OBJECT:
        sound = nbytes >= 0
    else:
        sound = (
            kind in (_ARRAY, _FOLLOWING)
            and 0 <= code < len(dtypes.BY_CODE)
            and 0 <= ndim <= _MAX_DIMENSIONS
            and min(shape := _shape(words), default=0) >= 0
            and math.prod(shape) * dtypes.BY_CODE[code].itemsize == nbytes
        )
    if not sound:
        raise CollectiveError(
            f"{what}: a message begins with {', '.join(map(str, words))}; its kind, dtype, bytes "
            "and shape do not fit together. The sender has another version of this package, or "
            "its memory is damaged."
        )
    return words


def _shape(words: Sequence[int]) -> tuple[int, ...]:
    return tuple(words[4 : 4 + words[3]])


def _converted(leaf: Any, adapter: Adapter) -> Any:
    """Return the array ``leaf`` in the framework of ``adapter``."""
    theirs = adapter_of(leaf)
    if theirs is adapter:
        return leaf
    array, dtype = theirs.view(leaf)
    output = Output("recv", None, adapter, array.shape, dtype, array)
    output.flat[:] = array.ravel()
    return output.finish()


def _fill(out: Any, value: Any) -> Any:
    """Copy the arrays of ``value`` to those of ``out``, if they fit."""
    if nested.skeleton(out) != nested.skeleton(value):
        raise InvalidArgumentError("recv: out is nested differently from what came.")
    outputs = []
    for target, leaf in zip(nested.flatten(out), nested.flatten(value)):
        array, dtype = adapter_of(leaf).view(leaf)
        output = Output("recv", target, adapter_of(target), array.shape, dtype, array)
        outputs.append((output, array))
    for output, array in outputs:
        output.flat[:] = array.ravel()
        output.finish()
    return out


def _tag(tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag < _TAGS:
        raise InvalidArgumentError(f"tag: {tag!r}; an integer from 0 to {_TAGS - 1}.")
    return int(tag)
