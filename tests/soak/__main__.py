"""``python -m tests.soak``: random calls, kills, aliases, messages and flips, as many as requested.

::

    python -m tests.soak calls --backend shm --size 4 --turns 1000000
    python -m tests.soak aliasing --cases 100000
    python -m tests.soak kills --runs 200
    python -m tests.soak kills --runs 200 --backend hosts
    python -m tests.soak kills --runs 200 --midst
    python -m tests.soak messages --mutations 100000
    python -m tests.soak elastic --kills 200 --spares 4
    python -m tests.soak flips --flips 10000
    python -m tests.soak strangers --connections 10000

Each part prints a summary, and ends with exit code 1 if it found a problem. The parts are not part
of the tests, because they take hours on a small machine. ``--seconds`` ends a part early. Each part
prints its seed. ``--seed`` with the same number repeats a run; another number makes other choices.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from collective.testing import RankPool, RanksFailedError, preload
from tests.support.mpi_launches import VENDORS, launch_of
from tests.support.simulated_hosts import Pairs

from .aliasing import soak as aliasing
from .calls import soak
from .elastic import lives
from .findings import Findings
from .flips import Flips, flips
from .kills import kills
from .messages import TARGETS
from .midst import PHASES, midst
from .staging_flips import staging_flips
from .strangers import strangers

# Calls per job; after each job the part prints the number of calls so far.
_TURNS_A_JOB = 50_000
_CASES_A_JOB = 5_000
# Messages between two looks at the clock.
_MUTATIONS_AT_ONCE = 1_000
# After this time a rank counts as hanging, and the failure shows its stack.
_CALL_S = 120.0


def main(arguments: Sequence[str]) -> int:
    """Run one part; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__.split("\n")[0])
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("calls", help="random calls, compared with NumPy")
    part.add_argument("--backend", default="shm", help="a transport, mpich or openmpi")
    part.add_argument("--size", type=int, default=2)
    part.add_argument("--turns", type=int, default=1_000_000)
    part.set_defaults(run=_calls)
    part = parts.add_parser("aliasing", help="random calls whose arrays share memory")
    part.add_argument("--backend", default="shm,threads,tcp,gloo,hierarchical,mpich,openmpi")
    part.add_argument("--size", type=int, default=3)
    part.add_argument("--cases", type=int, default=100_000, help="for all transports together")
    part.set_defaults(run=_aliasing)
    part = parts.add_parser("kills", help="random kills of jobs and ranks")
    part.add_argument("--backend", default="shm,tcp,gloo,hierarchical,threads,mpich,openmpi")
    part.add_argument("--runs", type=int, default=200)
    part.add_argument("--midst", action="store_true", help="of ranks over tcp, in a drawn phase")
    part.set_defaults(run=_kills)
    part = parts.add_parser("messages", help="mutated messages for each listener and decoder")
    part.add_argument("--target", choices=TARGETS, action="append", help="default: all targets")
    part.add_argument("--mutations", type=int, default=100_000)
    part.set_defaults(run=_messages)
    part = parts.add_parser("elastic", help="random kills of ranks, whose job continues")
    part.add_argument("--backend", default="shm,tcp,gloo,hierarchical")
    part.add_argument("--kills", type=int, default=200)
    part.add_argument("--spares", type=int, default=0, help="processes that replace lost ranks")
    part.set_defaults(run=_elastic)
    part = parts.add_parser("flips", help="bit flips that COLLECTIVE_CHECK=results must find")
    part.add_argument("--flips", type=int, default=10_000)
    part.set_defaults(run=_flips)
    part = parts.add_parser("strangers", help="connections of strangers to a job over tcp")
    part.add_argument("--connections", type=int, default=10_000)
    part.set_defaults(run=_strangers)
    for part in parts.choices.values():
        part.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
        part.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    code: int = options.run(options)
    return code


def _pool(name: str, size: int) -> RankPool:
    """Return a pool of ranks over a transport, or over a vendor's MPI library."""
    backend = "mpi" if name in VENDORS else Pairs if name == "hierarchical" else name
    return RankPool(size, backend, mpiexec=launch_of(name) if name in VENDORS else None)


def _aliasing(options: argparse.Namespace) -> int:
    names = options.backend.split(",")
    done: Counter[str] = Counter()
    since = time.monotonic()
    for number, name in enumerate(names):
        share = options.cases * (number + 1) // len(names) - options.cases * number // len(names)
        end = time.monotonic() + options.seconds / len(names)
        cases = 0
        with _pool(name, options.size) as pool:
            while cases < share and time.monotonic() < end:
                batch, seed = min(share - cases, _CASES_A_JOB), options.seed + cases
                try:
                    results = pool.run(aliasing, seed, batch, timeout=600, call_timeout=_CALL_S)
                except RanksFailedError as failure:
                    print(f"aliasing over {name}, {options.size} ranks, seed {seed}: {failure}")
                    return 1
                done.update(results[0])
                cases += batch
        print(
            f"{cases} cases over {name}, {options.size} ranks, all right, "
            f"{time.monotonic() - since:.0f} s",
            flush=True,
        )
    print(", ".join(f"{count} {what}" for what, count in done.most_common()))
    return 0


