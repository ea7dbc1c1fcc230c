"""The calls between two ranks: send, recv, sendrecv."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from collective import dtypes, objects, tree
from collective.arrays import adapter_of
from collective.backend import ANY_SOURCE
from collective.buffer import Buffer
from collective.calls import Calls, Output, _with_site
from collective.errors import (
    InvalidArgumentError,
    RankError,
    ShapeError,
    UnsupportedError,
)
from collective.heads import Head
from collective.work import Lane

__all__ = ["PointToPoint"]

_UINT8 = dtypes.BY_NAME["uint8"]
# Every message begins with a head: kind, dtype code, bytes, dimensions, shape. What does not
# fit in after that follows in a message of its own.
_WORDS = 16
_MAX_DIMENSIONS = _WORDS - 4
_ARRAY, _OBJECT = 0, 1
_TAGS = 2**31
# Lanes that are kept for further messages; each may have a thread for some seconds.
_LANES = 64


class PointToPoint(Calls):
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
        dst, tag, seconds = self._peer("send", "dst", dst), _tag(tag), self._seconds(timeout)
        head, payload = self._message(x)

        def run() -> None:
            self._transport(self._backend.send, head.buffer, dst, tag, seconds)
            if payload is not None:
                self._transport(self._backend.send, payload, dst, tag, seconds)

        return self._post(("send", dst, tag), run, async_op)

    def recv(
        self,
        out: Any,
        src: int,
        *,
        tag: int = 0,
        like: Any = None,
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
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array.

        Raises:
            ShapeError, DtypeError: what came does not fit ``out``. The message is gone,
                ``out`` is untouched, the communicator stays usable.

        See Also:
            MPI_Recv.
        """
        if src != ANY_SOURCE:
            src = self._peer("recv", "src", src)
        elif not self.capabilities.any_source:
            raise UnsupportedError(
                f"recv: ANY_SOURCE is not supported by backend {self._backend.name!r} "
                f"{self._who}. Name the source, or use backend='shm' or 'threads'."
            )
        tag, seconds = _tag(tag), self._seconds(timeout)
        self._check_out(out)
        self._adapter(like)
        if self._lanes:
            self._refuse_overlap(src, tag)

        def run() -> Any:
            deadline = time.monotonic() + seconds
            head = Head(_WORDS)
            source = self._receive(head.buffer, src, tag, seconds)
            payload, follows, direct = self._place(head, out)
            if follows:
                rest = max(0.001, deadline - time.monotonic())
                self._receive(payload, source, tag, rest)
            return out if direct else self._arrived(head.words, payload, out, like)

        return self._post(("recv", src, tag), run, async_op)

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
            src, out, like: as in :meth:`recv`, without ANY_SOURCE.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            ``out``, or a new array.

        See Also:
            MPI_Sendrecv.
        """
        dst, src = self._rank("sendrecv", "dst", dst), self._rank("sendrecv", "src", src)
        if (dst == self.rank) != (src == self.rank):
            raise RankError(
                f"sendrecv: dst {dst}, src {src}; a rank that sends to itself receives from "
                f"itself {self._who}."
            )
        tag, seconds = _tag(tag), self._seconds(timeout)
        self._check_out(out)
        head, payload = self._message(x)
        self._adapter(like)
        send, recv = ("send", dst, tag), ("recv", src, tag)
        if dst != self.rank and (async_op or self._busy(send) or self._busy(recv)):
            # Each half takes its turn among the messages that are on their way already.
            sent = self.send(x, dst, tag=tag, timeout=timeout, async_op=True)
            received = self.recv(out, src, tag=tag, like=like, timeout=timeout, async_op=True)

            def both() -> Any:
                sent.wait()
                return received.wait()

            return self._post(("sendrecv", dst, src, tag), both, async_op)

        def run() -> Any:
            deadline = time.monotonic() + seconds
            coming = Head(_WORDS)
            self._transport(
                self._backend.sendrecv, head.buffer, dst, coming.buffer, src, tag, seconds
            )
            # What is sent still may be what it would be received over.
            received, follows, _ = self._place(coming, None)
            rest = max(0.001, deadline - time.monotonic())
            if payload is not None and follows:
                self._transport(self._backend.sendrecv, payload, dst, received, src, tag, rest)
            elif payload is not None:  # nothing is sent for nothing: the peer may be in recv
                self._transport(self._backend.send, payload, dst, tag, rest)
            elif follows:
                self._receive(received, src, tag, rest)
            return self._arrived(coming.words, received, out, like)

        return self._post(("sendrecv", dst, src, tag), run, async_op)

    # -- shared ---------------------------------------------------------------------------

    def _peer(self, what: str, name: str, rank: Any) -> int:
        rank = self._rank(what, name, rank)
        if rank == self.rank:
            raise RankError(
                f"{what}: {name} {rank} is this rank itself; it would wait for ever {self._who}. "
                "Use sendrecv, or an assignment."
            )
        return int(rank)

    def _busy(self, key: Any) -> bool:
        lane = self._lanes.get(key)
        return lane is not None and not lane.idle

    def _post(self, key: Any, run: Callable[[], Any], async_op: bool) -> Any:
        """Run a message now or in its lane: one a direction, peer and tag, in order."""
        if not async_op and not self._busy(key):
            return run()
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= _LANES:  # a program may never use a tag twice
                self._lanes = {k: kept for k, kept in self._lanes.items() if not kept.idle}
            lane = self._lanes[key] = Lane(f"collective-{'-'.join(map(str, key))}")
        work = lane.submit(f"{key[0]}(tag={key[-1]})", _with_site(run))
        return work if async_op else work.wait()

    def _refuse_overlap(self, src: int, tag: int) -> None:
        """Keep a receive from anybody apart from others of its tag: they'd share messages."""
        for key, lane in self._lanes.items():
            source = key[1]
            named = ("recv", source, tag) == key and source != src
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

    def _message(self, x: Any) -> tuple[Head, Buffer | None]:
        """Return the head of the message that ``x`` is, and what has to follow it."""
        head = Head(_WORDS)
        head.words[:] = 0
        if tree.is_tree(x):
            tree.flatten(x)  # refuses keys that cannot be sorted
            payload = Buffer(objects.encode(x), _UINT8)
            head.words[:3] = _OBJECT, 0, payload.count
        else:
            array, dtype = adapter_of(x).view(x)
            if array.ndim > _MAX_DIMENSIONS:
                raise ShapeError(
                    f"send: {array.ndim} dimensions; at most {_MAX_DIMENSIONS}. Reshape it."
                )
            head.words[:4] = _ARRAY, dtype.code, array.nbytes, array.ndim
            head.words[4 : 4 + array.ndim] = array.shape
            payload = Buffer(array.ravel(), dtype).bytes()
        head.put(payload.array)
        return head, payload if payload.count > head.room else None

    def _place(self, head: Head, out: Any) -> tuple[Buffer, bool, bool]:
        """Return the payload or room for it, whether it has yet to come, and if that is ``out``."""
        direct = self._direct(head.words, out)
        inline = head.inline(int(head.words[2]))
        if inline is None:
            payload = direct or Buffer.empty(int(head.words[2]), _UINT8)
        elif direct is not None:
            payload = direct
            payload.array[:] = inline
        else:
            payload = Buffer(inline, _UINT8)
        return payload, inline is None, direct is not None

    def _check_out(self, out: Any) -> None:
        if out is not None and not tree.is_tree(out):
            adapter_of(out).output(out)

    def _direct(self, words: np.ndarray[Any, Any], out: Any) -> Buffer | None:
        """Return ``out`` as bytes, if the message can be received right into it."""
        if out is None or tree.is_tree(out) or words[0] != _ARRAY:
            return None
        array, dtype = adapter_of(out).output(out)
        if not array.flags.carray or _shape(words) != array.shape or dtype.code != words[1]:
            return None
        return Buffer(array.ravel(), dtype).bytes()

    def _arrived(self, words: np.ndarray[Any, Any], payload: Buffer, out: Any, like: Any) -> Any:
        if words[0] == _OBJECT:
            value = objects.decode(payload.array)
            return value if out is None else _fill(out, value)
        if out is not None and tree.is_tree(out):
            raise InvalidArgumentError(
                f"recv: a single array came; out is a structure {self._who}."
            )
        dtype, shape = dtypes.BY_CODE[words[1]], _shape(words)
        adapter = adapter_of(out) if out is not None else self._adapter(like)
        output = Output("recv", out, adapter, shape, dtype)
        output.flat[:] = payload.array.view(dtype.storage)
        return output.finish()


def _shape(words: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(map(int, words[4 : 4 + int(words[3])]))


def _fill(out: Any, value: Any) -> Any:
    """Copy the arrays of ``value`` to those of ``out``, if they fit."""
    if tree.skeleton(out) != tree.skeleton(value):
        raise InvalidArgumentError("recv: out is nested differently from what came.")
    outputs = []
    for target, leaf in zip(tree.flatten(out), tree.flatten(value)):
        array, dtype = adapter_of(leaf).view(leaf)
        output = Output("recv", target, adapter_of(target), array.shape, dtype)
        outputs.append((output, array))
    for output, array in outputs:
        output.flat[:] = array.ravel()
        output.finish()
    return out


def _tag(tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, (int, np.integer)) or not 0 <= tag < _TAGS:
        raise InvalidArgumentError(f"tag: {tag!r}; an integer from 0 to {_TAGS - 1}.")
    return int(tag)
