"""Agent: owner of ranks' processes, which a supervisor orders to start, signal and end them.

An agent decides nothing. It obeys orders and reports what becomes of the processes. For a run on
this host it is an object of the supervisor's process (:class:`LocalHost`). On each of several hosts
(:mod:`collective.launch.hosts.agent`), and for each process of an MPI world
(:mod:`collective.launch.mpi_rank`), it is a process, and orders and reports are the frames of an
:class:`AgentLine`. The last runs without NumPy, so this module and those that it imports need none.

No process outlives its agent. The kernel kills a rank whose parent has ended. Processes that the
rank has started become children of the agent, or of whoever watches the agent, which is therefore
a subreaper (``adopt_orphans``), and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from collective.inner import platform
from collective.platform.topology import Processor, shares

from .agent_line import AgentLine, Message, Outlet, StreamBytes
from .loop import Loop, end_children, ended_children

if TYPE_CHECKING:
    from .hosts.reachability import Pulse


class Agent:
    """Processes of ranks that this process starts and owns.

    Args:
        loop: event loop of this process.
        report: function that gets each report: a message, or output of a process, which is empty at
            the end of the stream.
        common: environment variables that all processes get, beside those of their orders.
        stdin: standard input of a process that is to get that of the run, as for
            ``subprocess.Popen``.
    """

    def __init__(
        self, loop: Loop, report: Callable[[Message | StreamBytes], object],
        common: Mapping[str, str], stdin: int | None,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._report = report
        self._common = common
        self._stdin = stdin
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        # If the run may continue for long without a rank, all processes that a failed rank has
        # started end with it.
        self._lasting = False
        # Standard input of processes, and numbers of those that have not read all of it.
        self._inputs: dict[int, Outlet] = {}
        self._fed: set[int] = set()
        self._orders: dict[str, Callable[[Message], None]] = {
            "start": self._start,
            "signal": self._signal,
            "finish": self._finish,
        }

    @property
    def runs(self) -> bool:
        """Whether a process has not been reaped."""
        return any(child.returncode is None for child in self._children.values())

    def obey(self, frame: Message | StreamBytes) -> None:
        """Obey an order, or pass on standard input to a process."""
        if isinstance(frame, StreamBytes):
            self._feed(frame)
        else:
            self._orders[frame["kind"]](frame)

    def reap(self) -> None:
        """Reap the processes that have ended, and those of their descendants."""
        for pid, code in ended_children(self._end_group if self._lasting else None):
            number = self._number(pid)
            if number is not None:
                self._children[number].returncode = code
                self._ended(number, code)

    def _number(self, pid: int) -> int | None:
        """Return the number of the process with this id; None if it is a descendant."""
        for number, child in self._children.items():
            if child.pid == pid and child.returncode is None:
                return number
        return None

    def _end_group(self, pid: int, status: int) -> None:
        """End the process group of a failed rank before the rank is reaped and its id reused."""
        number = self._number(pid)
        if number is not None and status:
            self._send(number, signal.SIGKILL, group=True)

    def _send(self, number: int, sent: int, *, group: bool) -> None:
        child = self._children.get(number)
        # It is not reaped yet, so no other process or group has its id.
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(child.pid, signal.Signals(sent))

    def _send_all(self, sent: int, *, group: bool) -> None:
        for number in self._children:
            self._send(number, sent, group=group)

    def _start(self, order: Message) -> None:
        number = order["process"]
        self._lasting = order["lasting"]
        try:
            child = self._spawn(order, {**self._common, **order["environment"]})
        except OSError as error:
            text = f"collective run: the rank could not be started: {error}\n"
            self._report(StreamBytes(number, 2, text.encode()))
            self._report({"kind": "ended", "process": number, "code": 127})
            return
        self._report({"kind": "started", "process": number, "pid": child.pid})
        if child.stdin is not None:
            os.set_blocking(child.stdin.fileno(), False)
            self._inputs[number] = Outlet(child.stdin.fileno())

    def _spawn(self, order: Message, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the process of an order."""
        stdin = self._stdin if order["stdin"] else subprocess.DEVNULL
        return self._execute(order, environment, stdin)

    def _execute(
        self, order: Message, environment: Mapping[str, str], stdin: int | None,
        outputs: tuple[int, int] | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a process and relay its output.

        Args:
            order: the order to start it.
            environment: all its environment variables.
            stdin: as for ``subprocess.Popen``.
            outputs: descriptors that the process writes to, for which this process need relay
                nothing. Then the process also inherits the descriptors that this one did.
        """
        out, error = outputs or (subprocess.PIPE, subprocess.PIPE)
        number = order["process"]
        child = self._children[number] = subprocess.Popen(
            order["command"],
            env=environment,
            stdin=stdin,
            stdout=out,
            stderr=error,
            bufsize=0,
            close_fds=outputs is None,
            # Each rank has its own process group, so that the processes that it started can be
            # ended with it. And Ctrl-C in a terminal only reaches the launcher, which passes it on.
            start_new_session=True,
            # This is safe, because this process has one thread.
            preexec_fn=partial(_prepare, platform.die_with_parent(), order["processors"]),
        )
        for stream, file in enumerate((child.stdout, child.stderr), 1):
            if file is not None:
                self._loop.relay(file.fileno(), partial(self._wrote, number, stream))
        return child

    def _wrote(self, number: int, stream: int, data: bytes) -> None:
        self._report(StreamBytes(number, stream, data))

    def _feed(self, frame: StreamBytes) -> None:
        """Pass on standard input to a process, as far as the process reads it."""
        if frame.process not in self._inputs:
            return
        if not frame.data:
            self._close_input(frame.process)
            return
        self._inputs[frame.process].write(frame.data)
        self._inputs[frame.process].flush()
        self._fed.add(frame.process)

    def _close_input(self, number: int) -> None:
        self._fed.discard(number)
        if self._inputs.pop(number, None) is not None:
            stdin = self._children[number].stdin
            assert stdin is not None
            stdin.close()

    def _signal(self, order: Message) -> None:
        self._send(order["process"], order["number"], group=order["group"])

    def _ended(self, number: int, code: int) -> None:
        # Processes that the rank started may still write, so read no more than the pipes hold.
        for file in (self._children[number].stdout, self._children[number].stderr):
            if file is not None:
                self._loop.drain(file.fileno())
        self._close_input(number)
        self._report({"kind": "ended", "process": number, "code": code})

    def _finish(self, order: Message) -> None:
        """End all processes that the ranks have left, and report the rest of their output."""
        self._send_all(signal.SIGKILL, group=True)
        end_children(order["patience"])
        self._loop.finish()
        for number in list(self._inputs):
            self._close_input(number)
        for child in self._children.values():
            for file in (child.stdout, child.stderr):
                if file is not None:
                    file.close()
        self._children.clear()
        self._report({"kind": "finished"})


def _prepare(die_with_parent: Callable[[], None], processors: Sequence[int]) -> None:
    """Bind a new process to processors, if any are named, before it starts its program."""
    die_with_parent()
    if processors:
        # Meanwhile the container may have lost these processors. The rank then runs on the others.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, processors)


class RemoteAgent(Agent):
    """Agent that is a process: it obeys the frames of its line until the line ends.

    Args:
        incoming, outgoing: descriptors of the connection to the supervisor.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._line = AgentLine(incoming, outgoing, greeted=False)
        super().__init__(Loop(), self._line.post, os.environ, subprocess.PIPE)
        self._over = False

    def _step(self, seconds: float | None) -> None:
        """Handle the next events, after at most so many seconds."""
        self._loop.step([self._line, *self._inputs.values()], seconds)
        for number in [number for number in self._fed if not self._inputs[number].waiting]:
            self._fed.remove(number)
            self._line.post({"kind": "fed", "process": number})

    def _hear(self) -> None:
        """Obey the frames that have come."""
        try:
            frames = self._line.receive()
        except (EOFError, ValueError, OSError):
            self._end()
            return
        for frame in frames:
            self.obey(frame)

    def _end(self) -> None:
        """End the agent and its processes, for instance if the supervisor has ended."""
        self._over = True
        self._loop.forget(self._line.incoming)


class Host(ABC):
    """Host with its agent, as the supervisor sees it.

    Attributes:
        name: name of the host, for messages.
        slots: number of ranks that the host takes.
        processes: text by which ranks name the process table of the host.
        processors: processors that ranks may use there.
        shares: numbers of the processors of each rank, by its number on the host; empty if ranks
            are not bound to processors.
        local: whether it is the supervisor's host.
        pulse: signs of life of the host; None for the supervisor's own process.
        lost: why the host is lost; "" while it answers.
        leaving: whether the host goes down, so that no more ranks may start there.
    """

    pulse: Pulse | None = None
    lost = ""
    leaving = False
    processors: Sequence[Processor] = ()
    shares: Sequence[Sequence[int]] = ()

    def __init__(self, name: str, slots: int, processes: str, *, local: bool) -> None:
        self.name, self.slots, self.processes, self.local = name, slots, processes, local

    def bind(self) -> str:
        """Bind the ranks that start from now on to processors; return why they are not, or ""."""
        self.shares = shares(self.processors, self.slots)
        if self.shares:
            return ""
        cores = len({processor.core for processor in self.processors})
        where = f" on host {self.name}" if self.name else ""
        return f"--bind: {self.slots} ranks{where} share {cores} cores, so they are not bound"

    @abstractmethod
    def attend(self, loop: Loop, heard: Callable[[Message | StreamBytes], object]) -> None:
        """Pass on to ``heard`` what the agent reports, from now on, as events of ``loop``."""

    @abstractmethod
    def post(self, frame: Message | StreamBytes) -> None:
        """Send an order or standard input to the agent."""

    def beat(self) -> None:
        """Send the agent a sign of life, if it needs one."""
        return None

    def lose(self, why: str) -> None:
        """Note that the host is lost, and end the connection."""
        self.lost = self.lost or why


class LocalHost(Host):
    """The supervisor's own host, whose agent is an object of the supervisor's process."""

    def attend(self, loop: Loop, heard: Callable[[Message | StreamBytes], object]) -> None:
        agent = self._agent = Agent(loop, heard, {}, None)

        def react(numbers: bytes) -> None:
            agent.reap()
            heard({"kind": "stirred"})  # a rank sends SIGCHLD, too: its main thread has failed

        platform.adopt_orphans()
        loop.catch(react, signal.SIGCHLD)

    def post(self, frame: Message | StreamBytes) -> None:
        self._agent.obey(frame)
