"""Programs of tests, each in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "printed", "run_python"]

ROOT = Path(__file__).resolve().parent.parent


def run_python(
    *arguments: object,
    python: str | Path = sys.executable,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    merged: bool = False,
    timeout: float = 270.0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python, and return how it ended.

    Args:
        arguments: of the command, ``"-c"`` and a program, say.
        python: the command.
        env: all its variables, beside this project on its path; this process's by default.
        merged: whether what it writes to standard error is part of its output.
        timeout: in seconds, before it counts as hung.
        variables: more of them.
    """
    on_path = {"PYTHONPATH": str(ROOT)}
    kept = {**os.environ, **on_path} if env is None else {**on_path, **env}
    return subprocess.run(
        [python, *map(str, arguments)],
        cwd=cwd,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(*arguments: object, **options: Any) -> str:
    """Run Python as :func:`run_python` does; return what it prints, or fail with it."""
    done = run_python(*arguments, **options)
    assert done.returncode == 0, done.stdout + (done.stderr or "")
    return done.stdout
