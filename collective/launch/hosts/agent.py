"""Process on each host that starts the host's ranks, and ends them if the launcher is gone.

It runs as ``python -m collective.launch.hosts.agent``, under ssh or as a child of the supervisor.
It decides nothing: it obeys the messages on standard input, and reports on standard output
(:mod:`collective.launch.agent_line`). When standard input ends, or nothing has come for a while,
it kills the ranks. The agent is two processes (:func:`collective.launch.launcher.watch_over`). If
one of them is killed, the other ends what is left.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import time

import numpy as np

import collective
from collective.contract.process import RankProcess
from collective.inner import Deadline
from collective.platform import adopt_orphans, held_port
from collective.platform.topology import processors
from collective.start.network import interfaces

from ..agent import RemoteAgent
from ..agent_line import BEAT_S, Message
from ..launcher import watch_over
from ..loop import end_children
from .reachability import ReachableSocket, reached

#: Version of the messages.
PROTOCOL = 2
# After so long a silence the launcher's host, or the network, is gone.
_SILENCE_S = 20.0
# How long ranks may take to leave a host that goes down. Kubernetes and Slurm kill after 30 s.
_LEAVE_S = 25.0


class HostAgent(RemoteAgent):
    """Agent of one host.

    Args:
        control: read end of the pipe of :func:`watch_over`.
        incoming, outgoing: descriptors of the connection to the supervisor.
        port: a port that is held for rank 0 of a program of torch.distributed.
    """

    def __init__(self, control: int, incoming: int, outgoing: int, port: int) -> None:
        super().__init__(incoming, outgoing)
        self._control = control
        self._port = port
        self._listener: ReachableSocket | None = None
        # By when the ranks must have left, because this host goes down.
        self._leaves: Deadline | None = None
        self._heard = self._said = time.monotonic()
        self._orders.update(
            enter=self._enter, listen=self._listen, probe=self._probe, beat=lambda order: None,
        )  # fmt: skip

    def run(self) -> int:
        """Obey the supervisor until it closes the connection; then end all processes."""
        adopt_orphans()
        # A host that is shut down sends SIGTERM to both processes of the agent.
        self._loop.catch(self._caught, signal.SIGCHLD, signal.SIGTERM)
        self._loop.watch(self._control, self._heed)
        self._loop.watch(self._line.incoming, self._hear)
        self._line.greet()
        self._line.post(self._hello())
        while not self._over:
            self._step(max(0.0, self._said + BEAT_S - time.monotonic()))
            self._keep_alive()
        self._send_all(signal.SIGKILL, group=True)
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
            "processors": processors(usable=True),
            "port": self._port,
            "processes": own.host if own else "",
            "client": os.environ.get("SSH_CONNECTION", "").partition(" ")[0],
            "time": time.time(),
        }

    # -- events ----------------------------------------------------------------------------

    def _keep_alive(self) -> None:
        """Beat, and end if the supervisor does not, or if all ranks have left this host."""
        now = time.monotonic()
        if now - self._said >= BEAT_S:
            self._beat()
        if self._line.broken or now - self._heard > _SILENCE_S:
            self._end()
        left = not (self.runs or self._line.waiting)
        if self._leaves is not None and (left or self._leaves.expired):
            self._end()

    def _beat(self) -> None:
        """Send a sign of life."""
        # The line may be full because the launcher's output has a slow reader.
        if self._line.waiting:
            return
        self._said = time.monotonic()
        self._line.post({"kind": "beat"})

    def _hear(self) -> None:
        self._heard = time.monotonic()
        super()._hear()

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
            self._line.post({"kind": "leaving"})
            self._send_all(signal.SIGTERM, group=False)

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
        self._line.post({"kind": "entered", "why": reason, "time": time.time()})

    def _listen(self, message: Message) -> None:
        """Listen at the address that the ranks of this host will use."""
        answer: Message = {"kind": "listening", "why": "", "address": "", "interface": ""}
        try:
            self._listener = ReachableSocket(
                message["interface"], message["store"], message["token"], message["ports"]
            )
            address = self._listener.address
            names = [found.name for found in interfaces() if address in found.addresses]
            answer.update(
                address=address, port=self._listener.port, interface=names[0] if names else ""
            )
        except (RuntimeError, OSError) as error:  # CollectiveError is a RuntimeError
            answer["why"] = str(error)
        self._line.post(answer)

    def _probe(self, message: Message) -> None:
        """Connect to the other hosts; report which cannot be reached."""
        self._line.post({"kind": "reached", "failures": reached(message["peers"])})

    # -- processes ---------------------------------------------------------------------------

    def _start(self, order: Message) -> None:
        if self._listener is not None:
            # Its thread has ended when the first rank is forked. The socket goes on to listen: by
            # its answers the supervisor tells a busy host from one that is cut off.
            self._listener.rest()
            self._loop.watch(self._listener.fileno(), self._listener.dismiss)
            self._listener = None
        super()._start(order)

    def _caught(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            self._leave()
        self.reap()


def main() -> int:
    """Run the agent of this host; return its exit code."""
    # Nothing else may write to the connection.
    incoming, outgoing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with held_port() as port:

        def supervise(control: int) -> int:
            return HostAgent(control, incoming, outgoing, port).run()

        return watch_over(supervise, lambda: None)


if __name__ == "__main__":
    sys.exit(main())
