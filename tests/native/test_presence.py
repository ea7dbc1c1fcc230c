"""The native core is used where it is, and missed by nobody where it isn't."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import collective
from collective import native
from collective.algorithms import arithmetic
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op
from tests.support.interpreter import printed


def python(*arguments: str, **variables: str) -> str:
    """Run this interpreter in the repository; return its output, or fail with it."""
    return printed(*arguments, merged=True, **variables)


@pytest.fixture
def chosen():
    """Leave the choice as it was found."""
    before = native.chosen.extension, native.chosen.reason
    yield
    native.chosen.extension, native.chosen.reason = before


def test_a_build_without_a_compiler_succeeds_without_the_core(tmp_path: Path) -> None:
    # Setuptools builds it by itself, where pip would have it done.
    words = ["setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    output = python("-W", "ignore", *words, CC="/bin/false")
    assert 'building extension "collective.native._core" failed' in output
    assert not list(tmp_path.rglob("*.so"))


def test_an_extension_of_another_protocol_is_not_used() -> None:
    found, reason = native._checked(SimpleNamespace(PROTOCOL=native.PROTOCOL + 1))
    assert found is None
    assert reason == (
        f"built for protocol {native.PROTOCOL + 1}, but this package has protocol "
        f"{native.PROTOCOL}; build it again: pip install -e ."
    )


def test_a_core_that_is_not_built_is_said_not_to_be() -> None:
    # An entry of None is a module that there isn't.
    program = (
        "import sys; sys.modules['collective.native._core'] = None\n"
        "from collective import native; print(native.status())"
    )
    assert python("-c", program, COLLECTIVE_NATIVE="") == (
        "not in use: not built: a wheel without it, or no C compiler at installation\n"
    )


def test_a_method_shows_its_source_without_the_core() -> None:
    program = (
        "import sys; sys.modules['collective.native._core'] = None\n"
        "import collective, inspect\n"
        "with collective.init(size=1, rank=0) as comm:\n"
        "    print(inspect.getsource(comm.all_reduce), end='')"
    )
    source = inspect.getsource(inspect.unwrap(collective.Communicator.all_reduce))
    assert python("-c", program, COLLECTIVE_NATIVE="") == source


def test_the_variable_switches_it_off() -> None:
    program = "from collective import native; print(native.status(), native.chosen.extension)"
    assert python("-c", program, COLLECTIVE_NATIVE="off") == "not in use: switched off None\n"


def test_the_setting_switches_it_off() -> None:
    program = (
        "import collective; from collective import native\n"
        "collective.init(native='off').close(); print(native.status())"
    )
    assert python("-c", program, COLLECTIVE_NATIVE="") == "not in use: switched off\n"


def test_folds_are_the_reference_where_it_is_switched_off(chosen: None) -> None:
    native.switch(False)
    reference = arithmetic.reference("max", BY_NAME["float32"])
    assert arithmetic.fold(as_op("max"), BY_NAME["float32"]) is reference
    assert native.fold("max", BY_NAME["float32"].code, reference) is reference


def test_the_core_understands_the_codes_of_the_dtypes() -> None:
    core = pytest.importorskip("collective.native._core", reason="the native core is not built")
    for dtype in BY_NAME.values():
        made = core.make_fold("max", dtype.code, None)
        assert (made is None) == (dtype.kind == "c" or dtype.name.startswith("float8")), dtype
        if made is not None:
            a, b = np.zeros(3, dtype.storage), np.ones(3, dtype.storage)
            made(a, b, out=a)
            np.testing.assert_array_equal(a, b)
