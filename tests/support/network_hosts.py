"""Hosts on one machine: each has a network namespace, an address, a name and a TMPDIR.

Use :class:`Hosts` for tests of ranks on several hosts. Nothing is simulated in the program under
test: its ranks see one network interface, reach the other hosts only over TCP, and share no run
directory with them. A bridge in a separate namespace connects the hosts or, if messages are to be
slow, a relay (:mod:`tests.support.network_relay`). The end of the ``with`` removes everything; the
next run sweeps the leftovers of a killed run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from collective.platform import held_port
from tests import warm
from tests.support.interpreter import ROOT
from tests.support.mpi_launches import warm_python_of

__all__ = ["DEADLINE_S", "Host", "Hosts", "Job", "free_port", "needs_hosts", "refusal"]

# Seconds until a job of a few ranks counts as hung on a busy machine.
DEADLINE_S = 60.0
_PORT = 29500  # No other program listens in these namespaces.
_PREFIX = "collective"
_numbers = itertools.count()

# Host names resolve on a cluster, so they do here; the mount is visible only to this process.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


class Host:
    """One of the hosts of :class:`Hosts`.

    Attributes:
        name: result of gethostname(2) on the host.
        address: address of the host's only interface, ``eth0``.
        namespace: name of the host's namespace for ``ip netns``.
        directory: TMPDIR of the host.
        variables: variables of commands that :meth:`Hosts.ssh` starts, beside PATH and HOME.
        before: program that Python runs before an agent of `collective run` begins.
    """

    def __init__(self, name: str, address: str, namespace: str, directory: Path) -> None:
        self.name = name
        self.address = address
        self.namespace = namespace
        self.directory = directory
        self.names = directory.parent / "hosts"
        self.variables: dict[str, str] = {}
        self.before = ""

    def entering(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` on this host, in the same process."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _ENTER]
        return [*enter, "sh", str(self.names), self.name, *command]


class Job:
    """Processes that were started together, and their output."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]):
        self.processes = processes
        self._outputs = outputs

    def wait(self, timeout: float = DEADLINE_S) -> list[int]:
        """Return the exit codes; fail the test if some process does not end."""
        end = time.monotonic() + timeout
        try:
            return [p.wait(max(0.0, end - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            running = [i for i, p in enumerate(self.processes) if p.poll() is None]
            self.kill()
            raise AssertionError(
                f"processes {running} still ran after {timeout:g} s\n{self}"
            ) from None

    def succeed(self, timeout: float = DEADLINE_S) -> str:
        """Wait, fail the test if a process failed, and return the output of all processes."""
        codes = self.wait(timeout)
        assert not any(codes), f"exit codes {codes}\n{self}"
        return str(self)

    def text(self, index: int) -> str:
        """Return the output of process ``index``, of both streams."""
        return self._outputs[index].read_text(errors="replace")

    def until(self, *words: str, timeout: float = DEADLINE_S) -> None:
        """Wait until every process has printed all of ``words``."""
        end = time.monotonic() + timeout
        while not all(word in path.read_text() for path in self._outputs for word in words):
            assert time.monotonic() < end, f"some process did not print {words}\n{self}"
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the processes that still run, and wait for their end."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def __str__(self) -> str:
        return "\n".join(self.text(index) for index in range(len(self._outputs)))


class Hosts:
    """Hosts that exist for the body of a ``with``.

    Args:
        count: number of hosts.
        directory: empty directory for the files of the hosts.
        delay: seconds that a packet takes between hosts; None for a plain bridge.
    """

    def __init__(self, count: int, directory: Path, *, delay: float | None = None) -> None:
        number = next(_numbers)
        self._base = f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{number}"
        self._switch = f"{self._base}-switch"
        self._delay = delay
        self._directory = directory
        self._relay: subprocess.Popen[bytes] | None = None
        self._jobs: list[Job] = []
        self._outputs = itertools.count()
        self.hosts = [
            Host(f"host{k}", f"10.77.0.{k + 1}", f"{self._base}-{k}", directory / f"host{k}")
            for k in range(count)
        ]

    # -- making and removing ------------------------------------------------------------

    def __enter__(self) -> Hosts:
        _sweep()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self) -> None:
        lines = [f"{host.address} {host.name}" for host in self.hosts]
        (self._directory / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        for host in self.hosts:
            host.directory.mkdir()
            _ip("netns", "add", host.namespace)
        if self._delay is None:
            self._bridge()
        else:
            self._start_relay(self._delay)
        for host in self.hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")

    def _bridge(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for port, host in enumerate(self.hosts):
            ends = ["eth0", "netns", host.namespace, "type", "veth", "peer", "name", f"port{port}"]
            _ip("link", "add", "name", *ends, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", f"port{port}", "master", "bridge", "up")

    def _start_relay(self, delay: float) -> None:
        namespaces = [host.namespace for host in self.hosts]
        command = [
            sys.executable,
            str(ROOT / "tests" / "support" / "network_relay.py"),
            str(delay),
            *namespaces,
        ]
        self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == b"ready\n", "the relay did not start"

    def close(self) -> None:
        """Kill the processes on the hosts, and remove the hosts."""
        _kill(self.living())
        for job in self._jobs:
            job.kill()
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        for namespace in [*(host.namespace for host in self.hosts), self._switch]:
            _ip("netns", "del", namespace, check=False)

    def end(self, host: int) -> None:
        """Kill all processes on a host; its address stays."""
        _kill(_processes(self.hosts[host].namespace))

    def living(self) -> list[int]:
        """Return the ids of all processes on the hosts."""
        return [pid for host in self.hosts for pid in _processes(host.namespace)]

    def name(self, names: Mapping[str, int]) -> None:
        """Give hosts further names that all hosts resolve."""
        with open(self._directory / "hosts", "a") as file:
            file.writelines(f"{self.hosts[host].address} {name}\n" for name, host in names.items())

    def on(self, host: int) -> list[int]:
        """Return the ids of all processes on a host."""
        return _processes(self.hosts[host].namespace)

    def run_directories(self) -> list[str]:
        """Return the run directories that jobs have left on the hosts."""
        paths = (p for h in self.hosts for p in h.directory.glob("collective-*/*"))
        return [str(path) for path in paths if path.is_dir()]  # and no file of places

    # -- network failures ------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Pull the cable of a host out of the switch: packets vanish without an error."""
        self._port(host, "down")

    def mend(self, host: int) -> None:
        """Plug the cable of a host in again."""
        self._port(host, "up")

    def mute(self, host: int) -> None:
        """Drop all packets from and to a host; its link stays up."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def _port(self, host: int, state: str) -> None:
        if self._relay is not None:
            assert self._relay.stdin is not None
            self._relay.stdin.write(f"{host} {state}\n".encode())
            self._relay.stdin.flush()
        else:
            _ip("-n", self._switch, "link", "set", f"port{host}", state)

    # -- starting ranks --------------------------------------------------------------------

    def start(self, commands: Sequence[tuple[int, Sequence[str], Mapping[str, str]]]) -> Job:
        """Start commands as one job; each has a host and variables."""
        processes, outputs = [], []
        for where, command, variables in commands:
            host = self.hosts[where]
            output = self._directory / f"output-{next(self._outputs)}"
            with open(output, "wb") as file:
                processes.append(
                    subprocess.Popen(
                        host.entering(*command),
                        env=self.environment(host, variables),
                        cwd=self._directory,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
            outputs.append(output)
        job = Job(processes, outputs)
        self._jobs.append(job)
        return job

    def environment(self, host: Host, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process on ``host``."""
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(host.directory), "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own, **variables}

    def ranks(
        self, spread: Sequence[int], command: Sequence[str], **variables: str
    ) -> list[tuple[int, Sequence[str], Mapping[str, str]]]:
        """Return the commands of ranks for :meth:`start`, with the variables of torchrun.

        Args:
            spread: number of each rank's host.
            command: the command of every rank.
            variables: further variables of every rank.
        """
        commands: list[tuple[int, Sequence[str], Mapping[str, str]]] = []
        for rank, number in enumerate(spread):
            common = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(spread)),
                "LOCAL_RANK": str(list(spread[:rank]).count(number)),
                "LOCAL_WORLD_SIZE": str(list(spread).count(number)),
                "MASTER_ADDR": self.hosts[spread[0]].address,
                "MASTER_PORT": str(_PORT),
                "COLLECTIVE_SECRET": "of this test, and of nobody else",
            }
            commands.append((number, command, {**common, **variables}))
        return commands

    def by_hand(self, spread: Sequence[int], command: Sequence[str], **variables: str) -> Job:
        """Start a rank on each host of ``spread``, with the variables that torchrun would set."""
        return self.start(self.ranks(spread, command, **variables))

    def torchrun(self, each: int, script: Sequence[str], **variables: str) -> Job:
        """Start one torchrun on every host, with ``each`` ranks; by default without a secret."""
        commands = []
        variables = {"COLLECTIVE_SECRET": "none", **variables}
        for number in range(len(self.hosts)):
            launcher = [warm.python(), "-m", "torch.distributed.run"]
            launcher += [f"--nnodes={len(self.hosts)}", f"--nproc-per-node={each}"]
            launcher += [f"--node-rank={number}", f"--master-addr={self.hosts[0].address}"]
            commands.append((number, [*launcher, f"--master-port={_PORT}", *script], variables))
        return self.start(commands)

    def mpiexec(
        self, venv: Path, options: Sequence[str], script: Sequence[str], **variables: str
    ) -> Job:
        """Start ``script`` with the mpiexec of ``venv`` on the first host."""
        # Some mpiexec pass their variables to all hosts, so each rank sets its host's TMPDIR.
        in_directory = f'TMPDIR={self._directory}/$(hostname); export TMPDIR; exec "$@"'
        ranks = ["sh", "-c", in_directory, "sh", warm_python_of(venv.name), *script]
        return self.start([(0, [str(venv / "bin" / "mpiexec"), *options, *ranks], variables)])

    def remote_shell(self) -> Path:
        """Return a program that takes the arguments of ssh and runs commands on these hosts."""
        path = self._directory / "remote-shell"
        cases = "\n".join(
            f"{host.name}|{host.address}) set -- {' '.join(map(_quoted, host.entering()))} "
            f'sh -c "TMPDIR={host.directory}; export TMPDIR; $*" ;;'
            for host in self.hosts
        )
        path.write_text(
            '#!/bin/sh\nwhile case "$1" in -*) ;; *) false ;; esac; do shift; done\n'
            f'host="$1"; shift\ncase "$host" in\n{cases}\nesac\nexec "$@" </dev/null\n'
        )
        path.chmod(0o700)
        return path

    def ssh(self) -> Path:
        """Return a directory with a program ``ssh`` that runs commands on these hosts.

        As sshd does, it passes on standard input, and none of the caller's variables. A message of
        the login shell comes before the output of the command.
        """
        directory = self._directory / "bin"
        directory.mkdir(exist_ok=True)
        entering = {}
        for host in self.hosts:
            own = {"HOME": "/root", "TMPDIR": str(host.directory), **host.variables}
            own["SSH_CONNECTION"] = f"{self.hosts[0].address} 1 {host.address} 22"
            words = [f"{name}={value}" for name, value in own.items()]
            command = host.entering("env", "-i", f"PATH={os.environ['PATH']}", *words)
            entering[host.name] = entering[host.address] = command, host.before
        (directory / "hosts.json").write_text(json.dumps(entering))
        stand_in = ROOT / "tests" / "support" / "ssh_stand_in.py"
        words = [sys.executable, "-S", "-E", str(stand_in), str(directory / "hosts.json")]
        path = directory / "ssh"
        path.write_text(f'#!/bin/sh\nexec {" ".join(map(_quoted, words))} "$@"\n')
        path.chmod(0o700)
        return directory

    def run(self, arguments: Sequence[str], where: int = 0, **variables: str) -> Job:
        """Start ``collective run`` with ``arguments`` on a host, with :meth:`ssh` on its PATH."""
        path = f"{self.ssh()}{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, "-m", "collective", "run", *arguments]
        return self.start([(where, command, {"PATH": path, **variables})])


@functools.cache
def refusal() -> str | None:
    """Return why this machine cannot have such hosts, or None; try it with two hosts."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="hosts-") as directory:
        try:
            with Hosts(2, Path(directory)) as hosts:
                hosts.start([(0, ["true"], {})]).succeed(10.0)
        except (OSError, subprocess.CalledProcessError, AssertionError) as error:
            output = getattr(error, "stderr", b"") or str(error).encode()
            return f"no network namespaces here: {output.decode(errors='replace').strip()}"
    return None


_held = contextlib.ExitStack()


def free_port() -> int:
    """Return a port of this host without a listener; this process holds it to its end.

    The program that listens there has to set SO_REUSEADDR.
    """
    return _held.enter_context(held_port())


def needs_hosts() -> None:
    """Skip the test if this machine cannot have such hosts."""
    import pytest  # Benchmarks use this module, too, and may lack pytest.

    reason = refusal()
    if reason is not None:
        pytest.skip(reason)


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, check=check, timeout=30)
    return done.stdout.decode()


def _processes(namespace: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace, check=False).split()]


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _started(pid: int) -> str:
    """Return a process's start in ticks since boot, or an empty string if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2 :].split()[19]


def _sweep() -> None:
    """Remove the namespaces of dead runs, and the processes in these namespaces."""
    for line in _ip("netns", "list").splitlines():
        match = re.match(rf"({_PREFIX}-(\d+)-(\d+)-\d+-\w+)", line)
        if match is not None and _started(int(match[2])) != match[3]:
            _kill(_processes(match[1]))
            _ip("netns", "del", match[1], check=False)


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
