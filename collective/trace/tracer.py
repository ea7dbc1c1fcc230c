"""Traces: what each rank did when, as a file for Perfetto or chrome://tracing.

With ``COLLECTIVE_TRACE=dir`` every rank writes ``dir/rank-00000.json``, … in the Trace Event
Format (Google, "Trace Event Format", 2016; the JSON object form): its calls, what goes on in the
background, and what the program marks with :func:`span`. Without it nothing of this runs.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from .file import HEAD, open_file

__all__ = ["FIRST_LANE", "Interval", "Tracer", "current", "interval", "now", "span", "step"]

# Tracks are numbered apart from ranks, which are the processes here: Perfetto takes a track with
# its process's number for the main thread, and shows what is on track 0 there, too.
_FIRST_THREAD = 1_000_000
#: Tracks of what runs in the background are numbered from here, threads of the program below.
FIRST_LANE = 2_000_000
# How old what is not in the file may get, and how much of it there may be, in lines.
_AGE_S = 0.2
_LINES = 1 << 14
_TAIL = b"\n]}\n"

#: The clock of all times here, in seconds; one for all processes of a host.
now = time.monotonic

_of_process: Tracer | None = None
_open: list[Tracer] = []
_quote = json.dumps


class _OfThread(threading.local):
    tracer: Tracer | None = None


# Where ranks are threads, each has its own.
_of_thread = _OfThread()


class _Tid(threading.local):
    number: int | None = None


class Tracer:
    """Writes one rank's trace.

    The file is complete JSON after each write, so that of a rank that is killed can be read,
    but for its last fifth of a second. Methods may be called from any thread.

    Args:
        directory: where the file goes; it is made if it is not there.
        rank, size: whose trace this is.

    Attributes:
        path: the file.
        ended: whether it takes no more: it is closed, or could not be written.

    Raises:
        OSError: the file cannot be written; it may be another process's that still writes it,
            or something that is no trace, which is left as it is.
    """

    def __init__(self, directory: str, rank: int, size: int) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = directory
        self.path = os.path.join(directory, f"rank-{rank:05}.json")
        self.rank = rank
        self.size = size
        self.ended = False
        self._lines: list[str] = []
        self._writing = threading.Lock()
        self._begun = False
        self._tid = _Tid()
        self._tids: dict[str, int] = {}
        self._idle_tracks: list[int] = []
        self._tracks = itertools.count(FIRST_LANE)
        # Perfetto takes nothing but integers.
        self._numbers = itertools.count((rank << 32) + 1)
        self._stop = threading.Event()
        self._zero = 0.0
        self._position = 0
        self._file = open_file(self.path)

    def begin_file(self, zero: float, about: dict[str, Any]) -> None:
        """Write the head of the file.

        Args:
            zero: the time that becomes 0, on this rank's clock.
            about: what a reader should know of the run.
        """
        self._zero = zero
        head = HEAD + json.dumps({**about, "rank": self.rank})[1:]
        first = self._named("process_name", _FIRST_THREAD, f"rank {self.rank}")
        os.ftruncate(self._file, 0)
        self._write(f'{head}, "traceEvents": [\n{first}'.encode())
        self._put(f'{{"ph":"M","pid":{self.rank},"tid":{_FIRST_THREAD},"name":"process_sort_index",'
                  f'"args":{{"sort_index":{self.rank}}}}}')  # fmt: skip
        self._begun = True
        _open.append(self)
        threading.Thread(target=self._keep_writing, name="collective-trace", daemon=True).start()

    # -- events -----------------------------------------------------------------------------

    def begin(self, name: str, category: str, args: str = "") -> None:
        """Begin a slice on the calling thread's track.

        Args:
            name: what it is.
            category: by which a viewer can filter.
            args: further facts, as the inside of a JSON object.
        """
        self._put(
            f'{{"ph":"B","pid":{self.rank},"tid":{self.tid()},"ts":{self._at(now())},'
            f'"name":{_quote(name)},"cat":"{category}","args":{{{args}}}}}'
        )

    def end(self, args: str = "") -> None:
        """End the slice that the calling thread began last."""
        self._put(
            f'{{"ph":"E","pid":{self.rank},"tid":{self.tid()},"ts":{self._at(now())},'
            f'"args":{{{args}}}}}'
        )

    def instant(self, name: str, category: str, args: str = "") -> None:
        """Mark a moment on the calling thread's track."""
        self._put(
            f'{{"ph":"i","s":"t","pid":{self.rank},"tid":{self.tid()},"ts":{self._at(now())},'
            f'"name":{_quote(name)},"cat":"{category}","args":{{{args}}}}}'
        )

    def flow(self, phase: str, number: int) -> None:
        """Draw an arrow from (``"s"``), over (``"t"``) or to (``"f"``) the slice that is open."""
        bound = ',"bp":"e"' if phase != "s" else ""
        self._put(
            f'{{"ph":"{phase}","pid":{self.rank},"tid":{self.tid()},"ts":{self._at(now())},'
            f'"name":"async call","cat":"async","id":{number}{bound}}}'
        )

    def number(self) -> int:
        """Return a number that no rank has used for another arrow or interval."""
        return next(self._numbers)

    def between(self, phase: str, name: str, number: int, args: str = "") -> None:
        """Begin (``"b"``) or end (``"e"``) what belongs to no thread."""
        self._put(
            f'{{"ph":"{phase}","pid":{self.rank},"tid":{self.tid()},"ts":{self._at(now())},'
            f'"name":{_quote(name)},"cat":"interval","id2":{{"local":"{number:#x}"}},'
            f'"args":{{{args}}}}}'
        )

    # -- tracks -----------------------------------------------------------------------------

    def tid(self) -> int:
        """Return the number of the calling thread's track."""
        found = self._tid.number
        if found is None:
            thread = threading.current_thread()
            # A thread that follows another of its name continues that one's track.
            name = "program" if thread is threading.main_thread() else thread.name
            known = self._tids.get(name)
            if known is None:
                known = self._tids[name] = _FIRST_THREAD + len(self._tids)
                self._put(self._named("thread_name", known, name))
            found = self._tid.number = known
        return found

    def track(self, name: str) -> int:
        """Return the number of a new track for what runs in the background."""
        number = next(self._tracks)
        self._put(self._named("thread_name", number, name))
        return number

    @contextlib.contextmanager
    def on(self, track: int | None) -> Any:
        """Put what the calling thread does meanwhile on another track.

        Args:
            track: its number; None takes one on which nothing goes on now.
        """
        taken = track
        if taken is None:
            try:
                taken = self._idle_tracks.pop()
            except IndexError:
                taken = self.track("messages in the background")
        before, self._tid.number = self._tid.number, taken
        try:
            yield
        finally:
            self._tid.number = before
            if track is None:
                self._idle_tracks.append(taken)

    def _named(self, what: str, tid: int, name: str) -> str:
        return (
            f'{{"ph":"M","pid":{self.rank},"tid":{tid},"name":"{what}",'
            f'"args":{{"name":{_quote(name)}}}}}'
        )

    # -- the file ---------------------------------------------------------------------------

    def _at(self, moment: float) -> str:
        return f"{(moment - self._zero) * 1e6:.3f}"

    def _put(self, line: str) -> None:
        lines = self._lines
        lines.append(line)
        if len(lines) >= _LINES:
            self.flush()

    def flush(self) -> None:
        """Write what is not in the file yet."""
        with self._writing:
            count = len(self._lines)
            chunk = self._lines[:count]
            # Not a new list: a thread may be about to append to this one.
            del self._lines[:count]
            if chunk and self._begun and not self.ended:
                self._write(("".join(f",\n{line}" for line in chunk)).encode())

    def _write(self, text: bytes) -> None:
        rest, at = memoryview(text + _TAIL), self._position
        try:
            while rest:
                written = os.pwrite(self._file, rest, at)
                rest, at = rest[written:], at + written
        except OSError as error:
            self.ended = True
            with contextlib.suppress(OSError):  # back to what was whole
                os.ftruncate(self._file, self._position)
                if self._position:
                    os.pwrite(self._file, _TAIL, self._position)
            print(
                f"[collective trace, rank {self.rank}] {self.path}: {error.strerror}; the trace "
                "ends here, the program goes on.",
                file=sys.stderr,
            )
            return
        self._position += len(text)

    def _keep_writing(self) -> None:
        while not self._stop.wait(_AGE_S) and not self.ended:
            self.flush()

    def close(self) -> None:
        """Write what is left and close the file; what comes later is dropped."""
        self._stop.set()
        self.flush()
        with self._writing:
            if self in _open:
                _open.remove(self)
            if self._file >= 0:
                os.close(self._file)
            self.ended, self._file = True, -1


