"""The hosts of a run as the supervisor sees them: their agents, and the checks before the start."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import collective
from collective.deadline import Deadline
from collective.errors import ConfigError, RendezvousError
from collective.start.host_list import HostSlots
from collective.start.network import (
    address_of,
    address_toward,
    interfaces,
    is_loopback,
    own_address,
)
from collective.start.rendezvous import Endpoint

from .agent import BEAT_S, PROTOCOL
from .channel import Channel, Message, Output
from .pulse import Knocks, Pulse

__all__ = ["Cluster", "Machine", "SignalledError", "Site", "connected"]

# How long a host may take until its agent answers: ssh, the shell, and the imports of Python.
_START_S = 30.0
# How long an agent may take for a step of the checks; a connection that fails takes two seconds.
_STEP_S = 10.0
# How long the agents may take to end what still runs.
_CLOSE_S = 5.0
# Clocks that differ by more seconds are wrong. Traces and certificates depend on them.
_CLOCKS_S = 30.0
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


class Site(NamedTuple):
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


class Machine:
    """A host with its agent.

    Attributes:
        name: name of the host, as given.
        slots: number of ranks that the host takes.
        local: whether it is this host.
        hello: first message of the agent.
        address: address at which ranks of other hosts reach ranks of this one; "" until known.
        interface: network interface of the address.
        pulse: signs of life of the host.
        lost: why the host is lost; "" while it answers.
        leaving: whether the host goes down, so that no more ranks may start there.
    """

    def __init__(self, host: HostSlots, site: Site) -> None:
        self.name, self.slots = host
        self.local = is_this_host(self.name)
        self.hello: Message = {}
        self.address = self.interface = self.lost = ""
        self.leaving = False
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
        self.channel = Channel(
            self.process.stdout.fileno(), self.process.stdin.fileno(), greeted=True
        )
        self.errors = self.process.stderr.fileno()
        os.set_blocking(self.errors, False)
        self.pulse = Pulse()
        self._complaints = b""

    def receive(self) -> list[Message | Output]:
        """Return the frames that have come; note in :attr:`lost` if the connection has ended."""
        try:
            frames = self.channel.receive()
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
        if not self.hello and (noise := _readable(self.channel.noise)):
            text = f"{text}\n{noise}" if text else noise
        return f"{event}: {text}" if text else event

    def lose(self, why: str) -> None:
        """Note that the host is lost, and end the connection."""
        self.lost = self.lost or why
        self.close()

    def close(self) -> None:
        """End the connection: the agent kills what still runs, and ends."""
        self.pulse.forget()
        for file in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert file is not None
            file.close()

    def _why(self) -> str:
        """Return why the connection ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        if self.hello:
            return self.explained("the connection ended")
        what = "the agent" if self.local else "ssh"
        return self.explained(f"{what} ended with exit code {self.process.returncode}")


class Cluster:
    """All hosts of a run, with the spare ones.

    Args:
        machines: hosts in the order of the ranks, then the spare hosts.
        control: pipe of :func:`collective.launch.watching.watch_over`.
    """

    def __init__(self, machines: Sequence[Machine], control: int) -> None:
        self.machines = machines
        self._control = control
        self._numbers = itertools.count()

    @property
    def living(self) -> list[Machine]:
        """The hosts that are not lost."""
        return [machine for machine in self.machines if not machine.lost]

    def number(self) -> int:
        """Return a new number for a process."""
        return next(self._numbers)

    def ask(
        self, kind: str, message: Callable[[Machine], Message] | None, seconds: float
    ) -> dict[Machine, Message]:
        """Send each living host a message, and return the answer of each.

        Args:
            kind: kind of the answers.
            message: function that returns the message for a host; None to send none.
            seconds: time that the hosts have to answer.

        Returns:
            The answers of the hosts that have answered. The others are lost.

        Raises:
            SignalledError: a signal arrived, or the launcher has ended.
        """
        answers: dict[Machine, Message] = {}
        deadline, beat = Deadline(seconds), Deadline(0.0)
        with selectors.PollSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for machine in self.living:
                if message is not None:
                    machine.channel.post(message(machine))
                selector.register(machine.channel.incoming, selectors.EVENT_READ, machine)
            while len(answers) < len(self.living):
                if deadline.expired:
                    for machine in self.living:
                        if machine not in answers:
                            event = f"it did not answer within {seconds:g} s"
                            machine.lose(machine.explained(event))
                    break
                for key, _ in selector.select(min(BEAT_S, deadline.left())):
                    if key.data is None:
                        self._heed()
                        continue
                    self._read(key.data, kind, answers)
                    if key.data.lost:
                        selector.unregister(key.fd)
                if beat.expired:
                    beat = Deadline(BEAT_S)
                    self.beat()
        return answers

    def beat(self) -> None:
        """Send all agents a sign of life, and what could not be written before."""
        for machine in self.living:
            if machine.channel.waiting:
                machine.channel.flush()
            else:
                machine.channel.post({"kind": "beat"})

    def _heed(self) -> None:
        """Raise SignalledError if a signal ends the launch, or the launcher has ended."""
        numbers = os.read(self._control, 64)
        if not numbers:
            raise SignalledError(signal.SIGKILL)
        for number in numbers:
            if number not in (signal.SIGTSTP, signal.SIGCONT):
                raise SignalledError(number)

    def _read(self, machine: Machine, kind: str, answers: dict[Machine, Message]) -> None:
        for frame in machine.receive():
            if isinstance(frame, dict) and frame.get("kind") == kind:
                answers[machine] = frame

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
            machine.process.wait()


