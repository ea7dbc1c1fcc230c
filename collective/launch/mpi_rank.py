"""Agent that mpiexec starts for a rank: it starts the rank, and reports the rank's end.

The agent imports no NumPy, so it costs only a few milliseconds. Its directory is that of
:mod:`collective.launch.mpi`, and contains named pipes for each rank N: the rank writes its output
to ``N.out`` and ``N.error`` itself, so that none is lost if mpiexec kills the agent. ``N.orders``
and ``N.reports`` are the agent line. The order ``finish`` makes this process end, as the rank did.
The order ``die`` makes it kill itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from .agent import RemoteAgent
from .agent_line import Message

#: Kinds of named pipes of a rank.
PIPES = ("out", "error", "orders", "reports")
# Signals that this process passes on to the rank, if mpiexec or another process sends them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Variables in which the process manager of an MPI library gives a process its rank.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


class _MpiAgent(RemoteAgent):
    """Agent of one rank.

    Args:
        prefix: path of the pipes, without their kinds.

    Raises:
        OSError: there are no such pipes, or no process reads them.
    """

    def __init__(self, prefix: str) -> None:
        out, error, reports = (_writer(f"{prefix}.{kind}") for kind in ("out", "error", "reports"))
        super().__init__(os.open(f"{prefix}.orders", os.O_RDONLY | os.O_NONBLOCK), reports)
        self._outputs = out, error
        self._early = b""  # signals that came before the rank was started
        self._code = 0
        self._orders.update(finish=lambda order: self._end(), die=_die)

    def run(self) -> int:
        """Obey the supervisor until the end; return the code of the rank as a shell would."""
        self._loop.catch(self._caught, signal.SIGCHLD, *_SIGNALS)
        self._loop.watch(self._line.incoming, self._hear)
        # When this process ends with a failure, mpiexec stops the other ranks. So it waits for an
        # order: the other ranks first get time to report what they noticed.
        while not self._over:
            self._step(None)
        # If the launcher has ended, the rank still runs.
        self._send_all(signal.SIGKILL, group=True)
        while self.runs:
            self._step(None)
        return self._code if self._code >= 0 else 128 - self._code

    def _caught(self, numbers: bytes) -> None:
        if not self._children:
            self._early += numbers
        for number in numbers:
            if number in _SIGNALS:
                self._send_all(number, group=False)
        self.reap()

    def _spawn(self, order: Message, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            stdin = os.open(order["stdin"] or os.devnull, os.O_RDONLY)
        except OSError:  # the input cannot be reopened, such as a socket
            stdin = subprocess.DEVNULL
        # The rank inherits the descriptor that leads to the process manager.
        child = self._execute(order, environment, stdin, self._outputs)
        self._caught(self._early)
        return child

    def _ended(self, number: int, code: int) -> None:
        self._code = code
        super()._ended(number, code)


def main(directory: str) -> int:
    """Run the rank that the process manager has assigned; return its exit code."""
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "")
    try:
        agent = _MpiAgent(f"{directory}/{rank}")
    except OSError as problem:
        print(
            f"collective run: rank {rank or '?'} on {socket.gethostname()}: {problem}. "
            "`collective run` starts ranks on one host only; for several hosts, call mpiexec "
            "yourself.",
            file=sys.stderr,
        )
        return 1
    return agent.run()


def _writer(path: str) -> int:
    """Open a named pipe for writing.

    Raises:
        OSError: no process reads the pipe (ENXIO), since the launcher and its supervisor have
            ended. Without O_NONBLOCK, the open would wait for them without end.
    """
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    return pipe


def _die(order: Message) -> None:
    """Kill this process: the other ranks continue, and the rank was lost.

    Open MPI reports to them only a process that dies by a signal. If this one ended with a code
    other than 0, or went on, they would wait for ever.
    """
    os.kill(os.getpid(), signal.SIGKILL)
