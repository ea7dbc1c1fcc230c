"""Bytes that this process passes on without waiting, and the frames between it and an agent.

A frame has a kind (one byte), a length (four bytes) and a content. The content is a message in
JSON, or bytes that a rank has written or reads. The agent first writes a greeting: a login shell
may have printed something before, which the other side skips.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import struct
from typing import Any, NamedTuple

#: Seconds between two signs of life of an agent and of the supervisor.
BEAT_S = 0.25
#: First bytes that an agent writes.
GREETING = b"\0collective host agent 1\n"
_HEAD = struct.Struct(">BI")
_PLACE = struct.Struct(">IB")
_MESSAGE, _OUTPUT = 0, 1
# A frame of more bytes is not one of ours. The longest one is the environment of a rank.
_LONGEST = 1 << 26
# Back-pressure: while the reader has more bytes than this still to read, the writers have to wait.
_FULL = 1 << 20
# POSIX: if poll() reports a pipe as writable, it accepts this many bytes without blocking.
_CHUNK = select.PIPE_BUF
_READ = 1 << 16
# Most bytes that may come before the greeting.
_NOISE = 1 << 20

Message = dict[str, Any]


class StreamBytes(NamedTuple):
    """Bytes that a process has written, or is to read.

    Attributes:
        process: number of the process, which the supervisor has chosen.
        stream: 0 for standard input, 1 for standard output, 2 for standard error.
        data: the bytes; empty at the end of the stream.
    """

    process: int
    stream: int
    data: bytes


class Outlet:
    """Bytes on their way to a descriptor, which are written as its reader takes them.

    No method blocks, also if other processes have set the descriptor to block, as for a terminal.

    Attributes:
        descriptor: descriptor to write to.
        broken: whether nothing can be written any more. Further bytes are dropped.
        reason: why the outlet is broken; empty if its reader has closed the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.broken = False
        self.reason = ""
        self._backlog = bytearray()

    @property
    def waiting(self) -> bool:
        """Whether bytes are still to be written."""
        return bool(self._backlog)

    @property
    def full(self) -> bool:
        """Whether so many bytes are to be written that the sender should produce no more."""
        return len(self._backlog) > _FULL

    def write(self, data: bytes) -> None:
        """Queue ``data`` for :meth:`flush`."""
        if not self.broken:
            self._backlog += data

    def flush(self) -> None:
        """Write as much as possible."""
        ready = select.poll()
        ready.register(self.descriptor, select.POLLOUT)
        while self._backlog and not self.broken and ready.poll(0):
            try:
                done = os.write(self.descriptor, self._backlog[:_CHUNK])
            except BlockingIOError:
                return
            except OSError as error:  # a closed pipe, a terminal that was hung up, a full disk
                self.broken = True
                self.reason = "" if error.errno == errno.EPIPE else os.strerror(error.errno or 0)
                self._backlog.clear()
                return
            del self._backlog[:done]


class AgentLine(Outlet):
    """One end of a connection between the supervisor and an agent. No method blocks.

    Args:
        incoming: descriptor to read from.
        outgoing: descriptor to write to.
        greeted: whether a greeting precedes the frames that come.

    Attributes:
        incoming: descriptor to read from.
        noise: what came before the greeting.
    """

    def __init__(self, incoming: int, outgoing: int, *, greeted: bool) -> None:
        super().__init__(outgoing)
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)
        self.incoming = incoming
        self.noise = b""
        self._greeted = not greeted
        self._received = bytearray()

    def greet(self) -> None:
        """Queue the greeting."""
        self.write(GREETING)

    def post(self, frame: Message | StreamBytes) -> None:
        """Queue a frame, and write as much as possible."""
        if isinstance(frame, StreamBytes):
            kind, content = _OUTPUT, _PLACE.pack(frame.process, frame.stream) + frame.data
        else:
            kind, content = _MESSAGE, json.dumps(frame).encode()
        self.write(_HEAD.pack(kind, len(content)) + content)
        self.flush()

    def receive(self) -> list[Message | StreamBytes]:
        """Return the frames that have come.

        Raises:
            EOFError: the other side has closed the connection. All frames before that were
                returned.
            ValueError: the bytes are not those of an agent.
        """
        chunk = None
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self.incoming, _READ)
        if chunk == b"":
            raise EOFError
        self._received += chunk or b""
        if not self._greeted and not self._skip_noise():
            return []
        frames: list[Message | StreamBytes] = []
        while len(self._received) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._received)
            if kind not in (_MESSAGE, _OUTPUT) or length > _LONGEST:
                raise ValueError(f"a frame of kind {kind} with {length} bytes")
            end = _HEAD.size + length
            if len(self._received) < end:
                break
            content = bytes(self._received[_HEAD.size : end])
            del self._received[:end]
            frames.append(_parsed(kind, content))
        return frames

    def _skip_noise(self) -> bool:
        start = self._received.find(GREETING)
        if start < 0:
            self.noise = bytes(self._received)
            if len(self._received) > _NOISE:
                raise ValueError("more text before the greeting than a login shell prints")
            return False
        self.noise = bytes(self._received[:start])
        del self._received[: start + len(GREETING)]
        self._greeted = True
        return True


def _parsed(kind: int, content: bytes) -> Message | StreamBytes:
    if kind == _OUTPUT:
        process, stream = _PLACE.unpack_from(content)
        return StreamBytes(process, stream, content[_PLACE.size :])
    message = json.loads(content)
    if not isinstance(message, dict):
        raise ValueError("a message that is not an object")
    return message
