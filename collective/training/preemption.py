"""Notice that this process has to end soon: SIGTERM from a batch system, or from Kubernetes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from collective.deadline import Deadline

# Signals within this time count as one: a host that goes down signals every process, and so do
# launchers on it.
_SAME_S = 1.0


class PreemptedError(SystemExit):
    """This rank has received SIGTERM and leaves; its last commit is complete.

    It ends the program with exit code 143, as the signal would. A program that catches it can still
    write files, and must raise it again.
    """

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "this rank received SIGTERM; it leaves after a complete commit"


class Preemption:
    """Whether this process has received SIGTERM.

    Attributes:
        noticed: whether the signal has come.
    """

    def __init__(self) -> None:
        self.noticed = False
        self._insists = Deadline.never()

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Note the first SIGTERM in the context, where it would otherwise end the process at once.

        A further SIGTERM a second later, or later, ends the process. The context does nothing if
        the program handles the signal itself, and in ranks that are threads.
        """
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._notice)
        try:
            yield
        finally:
            with suppress(ValueError):  # the garbage collector may end a context in any thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self) -> None:
        """Raise :class:`PreemptedError` if the signal has come."""
        if self.noticed:
            raise PreemptedError

    def _notice(self, number: int, _: object) -> None:
        if not self.noticed:
            self.noticed = True
            self._insists = Deadline(_SAME_S)
        elif self._insists.expired:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
