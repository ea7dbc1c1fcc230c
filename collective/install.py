"""The command that installs this package with an extra, for errors, reports and tables.

The import name is ``collective``; the distribution cannot be called so, since PyPI's
``collective`` is another project's package.
"""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

__all__ = ["DISTRIBUTION", "anew", "hint", "installed_beside", "is_clone"]

#: What pip and importlib.metadata know this package by.
DISTRIBUTION = "collective-comm"

# Chainer's setup needs what setuptools has lost: a plain install of it fails.
_PIP_FOR = {
    "chainer": "echo 'setuptools<80' > build-constraint.txt && "
    "pip install --build-constraint build-constraint.txt"
}


def hint(extra: str = "") -> str:
    """Return the shell command that installs this package, with ``extra`` if one is named.

    It is right before the package is published and after: where the code runs from a clone
    it names the clone; elsewhere the package has been installed, and pip takes the
    installed one's extra without asking an index for the package itself.
    """
    wanted = f"[{extra}]" if extra else ""
    clone = _clone()
    what = f"{DISTRIBUTION}{wanted}" if clone is None else f"{clone}{wanted}"
    options = "" if clone is None else "-e "
    return f"{_PIP_FOR.get(extra, 'pip install')} {options}{shlex.quote(what)}"


def anew(package: str) -> str:
    """Return the shell command that installs a package again that is there and is broken."""
    return f"{_PIP_FOR.get(package, 'pip install')} --force-reinstall {package}"


@functools.cache
def _clone() -> Path | None:
    """Return the root of the clone that this module is in, if it is in one."""
    root = Path(__file__).resolve().parent.parent
    return root if is_clone(root) else None


def is_clone(root: Path) -> bool:
    """Tell whether a directory is the root of a clone."""
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return f'\nname = "{DISTRIBUTION}"\n' in text


def installed_beside(clone: Path) -> Path | None:
    """Return the directory with the package that is installed apart from a clone, if there is one.

    From an editable installation it is the clone that is imported.
    """
    import importlib.metadata  # takes 20 ms

    for found in importlib.metadata.distributions(name=DISTRIBUTION):
        home = Path(str(found.locate_file(""))).resolve()
        if home != clone.resolve() and (home / "collective" / "__init__.py").is_file():
            return home
    return None
