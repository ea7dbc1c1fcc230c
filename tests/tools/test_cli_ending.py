"""How commands end from outside: one line at most, no traceback, and nothing is left."""

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

__all__ = ["launches"]  # a fixture

COMMAND = [sys.executable, "-m", "collective"]


def start(launches: Launches, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command whose outputs are read unless ``options`` say otherwise."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    environment = launches.environment(**options.pop("variables", {}))
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=launches.directory,
        env=environment,
        text=True,
        **{**given, **options},
    )


def run(launches: Launches, *arguments: str, **options: Any) -> tuple[int, str, str]:
    """Return the command's exit code and outputs."""
    process = start(launches, *arguments, **options)
    out, error = process.communicate(timeout=DEADLINE_S + 30)
    return process.returncode, out, error


@pytest.fixture
def nobody() -> Iterator[int]:
    """Return the end of a pipe that nobody reads."""
    mine, theirs = os.pipe()
    os.close(mine)
    yield theirs
    os.close(theirs)


@pytest.fixture
def full() -> Iterator[int]:
    """Return a file on a full disk."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


# -- outputs ------------------------------------------------------------------------------------

NO_SPACE = "standard output: No space left on device"
PROGRAM = ["run", "-n", "2", "-m", "this"]  # which prints, and imports nothing


@pytest.mark.parametrize(
    ("output", "command", "expected"),
    [
        ("nobody", ["config"], (128 + signal.SIGPIPE, "")),
        ("full", ["config"], (2, f"collective: {NO_SPACE}.\n")),
        # Where it is the program's output, that is no error of its.
        ("nobody", PROGRAM, (141, "")),
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
def test_an_output_that_takes_no_more_is_told_in_a_line(
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


def test_a_closed_output_is_told(launches: Launches) -> None:
    code, _, error = run(launches, "config", stdout=None, preexec_fn=lambda: os.close(1))
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("collective: standard output is closed")


def test_errors_do_not_go_to_the_output_where_theirs_is_closed(launches: Launches) -> None:
    variables = {"COLLECTIVE_BAKEND": "shm"}
    close: Callable[[], None] = lambda: os.close(2)  # noqa: E731
    code, out, _ = run(launches, "config", variables=variables, stderr=None, preexec_fn=close)
    assert (code, out) == (2, "")


# -- what is refused once and not once a rank ---------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"COLLECTIVE_BACKEND": "cpu:shmm,cuda:nccl"},
        {"COLLECTIVE_ACROSS": "shmm"},
    ],
    ids=lambda variables: "=".join(*variables.items()),
)
def test_an_unknown_transport_is_told_once(launches: Launches, variables: dict[str, str]) -> None:
    script = launches.script("import collective; collective.init()")
    code, out, error = run(launches, "run", "-n", "3", script, variables=variables)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "Did you mean 'shm'?" in error


def test_a_trace_that_cannot_be_written_is_told_once(launches: Launches) -> None:
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
def test_without_a_temporary_directory(launches: Launches, command: list[str]) -> None:
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
def test_a_program_that_is_none_has_no_traceback_of_ours(
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
def test_doctor_leaves_nothing(launches: Launches, number: signal.Signals) -> None:
    packages = launches.directory / "packages"
    packages.mkdir()
    # Libraries that are found to hang, in processes that the doctor has started.
    for name in ("torch", "chainer"):
        body = f"import time; open({str(launches.directory / name)!r}, 'w'); time.sleep(600)"
        (packages / f"{name}.py").write_text(body)
    path = os.pathsep.join([str(packages), launches.environment()["PYTHONPATH"]])
    process = start(launches, "doctor", variables={"PYTHONPATH": path})
    launches.until(lambda: all((launches.directory / n).exists() for n in ("torch", "chainer")))
    assert ended(launches, process, number) == (128 + number, "")
    assert list(launches.temporary.iterdir()) == []


def connected(launches: Launches) -> int:
    """Return how many processes of these launches share memory."""
    found = 0
    for pid in launches.living():
        with contextlib.suppress(OSError):
            found += "/memfd:" in Path(f"/proc/{pid}/maps").read_text()
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_bench_shows_what_there_is_and_leaves_nothing(
    launches: Launches, number: signal.Signals
) -> None:
    sizes = ",".join(f"{n}K" for n in range(1, 1000))
    options = ["--quick", "--backend", "shm", "--sizes", sizes, "--json", "run.json"]
    process = start(launches, "bench", *options)
    launches.until(lambda: connected(launches) == 2)  # what follows is measuring
    code, error = ended(launches, process, number)
    assert code == 130, error
    assert "interrupted; results are missing" in error
    assert json.loads((launches.directory / "run.json").read_text())["interrupted"] is True
    assert [each for each in launches.temporary.rglob("*") if not each.is_dir()] == []


def test_parity_leaves_nothing(launches: Launches) -> None:
    process = start(launches, "parity", "--backend", "shm", "--framework", "numpy", "--ranks", "2")
    launches.until(lambda: connected(launches) == 2)
    assert ended(launches, process, signal.SIGTERM) == (143, "")
    assert list(launches.temporary.iterdir()) == []


def test_profile_leaves_nothing(launches: Launches) -> None:
    script = launches.script("arrive(); time.sleep(600)")
    process = start(launches, "profile", "-n", "2", script)
    launches.until_arrived(2)
    assert ended(launches, process, signal.SIGTERM) == (143, "")
    # Where launches meet stays, and is empty.
    assert [path.name for path in launches.temporary.rglob("*")] == [f"collective-{os.geteuid()}"]


def test_ranks_that_are_threads_leave_nothing(launches: Launches) -> None:
    (launches.directory / "script.py").write_text("import time; open('ran', 'w'); time.sleep(600)")
    process = start(launches, "run", "-n", "2", "--backend", "threads", "script.py")
    launches.until((launches.directory / "ran").exists)
    assert ended(launches, process, signal.SIGTERM) == (143, "")
