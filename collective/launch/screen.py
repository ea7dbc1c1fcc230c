"""Output of many ranks on one screen: complete lines, each with its rank in front.

Lines end with a newline or with a carriage return. Progress bars use the carriage return to
rewrite their line in place. A bar stays in place for as long as only its own rank writes. When
another rank writes, the bar continues in a new line.
"""

from __future__ import annotations

import os
import re
import time

from .agent_line import Outlet
from .tracebacks import find_traceback

# An unfinished line of this many bytes is shown as a complete line. Held output of this many bytes
# is too long for a traceback, so it is shown.
_LINE_LIMIT = 1 << 20
_COLOURS = (36, 33, 32, 35, 34, 31)
_SEQUENCE = rb"\x1b\[[0-9;?]*[A-Za-z]"
_LEADING = re.compile(rb"(?:%s)+" % _SEQUENCE)
_NOTHING = re.compile(rb"(?:%s)*" % _SEQUENCE)
_MOVES = re.compile(rb"\x1b\[[0-9;?]*[A-HJKfhl]")
_CURSOR = re.compile(rb"\x1b\[\?25[hl]")
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_UP = re.compile(rb"\x1b\[([0-9]*)([AF])")


class Screen(Outlet):
    """Output of the launcher: a terminal, a pipe or a file.

    Attributes:
        terminal: whether the output is a terminal.
        hidden: whether a rank has hidden the cursor. The rank may end without showing it again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.terminal = os.isatty(descriptor)
        self.hidden = False
        # The stream in whose unfinished line the cursor stands, the stream that wrote last, and
        # the number of complete lines above the cursor that are all from the latter.
        self._open: RankOutput | None = None
        self._last: RankOutput | None = None
        self._above = 0

    def fresh_line(self) -> None:
        """End the unfinished line, if there is one."""
        if self._open is not None:
            self.write(b"\n")
            self._open.shown = 0
            self._open = None

    def restore(self) -> None:
        """Restore the screen: begin a new line and show the cursor."""
        self.fresh_line()
        if self.hidden:
            self.write(_SHOW_CURSOR)

    def put(self, stream: RankOutput, text: bytes, end: bytes) -> None:
        """Show a line of ``stream``; ``end`` is a newline or a carriage return."""
        mine = self._open is stream
        if mine and stream.shown:
            self.write(text[stream.shown :] + end)
        elif _NOTHING.fullmatch(text) and (mine or end == b"\r"):
            # The newline that finishes a bar in its place, or the carriage return before a bar.
            self.write(text + end if mine else b"".join(_CURSOR.findall(text)))
        else:
            self._begin(stream, text)
            self.write(end)
        stream.shown = 0
        if end == b"\n" and self._open is not None:
            self._open = None
            self._above += 1

    def show_unfinished(self, stream: RankOutput, text: bytes) -> None:
        """Show a line that is not finished yet."""
        if self._open is stream and stream.shown:
            self.write(text[stream.shown :])
        else:
            self._begin(stream, text)
        stream.shown = len(text)

    def _begin(self, stream: RankOutput, text: bytes) -> None:
        if self._open is not stream:
            self.fresh_line()
        if self._last is not stream:
            self._above = 0
        leading = _LEADING.match(text)
        if leading:
            # Sequences that erase the line or move the cursor must come before the prefix, since
            # they would also erase or move the prefix. Colours come after it.
            moves = b"".join(_MOVES.findall(leading[0]))
            text = _MOVES.sub(b"", leading[0]) + text[leading.end() :]
            self.write(_UP.sub(self._climb, moves))
        self.write(stream.prefix + text)
        self._open = self._last = stream

    def _climb(self, move: re.Match[bytes]) -> bytes:
        """Return a move up that stays in the rank's own lines, and out of those of other ranks."""
        lines = min(int(move[1] or 1), self._above)
        self._above -= lines
        return b"\x1b[%d%s" % (lines, move[2]) if lines else b""


