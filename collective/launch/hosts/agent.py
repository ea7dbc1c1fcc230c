"""Process on each host that starts the host's ranks, and ends them if the launcher is gone.

It runs as ``python -m collective.launch.hosts.agent``, under ssh or as a child of the supervisor.
It decides nothing: it obeys the messages on standard input, and reports on standard output
(:mod:`collective.launch.hosts.channel`). When standard input ends, or nothing has come for a while,
it kills the ranks. The agent is two processes (:func:`collective.launch.watching.watch_over`). If
one of them is killed, the other ends what is left.
"""

from __future__ import annotations

import contextlib
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import collective
from collective.contract.process import RankProcess
from collective.deadline import Deadline
from collective.platform import adopt_orphans, held_port, usable_cores
from collective.start.network import interfaces

from ..processes import activity, end_children, ended_children
from ..rank import send_signal, start_process
from ..supervisor import PIPE_READS
from ..watching import watch_over
from .channel import Channel, Message, Output
from .reachability import Listener, reached

__all__ = ["BEAT_S", "PROTOCOL", "main"]

#: Version of the messages.
PROTOCOL = 1
#: Seconds between two signs of life, in both directions.
BEAT_S = 0.25
# After so long a silence the launcher's host, or the network, is gone.
_SILENCE_S = 20.0
# How long ranks may take to leave a host that goes down. Kubernetes and Slurm kill after 30 s.
_LEAVE_S = 25.0
_READ = 1 << 16


