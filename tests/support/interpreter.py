"""Programs of tests, each in an interpreter of its own."""

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
    """Run a command, and return how it ended.

    Args:
        command: its words.
        env: all its variables, beside this project on its path; this process's by default.
        stdin: what it reads.
        merged: whether what it writes to standard error is part of its output.
        timeout: in seconds, before it counts as hung.
        variables: more of them.
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
    kept = {**os.environ, **on_path} if env is None else {**on_path, **env}
    return {**kept, **more}


def run_python(
    *arguments: object, python: str | Path = sys.executable, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python, or another ``python``, as :func:`run` runs a command."""
    return run(python, *arguments, **options)


def printed(*arguments: object, **options: Any) -> str:
    """Run Python as :func:`run_python` does; return what it prints, or fail with it."""
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
    """Start Python with pipes for what it reads and writes; kill it if it has not ended by then."""
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
    """Run Python once with each of the arguments, at the same time; return how each ended."""
    end = time.monotonic() + timeout

    def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        out, error = process.communicate(timeout=end - time.monotonic())
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started(*each, **options)) for each in ranks]
        # Read at once: who fills a pipe that is read later would hold up those who wait for it.
        with ThreadPoolExecutor(len(running)) as pool:
            return list(pool.map(finish, running))
