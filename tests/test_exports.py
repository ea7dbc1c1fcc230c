"""What the modules offer: explicit, sorted, documented, and nothing imported unasked."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import collective

ROOT = Path(__file__).resolve().parent.parent
HEAVY = "torch cupy mpi4py chainer chainermn ml_dtypes pytest hypothesis rich matplotlib".split()


def _modules() -> list[str]:
    found = ["collective"]
    for module in pkgutil.walk_packages(collective.__path__, "collective."):
        if not module.name.endswith("__main__"):
            found.append(module.name)
    return found


MODULES = _modules()


def _import(name: str):
    if name.startswith("collective.adapters."):
        pytest.importorskip(name.split(".")[2])
    return importlib.import_module(name)


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions; each by name. As the linter has it."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_the_folders_beside_the_package_are_looked_at_too():
    assert {"collective.backends.shm.ring", "collective.adapters.torch.arrays"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_all_is_explicit_sorted_and_true(name):
    module = _import(name)
    if name.startswith("collective.testing.checks_"):
        return  # its functions are found by the decorator they carry
    own = [thing for thing in vars(module).values() if getattr(thing, "__module__", "") == name]
    if not own:
        return  # a package of modules, with nothing of its own
    names = getattr(module, "__all__", None)
    assert names is not None, f"{name} has no __all__"
    assert list(names) == sorted(set(names), key=_order), f"{name}.__all__ is not sorted"
    for offered in names:
        assert hasattr(module, offered), f"{name} offers {offered}, which it has not"


def _documented():
    for name in MODULES:
        if name.startswith("collective.adapters."):
            continue
        module = importlib.import_module(name)
        for offered in getattr(module, "__all__", ()):
            thing = getattr(module, offered)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield pytest.param(thing, id=f"{name}.{offered}")


@pytest.mark.parametrize("thing", list(_documented()))
def test_what_is_offered_has_a_docstring(thing):
    assert inspect.getdoc(thing), "no docstring"
    if not inspect.isclass(thing):
        return
    for name, member in vars(thing).items():
        if name.startswith("_") or not callable(getattr(member, "__func__", member)):
            continue
        if inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod, property)):
            # That of the method which it overrides serves as well.
            told = [getattr(vars(base).get(name), "__doc__", "") for base in thing.__mro__]
            assert any(told), f"{thing.__name__}.{name}: no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    assert (_import(name).__doc__ or "").strip(), "no docstring"


def test_everything_can_be_imported_by_name_without_a_communicator():
    namespace: dict[str, object] = {}
    exec("from collective import *", namespace)
    assert set(collective.__all__) <= set(namespace)
    assert not hasattr(collective, "no_such_name")


def test_every_error_is_offered():
    errors = importlib.import_module("collective.errors")
    assert set(errors.__all__) <= set(collective.__all__)


def test_every_call_of_a_communicator_is_a_call_of_the_module():
    own = {"abort", "close", "closed", "listen"}
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
def test_nothing_is_imported_that_the_user_has_not(statement, tmp_path):
    report = f"import sys; {statement}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", report],
        env={"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_package_says_that_it_is_typed():
    assert Path(collective.__file__).with_name("py.typed").exists()
