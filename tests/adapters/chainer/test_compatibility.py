"""Edits of Chainer's source that make it importable, and the cases without or against an edit.

Most tests start their own Python process, because a process imports Chainer only once.
"""

from __future__ import annotations

import ast
import compileall
import importlib
import importlib.util
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.arrays")

import chainer

from collective.adapters.chainer import compatibility
from collective.adapters.chainer.compatibility import edits as compatibility_edits
from collective.adapters.chainer.compatibility import requirements
from collective.adapters.chainer.compatibility.edits import EDITS, Edit
from tests.support.interpreter import ROOT, run_python

INSTALLED = Path(chainer.__file__).parent.parent
ON_NUMPY_2 = int(np.__version__.split(".")[0]) >= 2


def python(text: str, *options: str, path: Any = None) -> str:
    """Run a program with ``path`` and this project on its import path; return its output."""
    paths = os.pathsep.join(str(folder) for folder in (path, ROOT) if folder)
    done = run_python(*options, "-c", textwrap.dedent(text), PYTHONPATH=paths)
    return done.stdout + done.stderr


def source_of(module: str) -> str:
    path = INSTALLED / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def edited(module: str) -> str:
    text = source_of(module)
    for edit in EDITS[module]:
        text = text.replace(edit.old, edit.new)
    return text


# -- the edits -------------------------------------------------------------------------------


@pytest.mark.parametrize("module", EDITS)
def test_edit_text_occurs_in_installed_chainer_as_often_as_stated(module: str) -> None:
    for edit in EDITS[module]:
        assert source_of(module).count(edit.old) == edit.count
        assert edit.reason
    assert list(EDITS) == sorted(EDITS)


@pytest.mark.parametrize("module", EDITS)
def test_edited_module_keeps_line_of_every_other_statement(module: str) -> None:
    """Check that every line without an edit is unchanged and in its place."""
    before, after = source_of(module).splitlines(), edited(module).splitlines()
    assert len(before) == len(after)
    changed = [k for k, (old, new) in enumerate(zip(before, after)) if old != new]
    assert 0 < len(changed) <= sum(edit.count for edit in EDITS[module])
    ast.parse(edited(module))


def test_finder_ignores_modules_without_edits() -> None:
    finder = compatibility.CompatibilityFinder()
    for name in ("chainer", "chainer.links", "chainermn.links", "numpy", "json"):
        assert finder.find_spec(name, None) is None


def edits_with(numpy: str, setuptools: str, monkeypatch: Any) -> dict[str, list[Edit]]:
    """Return the edits that are needed with these versions of NumPy and setuptools."""
    spec = importlib.util.find_spec(compatibility_edits.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(np, "__version__", numpy)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: setuptools)
    needed = {
        name: [edit for edit in edits if edit.needed()] for name, edits in module.EDITS.items()
    }
    return {name: edits for name, edits in needed.items() if edits}


def test_older_numpy_and_setuptools_need_fewer_edits(monkeypatch: Any) -> None:
    edits = edits_with("1.24.4", "65.5.0", monkeypatch)
    assert "chainer.functions.array.as_strided" not in edits
    assert "chainer.distributions.categorical" not in edits
    assert "chainermn.iterators.multi_node_iterator" not in edits
    assert ("chainer.testing.helper" in edits) == (sys.version_info >= (3, 12))
    assert "chainer.links.activation.maxout" not in edits
    assert "chainer.functions.array.resize_images" in edits
    assert set(edits) == {
        name for name in edits if all("NumPy 2" not in e.reason for e in edits[name])
    }


@pytest.mark.parametrize("version", ["2.5.0", "2.5.0rc1", "2.6.0.dev0+git2026", "3.0.1"])
def test_newer_numpy_needs_all_edits(version: str, monkeypatch: Any) -> None:
    assert set(edits_with(version, "84.0", monkeypatch)) == set(EDITS)


def test_finder_ignores_module_whose_edits_are_not_needed(monkeypatch: Any) -> None:
    finder = compatibility.CompatibilityFinder()
    name, path = "chainer.functions.array.as_strided", [str(INSTALLED / "chainer/functions/array")]
    monkeypatch.setitem(
        EDITS, name, tuple(Edit(e.old, e.new, e.reason, lambda: False) for e in EDITS[name])
    )
    assert finder.find_spec(name, path) is None


# -- importing -------------------------------------------------------------------------------


def test_import_of_chainermn_prints_no_warning_and_leaves_no_traces() -> None:
    seen = python(
        """
        import sys
        import numpy
        had = set(vars(numpy))
        from collective.adapters.chainer.compatibility.edits import without_pkg_resources
        import chainer, chainermn
        from chainer.functions.array import as_strided, resize_images
        from chainermn.functions.batch_normalization import get_communication_backend

        print(chainer.__version__, get_communication_backend(None))
        new = {n for n in set(vars(numpy)) - had if "numpy." + n not in sys.modules}
        print(sorted(new & {"sctypes", "float", "int", "bool", "object"}))
        gone = {"mpi4py"} | ({"pkg_resources"} if without_pkg_resources() else set())
        print([n for n in sys.modules if n.partition(".")[0] in gone
               or n.startswith(("numpy.distutils", "chainermn.communicators.pure_nccl"))])
        for module in (as_strided, resize_images, chainer.links):
            print(type(module.__loader__).__name__, module.__file__ == module.__spec__.origin)
        """,
        "-W",
        "error",
    ).splitlines()
    first = "_Loader True" if ON_NUMPY_2 else "SourceFileLoader True"
    assert seen == ["7.8.1 mpi", "[]", "[]", first, "_Loader True", "SourceFileLoader True"]