def _calls(options: argparse.Namespace) -> int:
    name = options.backend
    done: Counter[str] = Counter()
    since = time.monotonic()
    with _pool(name, options.size) as pool:
        while (left := options.turns - done.total()) > 0:
            seconds = options.seconds - (time.monotonic() - since)
            if seconds <= 0:
                break
            seed = options.seed + done.total()
            try:
                results = pool.run(
                    soak, seed, min(left, _TURNS_A_JOB), min(seconds, 1e6),
                    timeout=min(seconds, 1e6) + 2 * _CALL_S, call_timeout=_CALL_S,
                )  # fmt: skip
            except RanksFailedError as failure:
                print(f"calls over {name}, {options.size} ranks, seed {seed}: {failure}")
                return 1
            done.update(results[0])
            print(
                f"{done.total()} calls over {name}, {options.size} ranks, all right, "
                f"{time.monotonic() - since:.0f} s",
                flush=True,
            )
    print(", ".join(f"{count} {operation}" for operation, count in done.most_common()))
    return 0


def _kills(options: argparse.Namespace) -> int:
    if options.midst:
        return _midst(options)
    since = time.monotonic()
    result = kills(options.backend.split(","), options.runs, options.seed, options.seconds)
    for problem in result.problems:
        print(problem)
    print(
        f"{result.runs.total()} kills, {result.early} of them before there was a rank; "
        f"{len(result.problems)} left something; the last process ended {result.longest_s:.1f} s "
        f"after the kill at most; {time.monotonic() - since:.0f} s"
    )
    print(", ".join(f"{count} {whom}" for whom, count in result.runs.most_common()))
    if result.segments:
        print("left in /dev/shm by MPI libraries:", *sorted(result.segments))
    return 1 if result.problems else 0


def _midst(options: argparse.Namespace) -> int:
    since = time.monotonic()
    result = midst(options.runs, options.seed, options.seconds)
    for problem in result.problems:
        print(problem)
    for phase in PHASES:
        print(
            f"{phase}: {result.kills[phase]} kills, {result.hits[phase]} in the middle; a survivor "
            f"had its error {result.seconds.get(phase, 0.0):.2f} s after the kill at most"
        )
    print(", ".join(f"{count} {what}" for what, count in result.errors.most_common()))
    print(
        f"{result.kills.total()} kills, {result.hits.total()} in the middle of a phase; "
        f"{len(result.problems)} problems; {time.monotonic() - since:.0f} s"
    )
    return 1 if result.problems else 0


def _elastic(options: argparse.Namespace) -> int:
    preload(["torch.distributed"])  # every job starts new processes, which need it
    since = time.monotonic()
    result = lives(
        options.backend.split(","), options.kills, options.seed, options.seconds, options.spares
    )
    for problem in result.problems:
        print(problem)
    print(
        f"{result.kills.total()} ranks killed, {result.joined} joined, {result.generations} "
        f"generations, {result.calls} sums; {len(result.problems)} problems; "
        f"the next generation added up {result.longest_s:.2f} s "
        f"after an error at most; {time.monotonic() - since:.0f} s"
    )
    print(", ".join(f"{count} {how}" for how, count in result.kills.most_common()))
    return 1 if result.problems else 0


def _strangers(options: argparse.Namespace) -> int:
    since = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        result = strangers(Path(directory), options.connections)
    for problem in result.problems:
        print(problem)
    for kind, quiet, attacked in result.medians():
        both = result.seconds[kind]
        print(
            f"{kind}: {1e6 * quiet:.0f} us, with strangers {1e6 * attacked:.0f} us; at most "
            f"{1e3 * max(both[0]):.0f} ms, with strangers {1e3 * max(both[1]):.0f} ms; "
            f"{len(both[0])} and {len(both[1])} calls"
        )
    print(", ".join(f"{count} at {where}" for where, count in result.listeners.most_common()))
    print(", ".join(f"{count} {kind}" for kind, count in result.made.most_common()))
    print(f"the processes have grown by {result.memory >> 10} KiB at most")
    print(f"{result.made.total()} connections, {time.monotonic() - since:.0f} s")
    return 1 if result.problems else 0


def _flips(options: argparse.Namespace) -> int:
    since = time.monotonic()
    result = flips(options.seed, options.flips, options.seconds)
    _print_flips(result, "flips", "in an input that no rank uses")
    staging = staging_flips(options.seed, options.flips, options.seconds)
    _print_flips(staging, "flips in staging areas", "after all ranks had read the place")
    print(f"{time.monotonic() - since:.0f} s")
    return 1 if result.problems or staging.problems else 0


def _print_flips(result: Flips, made: str, unused: str) -> None:
    for problem in result.problems[:10]:
        print(problem)
    print(
        f"{result.made} {made}, {result.found.total()} found, {result.folded} in a reduction with "
        f"equal wrong results on all ranks, {result.unused} {unused}; "
        f"{len(result.problems)} problems"
    )
    print(", ".join(f"{count} {where}" for where, count in result.found.most_common()))


def _messages(options: argparse.Namespace) -> int:
    code = 0
    for name in options.target or TARGETS:
        since = time.monotonic()
        findings = Findings()
        while (left := options.mutations - findings.made) > 0:
            if time.monotonic() - since > options.seconds:
                break
            dice = random.Random(options.seed + findings.made)
            findings.add(TARGETS[name](dice, min(left, _MUTATIONS_AT_ONCE)))
        for problem in findings.problems[:10]:
            print(problem)
        print(
            f"{name}: {findings.made} mutated messages, {len(findings.problems)} problems, "
            f"{time.monotonic() - since:.0f} s; "
            + ", ".join(f"{count} {end}" for end, count in findings.ends.most_common()),
            flush=True,
        )
        code = code or bool(findings.problems)
    return int(code)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
