"""The flight recorder: the last collective calls of a communicator, always on.

It costs a fraction of a microsecond a call (``benchmarks/recorder.py``), so it is there
when something went wrong that nobody was looking for. A transport that does not compare
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
from collective.request import Request, in_thread

__all__ = ["Entry", "Recorder", "dump_on_signal", "flight_recorder"]

# Calls kept for each communicator: some training steps of a large model. A power of two.
_CAPACITY = 512
# Calls told to people.
_LISTED = 32
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Whether a file is part of this package, by its name; a lookup in the path of every call.
_INSIDE: dict[str, bool] = {}
_now = time.monotonic
_numbers = itertools.count()
_all: weakref.WeakSet[Recorder] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded call.

    Attributes:
        sequence: its number among the communicator's collective calls, from 1.
        request: what this rank asked for.
        compares: whether it was the comparison of the ranks' calls, not yet the operation.
        site: ``file:line in function`` of the caller.
        began: when, on the clock of ``time.monotonic()``, in seconds.
        seconds: how long it took, None while it is running (or if it failed).
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


class _Ring:
    """The last calls of a communicator, as the native core keeps them where it is in use.

    Attributes:
        started: the number of calls that have begun.
        finished: the number of the last call that is over.
    """

    __slots__ = ("_calls", "_ended", "finished", "started")

    def __init__(self) -> None:
        self.started = 0
        self.finished = 0
        self._calls: list[Any] = [None] * _CAPACITY
        self._ended = [0.0] * _CAPACITY

    def begin(self, request: Request, compares: bool = False) -> None:
        """Record that a call begins, and where in the program it was made.

        Args:
            request: what this rank asks for.
            compares: whether the calls are only compared yet.
        """
        number = self.started + 1
        code: CodeType | str | None = in_thread.site
        at = 0
        if code is None:
            frame = sys._getframe(1)
            code = frame.f_code
            while _INSIDE.get(code.co_filename, True):
                if code.co_filename not in _INSIDE:
                    _INSIDE[code.co_filename] = code.co_filename.startswith(_PACKAGE)
                    continue
                above = frame.f_back
                if above is None:
                    break
                frame = above
                code = frame.f_code
            # The line is found out when somebody asks: that costs more than all the rest.
            at = frame.f_lasti
        self._calls[number % _CAPACITY] = number, request, compares, code, at, _now()
        # After its entry: the monitor's thread reads up to here, meanwhile.
        self.started = number

    def end(self) -> None:
        """Record that the call that began last is over."""
        self._ended[self.started % _CAPACITY] = _now()
        self.finished = self.started

    def kept(self, number: int) -> tuple[Request, bool, CodeType | str, int, float, float] | None:
        """Return what is known of a call: as in :class:`Entry`, with its end, if that is known."""
        kept = self._calls[number % _CAPACITY]
        if kept is None or kept[0] != number:
            return None  # overwritten meanwhile, or not written yet
        return (*kept[1:], self._ended[number % _CAPACITY])


class Recorder:
    """A ring of the last calls of one communicator, written by one thread at a time.

    Attributes:
        title: which communicator it is, for people.
        ring: what keeps the calls; in C where that is in use.
        begin, end: the ring's: ``begin(request, compares=False)`` records that a call begins,
            ``end()`` that it is over.
        failed: the number of the last call that has ended in an error.
    """

    __slots__ = ("__weakref__", "_number", "begin", "end", "failed", "ring", "title")

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.ring = ring = native.ring(_PACKAGE) or _Ring()
        self.begin = ring.begin
        self.end = ring.end
        self.failed = 0
        self._number = next(_numbers)
        _all.add(self)

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
        found = []
        for number in range(max(1, started - min(last, _CAPACITY) + 1), started + 1):
            kept = self.ring.kept(number)
            if kept is not None:
                found.append(_entry(number, *kept, over=number <= finished))
        return found

    def running(self) -> Entry | None:
        """Return the call that keeps the program's thread, None if there is none.

        May be called from any thread. A call in a lane's thread keeps nobody.
        """
        ring = self.ring
        number = ring.started
        kept = ring.kept(number)
        if max(ring.finished, self.failed) >= number or kept is None or isinstance(kept[2], str):
            return None
        return _entry(number, *kept, over=False)

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
    """Return the place of instruction ``at`` of ``code``; a lane's thread has it as text."""
    if isinstance(code, str):
        return code
    line = code.co_firstlineno
    for start, stop, number in code.co_lines():
        if start <= at < stop and number is not None:
            line = number
    return f"{code.co_filename}:{line} in {code.co_name}"


def flight_recorder() -> list[Recorder]:
    """Return the recorders of this process's communicators, the oldest first.

    ``str()`` of one tells its last calls; :meth:`Recorder.entries` gives them.
    """
    return sorted(_all, key=lambda recorder: recorder._number)


def dump_on_signal(name: str) -> None:
    """Write the flight recorders to stderr whenever the process gets signal ``name``.

    Does nothing for ``"none"``, outside the main thread, and if the program has a handler of
    its own for that signal. Python runs handlers between two steps of its own: a program that
    is stuck in another library's code writes when it comes out of it.
    """
    if name == "none" or threading.current_thread() is not threading.main_thread():
        return
    number = signal.Signals[name]
    if signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, _write)


def _write(number: int, frame: object) -> None:
    text = "\n".join(map(str, flight_recorder())) or "no communicator"
    # One write: ranks that share a terminal get the signal together.
    os.write(2, f"[flight recorder, process {os.getpid()}]\n{text}\n".encode())
