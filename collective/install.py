"""Commands that install this package with an extra, and where it cannot be imported.

The commands are for errors, reports and tables.

The import name is ``collective``. The distribution has another name, because PyPI's
``collective`` is another project's package.
"""

from __future__ import annotations

import functools
import importlib
import shlex
import sys
from pathlib import Path

#: Name of this package for pip and importlib.metadata.
DISTRIBUTION = "collective-comm"

# Chainer's setup needs a feature that setuptools has removed, so a plain install of Chainer fails.
_PIP_FOR = {
    "chainer": "echo 'setuptools<80' > build-constraint.txt && "
    "pip install --build-constraint build-constraint.txt"
}


def hint(extra: str = "") -> str:
    """Return the shell command that installs this package, with ``extra`` if one is named.

    The command works before and after the package is published. If the code runs from a clone, the
    command names the clone. Otherwise the package is installed, and pip installs the extra without
    asking an index for the package itself.
    """
    suffix = f"[{extra}]" if extra else ""
    clone = _clone()
    requirement = f"{DISTRIBUTION}{suffix}" if clone is None else f"{clone}{suffix}"
    options = "" if clone is None else "-e "
    return f"{_PIP_FOR.get(extra, 'pip install')} {options}{shlex.quote(requirement)}"


def anew(package: str) -> str:
    """Return the shell command that reinstalls a package that is installed but broken."""
    return f"{_PIP_FOR.get(package, 'pip install')} --force-reinstall {package}"


@functools.cache
def _clone() -> Path | None:
    """Return the root of the clone that contains this module; None if there is none."""
    root = Path(__file__).resolve().parent.parent
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return root if f'\nname = "{DISTRIBUTION}"\n' in text else None


def refuse_other_systems() -> None:
    """Raise an ImportError if this system is not Linux.

    The package calls this function before it imports a module that other systems lack, whose own
    error would not name the cause.
    """
    if sys.platform != "linux":
        raise ImportError(
            f"collective: this package needs Linux, and this system is {sys.platform!r}. Use "
            "collective on Linux, for example in a container or a virtual machine."
        )


def refuse_subinterpreter() -> None:
    """Raise an ImportError that says what is wrong if this is not the main interpreter.

    The package calls this function if NumPy cannot be imported. NumPy's own error does not name the
    cause.
    """
    for name in ("_interpreters", "_xxsubinterpreters"):  # since Python 3.13, and before
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        if interpreters.get_current() == interpreters.get_main():
            return
        raise ImportError(
            "collective: NumPy, which collective needs, cannot be imported in a subinterpreter "
            "beside the main interpreter. Use collective in the main interpreter, with ranks that "
            "are threads or processes."
        )
