"""Exports of the modules: their names without an underscore, which have docstrings.

Only packages, modules that hand on names of others, and modules that the reference shows have an
``__all__``, which is sorted and true. Importing the package imports no optional package.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import collective
from collective.errors import BackendUnavailableError
from tests.support.interpreter import ROOT, printed, run_python

HEAVY = [
    *"torch cupy mpi4py chainer chainermn jax optax ray".split(),
    *"ml_dtypes pytest hypothesis rich matplotlib".split(),
]
# Modules of Python that would take a tenth of the time of the package's import. Few processes need
# them, and NumPy imports none of them.
RARE = "importlib.metadata email zipfile concurrent.futures logging".split()


def _modules() -> list[str]:
    names = ["collective"]
    for module in pkgutil.walk_packages(collective.__path__, "collective."):
        # The names of an extension are in the .pyi file beside it.
        # The libraries for XLA are no modules of Python, though their names end like one.
        last = module.name.rpartition(".")[2]
        # Programs import the modules of this folder as mpi4py, which has no __all__ either.
        if ".importable." in module.name:
            continue
        if last not in ("__main__", "_core", "libcollective_xla", "libcollective_ffi"):
            names.append(module.name)
    return names


@functools.cache
def modules() -> list[str]:
    """Return the modules that can be imported with the frameworks that are installed here."""
    return list(filter(_is_complete, _modules()))


def _is_complete(name: str) -> bool:
    """Return whether the frameworks that a module imports are installed."""
    try:
        importlib.import_module(name)
    except (ModuleNotFoundError, BackendUnavailableError) as error:
        missing = error.__cause__ if isinstance(error, BackendUnavailableError) else error
        framework = (getattr(missing, "name", "") or "").partition(".")[0]
        if framework in HEAVY and importlib.util.find_spec(framework) is None:
            return False
        raise
    return True


def _order(name: str) -> tuple[int, str]:
    """Return the sort key of ``__all__``: constants, classes, functions; as in the linter."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_modules_include_folders_beside_package():
    assert {"collective.backends.shm.ring", "collective.adapters.torch.arrays"} <= set(_modules())


def _own(name: str) -> dict[str, Any]:
    """Return the classes and functions that a module defines, by name."""
    things = vars(importlib.import_module(name)).items()
    return {own: thing for own, thing in things if getattr(thing, "__module__", "") == name}


@functools.cache
def _shown() -> set[str]:
    """Return the modules, and the names in them, that the reference shows."""
    pages = (ROOT / "docs" / "reference").glob("**/*.md")
    return {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)}


def _hands_on(module: Any, names: list[str]) -> bool:
    """Return whether a module offers names that it imports, or imports late."""
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    imported = {alias.name for node in imports for alias in node.names}
    return not imported.isdisjoint(names) or not set(names) <= vars(module).keys()


def _wrong_in_all(name: str) -> str | None:
    """Return a text that says what is wrong with a module's ``__all__``, or None."""
    module = importlib.import_module(name)
    is_package = hasattr(module, "__path__")
    names = getattr(module, "__all__", None)
    if names and not (is_package or name in _shown() or _hands_on(module, names)):
        return f"{name}.__all__ repeats what the underscores say"
    if not _own(name):  # some packages define nothing
        return None
    if names is None:
        return f"{name} has no __all__" if is_package else None
    if list(names) != sorted(set(names), key=_order):
        return f"{name}.__all__ is not sorted"
    missing = [offered for offered in names if not hasattr(module, offered)]
    return f"{name} offers {missing}, which it has not" if missing else None


def test_all_is_in_packages_and_facades_only_sorted_and_true():
    assert [wrong for name in modules() if (wrong := _wrong_in_all(name))] == []


def _offered() -> Iterator[tuple[str, Any]]:
    for name in modules():
        if name.startswith("collective.adapters."):
            continue
        module = importlib.import_module(name)
        public = [own for own in _own(name) if not own.startswith("_")]
        for offered in getattr(module, "__all__", public):
            thing = getattr(module, offered)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield f"{name}.{offered}", thing


