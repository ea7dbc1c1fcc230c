"""The MPI libraries of the tests, each in a separate environment that `make test-all` builds.

Use :func:`needs` or :data:`by_vendor` for tests of MPI, :func:`mpirun` to run a script on ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from collective.testing import Mpiexec, RankPool
from tests import warm
from tests.support.interpreter import ROOT

__all__ = [
    "DEADLINE_S",
    "INSTALLED",
    "REPEATED",
    "ROOT",
    "VENDORS",
    "by_vendor",
    "launch_of",
    "marks_of",
    "mpirun",
    "needs",
    "pool_of",
    "run_alone",
    "warm_launch_of",
    "warm_python_of",
    "world_of",
]

VENDORS = ("mpich", "openmpi")
DEADLINE_S = 60.0
_LEAVE_S = 3.0


def launch_of(vendor: str) -> Mpiexec:
    """Return the :class:`Mpiexec` that starts ranks of a vendor's library."""
    return Mpiexec(str(ROOT / ".mpi" / vendor / "bin" / "python"))


@functools.cache
def warm_python_of(vendor: str) -> str:
    """Return a Python of tests/warm, with PyTorch imported, for ranks of a vendor's library."""
    python = warm.python()
    if python == sys.executable:
        return launch_of(vendor).python
    folder = ROOT / ".mpi" / vendor / "lib"
    (library,) = folder.glob("libmpi.so.*")
    (site,) = folder.glob("python*/site-packages")
    command = Path(python).with_name(vendor)
    command.write_text(
        f"#!/bin/sh\nexport MPI4PY_LIBMPI='{library}'\n"
        f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{site}"\n'
        f"exec '{python}' \"$@\"\n"
    )
    command.chmod(0o755)
    return str(command)


def warm_launch_of(vendor: str) -> Mpiexec:
    """Return the :class:`Mpiexec` for ranks that import PyTorch."""
    program = Path(launch_of(vendor).python).with_name("mpiexec")
    return Mpiexec(warm_python_of(vendor), str(program))


def needs(*vendors: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if an environment is missing; `make test-all` builds them."""
    missing = [vendor for vendor in vendors if not Path(launch_of(vendor).python).exists()]
    reason = f"no {' and no '.join(f'.mpi/{each}' for each in missing)}; `make test-all` builds it"
    return pytest.mark.skipif(bool(missing), reason=reason)


def marks_of(transport: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a case over a transport or a vendor of MPI.

    The case is skipped if the vendor's environment is missing. Only ``make test-all`` runs those
    over Open MPI.
    """
    marks = [needs(transport)] if transport in VENDORS else []
    return [*marks, pytest.mark.whole] if transport == "openmpi" else marks


#: Parameters for the vendors; and a mark that runs a test with each of them.
INSTALLED = [pytest.param(vendor, marks=marks_of(vendor)) for vendor in VENDORS]
#: The same for tests outside of ``tests/backends``, where MPI repeats facts.
REPEATED = [pytest.param(vendor, marks=[needs(vendor), pytest.mark.whole]) for vendor in VENDORS]
by_vendor = pytest.mark.parametrize("vendor", INSTALLED)


def world_of(name: str, size: int) -> Any:
    """Return a parameter for a fixture: a transport or a vendor of MPI, and a number of ranks."""
    return pytest.param((name, size), marks=marks_of(name), id=f"{name}-{size}")


@contextlib.contextmanager
def pool_of(world: tuple[str, int], package: ModuleType) -> Iterator[RankPool]:
    """Keep ranks that can import ``package`` and the packages installed beside it."""
    name, size = world
    if name not in VENDORS:
        with RankPool(size, name, timeout=90.0) as pool:
            yield pool
        return
    # The environments of vendors have MPI; all other packages come from this environment.
    packages = str(Path(str(package.__file__)).parent.parent)
    before = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (before, packages))))
        launch = warm_launch_of(name) if package.__name__ == "torch" else launch_of(name)
        with RankPool(size, "mpi", timeout=90.0, mpiexec=launch) as pool:
            yield pool


def mpirun(
    vendor: str,
    size: int,
    script: str,
    *,
    python: str | None = None,
    arguments: Sequence[str] = (),
    check: bool = True,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on ``size`` ranks under a vendor's ``mpiexec``; return both streams in one.

    Args:
        python: interpreter; by default that of the vendor's environment.
        arguments: more arguments for ``mpiexec``.
        check: if true, fail the test unless the job succeeds.
        environment: variables to add.
    """
    launch = launch_of(vendor)
    # These are a user's options, with which a rank that dies ends the job.
    program, *options = launch.command(size)
    command = [program, *arguments, *options, python or launch.python, "-c", script]
    done = _run(command, environment)
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}"
    return done


def run_alone(
    python: str, script: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a process without a launcher."""
    done = _run([python, "-c", script, *arguments], environment)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}"
    return done


def _run(
    command: Sequence[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    before = _segments()
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=DEADLINE_S)
        pytest.fail(f"{' '.join(command[:-1])}: not over after {DEADLINE_S:g} s\n{output}")
    finally:
        _sweep(before)
    return subprocess.CompletedProcess(command, process.returncode, output)


def _segments() -> set[Path]:
    """Return the files of shared memory of MPI libraries."""
    return {*Path("/dev/shm").glob("mpich_shm_*"), *Path("/dev/shm").glob("sm_segment.*")}


def _sweep(before: set[Path]) -> None:
    """Remove the shared memory that a failed job has left, when its last process has ended."""
    deadline = time.monotonic() + _LEAVE_S
    while new := _segments() - before:
        for segment in new - _used(new):
            segment.unlink(missing_ok=True)
        if time.monotonic() > deadline:
            return  # The segments belong to another job.
        time.sleep(0.05)


def _used(segments: set[Path]) -> set[Path]:
    """Return the segments that some process has mapped."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        used |= {segment for segment in segments if str(segment) in text}
    return used
