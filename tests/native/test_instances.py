"""Several instances of the core in a process: reloads, new imports, and other interpreters."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from collective import native
from tests.support.interpreter import ROOT, printed

pytestmark = pytest.mark.skipif(
    native.chosen.extension is None, reason="the native core is not in use"
)

_WORKS = """
import numpy as np
from collective.testing import run_ranks

def total(comm):
    return float(comm.all_reduce(np.ones(3))[0])

assert run_ranks(2, total, backend="threads") == [2.0, 2.0]
assert collective.native.status().startswith("in use"), collective.native.status()
"""
# A communicator made before a reload goes on after it.
_RELOADED = f"""
import importlib
import collective
{_WORKS}
with collective.init("threads", rank=0, size=1) as comm:
    for name in ("collective", "collective.native", "collective.native._core"):
        importlib.reload(importlib.import_module(name))
    assert collective.current() is comm
    assert comm.all_reduce(np.ones(3)).tolist() == [1.0] * 3
{_WORKS}
"""
_IMPORTED_AGAIN = f"""
import sys
import collective
{_WORKS}
core = collective.native._core
for name in [name for name in sys.modules if name.split(".")[0] == "collective"]:
    del sys.modules[name]
import collective
assert collective.native._core is not core
{_WORKS}
"""
_SUBINTERPRETER = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import sys

def run(code):
    number = interpreters.create()
    try:
        raised = interpreters.run_string(number, code)
    except interpreters.RunFailedError as error:  # before Python 3.13
        raised = error
    if raised is not None:
        print(getattr(raised, "formatted", raised))
    interpreters.destroy(number)
"""
# In place of NumPy, which cannot be imported twice: the core asks it only for these.
_ALONE = """
import sys, types
numpy = types.ModuleType("numpy")
numpy.ndarray, numpy.empty, numpy.asarray = type("ndarray", (), {}), None, None
numpy.zeros = numpy.dtype = lambda *args: numpy.ndarray()
sys.modules["numpy"] = numpy
package = types.ModuleType("collective")
package.__path__ = [PATH]
sys.modules["collective"] = package
from collective.native import _core
site = _core.InThread()
assert site.site is None, site.site
site.site = "here"
ring = _core.Ring(["nowhere"])
ring.begin("request")
print(ring.kept(1)[0], ring.kept(1)[2], id(_core.Ring))
"""


def _instance() -> ModuleType:
    spec = importlib.util.find_spec("collective.native._core")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_second_instance_has_types_of_its_own() -> None:
    assert _instance().Ring is not native.chosen.extension.Ring  # type: ignore[union-attr]


def test_dropped_instance_is_collected() -> None:
    module = _instance()
    alive = [weakref.ref(each) for each in (module, module.Ring, module.Door)]
    del module
    gc.collect()
    assert [each() for each in alive] == [None, None, None]


def test_object_outlives_its_dropped_instance() -> None:
    ring = _instance().Ring(["nowhere"])
    gc.collect()
    ring.begin("request")
    assert ring.kept(1)[0] == "request"


class _Callbacks:
    """Callbacks of a Shared, or the object in Python of an exchange, with a reference to it."""

    made: Any


def _shared(callbacks: Any) -> Any:
    return native.shared(
        np.zeros(1 << 17, np.uint8), 0, 2, 8, 1 << 16, 4096, 4096, 512, 1, callbacks
    )


def _plan(callbacks: Any) -> Any:
    return _shared(None).plan(0, 1, 0, None, None, 0, False, None, b"", callbacks)


def _exchange(callbacks: Any) -> Any:
    segment = np.zeros(1 << 17, np.uint8)
    return native.messages(segment, 0, 2, 4096, 4096, 1, False, callbacks)


@pytest.mark.parametrize("make", [_shared, _plan, _exchange])
def test_cycle_through_object_of_core_is_collected(make: Any) -> None:
    callbacks = _Callbacks()
    callbacks.made = make(callbacks)
    alive = weakref.ref(callbacks)
    del callbacks
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("program", [_RELOADED, _IMPORTED_AGAIN], ids=["reload", "new import"])
def test_calls_go_on_after_another_import(program: str) -> None:
    printed("-c", program)


def test_subinterpreter_is_refused_by_one_line() -> None:
    shown = printed("-c", f"import collective\n{_SUBINTERPRETER}\nrun('import collective')")
    assert "collective: NumPy, which collective needs, cannot be imported in a sub" in shown


def test_core_without_a_function_of_numpy_names_that() -> None:
    code = _ALONE.replace("PATH", repr(str(ROOT / "collective"))).replace(", numpy.asarray", "")
    code = code.replace(", None, None", ", None")
    shown = printed("-c", f"{_SUBINTERPRETER}\nrun({code!r})")
    assert "module 'numpy' has no attribute 'asarray'" in shown


def test_core_in_another_interpreter_shares_no_object() -> None:
    code = _ALONE.replace("PATH", repr(str(ROOT / "collective")))
    again = "print(ring.kept(1)[0], _core.InThread().site, id(_core.Ring))"
    shown = printed("-c", f"{_SUBINTERPRETER}\ncode = {code!r}\nexec(code)\nrun(code)\n{again}")
    main, other, main_again = (line.split() for line in shown.splitlines())
    assert main_again == main
    assert other[:2] == ["request", "here"]
    assert other[2] != main[2]
