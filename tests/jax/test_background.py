"""Calls inside ``jit`` in the background; ``make test-in ENV=jax`` installs JAX and runs this."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.interpreter import run_python

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

MISMATCH = "INTERNAL: MismatchError: all_reduce: the ranks made different calls"


def printed_by_ranks(turn: str, backend: str) -> list[str]:
    """Return what both ranks print in a turn of ``background.py``."""
    done = run_python(
        "-m", "collective", "run", "-n", 2, "--backend", backend,
        Path(__file__).with_name("background.py"), turn, timeout=250.0, COLLECTIVE_TIMEOUT="60",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_call_outside_jit_waits_for_call_inside_before_it(backend: str) -> None:
    assert printed_by_ranks("order", backend) == [
        f"[{rank}] [3. 3. 3.] [30. 30. 30.]" for rank in range(2)
    ]


def test_message_outside_jit_waits_for_message_inside_before_it() -> None:
    assert printed_by_ranks("messages", "shm") == ["[0] sent", "[1] [1. 1.] [2. 2.]"]


def test_loop_may_make_calls_inside_and_outside_jit() -> None:
    assert printed_by_ranks("loop", "shm") == [f"[{rank}] 228000.0" for rank in range(2)]


def test_barrier_outside_jit_waits_for_late_rank() -> None:
    assert printed_by_ranks("late", "shm") == ["[0] waited: True", "[1] late"]


def test_error_in_thread_of_xla_keeps_its_text() -> None:
    assert printed_by_ranks("error", "shm") == [f"[{rank}] {MISMATCH}" for rank in range(2)]


def test_interrupt_inside_jit_is_raised() -> None:
    assert printed_by_ranks("interrupt", "shm") == ["[0] KeyboardInterrupt", "[1] slept"]


def test_close_waits_for_calls_inside_jit() -> None:
    assert printed_by_ranks("block", "shm") == [f"[{rank}] [2. 2. 2.]" for rank in range(2)]


def test_end_of_program_waits_for_calls_inside_jit() -> None:
    assert printed_by_ranks("exit", "shm") == []
