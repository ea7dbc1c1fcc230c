"""Traces of the actions of each rank over time, as files for Perfetto or chrome://tracing.

With ``COLLECTIVE_TRACE=dir`` every rank writes ``dir/rank-00000.json``, … in the Trace Event
Format (Google, "Trace Event Format", 2016; the JSON object form). The file has the rank's calls,
its background operations, and the parts that the program marks with :func:`span`. Without that
setting, none of this code runs. A command merges the files, since no rank knows that it is the last
to write one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

# In a trace, each rank is a process. Tracks must have other numbers than ranks, because Perfetto
# shows a track with the number of its process as the main thread, and also shows track 0 there.
_FIRST_THREAD = 1_000_000
#: First number of the tracks of background operations; threads of the program have lower numbers.
FIRST_LANE = 2_000_000
# Maximum age, and maximum number, of lines that are not in the file yet.
_AGE_S = 0.2
_LINES = 1 << 14
_TAIL = b"\n]}\n"
# Beginning of every trace that this package writes.
_HEAD = '{"displayTimeUnit": "ns", "otherData": {'

#: Clock of all times in a trace, in seconds; all processes of a host share it.
now = time.monotonic

_of_process: Tracer | None = None
# Its ``tracer`` is that of a thread, for ranks that are threads.
_of_thread = threading.local()
_open: list[Tracer] = []
_quote = json.dumps


class Tracer:
    """Writer of one rank's trace.

    The file is complete JSON after each write. So even the trace of a killed rank is readable,
    except for its last fifth of a second. Methods may be called from any thread.

    Args:
        directory: directory of the file; it is made if it does not exist.
        rank: the rank whose trace this is.

    Attributes:
        path: path of the file.
        ended: whether the trace has ended: it is closed, or a write has failed.

    Raises:
        OSError: the file cannot be written. Another process may still be writing it, or it may be
            another kind of file, which is not changed.
    """

    def __init__(self, directory: str, rank: int) -> None:
        os.makedirs(directory, exist_ok=True)
        self.directory = directory
        self.path = os.path.join(directory, f"rank-{rank:05}.json")
        self.rank = rank
        self.ended = False
        self._lines: list[str] = []
        self._writing = threading.Lock()
        self._begun = False
        self._track = threading.local()  # its ``number`` is that of the thread's track
        self._tids: dict[str, int] = {}
        self._idle_tracks: list[int] = []
        self._tracks = itertools.count(FIRST_LANE)
        self._stop = threading.Event()
        self._zero = 0.0
        self._position = 0
        self._file = open_file(self.path)

    def begin_file(self, zero: float, about: dict[str, Any]) -> None:
        """Write the head of the file.

        Args:
            zero: time on this rank's clock that is 0 in the trace.
            about: facts about the run, for readers of the trace.
        """
        self._zero = zero
        head = _HEAD + json.dumps({**about, "rank": self.rank})[1:]
        first = self._named("process_name", _FIRST_THREAD, "name", f"rank {self.rank}")
        os.ftruncate(self._file, 0)
        self._write(f'{head}, "traceEvents": [\n{first}'.encode())
        self._put(self._named("process_sort_index", _FIRST_THREAD, "sort_index", self.rank))
        self._begun = True
        _open.append(self)
        threading.Thread(target=self._keep_writing, name="collective-trace", daemon=True).start()

    # -- events -----------------------------------------------------------------------------

    def begin(self, name: str, category: str, args: str = "") -> None:
        """Begin a slice on the calling thread's track.

        Args:
            name: name of the slice.
            category: category, by which a viewer can filter.
            args: further facts, as the inside of a JSON object.
        """
        self._event("B", f'"name":{_quote(name)},"cat":"{category}","args":{{{args}}}')

    def end(self, args: str = "") -> None:
        """End the slice that the calling thread began last."""
        self._event("E", f'"args":{{{args}}}')

    def instant(self, name: str, category: str, args: str = "") -> None:
        """Mark a moment on the calling thread's track."""
        self._event("i", f'"s":"t","name":{_quote(name)},"cat":"{category}","args":{{{args}}}')

    def _event(self, phase: str, rest: str) -> None:
        moment = (now() - self._zero) * 1e6
        self._put(
            f'{{"ph":"{phase}","pid":{self.rank},"tid":{self._tid()},"ts":{moment:.3f},{rest}}}'
        )

    # -- tracks -----------------------------------------------------------------------------

    def _tid(self) -> int:
        """Return the number of the calling thread's track."""
        number: int | None = getattr(self._track, "number", None)
        if number is None:
            thread = threading.current_thread()
            # A thread with the name of an earlier thread continues that thread's track.
            name = "program" if thread is threading.main_thread() else thread.name
            if name not in self._tids:
                self._tids[name] = _FIRST_THREAD + len(self._tids)
                self._put(self._named("thread_name", self._tids[name], "name", name))
            number = self._track.number = self._tids[name]
        return number

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Put the events of the calling thread on an idle background track, for a ``with`` body.

        A thread is short-lived, and a program may use a new tag, and so a new thread, for every
        message. So threads have no tracks of their own here.
        """
        try:
            track = self._idle_tracks.pop()
        except IndexError:
            track = next(self._tracks)
            self._put(self._named("thread_name", track, "name", "calls in the background"))
        before, self._track.number = getattr(self._track, "number", None), track
        try:
            yield
        finally:
            self._track.number = before
            self._idle_tracks.append(track)

    def _named(self, what: str, tid: int, key: str, value: str | int) -> str:
        """Return the event that names or places a track or a process."""
        return _quote({"ph": "M", "pid": self.rank, "tid": tid, "name": what, "args": {key: value}})

    # -- the file ---------------------------------------------------------------------------

    def _put(self, line: str) -> None:
        lines = self._lines
        lines.append(line)
        if len(lines) >= _LINES:
            self.flush()

    def flush(self) -> None:
        """Write the events that are not in the file yet."""
        with self._writing:
            count = len(self._lines)
            chunk = self._lines[:count]
            # Delete from the list, and do not replace it: another thread may be about to append to
            # this list.
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
            with contextlib.suppress(OSError):  # back to the last complete state
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
        """Write the remaining events and close the file; later events are dropped."""
        self._stop.set()
        self.flush()
        with self._writing:
            if self in _open:
                _open.remove(self)
            if self._file >= 0:
                os.close(self._file)
            self.ended, self._file = True, -1


def open_file(path: str) -> int:
    """Return a file descriptor of a new trace, or of a trace of the same user from an earlier run.

    Other users may be able to put files into the directory, such as /tmp. So an existing link is
    not followed, an existing pipe is not waited for, and an existing file is overwritten only if it
    is a trace of this user.

    Raises:
        OSError: the file cannot be written, another process is writing it, or it is no such trace;
            with the path.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if os.path.islink(path):
            raise FileExistsError(
                errno.EEXIST, "a link is there, and it is not followed", path
            ) from None
        file = os.open(path, flags)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(0, "another process is writing it", path) from None
        except OSError:
            pass  # the file system has no locks
        status = os.fstat(file)
        head = _HEAD.encode()
        # After a run that was killed or had no space left, the file may hold a part of the head.
        if not stat.S_ISREG(status.st_mode) or not head.startswith(os.pread(file, len(head), 0)):
            raise FileExistsError(errno.EEXIST, "it is no trace; it is not overwritten", path)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"the file belongs to uid {status.st_uid}", path)
    except BaseException:
        os.close(file)
        raise
    return file


