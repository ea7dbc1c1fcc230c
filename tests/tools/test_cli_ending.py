"""How commands end from outside: at most one line, no traceback, no leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launches import DEADLINE_S, Launches, launches

pytestmark = pytest.mark.whole

__all__ = ["launches"]  # a fixture

COMMAND = [sys.executable, "-m", "collective"]


def start(launches: Launches, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command; its outputs are pipes unless ``options`` replace them."""
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    environment = launches.environment(**options.pop("variables", {}))
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=launches.directory,
        env=environment,
        text=True,
        **{**defaults, **options},
    )


def run(launches: Launches, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """Return the command's exit code and outputs."""
    process = start(launches, *arguments, **options)
    out, error = process.communicate(timeout=DEADLINE_S + 30)
    return process.returncode, out, error


@pytest.fixture
def unread() -> Iterator[int]:
    """Yield the writing end of a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full() -> Iterator[int]:
    """Yield the descriptor of a file on a full disk."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


# -- outputs ------------------------------------------------------------------------------------

NO_SPACE = "standard output: No space left on device"
PROGRAM = ["run", "-n", "2", "-m", "this"]  # The module prints, and imports nothing else.


@pytest.mark.parametrize(
    ("output", "command", "expected"),
    [
        ("unread", ["config"], (128 + signal.SIGPIPE, "")),
        ("full", ["config"], (2, f"collective: {NO_SPACE}.\n")),
        # If the output is the program's, the run ends like a program killed by SIGPIPE.
        ("unread", PROGRAM, (141, "")),
        ("full", PROGRAM, (141, f"collective run: {NO_SPACE}\n")),
    ],
    ids=["reader-left", "full-disk", "reader-left-run", "full-disk-run"],
)
@pytest.mark.parametrize(
    "variables",
    [
        {"COLLECTIVE_BACKEND": "shm"},
        {"COLLECTIVE_BACKEND": "threads"},
        {"COLLECTIVE_BACKEND": "threads", "PYTHONUNBUFFERED": "1"},
    ],
    ids=["shm", "threads", "unbuffered"],
)
def test_output_that_cannot_be_written_ends_command_with_one_line(
    launches: Launches,
    output: str,
    command: list[str],
    expected: tuple[int, str],
    variables: dict[str, str],
    request: pytest.FixtureRequest,
) -> None:
    descriptor = request.getfixturevalue(output)
    code, _, error = run(launches, *command, stdout=descriptor, variables=variables)
    assert (code, error) == expected


def test_closed_output_ends_command_with_one_line(launches: Launches) -> None:
    code, _, error = run(launches, "config", stdout=None, preexec_fn=lambda: os.close(1))
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("collective: standard output is closed")


def test_closed_error_output_keeps_errors_out_of_output(launches: Launches) -> None:
    variables = {"COLLECTIVE_BAKEND": "shm"}
    close: Callable[[], None] = lambda: os.close(2)  # noqa: E731
    command = ("run", "-n", "2", "script.py")
    code, out, _ = run(launches, *command, variables=variables, stderr=None, preexec_fn=close)
    assert (code, out) == (2, "")


# -- errors printed once, and not once for each rank --------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"COLLECTIVE_BACKEND": "cpu:shmm,cuda:nccl"},
        {"COLLECTIVE_ACROSS": "shmm"},
    ],
    ids=lambda variables: "=".join(*variables.items()),
)
def test_unknown_transport_prints_one_line_for_all_ranks(
    launches: Launches, variables: dict[str, str]
) -> None:
    script = launches.script("import collective; collective.init()")
    code, out, error = run(launches, "run", "-n", "3", script, variables=variables)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "Did you mean 'shm'?" in error


def test_unwritable_trace_prints_one_line_for_all_ranks(launches: Launches) -> None:
    script = launches.script("import collective; collective.init()")
    variables = {"COLLECTIVE_TRACE": f"{script}/traces"}
    code, out, error = run(launches, "run", "-n", "3", script, variables=variables)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert f"{script}/traces: no files can be written there: Not a directory" in error


