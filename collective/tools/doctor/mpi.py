"""The programs that start MPI ranks here, and which of them serve an MPI library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .probe import environment

__all__ = ["mates", "starter_for", "starters"]

_ANSWER_S = 4.0
_VENDORS = (
    (r"Intel\(R\) MPI Library.*?Version ([\d.]+\d)", "Intel MPI"),
    (r"\(Open MPI\) ([\d.]+\d)", "Open MPI"),
    (r"HYDRA build details:\s+Version:\s+([\d.]+\w*)", "MPICH"),
    (r"PRRTE.*?([\d.]+\d)", "Open MPI"),
)
# Open MPI's daemons speak PMIx, those of MPICH and its descendants PMI; ranks whose library
# speaks the other end at once or take themselves for worlds of one.
_PMIX = ("Open MPI", "Spectrum MPI")


def starters(library: str) -> list[dict[str, Any]]:
    """Return the ``mpiexec`` that may be meant, the one that the shell finds first.

    Args:
        library: the file of the MPI library, or an empty text.

    Returns:
        Of each ``path``, ``vendor``, ``version``, ``error``, and whether it is ``on_path``,
        which is where a user who types its name gets it from.
    """
    first = shutil.which("mpiexec")
    candidates = [Path(sys.executable).parent / "mpiexec"]
    if library:
        candidates.append(Path(library).parent.parent / "bin" / "mpiexec")
    found: dict[str, dict[str, Any]] = {}
    for path in ([first] if first else []) + [str(p) for p in candidates if os.access(p, os.X_OK)]:
        real = os.path.realpath(path)
        if real not in found:
            found[real] = {"path": path, "on_path": path == first, **_version(path)}
    return list(found.values())


def starter_for(vendor: str, found: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the one of ``found`` that starts ranks of ``vendor``'s library, its own first."""
    own = [one for one in found if one["vendor"] == vendor]
    return next(iter(own + [one for one in found if mates(vendor, one["vendor"])]), None)


def mates(library: str, starter: str) -> bool:
    """Tell whether ranks with this vendor's library can be started by that vendor's mpiexec."""
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
    return {"vendor": "", "version": "", "error": f"`{path} --version` says: {words}"}
