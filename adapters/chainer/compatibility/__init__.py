"""Chainer on today's Python and NumPy: its modules compiled with a few expressions replaced.

Chainer's last release uses names that NumPy, setuptools and Python no longer have, one of them
while it is imported, so that nothing can be mended afterwards. A finder before the others loads
the modules concerned from the installed source, with the replacements of ``EDITS``. Nothing is
written to disk or added to another package, and lines keep their numbers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType

from .edits import EDITS, Edit, numpy_from

__all__ = ["CompatibilityFinder", "install"]

_PACKAGES = ("chainer", "chainermn", "chainerx")


class _Loader(importlib.abc.InspectLoader):
    """Load one module from its source, with its edits made."""

    def __init__(self, inner: importlib.abc.InspectLoader, origin: str, edits: Sequence[Edit]):
        self._inner = inner
        self._origin = origin
        self._edits = edits

    def get_source(self, fullname: str) -> str | None:
        """Return the source as installed, whose lines are those that tracebacks show."""
        return self._inner.get_source(fullname)

    def get_code(self, fullname: str) -> CodeType:
        source = self._inner.get_source(fullname)
        if source is None:
            raise ImportError(
                f"{fullname}: {self._origin} has no source, which is needed to load it here; "
                "install chainer==7.8.1 from its source distribution.",
                name=fullname,
                path=self._origin,
            )
        for edit in self._edits:
            if source.count(edit.old) != edit.count:
                raise ImportError(
                    f"{fullname}: {edit.old!r} is there {source.count(edit.old)} times in "
                    f"{self._origin}, of {_version()}; it is replaced {edit.count} times in "
                    f"Chainer 7.8.1, as {edit.reason}. Install chainer==7.8.1.",
                    name=fullname,
                    path=self._origin,
                )
            source = source.replace(edit.old, edit.new)
        # Not from a .pyc, nor to one: that is the installed source's.
        code: CodeType = compile(source, self._origin, "exec", dont_inherit=True)
        return code


class CompatibilityFinder(importlib.abc.MetaPathFinder):
    """Find the modules that need an edit here; leave all others to the finders behind."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "chainerx._core" and numpy_from(2, 0)():
            raise ImportError(
                "chainerx: this Chainer was built with ChainerX, which needs names that NumPy "
                "has not had since 2.0. Install chainer==7.8.1 without CHAINER_BUILD_CHAINERX, "
                "or numpy<2.",
                name=fullname,
            )
        edits = needed_edits(fullname)
        if not edits:
            return None
        behind = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
        spec = next((found for found in behind if found is not None), None)
        if spec is None:
            return None
        if spec.origin is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            raise ImportError(
                f"{fullname}: loaded by {type(spec.loader).__name__}, which gives no source; "
                "install chainer==7.8.1 as files.",
                name=fullname,
            )
        spec.loader = _Loader(spec.loader, spec.origin, edits)
        spec.cached = None
        return spec


def needed_edits(module: str) -> list[Edit]:
    """Return the edits that ``module`` needs on this Python, with what is installed."""
    return [edit for edit in EDITS.get(module, ()) if edit.needed()]


def install() -> None:
    """Make ``import chainer`` and ``import chainermn`` work from here on; once is enough.

    Raises:
        ImportError: an import of Chainer has failed in this process or is under way; what it
            left behind cannot be mended.

    Warns:
        RuntimeWarning: Chainer was imported before, so that some places stay as they are.
    """
    if any(isinstance(finder, CompatibilityFinder) for finder in sys.meta_path):
        return
    loaded = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    # The version is the last of the names that importing chainer binds.
    if loaded and not hasattr(sys.modules.get("chainer"), "__version__"):
        raise ImportError(
            f"collective.adapters.chainer: chainer is half-imported ({len(loaded)} of its modules "
            "are there): importing it failed before, or is under way. Start Python anew and "
            "import collective.adapters.chainer before chainer.",
            name="chainer",
        )
    missed = [name for name in loaded if needed_edits(name)]
    sys.meta_path.insert(0, CompatibilityFinder())
    if missed:
        warnings.warn(
            "chainer was imported before collective.adapters.chainer, so these modules stay as "
            f"they are: {', '.join(sorted(missed))}. Import collective.adapters.chainer first.",
            RuntimeWarning,
            stacklevel=2,
        )


def _version() -> str:
    try:
        return f"chainer {importlib.metadata.version('chainer')}"
    except importlib.metadata.PackageNotFoundError:
        return "a chainer that was not installed"
