"""Calls inside ``jit``; ``make test-in ENV=jax`` installs JAX and runs this."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.interpreter import run_python

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

HERE = Path(__file__).parent
DEADLINE_S = 250.0
CHECKS = 595


def launched(
    size: int, program: str, *arguments: str, backend: str = "shm"
) -> CompletedProcess[str]:
    """Run a program of this folder on several ranks."""
    return run_python(
        "-m", "collective", "run", "-n", size, "--backend", backend, HERE / program, *arguments,
        timeout=DEADLINE_S, COLLECTIVE_TIMEOUT="60",
    )  # fmt: skip


@pytest.mark.parametrize(("backend", "size"), [("shm", 2), ("shm", 3), ("tcp", 2)])
def test_calls_transformations_and_gradients_are_right(backend: str, size: int) -> None:
    done = launched(size, "inside_jit.py", backend=backend)
    results = re.findall(r"(\d+) checks, (\d+) wrong", done.stdout)
    assert results == [(str(CHECKS), "0")] * size, done.stdout + done.stderr


def test_python_makes_only_the_first_of_repeated_calls() -> None:
    done = launched(2, "without_python.py", "jit")
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] 3 calls by Python, result {{1.0}}" for rank in range(2)
    ], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ("differ", r"MismatchError: all_\w+: .*inside_jit_errors.py:\d+ in one .*:\d+ in two"),
        ("shapes", r"MismatchError: all_reduce: .*float32\[3\].*float32\[4\]"),
        ("devices", "functional, which need one device for each rank"),
        ("shard_map", "functional, which need one device for each rank"),
        ("scan", "UnsupportedError: scan: a scan has no derivative"),
        ("scan forward", "UnsupportedError: scan: a scan has no derivative"),
        ("and", "UnsupportedError: all_reduce: op='band' has no gradient"),
        ("stored", "UnsupportedError: jax: a compiled program with calls .* cannot be stored"),
        ("collected", "UnsupportedError: jax: .* or whose compiled function is gone"),
        ("op", "InvalidArgumentError: all_reduce: op='median'"),
        ("rank", "RankError: recv: src=-1 is no rank"),
        ("none", "InvalidArgumentError: broadcast: the array is None"),
        ("structure", r"InvalidArgumentError: all_reduce: got a list \(expected one array\)"),
        ("array as rank", r"RankError: broadcast: root is .* \(expected an integer\)"),
        ("checkpoint", "NotImplementedError: .* cannot be made twice, as jax.checkpoint would"),
        ("platform", "UnsupportedError: all_reduce: a call inside jit for cuda; only the CPU"),
        ("counts", "ShapeError: reduce_scatter: counts"),
    ],
)
def test_failure_is_named_on_every_rank(turn: str, text: str) -> None:
    done = launched(2, "inside_jit_errors.py", turn)
    for rank in range(2):
        (line,) = re.findall(rf"^.*\[{rank}\] \w*Error: .*$", done.stdout, re.MULTILINE)
        assert re.search(text, line), line
