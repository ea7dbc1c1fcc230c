"""Kills of one rank in the middle of something: does every survivor get the right error in time?

Each run forks ranks over ``tcp`` that meet at an address, as ranks of several hosts do. The seed
decides who dies and in what: in ``init``, in short or long calls, while the ranks connect a group,
grow or close. The victim sets the kernel's timer to a moment in that phase. The timer's signal ends
the process as SIGKILL does, and at a more exact moment, which does not depend on when another
process runs. The victim writes to a pipe when it enters the phase and when it leaves it. So the run
knows whether the kill came too late.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import re
import select
import signal
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import collective
from collective.errors import CollectiveError, PeerLostError, RendezvousError
from tests.support.network_hosts import free_port

__all__ = ["PHASES", "Midst", "midst"]

SIZE = 3
PHASES = ("init", "short calls", "long calls", "group", "grow", "close")
# Deadline of calls, and of the arrival of all ranks. No loss may take so long to be noticed, except
# that of a rank that has not arrived yet.
_CALL_S, _START_S = 30.0, 6.0
# Time from the kill to the error, and until a survivor has ended.
_PROMISED_S = 5.0
_PATIENCE_S = 60.0
# Runs without a kill, which tell how long each phase takes.
_REHEARSALS = 5
_PORTS = 16


@dataclass
class Midst:
    """Result of :func:`midst`.

    Attributes:
        kills: number of kills, by phase.
        hits: number of those that hit the victim before it had left the phase.
        errors: number of survivors, by phase and what they got.
        seconds: longest time from a kill to a survivor's error, by phase.
        problems: a paragraph for each run with a wrong or late error, or that left something.
    """

    kills: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def midst(runs: int, seed: int, seconds: float) -> Midst:
    """Make runs, each of which kills a rank in the next of :data:`PHASES`.

    Args:
        runs: number of kills that have to hit their victim in the middle of a phase.
        seed: decides the victims, and the moments as far as timing is reproducible.
        seconds: time after which no further run starts.
    """
    dice, result = random.Random(seed), Midst()
    end = time.monotonic() + seconds
    usual = _usual()
    while result.hits.total() < runs and time.monotonic() < end:
        # A kill in a short phase often comes too late: then try that phase again.
        phase = min(PHASES, key=lambda phase: result.hits[phase])
        victim = dice.randrange(SIZE)
        _Run(phase, victim, max(1e-5, dice.random() * usual[phase])).make(result)
    return result


def _usual() -> dict[str, float]:
    """Return how long each phase takes, in seconds."""
    result = Midst()
    durations: dict[str, list[float]] = {}
    for _ in range(_REHEARSALS):
        run = _Run("", -1, 0.0)
        run.make(result)
        for phase, duration in run.durations().items():
            durations.setdefault(phase, []).append(duration)
    if result.problems:
        raise RuntimeError("\n".join(result.problems))
    return {phase: statistics.median(durations[phase]) for phase in PHASES}


class _Run:
    """One job of :data:`SIZE` ranks.

    Args:
        phase: phase in which the victim dies.
        victim: number of the rank that dies; -1 for none.
        delay: seconds from the beginning of the phase to the death.
    """

    def __init__(self, phase: str, victim: int, delay: float) -> None:
        self._phase, self._victim, self._delay = phase, victim, delay
        self._said: dict[int, list[Any]] = {rank: [] for rank in range(SIZE)}

    def durations(self) -> dict[str, float]:
        """Return how long each phase took on rank 0."""
        lines = [line for line in self._said[0] if line[0] in ("enters", "leaves")]
        times: dict[str, dict[str, float]] = {}
        for what, phase, moment in lines:
            times.setdefault(phase, {})[what] = moment
        return {phase: each["leaves"] - each["enters"] for phase, each in times.items()}

    def make(self, result: Midst) -> None:
        """Run the ranks until all have ended, and record what they got."""
        store, first = free_port(), free_port()
        ports = f"{first}-{min(first + _PORTS, 65535)}"
        ended, late = self._processes(store, ports)
        problems = [f"rank {rank} runs on after {_PATIENCE_S:g} s" for rank in late]
        if self._victim >= 0:
            problems += self._judged(ended, result)
        else:
            problems += [f"rank {rank}: {line}" for rank in range(SIZE)
                         for line in self._said[rank] if line[0] == "error"]  # fmt: skip
        problems += [f"rank {rank}: {line}" for rank in range(SIZE) for line in self._said[rank]
                     if line[0] == "left"]  # fmt: skip
        if problems:
            result.problems.append(
                f"rank {self._victim} killed in {self._phase!r} after {self._delay:.6f} s: "
                + "; ".join(problems)
            )

    # -- the processes ----------------------------------------------------------------------

    def _processes(self, store: int, ports: str) -> tuple[dict[int, float], list[int]]:
        """Fork the ranks and wait for them; return when each ended, and those that did not."""
        pids: dict[int, int] = {}
        pipes: dict[int, int] = {}
        for rank in range(SIZE):
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(reading)
                _Rank(rank, writing, self._phase, self._victim, self._delay).live(store, ports)
            os.close(writing)
            pids[pid], pipes[reading] = rank, rank
        ended: dict[int, float] = {}
        texts = dict.fromkeys(pipes, b"")
        end = time.monotonic() + _PATIENCE_S
        while pipes and time.monotonic() < end:
            for pipe in select.select(list(pipes), [], [], 0.5)[0]:
                if part := os.read(pipe, 1 << 16):
                    texts[pipe] += part
                    continue
                # The end of a process closes its pipe, which wakes this one at once.
                rank = pipes.pop(pipe)
                ended[rank] = time.monotonic()
                self._said[rank] = [ast.literal_eval(line) for line in _lines(texts[pipe])]
                os.close(pipe)
        late = list(pipes.values())
        for pid, rank in pids.items():
            if rank in late:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe, rank in pipes.items():
            self._said[rank] = [ast.literal_eval(line) for line in _lines(texts[pipe])]
            os.close(pipe)
        return ended, late

    # -- what the survivors got -----------------------------------------------------------------

    def _judged(self, ended: dict[int, float], result: Midst) -> list[str]:
        """Record the run; return what is wrong with it."""
        phase, victim = self._phase, self._victim
        result.kills[phase] += 1
        result.hits[phase] += self._said[victim][-1][:2] == ("enters", phase)
        problems = []
        for rank in set(range(SIZE)) - {victim}:
            said = [line for line in self._said[rank] if line[0] != "left"]
            last = said[-1] if said else ("nothing",)
            if last[0] == "error":
                _, kind, text, moment = last
                result.errors[f"{kind} in {phase}"] += 1
                seconds = moment - ended.get(victim, moment)
                result.seconds[phase] = max(seconds, result.seconds.get(phase, 0.0))
                # Ranks wait until their own deadline for one that has not arrived.
                allowed = _PROMISED_S + (_START_S if phase == "init" else 0.0)
                if seconds > allowed:
                    problems.append(f"rank {rank} got its error after {seconds:.1f} s: {text}")
                if not self._is_right(kind, text):
                    problems.append(f"rank {rank} got {kind}: {text}")
            elif last[0] == "done" and phase in ("close", "grow"):
                result.errors[f"no error in {phase}"] += 1
            else:
                problems.append(f"rank {rank}: {last}")
        return problems

    def _is_right(self, kind: str, text: str) -> bool:
        names = re.search(rf"\branks? (\d+, |\d+ and )*{self._victim}\b", text) is not None
        # Ranks that have not met yet know no more than that a rank did not come.
        not_met = self._phase == "init" and kind == RendezvousError.__name__
        return names and (not_met or kind == PeerLostError.__name__)


def _lines(text: bytes) -> list[str]:
    # A process may die in the middle of a line.
    return text.decode().splitlines()[: text.count(b"\n")]


class _Rank:
    """A forked process that is one rank; arguments as for :class:`_Run`."""

    def __init__(self, rank: int, pipe: int, phase: str, victim: int, delay: float) -> None:
        self._rank, self._pipe = rank, pipe
        self._fatal = phase if rank == victim else ""
        # Ranks repeat what takes little time until the victim is dead.
        self._repeats = 1 << 30 if phase in ("short calls", "long calls", "group") else 1
        self._repeated, self._delay = phase, delay
        self._without = victim >= 0

    def live(self, store: int, ports: str) -> None:
        """Be a rank, and end the process."""
        code = 1
        try:
            os.environ["COLLECTIVE_PORT"] = ports
            before = _descriptors()
            # The server of the store stays as long as the process of rank 0.
            if self._rank == 0:
                before.update(["socket:", "anon_inode:"])
            self._phases(f"tcp://127.0.0.1:{store}")
            end = time.monotonic() + _PROMISED_S
            while (left := _descriptors() - before) and time.monotonic() < end:
                time.sleep(0.05)
            if left:
                self._say("left", sorted(left.elements()))
            code = 0
        except BaseException:
            self._say("broke", traceback.format_exc())
        finally:
            os._exit(code)

    def _phases(self, store: str) -> None:
        comm: Any = None
        try:
            with self._entered("init"):
                comm = collective.init(
                    backend="tcp", rank=self._rank, size=SIZE, local_rank=0, local_size=1,
                    interface="lo", store=store, secret="of this test, and of nobody else",
                    timeout=_CALL_S, start_timeout=_START_S, shrink_grace=1.0,
                )  # fmt: skip
            comm.barrier()
            self._calls(comm)
            with self._entered("grow"):
                comm = comm.grow()
            if comm.size < SIZE:
                self._say("done", "went on without", sorted(comm.membership.lost))
            comm.barrier()
            with self._entered("close"):
                comm.close()
            self._say("done")
        except CollectiveError as error:
            self._say("error", type(error).__name__, str(error), time.monotonic())
            if comm is not None:
                comm.close()

    def _calls(self, comm: Any) -> None:
        short, long = np.ones(1), np.ones(1 << 21)

        def group() -> None:
            comm.dup().close()

        calls: dict[str, Callable[[], object]] = {
            "short calls": lambda: comm.all_reduce(short),
            "long calls": lambda: comm.all_reduce(long, out=long, op="max"),
            "group": group,
        }
        for phase, call in calls.items():
            call()  # the first one takes longer
            with self._entered(phase):
                for _ in range(self._repeats if phase == self._repeated else 1):
                    call()

    @contextlib.contextmanager
    def _entered(self, phase: str) -> Iterator[None]:
        self._say("enters", phase, time.monotonic())
        if phase == self._fatal:
            # The signal's default action ends the process, whatever it does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._delay)
        yield
        self._say("leaves", phase, time.monotonic())
        if phase == self._fatal:
            time.sleep(_PATIENCE_S)  # the timer was late

    def _say(self, *words: object) -> None:
        os.write(self._pipe, f"{words!r}\n".encode())


def _descriptors() -> Counter[str]:
    """Return how many sockets, pipes and the like this process has open, by kind."""
    kinds = Counter[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the list itself
            kind = os.readlink(f"/proc/self/fd/{descriptor}").partition("[")[0]
            kinds[kind] += not kind.startswith("/")
    return kinds
