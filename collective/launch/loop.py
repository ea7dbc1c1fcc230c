"""Event loop of a process that owns others, and the ends of them and of their descendants.

Supervisor and agents have one :class:`Loop` each, and no thread for each child. Nothing in it
blocks: while the process waited for a slow reader of its output, it would miss signals, ends of
ranks and the signs of life of hosts. So bytes to be written wait in an
:class:`~.agent_line.Outlet`. While too many wait, the loop reads nothing from the ranks, and the
kernel slows them down.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from collective.inner import Deadline, platform

from .agent_line import Outlet

_READ = 1 << 16
# A pipe holds 1 MiB at most, and each read takes 64 KiB.
_PIPE_READS = 16


class Loop:
    """Event loop of a process that owns other processes.

    Attributes:
        open: what the end of the loop closes.
    """

    def __init__(self) -> None:
        self.open = contextlib.ExitStack()
        # Unlike epoll, poll also accepts regular files.
        self._selector = self.open.enter_context(selectors.PollSelector())
        # Descriptors from which output of ranks comes, each with the function that reads it.
        self._sources: dict[int, Callable[[], object]] = {}
        # Functions that get the output from pipes that are still open at the other end.
        self._pipes: dict[int, Callable[[bytes], object]] = {}

    def catch(self, react: Callable[[bytes], object], *numbers: int) -> None:
        """Call ``react`` with the numbers of signals that have come, one byte for each.

        The signals arrive as bytes in a pipe, so none is missed just before the wait.

        Args:
            react: function of these bytes.
            numbers: signals to catch, which until now had their default effect.
        """
        wake, wake_end = os.pipe()
        for end in (wake, wake_end):
            os.set_blocking(end, False)
            self.open.callback(os.close, end)
        for number in numbers:
            # The handler itself is empty, but without a handler Python writes no byte to the pipe.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self.open.callback(signal.set_wakeup_fd, -1)
        self.watch(wake, lambda: react(_all_of(wake)))

    def watch(
        self, descriptor: int, react: Callable[[], object], *, is_source: bool = False
    ) -> None:
        """Call ``react`` when there is something to read.

        Args:
            is_source: whether output of ranks comes from there, which has to wait while there is
                no place for it.
        """
        if is_source:
            self._sources[descriptor] = react
        self._selector.register(descriptor, selectors.EVENT_READ, react)

    def watches(self, descriptor: int) -> bool:
        """Return whether the descriptor is watched."""
        return descriptor in self._selector.get_map()

    def forget(self, descriptor: int) -> None:
        """Watch a descriptor no more, before it is closed."""
        self._sources.pop(descriptor, None)
        self._pipes.pop(descriptor, None)
        if self.watches(descriptor):
            self._selector.unregister(descriptor)

    def relay(self, pipe: int, show: Callable[[bytes], object]) -> None:
        """Call ``show`` with all that is written to a pipe, and with ``b""`` at its end."""
        os.set_blocking(pipe, False)
        self._pipes[pipe] = show
        self.watch(pipe, partial(self.read, pipe), is_source=True)

    def read(self, pipe: int) -> bool:
        """Pass on output from a pipe; return whether there may be more to read at once."""
        show = self._pipes.get(pipe)
        if show is None:  # an event of the same step, whose handling has read the pipe
            return False
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return False
        if not data:
            self.forget(pipe)
        show(data)
        return bool(data)

    def drain(self, pipe: int) -> None:
        """Pass on what a pipe holds; other processes may still write more to it."""
        for _ in range(_PIPE_READS):
            if not self.read(pipe):
                break

    def finish(self) -> None:
        """Pass on the rest of all pipes, to which no process writes any more."""
        for pipe, show in list(self._pipes.items()):
            while self.read(pipe):
                pass
            # A process that was given up, since it waits for a disk, may have the pipe open.
            if pipe in self._pipes:
                self.forget(pipe)
                show(b"")

    def step(
        self, outlets: Iterable[Outlet], seconds: float | None, *, hurried: bool = False
    ) -> None:
        """Wait for the next events and handle them.

        Args:
            outlets: where bytes may wait to be written.
            seconds: longest wait; None for no limit.
            hurried: whether to read from sources also while an outlet is full.
        """
        writing = [outlet for outlet in outlets if outlet.waiting]
        for outlet in writing:
            self._selector.register(outlet.descriptor, selectors.EVENT_WRITE, outlet.flush)
        # Back-pressure: while an outlet is full, do not read from the ranks. Their pipes fill up,
        # so a slow reader slows the ranks down.
        full = any(outlet.full for outlet in writing) and not hurried
        held = list(self._sources.items()) if full else []
        for source, _ in held:
            self._selector.unregister(source)
        events = self._selector.select(seconds)
        for outlet in writing:
            self._selector.unregister(outlet.descriptor)
        for source, react in held:
            self._selector.register(source, selectors.EVENT_READ, react)
        for key, _ in events:
            key.data()


def _all_of(pipe: int) -> bytes:
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(pipe, 4096):
            data += chunk
    return data


def ended_children(look: Callable[[int, int], None] | None = None) -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, and yield the id and the code of each.

    Args:
        look: function of a child's id and status, called before the child is reaped, when no other
            process or group can have its id.
    """
    while True:
        which = -1
        try:
            if look is not None and (ended := platform.ended_child()):
                which = ended[0]
                look(*ended)
            pid, status = os.waitpid(which, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def end_children(patience: float) -> None:
    """Wait until this process has no children left, and reap them all.

    Args:
        patience: seconds in which the children may end by themselves before SIGTERM, and again
            before SIGKILL. For instance, a resource tracker needs some time to remove what its
            process has left. A child that survives even SIGKILL, since it waits for a disk, is
            given up after five more seconds.
    """
    end = Deadline(2 * patience + 5)
    signals = (Deadline(patience), signal.SIGTERM), (Deadline(2 * patience), signal.SIGKILL)
    while _reap() and not end.expired:
        due = [number for moment, number in signals if moment.expired]
        if due:
            for pid, parent in parents().items():
                if parent == os.getpid():
                    with contextlib.suppress(PermissionError):  # the child changed its user
                        os.kill(pid, due[-1])
        # When a child dies, this process adopts its children, so continue until all have ended.
        time.sleep(0.005)


def _reap() -> bool:
    """Reap the children that have ended; return whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for pid in platform.process_ids():
        with contextlib.suppress(OSError):
            status = platform.process_status(pid)
            if status is not None:
                found[pid] = status.parent
    return found
