"""Random kills of whole jobs, of their parts and of ranks: does any process remain?

Each run starts ``collective run`` with a short program. It kills one or more processes at a random
moment between the launcher's start and the program's end, and waits until no process of the job is
left. The transport ``hosts`` is ``collective run --hosts`` on network namespaces, with a stand-in
for ssh. There the command has to end soon after the kill, too, or when it would have ended anyway.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.launches import Marked, kill
from tests.support.mpi_launches import ROOT, VENDORS, launch_of
from tests.support.network_hosts import Hosts

__all__ = ["HOSTS", "Kills", "kills"]

SIZE = 3
#: The transport that stands for several hosts.
HOSTS = "hosts"
# The time in which the command on several hosts has to end.
_PROMISED_S = 10.0
# Time before a remaining process counts as a problem; on a busy machine a kill takes time, too.
_PATIENCE_S = 30.0
# An undisturbed run is faster than this, even on the busiest machine.
_DEADLINE_S = 120.0
_PROGRAM = """
import time
import numpy as np
import collective

with collective.init() as comm:
    x, end = np.ones(1000), time.monotonic() + 0.5
    while comm.broadcast_object(time.monotonic() < end):
        assert comm.all_reduce(x)[0] == comm.size
print("done", flush=True)
"""
#: Victims of a kill. "all" and its reverse kill every process of the job, one after the other.
VICTIMS = (
    "launcher",
    "launcher's group",
    "supervisor",
    "launcher and supervisor",
    "any process",
    "a rank",
    "two ranks",
    "all",
    "all, the last one first",
)
#: Further victims on several hosts. An agent is two processes.
_OF_HOSTS = (
    "ssh of the first host",
    "ssh of the last host",
    "both ssh",
    "one of an agent",
    "an agent",
)


@dataclass
class Kills:
    """Result of :func:`kills`.

    Attributes:
        runs: number of runs, by victim.
        early: number of runs that had no rank yet at the kill.
        problems: a paragraph for each run that left a process or did not end.
        segments: files of MPI libraries in /dev/shm that no process was left to remove.
        longest_s: longest time from a kill to the end of the last process, in seconds.
    """

    runs: Counter[str] = field(default_factory=Counter)
    early: int = 0
    problems: list[str] = field(default_factory=list)
    segments: set[str] = field(default_factory=set)
    longest_s: float = 0.0


def kills(transports: Sequence[str], runs: int, seed: int, seconds: float) -> Kills:
    """Make ``runs`` runs, over the transports in turn.

    Args:
        transports: names of transports, or of MPI libraries that the tests know.
        runs: number of runs.
        seed: decides the victims, and the moments as far as timing is reproducible.
        seconds: time after which no further run starts.
    """
    random_ = random.Random(seed)
    result = Kills()
    end = time.monotonic() + seconds
    before = {name: _run(name).undisturbed() for name in transports}
    for number in range(runs):
        if time.monotonic() > end:
            break
        name = transports[number % len(transports)]
        # In half of the runs the kill comes before the ranks do anything.
        latest = before[name] * random_.choice((0.4, 1.0))
        _run(name).killed(random_.uniform(0.0, latest), before[name], random_, result)
    return result


def _run(transport: str) -> _Run:
    return _OnHosts(transport) if transport == HOSTS else _Run(transport)


class _Run:
    """One run of the launcher, in a separate directory."""

    victims = VICTIMS

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._marked = Marked()

    def undisturbed(self) -> float:
        """Return the duration of a run without a kill, in seconds."""
        with tempfile.TemporaryDirectory(prefix="soak-") as directory:
            since = time.monotonic()
            launcher = self._start(Path(directory))
            try:
                launcher.wait(_DEADLINE_S)
            finally:
                self._marked.end()
                self._clean_up()
            text = Path(directory, "output").read_text()
            if launcher.returncode or text.count("done") != SIZE:
                raise RuntimeError(f"{self._transport}: exit code {launcher.returncode}\n{text}")
            return time.monotonic() - since

    def killed(self, moment: float, usual: float, random_: random.Random, result: Kills) -> None:
        """Kill a random victim after ``moment`` seconds, and record the end of the others.

        Args:
            usual: duration of a run without a kill, in seconds.
        """
        segments = set(os.listdir("/dev/shm"))
        with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
            directory = Path(name)
            launcher = self._start(directory)
            time.sleep(moment)
            living = self._marked.living()
            ranks = [pid for pid, variables in living.items() if b"COLLECTIVE_RANK=" in variables]
            victim = random_.choice(self.victims)
            for pid in self._victims(victim, launcher.pid, list(living), ranks, random_):
                kill(pid)
            since = time.monotonic()
            problem = self._wait(launcher, directory, max(0.0, usual - moment))
            self._clean_up()
            result.longest_s = max(result.longest_s, time.monotonic() - since)
        result.runs[victim] += 1
        result.early += not ranks
        result.segments |= {
            segment for segment in set(os.listdir("/dev/shm")) - segments
            if segment.startswith(("mpich_shm_", "sm_segment."))
        }  # fmt: skip
        if problem:
            result.problems.append(
                f"{self._transport}, {victim} after {moment:.3f} s, when it had {len(living)} "
                f"processes, {len(ranks)} of them ranks: {problem}"
            )

    def _start(self, directory: Path) -> subprocess.Popen[bytes]:
        vendor = self._transport in VENDORS
        python = launch_of(self._transport).python if vendor else sys.executable
        (directory / "program.py").write_text(_PROGRAM)
        command = [python, "-m", "collective", "run", "-n", str(SIZE)]
        command += ["--backend", "mpi" if vendor else self._transport, "program.py"]
        with open(directory / "output", "wb") as output:
            return subprocess.Popen(
                command,
                cwd=directory,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": str(directory),
                    self._marked.variable: self._marked.value,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _clean_up(self) -> None:
        """Remove what a run on several hosts needs."""

    def _victims(
        self,
        victim: str,
        launcher: int,
        living: list[int],
        ranks: list[int],
        random_: random.Random,
    ) -> list[int]:
        supervisor = [pid for pid in living if pid != launcher and _parent(pid) == launcher]
        if victim == "launcher's group":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher, signal.SIGKILL)
            return []
        if victim == "any process":
            return random_.sample(living, min(1, len(living)))
        if victim.endswith(("rank", "ranks")):
            # If there is no rank yet, choose among the processes that exist.
            some = ranks or living
            return random_.sample(some, min(len(some), 2 if victim == "two ranks" else 1))
        return {
            "launcher": [launcher],
            "supervisor": supervisor[:1],
            "launcher and supervisor": [launcher, *supervisor[:1]],
            "all": living,
            "all, the last one first": living[::-1],
        }[victim]

    def _wait(self, launcher: subprocess.Popen[bytes], directory: Path, usual: float) -> str:
        """Return a description of the problem at the end of the run, or an empty text.

        Args:
            usual: seconds that the run would still last without the kill.
        """
        problem = ""
        try:
            launcher.wait(_DEADLINE_S)
        except subprocess.TimeoutExpired:
            problem = f"the launcher runs on after {_DEADLINE_S:g} s; "
        else:
            if left := self._marked.left(_PATIENCE_S):
                problem = f"left after {_PATIENCE_S:g} s: {left}; "
        self._marked.end()
        launcher.wait()
        text = (directory / "output").read_text(errors="replace")
        if launcher.returncode == 0 and text.count("done") != SIZE:
            problem += "exit code 0, though not all ranks were done; "
        return problem and f"{problem}output:\n{text[-2000:]}"


class _OnHosts(_Run):
    """One run on two hosts of network namespaces, from a third one."""

    victims = (*VICTIMS, *_OF_HOSTS * 2)

    def _start(self, directory: Path) -> subprocess.Popen[bytes]:
        (directory / "program.py").write_text(_PROGRAM)
        self._hosts = Hosts(3, directory).__enter__()
        for host in self._hosts.hosts:
            host.variables[self._marked.variable] = self._marked.value
        job = self._hosts.run(
            ["--hosts", f"host1:{SIZE - 1},host2:1", "program.py"],
            **{self._marked.variable: self._marked.value},
        )
        (directory / "output").symlink_to(directory / "output-0")
        return job.processes[0]

    def _clean_up(self) -> None:
        self._hosts.close()

    def _victims(
        self,
        victim: str,
        launcher: int,
        living: list[int],
        ranks: list[int],
        random_: random.Random,
    ) -> list[int]:
        if victim not in _OF_HOSTS:
            return super()._victims(victim, launcher, living, ranks, random_)
        ssh = {host: _with(living, "ssh_stand_in", f"\0{host}\0") for host in ("host1", "host2")}
        agents = _with(living, "collective.launch.hosts.agent")
        agents = [pid for pid in agents if pid not in (*ssh["host1"], *ssh["host2"])]
        outer = [pid for pid in agents if _parent(pid) not in agents]
        some = random_.sample(outer, min(1, len(outer)))
        victims = {
            "ssh of the first host": ssh["host1"],
            "ssh of the last host": ssh["host2"],
            "both ssh": ssh["host1"] + ssh["host2"],
            "one of an agent": random_.sample(agents, min(1, len(agents))),
            "an agent": [pid for pid in agents if pid in some or _parent(pid) in some],
        }[victim]
        # Before there is such a process, choose among those that exist.
        return victims or random_.sample(living, min(1, len(living)))

    def _wait(self, launcher: subprocess.Popen[bytes], directory: Path, usual: float) -> str:
        since = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(usual + _PROMISED_S)
        late = launcher.poll() is None
        stacks = "".join(f"{pid}: {what}\n" for pid, what in self._marked.left(0.0).items())
        problem = super()._wait(launcher, directory, usual)
        if not late:
            return problem
        seconds = time.monotonic() - since
        return f"the command ended {seconds:.1f} s after the kill; {problem}\n{stacks}"


def _with(pids: Sequence[int], *words: str) -> list[int]:
    """Return the processes whose command lines contain all ``words``."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if all(word in command for word in words):
                found.append(pid)
    return found


def _parent(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])