class RankOutput:
    """Standard output or standard error of a rank.

    Attributes:
        shown: number of bytes of the unfinished line that the screen shows.
        prefix: text before each line.
        silent_since: time of the last output, on the clock of ``time.monotonic()``. None unless
            this output has left an unfinished line that the screen does not show completely.
        in_traceback: whether output is held back because a traceback began.
    """

    def __init__(
        self, rank: int, screen: Screen, keep: int, *, holds_tracebacks: bool = False
    ) -> None:
        """Create the stream of ``rank``.

        Args:
            rank: number of the rank.
            screen: screen that shows the output.
            keep: number of bytes to remember for :attr:`tail`.
            holds_tracebacks: whether to hold back the output from the first line of a traceback
                on, until :meth:`release`.
        """
        self.screen = screen
        self.in_traceback = False
        self.shown = 0
        self.silent_since: float | None = None
        self.prefix = f"[{rank}] ".encode()
        if screen.terminal and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[rank % len(_COLOURS)]
            self.prefix = f"\x1b[{colour}m[{rank}]\x1b[0m ".encode()
        self._keep = keep
        self._tail = bytearray()
        self._line = bytearray()
        self._held: bytearray | None = None
        self._holds_tracebacks = holds_tracebacks

    @property
    def tail(self) -> bytes:
        """Last bytes of the output, and all that is held back."""
        return bytes(self._tail[-self._keep :]) + self.held if self._keep else b""

    def hold(self) -> None:
        """Hold back the output from now on, until :meth:`release`."""
        self._held = bytearray()

    @property
    def held(self) -> bytes:
        """Output that is held back."""
        return bytes(self._held or b"")

    def release(self, output: bytes | None = None, *, ends: bool = True) -> None:
        """Stop holding back; show the held output.

        Args:
            output: output to show in place of the held output.
            ends: whether to end its last line. If false, further output continues this line.
        """
        if self._held is not None:
            output = self.held if output is None else output
            self._held = None
            self.in_traceback = False
            self._show(output)
            if ends:
                self.finish()

    def feed(self, data: bytes) -> None:
        """Add output of the rank, and show its complete lines."""
        if self._holds_tracebacks and self._held is None:
            data = self._hold_traceback(data)
        if self._held is None:
            self._show(data)
            return
        self._held += data
        if len(self._held) > _LINE_LIMIT:  # the rank keeps running
            self.release(ends=False)

    def _hold_traceback(self, data: bytes) -> bytes:
        """Begin to hold if a traceback begins in the output; return the rest of the output."""
        start = find_traceback(bytes(self._line) + data)
        if start is None or (self.shown and start < len(self._line)):
            return data
        if start < len(self._line):  # the first line of the traceback has come in pieces
            data = bytes(self._line) + data
            if self._keep:
                del self._tail[-len(self._line) :]
            self._line.clear()
            self.silent_since = None
        else:
            start -= len(self._line)
            self._show(data[:start])
            data = data[start:]
        self.hold()
        self.in_traceback = True
        return data

    def _show(self, data: bytes) -> None:
        """Show the complete lines of the output with ``data`` added."""
        if self._keep:
            self._tail += data
            if len(self._tail) > 2 * self._keep:
                del self._tail[: -self._keep]
        for change in _CURSOR.findall(data):
            self.screen.hidden = change == _HIDE_CURSOR
        *lines, rest = re.split(rb"([\r\n])", self._line + data)
        for text, end in zip(lines[::2], lines[1::2], strict=True):
            self.screen.put(self, text, end)
        self._line[:] = rest
        if len(self._line) > _LINE_LIMIT:
            self.finish()
        self.silent_since = time.monotonic() if self._line else None

    def show_unfinished(self) -> None:
        """Show the unfinished line, such as a prompt or a bar."""
        self.screen.show_unfinished(self, bytes(self._line))
        self.silent_since = None

    def finish(self) -> None:
        """End the unfinished line; the stream has no more output."""
        if self._line and self._held is None:
            bare = _NOTHING.fullmatch(self._line)
            self.screen.put(self, bytes(self._line), b"\r" if bare else b"\n")
            self._line.clear()
        self.silent_since = None
