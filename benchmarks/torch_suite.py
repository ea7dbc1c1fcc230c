"""PyTorch's own tests of its backends, run over ours: ``python benchmarks/torch_suite.py``.

PyTorch's wheel contains the test suite for its backends,
``torch.testing._internal.distributed.distributed_test``. This command runs the suite over the
backend ``collective`` and over PyTorch's Gloo, and names each test with different outcomes. The
tests decide by a backend's name what it supports (``BACKEND != "gloo"``). So the name of our
backend also compares equal to those of the two backends for CPUs, ``gloo`` and ``mpi``. The suite
needs ``expecttest``.

The ranks of a test are forked from a process that has imported everything. Spawning three
interpreters would take most of the time.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collective.tools.bench.machine import measured
from collective.tools.show import add_outputs, print_table

_OUTCOMES = ("passed", "failed", "skipped")
_SECONDS = 60
_SUITE = "torch.testing._internal.distributed.distributed_test"


class _Name(str):
    """Name of our backend, which the tests' conditions also accept as ``gloo`` and ``mpi``."""

    __slots__ = ()
    _TAKEN_FOR = ("gloo", "mpi")

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in _Name._TAKEN_FOR

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")  # the tests look the name up in sets that contain "gloo"


class _Result(unittest.TestResult):
    """Result that records the outcome of each test, with the reason.

    Args:
        report: function that is called after each test, with a text about the progress.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Any]] = {}
        self._report = report
        self._since = 0.0

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._since = time.perf_counter()

    def _note(self, test: Any, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        took = time.perf_counter() - self._since
        self.found[name] = {"outcome": outcome, "why": why, "seconds": round(took, 3)}
        self._report(f"{len(self.found)}: {name} {outcome}")

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, "failed", str(err[1]))

    addFailure = addError


def _tests(module: Any, pattern: str) -> unittest.TestSuite:
    """Return the tests of the suite whose names match; each runs in forked ranks."""
    import torch

    fork = torch.multiprocessing.get_context("fork")

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(fork.Process)

    names = unittest.TestLoader().getTestCaseNames(Suite)
    wanted = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
    return unittest.TestSuite(Suite(name) for name in names if fnmatch.fnmatch(name, wanted))


def _run_here(backend: str, pattern: str, out: Path) -> None:
    """Run the tests in this process, with its environment, and write the outcomes."""
    import torch

    torch.set_num_threads(1)
    name = backend
    if backend == "collective":
        # Import these before the fork. Otherwise each rank of each test would import them.
        for module in ("autoload", "plugin", "backend"):
            importlib.import_module(f"collective.adapters.torch.{module}")
        cases = importlib.import_module("torch.testing._internal.common_distributed").DistTestCases
        cases.backend_feature["plugin"].add(backend)
        name = _Name(backend)
    with unittest.mock.patch.object(os, "environ", {**os.environ, "BACKEND": name}):
        suite = importlib.import_module(_SUITE)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    shown = terminal.isatty()
    # The output of the tests goes to a log, since it would hide the progress of the command.
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def tell(text: str) -> None:
        if shown:
            print(f"\r\033[K{backend} {text}", end="", file=terminal)

    result = _Result(tell)
    _tests(suite, pattern).run(result)
    out.write_text(json.dumps(result.found))


def run(backend: str, ranks: int, transport: str, pattern: str, logs: Path) -> dict[str, Any]:
    """Run the tests over a backend; return outcome, reason and time by test."""
    out = logs.resolve() / f"{backend}.json"
    environment = {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "COLLECTIVE_BACKEND": transport,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(_SECONDS),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--inside", str(out), "--backend", backend, "-k", pattern]
    subprocess.run(command, check=True, env=environment)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def differences(sides: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    """Return the tests with different outcomes or failures, with the outcome on each side."""
    names = sorted(set().union(*sides.values()))
    rows = []
    for name in names:
        outcomes = {side: found.get(name, {}).get("outcome", "-") for side, found in sides.items()}
        if len(set(outcomes.values())) > 1 or "failed" in outcomes.values():
            rows.append((name, outcomes))
    return rows


def show(report: dict[str, Any]) -> None:
    """Print the counts, the differences and the reasons of failures."""
    sides = report["outcomes"]
    about = report["machine"]
    print(f"{about['date']}, torch {report['torch']}, {report['ranks']} ranks\n")
    rows = []
    for side, found in sides.items():
        counts = collections.Counter(test["outcome"] for test in found.values())
        seconds = sum(test["seconds"] for test in found.values())
        name = side if side != "collective" else f"collective ({report['transport']})"
        rows.append([name, *(str(counts[o]) for o in _OUTCOMES), str(len(found)), f"{seconds:.0f}"])
    print_table("torch's own tests", ["backend", *_OUTCOMES, "all", "seconds"], rows)
    unlike = differences(sides)
    if not unlike:
        print("All tests have the same outcome on both sides.")
        return
    rows = []
    for name, outcomes in unlike:
        reasons = [found[name]["why"] for found in sides.values() if name in found]
        why = next((_last_line(text) for text in reasons if text), "")
        rows.append([name, *outcomes.values(), why])
    print_table("what differs, and what failed", ["test", *sides, "why"], rows)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    return (errors or lines or [""])[-1][:160]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a test failed over ``collective`` only."""
    parser = argparse.ArgumentParser(description="Run PyTorch's tests of its backends over ours.")
    parser.add_argument("--backend", choices=["collective", "gloo"], help="both by default")
    parser.add_argument("--ranks", "-n", type=int, default=3, help="3 by default")
    parser.add_argument(
        "--transport", default="shm", help="transport of our backend: shm by default"
    )
    parser.add_argument("-k", dest="pattern", default="", help="part of a test's name, or a glob")
    add_outputs(parser)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the output of the tests")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("expecttest") is None:
        parser.error("torch's tests need expecttest: pip install expecttest")
    if options.inside is not None:
        _run_here(options.backend, options.pattern, options.inside)
        return 0
    backends = [options.backend] if options.backend else ["collective", "gloo"]

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            logs = options.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            outcomes = {
                backend: run(backend, options.ranks, options.transport, options.pattern, logs)
                for backend in backends
            }
        if not any(outcomes.values()):
            parser.error(f"-k {options.pattern}: no test has such a name")
        return {
            "torch": importlib.metadata.version("torch"),
            "ranks": options.ranks,
            "transport": options.transport,
            "outcomes": outcomes,
        }

    report = measured(options, measure)
    show(report)
    return int(
        any(
            seen["collective"] == "failed" and seen.get("gloo") != "failed"
            for _, seen in differences(report["outcomes"])
            if "collective" in seen
        )
    )


if __name__ == "__main__":
    sys.exit(main())