def test_edited_module_shows_installed_source_lines(tmp_path: Path) -> None:
    resize = importlib.import_module("chainer.functions.array.resize_images")
    lines = source_of("chainer.functions.array.resize_images").splitlines()
    first = resize.ResizeImages.__init__.__code__.co_firstlineno
    assert "def __init__" in lines[first - 1]
    assert resize.__loader__.get_source(resize.__name__) == "\n".join(lines) + "\n"


def test_import_after_chainer_warns_about_unedited_modules() -> None:
    seen = python("""
        import numpy as np, sys, types
        # Programs that repair the import themselves do this.
        np.sctypes = {"int": [np.int32], "float": [np.float32]}
        for name in ("pkg_resources", "numpy.distutils", "numpy.distutils.system_info"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["pkg_resources"].require = lambda text: None
        import chainer
        import collective.adapters.chainer
        print(chainer.Variable is not None)
        """)
    assert "True" in seen
    assert "RuntimeWarning: chainer was imported before collective.adapters.chainer" in seen
    assert "chainer.functions.array.resize_images" in seen


def test_evaluator_without_iterator_can_be_finalized() -> None:
    # ChainerMN's seq2seq example has such an evaluator.
    evaluator = chainer.training.extensions.Evaluator({"main": None}, chainer.Link())
    evaluator.finalize()


def test_numpy_variable_reports_cpu_device() -> None:
    assert "- device: CPU\n" in chainer.Variable(np.ones(2, np.float32)).debug_print()


@pytest.mark.skipif(not ON_NUMPY_2, reason="on NumPy 1 Chainer can be imported")
def test_import_after_failed_chainer_import_raises_import_error() -> None:
    seen = python("""
        try:
            import chainer
        except (AttributeError, ImportError):
            pass
        import collective.adapters.chainer
        """)
    assert "ImportError: collective.adapters.chainer: chainer is half-imported" in seen
    assert "Start Python anew" in seen


# -- cases without a remedy ------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a folder with a package ``chainer`` of another version."""
    package = tmp_path / "chainer" / "functions" / "array"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "resize_images.py").write_text("import numpy\nkind = numpy.float64\n")
    return tmp_path


def test_chainer_version_without_edit_text_raises_import_error(other: Path) -> None:
    seen = python(
        "import collective.adapters.chainer, chainer.functions.array.resize_images", path=other
    )
    assert (
        "ImportError: chainer.functions.array.resize_images: 'numpy.float)' occurs 0 times" in seen
    )
    assert f"{other}" in seen
    assert "NumPy 1.24 has no float" in seen
    assert "Install chainer==7.8.1." in seen


def test_chainer_without_source_raises_import_error(other: Path) -> None:
    compileall.compile_dir(other, quiet=1, legacy=True)
    (other / "chainer/functions/array/resize_images.py").unlink()
    seen = python(
        "import collective.adapters.chainer, chainer.functions.array.resize_images", path=other
    )
    assert "has no source" in seen


@pytest.mark.skipif(not ON_NUMPY_2, reason="on NumPy 1 ChainerX can be imported")
def test_chainerx_import_raises_import_error(tmp_path: Path) -> None:
    package = tmp_path / "chainerx"
    package.mkdir()
    (package / "__init__.py").write_text("from chainerx import _core\n")
    (package / "_core.py").touch()
    seen = python("import collective.adapters.chainer, chainerx", path=tmp_path)
    assert "ImportError: chainerx: this Chainer was built with ChainerX" in seen
    assert "without CHAINER_BUILD_CHAINERX, or numpy<2" in seen


# -- replacements for removed packages -------------------------------------------------------


def test_require_checks_versions_as_pkg_resources() -> None:
    requirements.require("numpy>=1.0", "chainer==7.8.1")
    with pytest.raises(requirements.VersionConflict, match=r"numpy<1: .* is installed"):
        requirements.require("numpy<1")
    with pytest.raises(requirements.DistributionNotFound):
        requirements.require("no-such-package>=1")
    assert issubclass(requirements.VersionConflict, requirements.ResolutionError)


def test_chainer_with_requires_decorator_skips_on_unmet_requirement() -> None:
    # A separate process runs this: under pytest, Chainer's test tools require their own markers.
    seen = python("""
        import collective.adapters.chainer
        from chainer import testing

        for text in ("numpy>=1", "numpy<1", "no-such-package"):
            test = testing.with_requires(text)(lambda: None)
            print(getattr(test, "__unittest_skip__", False), end=" ")
        """)
    assert seen == "False True True "


def test_chainer_environment_check_warns_of_unknown_cupy(monkeypatch: Any) -> None:
    def distribution(name: str) -> Any:
        if name == "cupy":
            return SimpleNamespace(version="14.2.0rc1")
        raise requirements.DistributionNotFound(name)

    monkeypatch.setattr(requirements, "get_distribution", distribution)
    check = importlib.import_module("chainer._environment_check")
    if check.pkg_resources is not requirements:
        pytest.skip("this setuptools has pkg_resources itself")
    with pytest.warns(UserWarning, match=r"CuPy \(cupy\) version 14.2.0rc1 may not be compatible"):
        check.check()


def test_nccl_query_imports_no_mpi_and_recognises_pure_nccl(
    monkeypatch: Any,
) -> None:
    normalization = importlib.import_module("chainermn.functions.batch_normalization")
    optimizers = importlib.import_module("chainermn.optimizers")
    name = "chainermn.communicators.pure_nccl_communicator"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert normalization.get_communication_backend(object()) == "mpi"
    with pytest.raises(ValueError, match="does not support double buffering"):
        optimizers.create_multi_node_optimizer(object(), object(), double_buffering=True)
    assert name not in sys.modules

    module = ModuleType(name)
    module.PureNcclCommunicator = type("PureNcclCommunicator", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    assert normalization.get_communication_backend(module.PureNcclCommunicator()) == "nccl"
