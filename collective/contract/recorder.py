"""Flight recorder: a record of the last collective calls of a communicator, always on.

Recording costs a fraction of a microsecond a call. So it is always on,
and a record exists even for a failure that nobody expected. A transport that does not compare
the ranks' calls by itself has the recorders compared when a call stalls.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from types import CodeType
from typing import Any

from collective import native
from collective.request import (
    LIBRARIES,
    Request,
    in_thread,
    is_library_file,
    pass_over_frameworks,
)

# Calls kept for each communicator: some training steps of a large model. A power of two.
_CAPACITY = 512
# Number of calls that the text of a recorder lists.
_LISTED = 32
_now = time.monotonic
_numbers = itertools.count()
_all: weakref.WeakSet[Recorder] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded call.

    Attributes:
        sequence: number of the call among the communicator's collective calls, from 1.
        request: the request of this rank.
        compares: whether this was only a comparison: of the ranks' calls before the operation, or
            of their results after it.
        site: ``file:line in function`` of the caller.
        began: when the call began, in seconds on the clock of ``time.monotonic()``.
        seconds: duration of the call; None while it is running, or if it failed.
    """

    sequence: int
    request: Request
    compares: bool
    site: str
    began: float
    seconds: float | None

    def __str__(self) -> str:
        what = f"{'compare ' * self.compares}{self.request}"
        took = "not finished" if self.seconds is None else f"{self.seconds * 1e6:,.0f} µs"
        return f"#{self.sequence} {what} at {self.site or '?'}: {took}"


class _CallRing:
    """Ring buffer of the last calls of a communicator; the native core has the same in C.

    Attributes:
        started: the number of calls that have begun.
        finished: the number of the last call that is over.
        left, interval: the number of calls until one whose results the ranks compare, and of calls
            from one such call to the next one. The native core counts down the calls that it makes;
            the communicator counts the other calls.
    """

    __slots__ = ("_calls", "_ended", "finished", "interval", "left", "started")

    def __init__(self) -> None:
        self.started = 0
        self.finished = 0
        self.left = self.interval = sys.maxsize
        self._calls: list[Any] = [None] * _CAPACITY
        self._ended = [0.0] * _CAPACITY

    def begin(self, request: Request, compares: bool = False) -> None:
        """Record that a call begins, and which line of the program made it.

        Args:
            request: the request of this rank.
            compares: whether this is only a comparison of the ranks' calls or results.
        """
        number = self.started + 1
        code: CodeType | str | None = in_thread.site
        at = 0
        if code is None:
            frame = sys._getframe(1)
            code = frame.f_code
            while is_library_file[code.co_filename]:
                above = frame.f_back
                if above is None:
                    break
                frame = above
                code = frame.f_code
            # Keep the instruction, and compute the line number only when a reader wants it: that
            # costs more than all the rest.
            at = frame.f_lasti
        self._calls[number % _CAPACITY] = number, request, compares, code, at, _now()
        # Publish the number after the entry: the monitor's thread may read entries up to this
        # number at any time.
        self.started = number

    def end(self) -> None:
        """Record that the call that began last is over."""
        self._ended[self.started % _CAPACITY] = _now()
        self.finished = self.started

    def kept(self, number: int) -> tuple[Request, bool, CodeType | str, int, float, float] | None:
        """Return the record of a call, or None if the ring does not have it.

        The fields are request, compares, code, instruction, begin and end. The end is stale while
        the call is running.
        """
        call = self._calls[number % _CAPACITY]
        if call is None or call[0] != number:
            return None  # overwritten meanwhile, or not written yet
        return (*call[1:], self._ended[number % _CAPACITY])


class Recorder:
    """Recorder of the last calls of one communicator, written by one thread at a time.

    Attributes:
        title: description of the communicator, for people.
        ring: the ring buffer of the calls, in C where the native core is in use.
        begin, end: methods of the ring: ``begin(request, compares=False)`` records that a call
            begins, ``end()`` that it is over.
        failed: the number of the last call that has ended in an error.
    """

    __slots__ = ("__weakref__", "_number", "begin", "end", "failed", "ring", "title")

    def __init__(self, title: str = "") -> None:
        self.title = title
        pass_over_frameworks()
        self.ring = ring = native.ring(LIBRARIES) or _CallRing()
        self.begin = ring.begin
        self.end = ring.end
        self.failed = 0
        self._number = next(_numbers)
        _all.add(self)

    def __repr__(self) -> str:
        return f"<Recorder of {self.title or 'no communicator'}: {self.started} calls>"

    @property
    def started(self) -> int:
        """The number of calls that have begun."""
        return self.ring.started

    @property
    def finished(self) -> int:
        """The number of the last call that is over."""
        return self.ring.finished

    def fail(self) -> None:
        """Record that the call that began last has ended in an error."""
        self.failed = self.ring.started

    def entries(self, last: int = _CAPACITY) -> list[Entry]:
        """Return the last recorded calls, the oldest first. May be called from any thread."""
        started, finished = self.ring.started, self.ring.finished
        entries = []
        for number in range(max(1, started - min(last, _CAPACITY) + 1), started + 1):
            call = self.ring.kept(number)
            if call is not None:
                entries.append(_entry(number, *call, over=number <= finished))
        return entries

    def running(self) -> Entry | None:
        """Return the call in which a thread of the program waits, None if there is none.

        May be called from any thread. A call in a lane's thread does not count, since no thread of
        the program waits in it.
        """
        ring = self.ring
        number = ring.started
        call = ring.kept(number)
        if max(ring.finished, self.failed) >= number or call is None or isinstance(call[2], str):
            return None
        return _entry(number, *call, over=False)

    def __str__(self) -> str:
        entries = self.entries(_LISTED)
        last = f", the last {len(entries)}:" if entries else ""
        head = f"{self.title}: {self.started} collective calls{last}"
        return "\n".join([head, *(f"  {entry}" for entry in entries)])


def _entry(
    number: int,
    request: Request,
    compares: bool,
    code: CodeType | str,
    at: int,
    began: float,
    ended: float,
    *,
    over: bool,
) -> Entry:
    seconds = ended - began if over and ended >= began else None
    return Entry(number, request, compares, _site(code, at), began, seconds)


def _site(code: CodeType | str, at: int) -> str:
    """Return ``file:line in function`` of instruction ``at`` of ``code``.

    For a call in a lane's thread ``code`` is that text already.
    """
    if isinstance(code, str):
        return code
    line = code.co_firstlineno
    for start, stop, number in code.co_lines():
        if start <= at < stop and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {code.co_name}"


def flight_recorder() -> list[Recorder]:
    """Return the recorders of this process's communicators, the oldest first.

    ``str()`` of a recorder lists its last calls; :meth:`Recorder.entries` returns them.
    """
    return sorted(_all, key=lambda recorder: recorder._number)


def dump_on_signal() -> None:
    """Write the flight recorders to stderr whenever the process gets SIGUSR2.

    Does nothing outside the main thread, and if the program has its own handler for that signal.
    Python runs signal handlers only between two of its own steps. So a program
    that is stuck in the code of another library writes only after it has returned from there.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _write)


def _write(number: int, frame: object) -> None:
    text = "\n".join(map(str, flight_recorder())) or "no communicator"
    # Use one write: ranks that share a terminal get the signal together, and their texts must not
    # mix.
    os.write(2, f"[flight recorder, process {os.getpid()}]\n{text}\n".encode())