def _undocumented(called: str, thing: Any) -> Iterator[str]:
    """Yield the names without docstring among a class or function and its methods."""
    if not inspect.getdoc(thing):
        yield called
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        if name.startswith("_") or not callable(getattr(member, "__func__", member)):
            continue
        if inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod, property)):
            # The docstring of the overridden method is sufficient.
            docs = [getattr(vars(base).get(name), "__doc__", "") for base in thing.__mro__]
            if not any(docs):
                yield f"{called}.{name}"


def test_exports_have_docstrings():
    assert [name for called, thing in _offered() for name in _undocumented(called, thing)] == []


def test_modules_have_docstrings():
    imported = {name: importlib.import_module(name) for name in modules()}
    silent = [name for name, module in imported.items() if not (module.__doc__ or "").strip()]
    assert silent == []


def test_star_import_gives_all_names_without_communicator():
    namespace: dict[str, object] = {}
    exec("from collective import *", namespace)
    assert set(collective.__all__) <= set(namespace)
    assert not hasattr(collective, "no_such_name")


def test_errors_are_all_exported():
    errors = importlib.import_module("collective.errors")
    assert set(errors.__all__) <= set(collective.__all__)


def test_communicator_calls_are_functions_of_package():
    own = {"abort", "close", "closed", "fail", "leave", "listen"}
    calls = {
        name
        for name, member in inspect.getmembers(collective.Communicator)
        if not name.startswith("_") and inspect.isfunction(member)
    }
    assert calls - own <= set(collective.__all__)


@pytest.mark.parametrize(
    "statement",
    [
        "import collective",
        "import collective, numpy; collective.init().all_reduce(numpy.ones(2))",
        "import collective, numpy; collective.init('shm').all_reduce(numpy.ones(2))",
        "import collective.testing",
        "import collective.tools.cli.main",
    ],
)
def test_import_loads_no_optional_package(statement, tmp_path):
    report = f"import sys; {statement}; print([m for m in {HEAVY} if m in sys.modules])"
    done = run_python("-c", report, env={}, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_import_loads_no_rarely_needed_module_of_python(tmp_path):
    report = f"import sys, collective; print([m for m in {RARE} if m in sys.modules])"
    done = run_python("-c", report, env={}, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_package_has_typed_marker():
    assert Path(collective.__file__).with_name("py.typed").exists()


RELOAD = """
import copy, importlib, sys
import numpy as np
import collective

def use(comm):
    x = np.ones(3)
    for result in (
        comm.all_reduce(x), comm.broadcast(x), comm.all_gather(x), comm.sendrecv(x, 0, 0),
        comm.all_reduce(x, async_op=True).wait(), comm.all_reduce(x, out=x),
    ):
        assert result.tolist() == [1.0] * 3
    comm.barrier()
    assert comm.all_gather_object("text") == ["text"]
    copy.copy(comm).barrier()

with collective.init("threads") as before:
    modules = [name for name in sys.modules
               if name == "collective" or name.startswith("collective.communicator")]
    assert "collective.communicator.communicator" in modules
    for name in modules + modules[::-1]:
        importlib.reload(sys.modules[name])
        use(before)
        with collective.init("threads") as after:
            use(after)
print("all right")
"""


@pytest.mark.parametrize("disabled", ["", "native"])
def test_reload_of_any_module_keeps_communicators_usable(disabled: str) -> None:
    assert printed("-c", RELOAD, COLLECTIVE_DISABLE=disabled) == "all right\n"


@pytest.mark.parametrize("name", ["ANY_SOURCE", "NULL"])
def test_number_in_place_of_a_rank_prints_its_name(name: str) -> None:
    number = getattr(collective, name)
    assert repr(number) == str(number) == f"collective.{name}"
    assert json.loads(json.dumps(number)) == number


@pytest.mark.parametrize("name", ["ANY_SOURCE", "NULL"])
def test_copy_of_a_number_in_place_of_a_rank_prints_its_name(name: str) -> None:
    number = getattr(collective, name)
    copied = pickle.loads(pickle.dumps(number))
    assert copied == number
    assert repr(copied) == f"collective.{name}"