# -- marks of the program -----------------------------------------------------------------------


@contextlib.contextmanager
def _slice(tracer: Tracer, name: str, args: dict[str, Any]) -> Iterator[None]:
    tracer.begin(name, "span", _quote(args, default=str)[1:-1])
    try:
        yield
    finally:
        tracer.end()


# Result of span() without a trace.
_NOTHING = contextlib.nullcontext()


def current() -> Tracer | None:
    """Return the tracer of this rank; None if the rank writes no trace."""
    return getattr(_of_thread, "tracer", None) or _of_process


def span(name: str, **args: Any) -> AbstractContextManager[None]:
    """Show the body of a ``with`` statement in the trace, under ``name``.

    ::

        with collective.trace.span("load batch", index=i):
            ...

    Args:
        name: name of the slice in the trace.
        args: numbers and texts that a viewer shows with the slice.
    """
    # Without any open trace, skip looking up the tracer.
    if not _open:
        return _NOTHING
    tracer = current()
    return _NOTHING if tracer is None else _slice(tracer, name, args)


def step(by: str = "program") -> None:
    """Mark the boundary of two training steps; ``by`` names the code that marks it."""
    tracer = current() if _open else None
    if tracer is not None:
        tracer.instant("step", "step", f'"by":{_quote(by)}')


def set_current(tracer: Tracer, *, of_thread: bool) -> None:
    """Make :func:`current` return ``tracer``, in this thread or in the whole process."""
    global _of_process
    if of_thread:
        _of_thread.tracer = tracer
    else:
        _of_process = tracer


def opened(directory: str, rank: int, *, of_thread: bool) -> Tracer | None:
    """Return the open tracer of this process for ``directory``, if there is one.

    Args:
        rank: the rank of the tracer; used only where ranks are threads. A process has one trace,
            whatever its rank is in a group.
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
    """Drop all tracers in a forked child, which must not write to the files of its parent."""
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