@contextlib.contextmanager
def connected(
    hosts: Sequence[HostSlots], spares: Sequence[HostSlots], site: Site, control: int
) -> Iterator[Cluster]:
    """Connect to all hosts, and check that they have the same versions and files.

    Args:
        hosts, spares: hosts of the ranks, and spare hosts.
        site: what the hosts must have alike.
        control: pipe of :func:`collective.launch.watching.watch_over`.

    Raises:
        ConfigError: a host has another version, or lacks a file; or there is no ssh.
        RendezvousError: a host does not answer.
        SignalledError: a signal arrived, or the launcher has ended.
    """
    names = [name for name, _ in (*hosts, *spares)]
    if not all(map(is_this_host, names)) and shutil.which(site.ssh[0]) is None:
        raise ConfigError(
            f"hosts: {site.ssh[0]!r} is needed to reach {', '.join(names)}, and there is none on "
            "PATH. Install an ssh client, or name another with --ssh."
        )
    cluster = Cluster([Machine(host, site) for host in (*hosts, *spares)], control)
    try:
        for machine, hello in cluster.ask("hello", None, _START_S).items():
            machine.hello = hello
        _refuse_lost(cluster)
        _check_versions(cluster.machines)
        order = {"kind": "enter", "directory": site.directory, "script": site.script}
        asked = time.time()
        answers = cluster.ask("entered", lambda machine: order, _STEP_S)
        _refuse_lost(cluster)
        _check_clocks(answers, asked, time.time())
        missing = [f"{m.name}: {answer['why']}" for m, answer in answers.items() if answer["why"]]
        if missing:
            raise ConfigError(
                f"hosts: {'; '.join(missing)}. All hosts need the same files at the same path, "
                "such as those of a shared file system."
            )
        yield cluster
    finally:
        cluster.close()


def check_reachability(cluster: Cluster, store: Endpoint, interface: str) -> None:
    """Test that each host reaches all others and the store, before any rank starts.

    Args:
        store: address at which the supervisor serves the store.
        interface: network interface that the ranks will use; empty for the one toward the store.

    Raises:
        RendezvousError: some hosts do not reach each other. The text names the pairs.
        ConfigError: a host has no such interface.
    """
    tokens = {machine: secrets.token_hex(8) for machine in cluster.machines}
    listening = cluster.ask(
        "listening",
        lambda machine: {
            "kind": "listen",
            "interface": interface,
            "store": [store.host, store.port],
            "token": tokens[machine],
        },
        _STEP_S,
    )
    _refuse_lost(cluster)
    faults = [f"{m.name}: {answer['why']}" for m, answer in listening.items() if answer["why"]]
    if faults:
        raise ConfigError(f"hosts: {'; '.join(faults)}")
    for machine, answer in listening.items():
        machine.address, machine.interface = answer["address"], answer["interface"]
        if not machine.local:
            machine.pulse.knocks = Knocks(machine.address, answer["port"])
    if len(cluster.machines) == 1:
        return
    only_here = [m for m in cluster.machines if is_loopback(m.address)]
    if only_here:
        listed = ", ".join(f"{m.name} ({m.interface or 'lo'}, {m.address})" for m in only_here)
        raise RendezvousError(
            f"hosts: other hosts cannot reach {listed}: the ranks there would listen on loopback "
            "only. Set COLLECTIVE_INTERFACE to an interface that the hosts share, and map the "
            "host's name to its address there. In a container, give the container a network of "
            "its own or the host's (hostNetwork), with a name that resolves to it."
        )

    def probe(machine: Machine) -> Message:
        peers: list[list[Any]] = [
            [peer.name, peer.address, listening[peer]["port"], tokens[peer]]
            for peer in cluster.machines
            if peer is not machine
        ]
        return {"kind": "probe", "peers": [["", store.host, store.port, ""], *peers]}

    answers = cluster.ask("reached", probe, _STEP_S)
    _refuse_lost(cluster)
    by_name = {machine.name: machine for machine in cluster.machines}
    lines = [
        f"{machine.name} ({machine.interface}, {machine.address}) -> "
        + (f"{_place(by_name[name])}: {reason}" if name else f"this host ({store}): {reason}")
        for machine, answer in answers.items()
        for name, reason in answer["failures"]
    ]
    if lines:
        raise RendezvousError(
            "hosts: some hosts cannot connect to others at the addresses that ranks would use:\n"
            + "".join(f"  {line}\n" for line in lines)
            + "Open all TCP ports between the hosts, or set COLLECTIVE_INTERFACE to an interface "
            "that all of them share."
        )