class _Process:
    """Process of a rank.

    Attributes:
        number: number of the process in messages.
        process: the process, whose standard input may be a pipe.
        input: bytes that the process has not read yet.
        code: exit code in the form of ``subprocess``; None while it runs.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process
        self.input = bytearray()
        self.code: int | None = None


class Agent:
    """Agent of one host.

    Args:
        control: read end of the pipe of :func:`watch_over`.
        incoming, outgoing: descriptors of the connection to the supervisor.
        port: a port that is held for rank 0 of a program of torch.distributed.
    """

    def __init__(self, control: int, incoming: int, outgoing: int, port: int) -> None:
        self._control = control
        self._channel = Channel(incoming, outgoing, greeted=False)
        self._port = port
        self._processes: dict[int, _Process] = {}
        self._pipes: dict[int, tuple[int, int]] = {}
        self._listener: Listener | None = None
        self._over = False
        # Whether the run continues after the loss of a rank.
        self._lasting = False
        # By when the ranks must have left, because this host goes down.
        self._leaves: Deadline | None = None
        self._heard = self._said = time.monotonic()
        self._selector = selectors.PollSelector()
        self._orders: dict[str, Callable[[Message], None]] = {
            "enter": self._enter,
            "listen": self._listen,
            "probe": self._probe,
            "start": self._start,
            "signal": self._signal,
            "finish": self._finish,
            "beat": lambda message: None,
        }

    def run(self) -> int:
        """Obey the supervisor until it closes the connection; then end all processes."""
        adopt_orphans()
        wake, wake_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self._watch(wake, partial(self._reap, wake))
        # A host that is shut down sends SIGTERM to both processes of the agent.
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._watch(self._control, self._heed)
        self._watch(self._channel.incoming, self._obey)
        self._channel.greet()
        self._channel.post(self._hello())
        while not self._over:
            self._step()
        for process in self._processes.values():
            self._send(process, signal.SIGKILL)
        end_children(0.0)
        return 0

    def _hello(self) -> Message:
        own = RankProcess.own()
        return {
            "kind": "hello",
            "protocol": PROTOCOL,
            "version": collective.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "executable": sys.executable,
            "host": socket.gethostname(),
            "cores": usable_cores(),
            "port": self._port,
            "processes": own.host if own else "",
            "client": os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
            "time": time.time(),
        }

    # -- events ----------------------------------------------------------------------------

    def _watch(self, descriptor: int, react: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, react)

    def _step(self) -> None:
        channel = self._channel
        writing = channel.waiting
        if writing:
            self._selector.register(channel.outgoing, selectors.EVENT_WRITE, channel.flush)
        # Back-pressure: while the connection is full, the ranks' pipes fill up.
        held = list(self._pipes) if channel.full else []
        for pipe in held:
            self._selector.unregister(pipe)
        events = self._selector.select(max(0.0, self._said + BEAT_S - time.monotonic()))
        if writing:
            self._selector.unregister(channel.outgoing)
        for pipe in held:
            self._watch(pipe, partial(self._relay, pipe))
        for key, _ in events:
            key.data()
        now = time.monotonic()
        if now - self._said >= BEAT_S:
            self._beat()
        if channel.broken or now - self._heard > _SILENCE_S:
            self._end()
        if self._leaves is not None:
            runs = any(process.code is None for process in self._processes.values())
            if self._leaves.expired or not (runs or channel.waiting):
                self._end()

    def _beat(self) -> None:
        """Send a sign of life, with the activity of the processes."""
        # The channel may be full because the launcher's output has a slow reader.
        if self._channel.waiting:
            return
        self._said = time.monotonic()
        looks = {}
        for number, process in self._processes.items():
            if process.code is None and (look := activity(process.process.pid)):
                looks[str(number)] = list(look)
        self._channel.post({"kind": "beat", "activity": looks})

    def _obey(self) -> None:
        try:
            frames = self._channel.receive()
        except (EOFError, ValueError, OSError):
            self._end()
            return
        self._heard = time.monotonic()
        for frame in frames:
            if isinstance(frame, Output):
                self._feed(frame)
            else:
                self._orders[frame["kind"]](frame)

    def _heed(self) -> None:
        """React to signals that the other process has received, or to its end."""
        numbers = os.read(self._control, 64)
        if set(numbers) == {signal.SIGTERM}:
            self._leave()
        elif set(numbers) - {signal.SIGTSTP, signal.SIGCONT} or not numbers:
            self._end()

    def _leave(self) -> None:
        """Pass SIGTERM on, so that the ranks leave by themselves, and end after them."""
        if self._leaves is None:
            self._leaves = Deadline(_LEAVE_S)
            self._channel.post({"kind": "leaving"})
            for process in self._processes.values():
                self._send(process, signal.SIGTERM, group=False)

    def _end(self) -> None:
        self._over = True

    # -- before the start --------------------------------------------------------------------

    def _enter(self, message: Message) -> None:
        """Change to the directory of the program, and look for the script."""
        directory, script = message["directory"], message["script"]
        reason = ""
        try:
            os.chdir(directory)
            if script and not os.path.exists(script):
                reason = f"script {script!r}: no such file in {directory}"
        except OSError as error:
            reason = f"directory {directory}: {error.strerror}"
        self._channel.post({"kind": "entered", "why": reason, "time": time.time()})

    def _listen(self, message: Message) -> None:
        """Listen at the address that the ranks of this host will use."""
        answer: Message = {"kind": "listening", "why": "", "address": "", "interface": ""}
        try:
            self._listener = Listener(message["interface"], message["store"], message["token"])
            address = self._listener.address
            names = [found.name for found in interfaces() if address in found.addresses]
            answer.update(
                address=address, port=self._listener.port, interface=names[0] if names else ""
            )
        except (RuntimeError, OSError) as error:  # CollectiveError is a RuntimeError
            answer["why"] = str(error)
        self._channel.post(answer)

    def _probe(self, message: Message) -> None:
        """Connect to the other hosts; report which cannot be reached."""
        self._channel.post({"kind": "reached", "failures": reached(message["peers"])})

    # -- processes ---------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        if self._listener is not None:
            # Its thread has ended when the first rank is forked. The socket goes on to listen: by
            # its answers the supervisor tells a busy host from one that is cut off.
            self._listener.rest()
            self._watch(self._listener.fileno(), self._listener.dismiss)
            self._listener = None
        number = message["process"]
        self._lasting = message["lasting"]
        environment = {**os.environ, **message["environment"]}
        stdin = subprocess.PIPE if message["stdin"] else subprocess.DEVNULL
        try:
            process = start_process(message["command"], environment, stdin)
        except OSError as error:
            text = f"collective run: the rank could not be started: {error}\n"
            self._channel.post(Output(number, 2, text.encode()))
            self._channel.post({"kind": "ended", "process": number, "code": 127})
            return
        self._processes[number] = _Process(number, process)
        self._channel.post({"kind": "started", "process": number, "pid": process.pid})
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, file in ((1, process.stdout), (2, process.stderr)):
            os.set_blocking(file.fileno(), False)
            self._pipes[file.fileno()] = number, stream
            self._watch(file.fileno(), partial(self._relay, file.fileno()))
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)

    def _relay(self, pipe: int) -> bool:
        """Pass on output; return whether there may be more to read at once."""
        if pipe not in self._pipes:
            return False
        try:
            data = os.read(pipe, _READ)
        except BlockingIOError:
            return False
        number, stream = self._pipes[pipe]
        if data:
            self._channel.post(Output(number, stream, data))
            return True
        self._selector.unregister(pipe)
        del self._pipes[pipe]
        return False

    def _feed(self, frame: Output) -> None:
        """Pass on standard input to a process, as far as the process reads it."""
        process = self._processes[frame.process]
        if frame.data:
            process.input += frame.data
            self._pour(process)
        elif process.process.stdin is not None:
            process.process.stdin.close()

    def _pour(self, process: _Process) -> None:
        pipe = process.process.stdin
        if pipe is None or pipe.closed:
            return
        watched = pipe.fileno() in self._selector.get_map()
        try:
            while process.input:
                del process.input[: os.write(pipe.fileno(), process.input)]
        except BlockingIOError:
            if not watched:
                react = partial(self._pour, process)
                self._selector.register(pipe.fileno(), selectors.EVENT_WRITE, react)
            return
        except OSError:  # the process reads no more
            process.input.clear()
        if watched:
            self._selector.unregister(pipe.fileno())
        self._channel.post({"kind": "fed", "process": process.number})

    def _signal(self, message: Message) -> None:
        process = self._processes.get(message["process"])
        if process is not None:
            self._send(process, message["number"], group=message["group"])

    def _send(self, process: _Process, number: int, *, group: bool = True) -> None:
        if process.code is None:
            send_signal(process.process.pid, number, group=group)

    def _reap(self, wake: int) -> None:
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(wake, 4096):
                numbers += chunk
        if signal.SIGTERM in numbers:
            self._leave()
        # The run may continue for long, so end all processes of a lost rank now.
        for pid, code in ended_children(self._end_group if self._lasting else None):
            for process in self._processes.values():
                if process.process.pid == pid and process.code is None:
                    self._ended(process, code)

    def _end_group(self, pid: int, status: int) -> None:
        for process in self._processes.values():
            if process.process.pid == pid and status:
                self._send(process, signal.SIGKILL)

    def _ended(self, process: _Process, code: int) -> None:
        process.code = process.process.returncode = code
        for pipe in [pipe for pipe, (number, _) in self._pipes.items() if number == process.number]:
            # Processes that the rank started may still write, so read no more than a pipe holds.
            for _ in range(PIPE_READS):
                if not self._relay(pipe):
                    break
        self._close_input(process)
        self._channel.post({"kind": "ended", "process": process.number, "code": code})

    def _close_input(self, process: _Process) -> None:
        pipe = process.process.stdin
        if pipe is not None and not pipe.closed:
            if pipe.fileno() in self._selector.get_map():
                self._selector.unregister(pipe.fileno())
            pipe.close()

    def _finish(self, message: Message) -> None:
        """End all processes that the ranks have left, and send the rest of their output."""
        for process in self._processes.values():
            self._send(process, signal.SIGKILL)
        end_children(message["patience"])
        for pipe in list(self._pipes):
            while self._relay(pipe):
                pass
        for process in self._processes.values():
            self._close_input(process)
            for file in (process.process.stdout, process.process.stderr):
                assert file is not None
                if self._pipes.pop(file.fileno(), None):
                    self._selector.unregister(file.fileno())
                file.close()
        self._processes.clear()
        self._channel.post({"kind": "finished"})


def main() -> int:
    """Run the agent of this host; return its exit code."""
    # Nothing else may write to the connection.
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with held_port() as port:

        def supervise(control: int) -> int:
            return Agent(control, incoming, outgoing, port).run()

        return watch_over(supervise, lambda: None)


if __name__ == "__main__":
    sys.exit(main())
