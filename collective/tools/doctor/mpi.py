"""The programs that start MPI ranks here, and the MPI libraries that each of them can start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .probe import environment

_ANSWER_S = 4.0
_VENDORS = (
    (r"Intel\(R\) MPI Library.*?Version ([\d.]+\d)", "Intel MPI"),
    (r"\(Open MPI\) ([\d.]+\d)", "Open MPI"),
    (r"HYDRA build details:\s+Version:\s+([\d.]+\w*)", "MPICH"),
    (r"PRRTE.*?([\d.]+\d)", "Open MPI"),
)
# Open MPI's daemons use the protocol PMIx, those of MPICH and its descendants PMI. Ranks whose
# library uses the other protocol end at once, or each becomes a world of one rank.
_PMIX = ("Open MPI", "Spectrum MPI")


def starters(library: str) -> list[dict[str, Any]]:
    """Return the ``mpiexec`` programs that a user may mean, the first one on PATH first.

    Args:
        library: file of the MPI library, or "".

    Returns:
        For each program ``path``, ``vendor``, ``version``, ``error``, and whether it is
        ``on_path``, so that a user who types ``mpiexec`` gets it.
    """
    first = shutil.which("mpiexec")
    candidates = [Path(sys.executable).parent / "mpiexec"]
    if library:
        candidates.append(Path(library).parent.parent / "bin" / "mpiexec")
    programs: dict[str, dict[str, Any]] = {}
    for path in ([first] if first else []) + [str(p) for p in candidates if os.access(p, os.X_OK)]:
        real = os.path.realpath(path)
        if real not in programs:
            programs[real] = {"path": path, "on_path": path == first, **_version(path)}
    return list(programs.values())


def starter_for(vendor: str, found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the program in ``found`` for ranks of ``vendor``'s library, its own mpiexec first."""
    own = [one for one in found if one["vendor"] == vendor]
    return next(iter(own + [one for one in found if mates(vendor, one["vendor"])]), None)


def mates(library: str, starter: str) -> bool:
    """Tell whether an mpiexec of vendor ``starter`` can start ranks with ``library``'s library."""
    return bool(library and starter) and (library in _PMIX) == (starter in _PMIX)


def _version(path: str) -> dict[str, str]:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"vendor": "", "version": "", "error": f"`{path} --version`: {error}"}
    for pattern, vendor in _VENDORS:
        if match := re.search(pattern, done.stdout, re.DOTALL):
            return {"vendor": vendor, "version": match[1], "error": ""}
    words = " ".join(done.stdout.split())[:200]
    return {"vendor": "", "version": "", "error": f"`{path} --version` printed: {words}"}