def _place(machine: Machine) -> str:
    return f"{machine.name} ({machine.interface}, {machine.address})"


def store_address(machines: Sequence[Machine], interface: str) -> str:
    """Return the address of this host at which all hosts reach it.

    Args:
        interface: network interface that the ranks will use; empty for any.

    Raises:
        ConfigError: there is no such interface.
    """
    others = [machine for machine in machines if not machine.local]
    if not others:
        return "127.0.0.1"
    if interface:
        return address_of(interface)
    own = {address for found in interfaces() for address in found.addresses}
    for machine in others:
        # sshd knows the address from which this host has come.
        client = str(machine.hello["client"])
        if client in own and not is_loopback(client):
            return client
        with contextlib.suppress(RendezvousError):
            address = address_toward(machine.name.rpartition("@")[2], 22)
            if not is_loopback(address):
                return address
    return own_address()


def is_this_host(name: str) -> bool:
    """Return whether a host's name is one of this host, so that it needs no ssh."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]) or is_loopback(name):
        return True
    return any(name in found.addresses for found in interfaces())


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that ranks on other hosts get, too."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_HOST and not name.startswith(_OF_HOST_PREFIXES)
    }


# Variables that describe this host, or this session on it.
_OF_HOST = frozenset(
    "_ DISPLAY HOME HOST HOSTNAME KRB5CCNAME LOGNAME MAIL OLDPWD PWD SHELL SHLVL SSH_AGENT_PID "
    "TEMP TERM_SESSION_ID TMP TMPDIR USER WAYLAND_DISPLAY XAUTHORITY".split()
)
_OF_HOST_PREFIXES = (
    "DBUS_", "SSH_", "XDG_", "SLURMD_", "SLURM_GTIDS", "SLURM_LAUNCH_NODE", "SLURM_LOCALID",
    "SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP", "SLURM_TASK_PID", "SLURM_TOPOLOGY", "PMI",
)  # fmt: skip


def _readable(output: bytes) -> str:
    """Return the end of what a command has written, for error texts."""
    return output.decode(errors="replace").strip()[-_COMPLAINTS:]


def _refuse_lost(cluster: Cluster) -> None:
    lost = [f"host {machine.name}: {machine.lost}" for machine in cluster.machines if machine.lost]
    if lost:
        listed = "\n  ".join(lost)
        first = next(machine.name for machine in cluster.machines if machine.lost)
        raise RendezvousError(
            f"hosts: {len(lost)} of {len(cluster.machines)} hosts cannot be used:\n  {listed}\n"
            f"Check that `ssh {first} true` works without a password, and that "
            f"{sys.executable} exists there."
        )


def _check_versions(machines: Sequence[Machine]) -> None:
    """Refuse hosts whose Python or package differs from that of this host."""
    own = {
        "protocol": PROTOCOL,
        "version": collective.__version__,
        "python": platform.python_version(),
    }
    words = {"protocol": "protocol", "version": "collective", "python": "Python"}
    faults = []
    for machine in machines:
        for key, value in own.items():
            theirs = machine.hello.get(key)
            if _series(key, theirs) != _series(key, value):
                faults.append(f"{machine.name} has {words[key]} {theirs}, this host {value}")
    if faults:
        raise ConfigError(
            f"hosts: the hosts have different versions: {'; '.join(faults)}. Install the same "
            "versions on all hosts, or use one environment on a file system that all see."
        )


def _series(key: str, version: object) -> object:
    """Return the part of a version that must be equal: of Python 3.11.7, it is 3.11."""
    return str(version).rpartition(".")[0] if key == "python" else version


def _check_clocks(answers: Mapping[Machine, Message], asked: float, heard: float) -> None:
    """Refuse hosts whose clock differs from that of this host."""
    faults = []
    for machine, answer in answers.items():
        # The clock was read at some moment between the question and the last answer.
        ahead, behind = answer["time"] - heard, asked - answer["time"]
        if max(ahead, behind) > _CLOCKS_S:
            word = "ahead of" if ahead > 0 else "behind"
            faults.append(f"{machine.name} is {max(ahead, behind):.0f} s {word} this host")
    if faults:
        raise ConfigError(
            f"hosts: the clocks of the hosts differ: {'; '.join(faults)}. Traces and certificates "
            "need the same time everywhere. Set the clocks, for example with `chronyc makestep`."
        )
