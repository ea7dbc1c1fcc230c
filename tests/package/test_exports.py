"""What the modules offer: explicit, sorted, documented, and nothing imported unasked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import collective
from tests.support.interpreter import printed, run_python

HEAVY = "torch cupy mpi4py chainer chainermn ml_dtypes pytest hypothesis rich matplotlib".split()


def _modules() -> list[str]:
    found = ["collective"]
    for module in pkgutil.walk_packages(collective.__path__, "collective."):
        # An extension's names stand in the .pyi beside it.
        if not module.name.endswith(("__main__", "native._core")):
            found.append(module.name)
    return found


def _installed(name: str) -> bool:
    """Whether the framework of an adapter's module is there."""
    words = name.split(".")
    adapter = words[1:2] == ["adapters"] and len(words) > 2
    return not adapter or importlib.util.find_spec(words[2]) is not None


MODULES = list(filter(_installed, _modules()))


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions; each by name. As the linter has it."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_the_folders_beside_the_package_are_looked_at_too():
    assert {"collective.backends.shm.ring", "collective.adapters.torch.arrays"} <= set(MODULES)


def _wrong_in_all(name: str) -> str | None:
    """Return what is wrong with what a module says that it offers, or None."""
    module = importlib.import_module(name)
    own = [thing for thing in vars(module).values() if getattr(thing, "__module__", "") == name]
    # The functions of checks are found by the decorator they carry; some packages have nothing.
    if name.startswith("collective.testing.checks_") or not own:
        return None
    names = getattr(module, "__all__", None)
    if names is None:
        return f"{name} has no __all__"
    if list(names) != sorted(set(names), key=_order):
        return f"{name}.__all__ is not sorted"
    missing = [offered for offered in names if not hasattr(module, offered)]
    return f"{name} offers {missing}, which it has not" if missing else None


def test_all_is_explicit_sorted_and_true():
    assert [wrong for name in MODULES if (wrong := _wrong_in_all(name))] == []


def _offered() -> Iterator[tuple[str, Any]]:
    for name in MODULES:
        if name.startswith("collective.adapters."):
            continue
        module = importlib.import_module(name)
        for offered in getattr(module, "__all__", ()):
            thing = getattr(module, offered)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield f"{name}.{offered}", thing


def _undocumented(called: str, thing: Any) -> Iterator[str]:
    """Yield the names of what has no docstring of a class or function and its methods."""
    if not inspect.getdoc(thing):
        yield called
    for name, member in vars(thing).items() if inspect.isclass(thing) else ():
        if name.startswith("_") or not callable(getattr(member, "__func__", member)):
            continue
        if inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod, property)):
            # That of the method which it overrides serves as well.
            docs = [getattr(vars(base).get(name), "__doc__", "") for base in thing.__mro__]
            if not any(docs):
                yield f"{called}.{name}"


def test_what_is_offered_has_a_docstring():
    assert [name for called, thing in _offered() for name in _undocumented(called, thing)] == []


def test_every_module_says_what_it_is():
    modules = {name: importlib.import_module(name) for name in MODULES}
    silent = [name for name, found in modules.items() if not (found.__doc__ or "").strip()]
    assert silent == []


def test_everything_can_be_imported_by_name_without_a_communicator():
    namespace: dict[str, object] = {}
    exec("from collective import *", namespace)
    assert set(collective.__all__) <= set(namespace)
    assert not hasattr(collective, "no_such_name")


def test_every_error_is_offered():
    errors = importlib.import_module("collective.errors")
    assert set(errors.__all__) <= set(collective.__all__)


def test_every_call_of_a_communicator_is_a_call_of_the_module():
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
def test_nothing_is_imported_that_the_user_has_not(statement, tmp_path):
    report = f"import sys; {statement}; print([m for m in {HEAVY} if m in sys.modules])"
    done = run_python("-c", report, env={}, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_package_says_that_it_is_typed():
    assert Path(collective.__file__).with_name("py.typed").exists()


RELOAD = """
import copy, importlib, sys
import numpy as np
import collective

def use(comm):
    x = np.ones(3)
    for result in (
        comm.all_reduce(x), comm.broadcast(x), comm.all_gather(x), comm.sendrecv(x, 0, 0),
        comm.all_reduce(x, async_op=True).wait(), comm.plan("all_reduce", x)(),
        comm.plan("all_reduce", x, out=x)(),
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


@pytest.mark.parametrize("core", ["on", "off"])
def test_reload_of_any_module_leaves_communicators_usable(core: str) -> None:
    assert printed("-c", RELOAD, COLLECTIVE_NATIVE=core) == "all right\n"
