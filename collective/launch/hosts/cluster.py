"""The hosts of a run as the supervisor sees them: their agents, and questions to all of them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from collective import RendezvousError
from collective.inner import Deadline, HostSlots
from collective.start.network import interfaces, is_loopback

from ..agent import Host
from ..agent_line import BEAT_S, AgentLine, Message, StreamBytes
from ..loop import Loop
from .reachability import Pulse

# How long the agents may take to end what still runs, and a process that ends, or was killed.
_CLOSE_S, _EXIT_S = 5.0, 0.5
# The last bytes of what ssh wrote to standard error, for error texts.
_COMPLAINTS = 2000
_SSH = ("-T", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5")


class SignalledError(Exception):
    """A signal, or the end of the launcher, ended the launch before the ranks started.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class SharedPaths(NamedTuple):
    """Properties that all hosts of a run must share.

    Attributes:
        directory: working directory of the program.
        script: the script; "" if the program is a module.
        python: interpreter of agents and ranks.
        path: PYTHONPATH of the agents.
        ssh: command of ssh.
    """

    directory: str
    script: str
    python: str
    path: str
    ssh: Sequence[str]


class Machine(Host):
    """A host with the process of its agent.

    Attributes:
        hello: first message of the agent.
        address: address at which ranks of other hosts reach ranks of this one; "" until known.
        interface: network interface of the address.
    """

    pulse: Pulse
    _loop: Loop | None = None

    def __init__(self, host: HostSlots, site: SharedPaths) -> None:
        super().__init__(host.name, host.slots, "", local=is_this_host(host.name))
        self.hello: Message = {}
        self.address = self.interface = ""
        command = [site.python, "-m", "collective.launch.hosts.agent"]
        environment = {**os.environ, "PYTHONPATH": site.path}
        if not self.local:
            # A login shell runs the command, so each word is quoted.
            words = ["exec", "env", f"PYTHONPATH={site.path}", *command]
            command = [*site.ssh, *_SSH, "--", self.name, shlex.join(words)]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal only reaches the launcher
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.line = AgentLine(
            self.process.stdout.fileno(), self.process.stdin.fileno(), greeted=True
        )
        self.errors = self.process.stderr.fileno()
        os.set_blocking(self.errors, False)
        self.pulse = Pulse()
        self._complaints = b""

    def attend(self, loop: Loop, heard: Callable[[Message | StreamBytes], object]) -> None:
        self.pulse.hear()  # nobody has listened between two attempts
        self.listen(loop, heard)
        loop.watch(self.errors, partial(self._complain, heard))

    def listen(self, loop: Loop, heard: Callable[[Message | StreamBytes], object]) -> None:
        """Pass on what the agent reports, and keep for errors what ssh writes."""
        self._loop = loop
        loop.watch(self.line.incoming, partial(self._hear, heard), is_source=True)

    def _hear(self, heard: Callable[[Message | StreamBytes], object]) -> None:
        for frame in self.receive():
            heard(frame)
        if self.lost:
            heard({"kind": "lost"})

    def _complain(self, heard: Callable[[Message | StreamBytes], object]) -> None:
        """Report what ssh or the agent has written to standard error."""
        if self.lost:
            return
        data = self.complaints()
        if not data and self._loop is not None:  # the end of the stream
            self._loop.forget(self.errors)
        for line in data.decode(errors="surrogateescape").splitlines():
            heard({"kind": "complaint", "text": line})

    def post(self, frame: Message | StreamBytes) -> None:
        self.line.post(frame)

    def beat(self) -> None:
        """Send the agent a sign of life, and what could not be written before."""
        if self.line.waiting:
            self.line.flush()
        else:
            self.line.post({"kind": "beat"})

    def receive(self) -> list[Message | StreamBytes]:
        """Return the frames that have come; note in :attr:`lost` if the connection has ended."""
        if self.lost:
            return []  # by now the descriptor may be another one, such as that of a rank's link
        try:
            frames = self.line.receive()
        except (EOFError, OSError):
            self.lose(self._why())
            return []
        except ValueError as error:
            self.lose(f"what it sends is not from an agent: {error}")
            return []
        self.pulse.hear()
        return frames

    def complaints(self) -> bytes:
        """Return what ssh and the agent have written to standard error since the last call."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.errors, 65536):
                data += chunk
        self._complaints = (self._complaints + data)[-_COMPLAINTS:]
        return data

    def explained(self, event: str) -> str:
        """Return ``event`` and the last text on standard error, if any, as the reason."""
        self.complaints()
        text = _readable(self._complaints)
        if not self.hello and (noise := _readable(self.line.noise)):
            text = f"{text}\n{noise}" if text else noise
        return f"{event}: {text}" if text else event

    def lose(self, why: str) -> None:
        super().lose(why)
        if self._loop is not None:
            for descriptor in (self.line.incoming, self.errors):
                self._loop.forget(descriptor)
        self.close()

    def close(self) -> None:
        """End the connection: the agent kills what still runs, and ends."""
        self.pulse.forget()
        self.line.broken = True
        for file in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert file is not None
            file.close()

    def _why(self) -> str:
        """Return why the connection ended."""
        # All hosts may be lost at once, and meanwhile no other host gets a sign of life.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_S)
        if self.hello:
            return self.explained("the connection ended")
        what = "the agent" if self.local else "ssh"
        return self.explained(f"{what} ended with exit code {self.process.returncode}")


class Cluster:
    """All hosts of a run, with the spare ones.

    Args:
        machines: hosts in the order of the ranks, then the spare hosts.
        control: pipe of :func:`collective.launch.launcher.watch_over`.
    """

    def __init__(self, machines: Sequence[Machine], control: int) -> None:
        self.machines = machines
        self._control = control

    @property
    def living(self) -> list[Machine]:
        """The hosts that are not lost."""
        return [machine for machine in self.machines if not machine.lost]

    def ask(
        self, kind: str, message: Callable[[Machine], Message] | None, seconds: float
    ) -> dict[Machine, Message]:
        """Send each host a message, and return the answer of each.

        Args:
            kind: kind of the answers.
            message: function that returns the message for a host; None to send none.
            seconds: time that the hosts have to answer.

        Raises:
            RendezvousError: a host has not answered.
            SignalledError: a signal arrived, or the launcher has ended.
        """
        answers: dict[Machine, Message] = {}
        deadline, beat = Deadline(seconds), Deadline(0.0)
        loop = Loop()

        def note(machine: Machine, answer: Message | StreamBytes) -> None:
            if isinstance(answer, dict) and answer.get("kind") == kind:
                answers[machine] = answer

        with loop.open:
            loop.watch(self._control, self._heed)
            for machine in self.living:
                if message is not None:
                    machine.post(message(machine))
                machine.listen(loop, partial(note, machine))
            while len(answers) < len(self.living):
                if deadline.expired:
                    for machine in self.living:
                        if machine not in answers:
                            event = f"it did not answer within {seconds:g} s"
                            machine.lose(machine.explained(event))
                    break
                loop.step((), min(BEAT_S, deadline.left()))
                if beat.expired:
                    beat = Deadline(BEAT_S)
                    self.beat()
        self._refuse_lost()
        return answers

    def _refuse_lost(self) -> None:
        lost = [machine for machine in self.machines if machine.lost]
        if lost:
            listed = "\n  ".join(f"host {machine.name}: {machine.lost}" for machine in lost)
            raise RendezvousError(
                f"hosts: {len(lost)} of {len(self.machines)} hosts cannot be used:\n  {listed}\n"
                f"Check that `ssh {lost[0].name} true` works without a password, and that "
                f"{sys.executable} exists there."
            )

    def beat(self) -> None:
        """Send all agents a sign of life."""
        for machine in self.living:
            machine.beat()

    def _heed(self) -> None:
        """Raise SignalledError if a signal ends the launch, or the launcher has ended."""
        numbers = os.read(self._control, 64)
        if not numbers:
            raise SignalledError(signal.SIGKILL)
        for number in numbers:
            if number not in (signal.SIGTSTP, signal.SIGCONT):
                raise SignalledError(number)

    def close(self) -> None:
        """End all connections, and with them what still runs on the hosts."""
        deadline = Deadline(_CLOSE_S)
        for machine in self.living:
            assert machine.process.stdin is not None
            machine.process.stdin.close()  # the agent kills what still runs, and ends
        for machine in self.living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                machine.process.wait(deadline.left())
            machine.close()
        for machine in self.machines:
            machine.process.kill()
        # A process that waits for a disk survives even this, and is given up.
        deadline = Deadline(_EXIT_S)
        for machine in self.machines:
            with contextlib.suppress(subprocess.TimeoutExpired):
                machine.process.wait(deadline.left())


def is_this_host(name: str) -> bool:
    """Return whether a host's name is one of this host, so that it needs no ssh."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]) or is_loopback(name):
        return True
    return any(name in found.addresses for found in interfaces())


def _readable(output: bytes) -> str:
    """Return the end of what a command has written, for error texts."""
    return output.decode(errors="replace").strip()[-_COMPLAINTS:]
