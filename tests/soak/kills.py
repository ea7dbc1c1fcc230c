"""Random kills of whole jobs, of their parts and of ranks: is anything left that runs?

Each run starts `collective run` with a short program, kills somebody at a random moment between
the start of the launcher and the end of the program, and waits until nobody of the job is left.
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
# Until it is said that something is left: on a busy machine a kill takes its time, too.
_PATIENCE_S = 30.0
# No run takes longer, undisturbed, on the busiest machine.
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
#: Who is killed. "all" and its reverse are every process of the job, one after the other.
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
    """What came of it.

    Attributes:
        runs: how many there were, by who was killed.
        early: in how many there was no rank yet.
        problems: a paragraph a run of which something was left, or that did not end.
        segments: files of MPI libraries in /dev/shm that nobody was left to remove.
        longest_s: the longest time from a kill to the end of the last process.
    """

    runs: Counter[str] = field(default_factory=Counter)
    early: int = 0
    problems: list[str] = field(default_factory=list)
    segments: set[str] = field(default_factory=set)
    longest_s: float = 0.0


def kills(transports: Sequence[str], runs: int, seed: int, seconds: float) -> Kills:
    """Make ``runs`` runs, over the transports in turn.

    Args:
        transports: names of transports, or of MPI libraries that tests have.
        runs: how many.
        seed: decides who is killed; when, it decides as far as time can be repeated.
        seconds: after which no more are made.
    """
    random_ = random.Random(seed)
    found = Kills()
    end = time.monotonic() + seconds
    before = {name: _Run(name).undisturbed() for name in transports}
    for number in range(runs):
        if time.monotonic() > end:
            break
        name = transports[number % len(transports)]
        # Half of them before the ranks do anything.
        latest = before[name] * random_.choice((0.4, 1.0))
        _Run(name).killed(random_.uniform(0.0, latest), random_, found)
    return found


class _Run:
    """One launch, in a directory of its own."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._marked = Marked()

    def undisturbed(self) -> float:
        """Return how long a run takes that nobody disturbs."""
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

    def killed(self, moment: float, random_: random.Random, found: Kills) -> None:
        """Kill somebody after so many seconds, and see what becomes of the others."""
        segments = set(os.listdir("/dev/shm"))
        with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
            directory = Path(name)
            launcher = self._start(directory)
            time.sleep(moment)
            living = self._marked.living()
            ranks = [pid for pid, variables in living.items() if b"COLLECTIVE_RANK=" in variables]
            whom = random_.choice(VICTIMS)
            for pid in self._victims(whom, launcher.pid, list(living), ranks, random_):
                kill(pid)
            since = time.monotonic()
            problem = self._wait(launcher, directory)
            found.longest_s = max(found.longest_s, time.monotonic() - since)
        found.runs[whom] += 1
        found.early += not ranks
        found.segments |= {
            each for each in set(os.listdir("/dev/shm")) - segments
            if each.startswith(("mpich_shm_", "sm_segment."))
        }  # fmt: skip
        if problem:
            found.problems.append(
                f"{self._transport}, {whom} after {moment:.3f} s, when it had {len(living)} "
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
        self, whom: str, launcher: int, living: list[int], ranks: list[int], random_: random.Random
    ) -> list[int]:
        supervisor = [pid for pid in living if pid != launcher and _parent(pid) == launcher]
        if whom == "launcher's group":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher, signal.SIGKILL)
            return []
        if whom == "any process":
            return random_.sample(living, min(1, len(living)))
        if whom.endswith(("rank", "ranks")):
            # Before there is one, whoever is there.
            some = ranks or living
            return random_.sample(some, min(len(some), 2 if whom == "two ranks" else 1))
        return {
            "launcher": [launcher],
            "supervisor": supervisor[:1],
            "launcher and supervisor": [launcher, *supervisor[:1]],
            "all": living,
            "all, the last one first": living[::-1],
        }[whom]

    def _wait(self, launcher: subprocess.Popen[bytes], directory: Path) -> str:
        """Return what is wrong with the end of the run, or an empty text."""
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
