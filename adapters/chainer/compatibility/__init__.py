"""Chainer on current Python and NumPy: its modules, compiled with a few expressions replaced.

Chainer's last release uses names that NumPy, setuptools and Python no longer have. One of them is
used while Chainer is imported, so a repair after the import would be too late. Therefore a finder
in front of all others loads the modules concerned from the installed source, with the replacements
of ``EDITS``. Nothing is written to disk or added to another package, and line numbers stay the
same.
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
    """Loader of one module from its source, with its edits applied."""

    def __init__(self, inner: importlib.abc.InspectLoader, origin: str, edits: Sequence[Edit]):
        self._inner = inner
        self._origin = origin
        self._edits = edits

    def get_source(self, fullname: str) -> str | None:
        """Return the installed source, whose lines tracebacks show."""
        return self._inner.get_source(fullname)

    def get_code(self, fullname: str) -> CodeType:
        source = self._inner.get_source(fullname)
        if source is None:
            raise ImportError(
                f"{fullname}: {self._origin} has no source, which is needed to load it here. "
                "Install chainer==7.8.1 from its source distribution.",
                name=fullname,
                path=self._origin,
            )
        for edit in self._edits:
            if source.count(edit.old) != edit.count:
                raise ImportError(
                    f"{fullname}: {edit.old!r} occurs {source.count(edit.old)} times in "
                    f"{self._origin}, of {_version()} (expected {edit.count}, as in Chainer "
                    f"7.8.1). It has to be replaced, because {edit.reason}. Install "
                    "chainer==7.8.1.",
                    name=fullname,
                    path=self._origin,
                )
            source = source.replace(edit.old, edit.new)
        # No .pyc file is read or written: it would belong to the unchanged source.
        code: CodeType = compile(source, self._origin, "exec", dont_inherit=True)
        return code


class CompatibilityFinder(importlib.abc.MetaPathFinder):
    """Finder of the modules that need an edit here; other finders load all other modules."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "chainerx._core" and numpy_from(2, 0)():
            raise ImportError(
                "chainerx: this Chainer was built with ChainerX, which needs names that NumPy "
                "removed in 2.0. Install chainer==7.8.1 without CHAINER_BUILD_CHAINERX, or "
                "numpy<2.",
                name=fullname,
            )
        edits = needed_edits(fullname)
        if not edits:
            return None
        behind = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
        spec = next((candidate for candidate in behind if candidate is not None), None)
        if spec is None:
            return None
        if spec.origin is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
            raise ImportError(
                f"{fullname}: its loader {type(spec.loader).__name__} gives no source. Install "
                "chainer==7.8.1 as files.",
                name=fullname,
            )
        spec.loader = _Loader(spec.loader, spec.origin, edits)
        spec.cached = None
        return spec


def needed_edits(module: str) -> list[Edit]:
    """Return the edits that ``module`` needs with this Python and the installed packages."""
    return [edit for edit in EDITS.get(module, ()) if edit.needed()]


def install() -> None:
    """Make later imports of ``chainer`` and ``chainermn`` work; idempotent.

    Raises:
        ImportError: an import of Chainer has failed in this process or is in progress. The
            half-imported modules cannot be repaired.

    Warns:
        RuntimeWarning: Chainer was imported before, so that some modules stay unrepaired.
    """
    if any(isinstance(finder, CompatibilityFinder) for finder in sys.meta_path):
        return
    loaded = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    # The version is the last name that importing chainer binds.
    if loaded and not hasattr(sys.modules.get("chainer"), "__version__"):
        raise ImportError(
            f"collective.adapters.chainer: chainer is half-imported ({len(loaded)} of its modules "
            "exist): importing it failed before, or is in progress. Start Python anew and "
            "import collective.adapters.chainer before chainer.",
            name="chainer",
        )
    missed = [name for name in loaded if needed_edits(name)]
    sys.meta_path.insert(0, CompatibilityFinder())
    if missed:
        warnings.warn(
            "chainer was imported before collective.adapters.chainer, so these modules stay "
            f"unrepaired: {', '.join(sorted(missed))}. Import collective.adapters.chainer first.",
            RuntimeWarning,
            stacklevel=2,
        )


def _version() -> str:
    try:
        return f"chainer {importlib.metadata.version('chainer')}"
    except importlib.metadata.PackageNotFoundError:
        return "a chainer that was not installed"