@pytest.mark.parametrize(
    "command",
    [
        ["run", "-n", "2", "script.py"],
        ["bench", "--backend", "threads"],
        ["doctor"],
    ],
    ids=lambda command: command[0],
)
def test_missing_temporary_directory_prints_one_line(
    launches: Launches, command: list[str]
) -> None:
    launches.script("print('hello')")

    def write_nothing() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    code, out, error = run(launches, *command, preexec_fn=write_nothing)
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert "No usable temporary directory" in error
    assert "Set TMPDIR to a directory that can be written to" in error


@pytest.mark.parametrize(
    ("body", "message"),
    [(None, "script 'script.py': Is a directory"), ("x = (", "SyntaxError: '(' was never closed")],
    ids=["directory", "syntax"],
)
def test_invalid_program_prints_error_without_traceback(
    launches: Launches, body: str | None, message: str
) -> None:
    if body is None:
        (launches.directory / "script.py").mkdir()
    else:
        launches.script(body)
    code, _, error = run(launches, "run", "-n", "2", "--backend", "threads", "script.py")
    assert code == 1
    assert message in error
    assert "Traceback" not in error


# -- signals ------------------------------------------------------------------------------------


def ended(launches: Launches, process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Send a signal to the command alone; return its exit code and error output."""
    process.send_signal(number)
    _, error = process.communicate(timeout=DEADLINE_S)
    assert launches.living() == []
    return process.returncode, error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_doctor_leaves_nothing_after_signal(launches: Launches, number: signal.Signals) -> None:
    packages = launches.directory / "packages"
    packages.mkdir()
    # The imports of these libraries hang in processes that doctor has started.
    for name in ("torch", "chainer"):
        body = f"import time; open({str(launches.directory / name)!r}, 'w'); time.sleep(600)"
        (packages / f"{name}.py").write_text(body)
    path = os.pathsep.join([str(packages), launches.environment()["PYTHONPATH"]])
    process = start(launches, "doctor", variables={"PYTHONPATH": path})
    launches.until(lambda: all((launches.directory / n).exists() for n in ("torch", "chainer")))
    assert ended(launches, process, number) == (128 + number, "")
    assert list(launches.temporary.iterdir()) == []


def connected(launches: Launches) -> int:
    """Return the number of processes of these launches that share memory."""
    count = 0
    for pid in launches.living():
        with contextlib.suppress(OSError):
            count += "/memfd:" in Path(f"/proc/{pid}/maps").read_text()
    return count


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_bench_writes_results_and_leaves_nothing_after_signal(
    launches: Launches, number: signal.Signals
) -> None:
    sizes = ",".join(f"{n}K" for n in range(1, 1000))
    options = ["--quick", "--backend", "shm", "--sizes", sizes, "--json", "run.json"]
    process = start(launches, "bench", *options)
    launches.until(lambda: connected(launches) == 2)  # The measurements begin now.
    code, error = ended(launches, process, number)
    assert code == 130, error
    assert "interrupted; results are missing" in error
    assert json.loads((launches.directory / "run.json").read_text())["interrupted"] is True
    left = [path.name for path in launches.temporary.rglob("*") if not path.is_dir()]
    assert left == ["places"]  # in which ranks lock bytes


def test_parity_leaves_nothing_after_signal(launches: Launches) -> None:
    process = start(launches, "parity", "--backend", "shm", "--framework", "numpy", "--ranks", "2")
    launches.until(lambda: connected(launches) == 2)
    code, error = ended(launches, process, signal.SIGTERM)
    assert code == 143
    # In a pipe the command tells its progress in lines.
    assert [line for line in error.splitlines() if not line.startswith("collective parity: ")] == []
    assert list(launches.temporary.iterdir()) == []


def test_profile_leaves_nothing_after_signal(launches: Launches) -> None:
    script = launches.script("arrive(); time.sleep(600)")
    process = start(launches, "profile", "-n", "2", script)
    launches.until_arrived(2)
    assert ended(launches, process, signal.SIGTERM) == (143, "")
    # The base directory of run directories stays, and is empty.
    assert [path.name for path in launches.temporary.rglob("*")] == [f"collective-{os.geteuid()}"]


def test_thread_run_leaves_nothing_after_signal(launches: Launches) -> None:
    (launches.directory / "script.py").write_text(
        "import time; open('ran', 'w').close(); time.sleep(600)"
    )
    process = start(launches, "run", "-n", "2", "--backend", "threads", "script.py")
    launches.until((launches.directory / "ran").exists)
    assert ended(launches, process, signal.SIGTERM) == (143, "")
