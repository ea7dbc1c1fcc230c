"""Random kills of whole jobs, of their parts and of ranks: does any process remain?

Each run starts ``collective run`` with a short program. It kills one or more processes at a random
moment between the launcher's start and the program's end, and waits until no process of the job is
left.
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

__all__ = ["Kills", "kills"]

SIZE = 3
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
    before = {name: _Run(name).undisturbed() for name in transports}
    for number in range(runs):
        if time.monotonic() > end:
            break
        name = transports[number % len(transports)]
        # In half of the runs the kill comes before the ranks do anything.
        latest = before[name] * random_.choice((0.4, 1.0))
        _Run(name).killed(random_.uniform(0.0, latest), random_, result)
    return result


class _Run:
    """One run of the launcher, in a separate directory."""

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
            text = Path(directory, "output").read_text()
            if launcher.returncode or text.count("done") != SIZE:
                raise RuntimeError(f"{self._transport}: exit code {launcher.returncode}\n{text}")
            return time.monotonic() - since

    def killed(self, moment: float, random_: random.Random, result: Kills) -> None:
        """Kill a random victim after ``moment`` seconds, and record the end of the others."""
        segments = set(os.listdir("/dev/shm"))
        with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
            directory = Path(name)
            launcher = self._start(directory)
            time.sleep(moment)
            living = self._marked.living()
            ranks = [pid for pid, variables in living.items() if b"COLLECTIVE_RANK=" in variables]
            victim = random_.choice(VICTIMS)
            for pid in self._victims(victim, launcher.pid, list(living), ranks, random_):
                kill(pid)
            since = time.monotonic()
            problem = self._wait(launcher, directory)
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

    def _wait(self, launcher: subprocess.Popen[bytes], directory: Path) -> str:
        """Return a description of the problem at the end of the run, or an empty text."""
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


def _parent(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[1])
