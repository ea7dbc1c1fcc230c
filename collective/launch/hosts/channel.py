"""Connection between the supervisor and the agent of a host, over the pipes of ssh.

A frame has a kind (one byte), a length (four bytes) and a content. The content is a message in
JSON, or bytes that a rank has written or reads. The agent first writes a greeting: a login shell
may have printed something before, which the other side skips.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
from typing import Any, NamedTuple

__all__ = ["GREETING", "Channel", "Message", "Output"]

#: First bytes that an agent writes.
GREETING = b"\0collective host agent 1\n"
_HEAD = struct.Struct(">BI")
_PLACE = struct.Struct(">IB")
_MESSAGE, _OUTPUT = 0, 1
# A frame of more bytes is not one of ours. The longest one is the environment of a rank.
_LONGEST = 1 << 26
# While so many bytes wait to be written, the sender should produce no more.
_FULL = 1 << 20
_READ = 1 << 16
# Most bytes that may come before the greeting.
_NOISE = 1 << 20

Message = dict[str, Any]


class Output(NamedTuple):
    """Bytes that a process has written, or is to read.

    Attributes:
        process: number of the process, which the supervisor has chosen.
        stream: 0 for standard input, 1 for standard output, 2 for standard error.
        data: the bytes; empty at the end of the stream.
    """

    process: int
    stream: int
    data: bytes


class Channel:
    """One end of the connection. No method blocks.

    Args:
        incoming: descriptor to read from.
        outgoing: descriptor to write to.
        greeted: whether a greeting precedes the frames that come.

    Attributes:
        broken: whether the other end takes no more bytes.
        noise: what came before the greeting.
    """

    def __init__(self, incoming: int, outgoing: int, *, greeted: bool) -> None:
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)
        self.incoming, self.outgoing = incoming, outgoing
        self.broken = False
        self.noise = b""
        self._greeted = not greeted
        self._received = bytearray()
        self._backlog = bytearray()

    @property
    def waiting(self) -> bool:
        """Whether bytes are still to be written."""
        return bool(self._backlog)

    @property
    def full(self) -> bool:
        """Whether so many bytes are to be written that the sender should produce no more."""
        return len(self._backlog) > _FULL

    def greet(self) -> None:
        """Queue the greeting."""
        self._backlog += GREETING

    def post(self, frame: Message | Output) -> None:
        """Queue a frame, and write as much as possible."""
        if isinstance(frame, Output):
            content = _PLACE.pack(frame.process, frame.stream) + frame.data
            self._backlog += _HEAD.pack(_OUTPUT, len(content)) + content
        else:
            content = json.dumps(frame).encode()
            self._backlog += _HEAD.pack(_MESSAGE, len(content)) + content
        self.flush()

    def flush(self) -> None:
        """Write as much as possible."""
        while self._backlog and not self.broken:
            try:
                done = os.write(self.outgoing, self._backlog[: select.PIPE_BUF])
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
                self._backlog.clear()
                return
            del self._backlog[:done]

    def receive(self) -> list[Message | Output]:
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
        frames: list[Message | Output] = []
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


def _parsed(kind: int, content: bytes) -> Message | Output:
    if kind == _OUTPUT:
        process, stream = _PLACE.unpack_from(content)
        return Output(process, stream, content[_PLACE.size :])
    message = json.loads(content)
    if not isinstance(message, dict):
        raise ValueError("a message that is not an object")
    return message
