"""Programs of tests, each in a new interpreter.

Use :func:`printed` for the output of a program that has to succeed, :func:`run_python` for its exit
code and outputs, :func:`started` for a program that runs beside the test.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "printed", "run", "run_python", "run_together", "started"]

ROOT = Path(__file__).resolve().parents[2]


def run(
    *command: object,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    merged: bool = False,
    timeout: float = 270.0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command, and return its exit code and outputs.

    Args:
        command: words of the command.
        cwd: working directory.
        env: all variables, beside PYTHONPATH with this project; by default those of this process.
        stdin: text for standard input.
        merged: if true, standard error goes to standard output.
        timeout: seconds until the command counts as hung.
        variables: more variables.
    """
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=_environment(env, variables),
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )


def _environment(env: Mapping[str, str] | None, more: Mapping[str, str]) -> dict[str, str]:
    on_path = {"PYTHONPATH": str(ROOT)}
    base = {**os.environ, **on_path} if env is None else {**on_path, **env}
    return {**base, **more}


def run_python(
    *arguments: object, python: str | Path = sys.executable, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python, or another ``python``, with the options of :func:`run`."""
    return run(python, *arguments, **options)


def printed(*arguments: object, **options: Any) -> str:
    """Run Python with the options of :func:`run_python`; return its output, or fail with it."""
    done = run_python(*arguments, **options)
    assert done.returncode == 0, done.stdout + (done.stderr or "")
    return done.stdout


@contextlib.contextmanager
def started(
    *arguments: object,
    python: str | Path = sys.executable,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    **variables: str,
) -> Iterator[subprocess.Popen[str]]:
    """Start Python with pipes for its streams; kill it at the end if it still runs."""
    with subprocess.Popen(
        [str(python), *map(str, arguments)],
        cwd=cwd,
        env=_environment(env, variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run_together(
    *ranks: Sequence[object], timeout: float = 270.0, **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """Run Python with each list of arguments at the same time; return codes and outputs."""
    end = time.monotonic() + timeout

    def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, error = process.communicate(timeout=end - time.monotonic())
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started(*each, **options)) for each in ranks]
        # Read all outputs at once: a process with a full pipe would block those that wait for it.
        with ThreadPoolExecutor(len(running)) as pool:
            return list(pool.map(finish, running))