# -- what a program says ------------------------------------------------------------------------


class _ProgramSlice(AbstractContextManager[None]):
    """A slice of the program's."""

    def __init__(self, tracer: Tracer, name: str, args: dict[str, Any]) -> None:
        self._tracer = tracer
        self._name = name
        self._args = args

    def __enter__(self) -> None:
        self._tracer.begin(self._name, "span", _quote(self._args, default=str)[1:-1])

    def __exit__(self, *_: object) -> None:
        self._tracer.end()


class Interval:
    """Something that begins in one thread and may end in another."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name
        self._number = tracer.number()
        tracer.between("b", name, self._number)

    def end(self) -> None:
        """Say that it is over; more than once does nothing."""
        if self._number:
            self._tracer.between("e", self._name, self._number)
        self._number = 0


# Stands for a span where nothing is traced.
_NOTHING = contextlib.nullcontext()


def current() -> Tracer | None:
    """Return the tracer of this rank, None if it is not traced."""
    return _of_thread.tracer or _of_process


def span(name: str, **args: Any) -> AbstractContextManager[None]:
    """Show the body of a ``with`` statement in the trace, under ``name``.

    ::

        with collective.trace.span("load batch", index=i):
            ...

    Args:
        args: numbers and texts that a viewer shows with it.
    """
    # Nothing to look up as long as nobody traces.
    if not _open:
        return _NOTHING
    tracer = current()
    return _NOTHING if tracer is None else _ProgramSlice(tracer, name, args)


def interval(name: str) -> Interval | None:
    """Begin something that is over when its ``end`` is called, in whatever thread."""
    tracer = current() if _open else None
    return None if tracer is None else Interval(tracer, name)


def step(by: str = "program") -> None:
    """Mark the boundary of two training steps; ``by`` says who does."""
    tracer = current() if _open else None
    if tracer is not None:
        tracer.instant("step", "step", f'"by":{_quote(by)}')


def set_current(tracer: Tracer, *, of_thread: bool) -> None:
    """Make ``tracer`` what :func:`current` returns, in this thread or everywhere."""
    global _of_process
    if of_thread:
        _of_thread.tracer = tracer
    else:
        _of_process = tracer


def opened(directory: str, rank: int, *, of_thread: bool) -> Tracer | None:
    """Return the open tracer of this process for ``directory``, if there is one.

    Args:
        rank: whose, where ranks are threads. A process is one rank, whatever groups it is in.
    """
    for tracer in _open:
        fits = not of_thread or tracer.rank == rank
        if fits and tracer.directory == directory and not tracer.ended:
            return tracer
    return None


@atexit.register
def _close_all() -> None:
    for tracer in list(_open):
        tracer.close()


def _forget() -> None:
    """A forked child is no rank: it writes to no file of its parent's."""
    global _of_process
    for tracer in _open:
        tracer.ended = True
        tracer._writing = threading.Lock()  # another thread may have held it
        with contextlib.suppress(OSError):
            os.close(tracer._file)
        tracer._file = -1
    _open.clear()
    _of_process = None
    _of_thread.tracer = None


os.register_at_fork(after_in_child=_forget)
