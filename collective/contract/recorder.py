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
        call: what this rank asked for.
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


class Recorder:
    """A ring of the last calls of one communicator, written by one thread at a time.

    Attributes:
        title: which communicator it is, for people.
        started: the number of calls that have begun.
        finished: the number of the last call that is over.
        failed: the number of the last call that has ended in an error.
    """

    __slots__ = (
        "__weakref__", "_ended", "_number", "_ring", "failed", "finished", "started", "title",
    )  # fmt: skip

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.started = 0
        self.finished = 0
        self.failed = 0
        self._number = next(_numbers)
        self._ring: list[Any] = [None] * _CAPACITY
        self._ended = [0.0] * _CAPACITY
        _all.add(self)

    def begin(self, request: Request, compares: bool = False, depth: int = 3) -> None:
        """Record that a call begins.

        Args:
            call: what this rank asks for.
            compares: whether the calls are only compared yet.
            depth: where the program's frame may be at the nearest: a communicator's method
                calls another that calls this.
        """
        self.started = number = self.started + 1
        site = in_thread.site
        if site is None:
            frame = sys._getframe(depth)
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
            self._ring[number & _CAPACITY - 1] = (
                number,
                request,
                compares,
                code,
                frame.f_lasti,
                _now(),
            )
        else:
            self._ring[number & _CAPACITY - 1] = number, request, compares, site, 0, _now()

    def end(self) -> None:
        """Record that the call that began last is over."""
        self._ended[self.started & _CAPACITY - 1] = _now()
        self.finished = self.started

    def entries(self, last: int = _CAPACITY) -> list[Entry]:
        """Return the last recorded calls, the oldest first. May be called from any thread."""
        started, finished = self.started, self.finished
        found = []
        for number in range(max(1, started - min(last, _CAPACITY) + 1), started + 1):
            kept = self._ring[number & _CAPACITY - 1]
            if kept is None or kept[0] != number:
                continue  # overwritten meanwhile, or not written yet
            _, call, compares, code, at, began = kept
            ended = self._ended[number & _CAPACITY - 1]
            seconds = ended - began if number <= finished and ended >= began else None
            found.append(Entry(number, call, compares, _site(code, at), began, seconds))
        return found

    def running(self) -> Entry | None:
        """Return the call that keeps the program's thread, None if there is none.

        May be called from any thread. A call in a lane's thread keeps nobody.
        """
        number = self.started
        kept = self._ring[number & _CAPACITY - 1]
        if max(self.finished, self.failed) >= number or kept is None or kept[0] != number:
            return None
        _, call, compares, code, at, began = kept
        if isinstance(code, str):
            return None
        return Entry(number, call, compares, _site(code, at), began, None)

    def __str__(self) -> str:
        entries = self.entries(_LISTED)
        last = f", the last {len(entries)}:" if entries else ""
        head = f"{self.title}: {self.started} collective calls{last}"
        return "\n".join([head, *(f"  {entry}" for entry in entries)])


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
