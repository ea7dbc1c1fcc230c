"""The package with the native core, and without it."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import collective
from collective import native
from collective.algorithms import arithmetic
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op
from tests.support.interpreter import ROOT, printed, run


def python(*arguments: str, **variables: str) -> str:
    """Run this interpreter in the repository; return its output, or fail with the output."""
    return printed(*arguments, merged=True, **variables)


@pytest.fixture
def chosen():
    """Restore the choice of the core after the test."""
    before = native.chosen.extension, native.chosen.reason
    yield
    native.chosen.extension, native.chosen.reason = before


def test_build_without_compiler_succeeds_without_core(tmp_path: Path) -> None:
    # Call setuptools directly, as pip would do.
    words = ["setup.py", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    output = python("-W", "ignore", *words, CC="/bin/false")
    assert 'building extension "collective.native._core" failed' in output
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("width", ["-m32", "-m64"])
def test_core_compiles_only_for_64_bits(width: str, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    # A freestanding program needs no C library, which is seldom installed for 32 bits.
    command = ["cc", width, "-std=gnu11", "-ffreestanding", "-fsyntax-only", "-x", "c"]
    empty = tmp_path / "empty.c"
    empty.touch()
    if run(*command, empty).returncode:
        pytest.skip(f"the compiler has no {width}")
    done = run(*command, ROOT / "collective" / "native" / "core.h", merged=True)
    if width == "-m64":
        assert done.returncode == 0, done.stdout
    else:
        assert "the native core needs a 64-bit platform" in done.stdout


def test_core_counts_references_with_headers_of_newer_pythons(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    singletons = ("None", "True", "False", "NotImplemented")
    # As the headers of Python 3.12 and newer define them.
    lines = [f"#define Py_RETURN_{name.upper()} return Py_{name}\n" for name in singletons]
    (tmp_path / "Python.h").write_text("".join(lines))
    (tmp_path / "pyconfig.h").touch()
    probes = [f"Py_RETURN_{name.upper()};\n" for name in singletons]
    (tmp_path / "probe.c").write_text('#include "python.h"\n' + "".join(probes))
    native = ROOT / "collective" / "native"
    done = run("cc", "-E", "-P", "-I", tmp_path, "-I", native, tmp_path / "probe.c", merged=True)
    wanted = [f"return Py_NewRef(Py_{name});" for name in singletons]
    assert done.stdout.splitlines()[-len(wanted) :] == wanted


def test_doctor_on_32_bits_says_why_there_is_no_core() -> None:
    program = (
        "import sys; sys.maxsize = 2**31 - 1; sys.modules['collective.native._core'] = None\n"
        "from collective.tools.doctor import _native; print(_native(None))"
    )
    assert python("-c", program, COLLECTIVE_DISABLE="") == (
        "not in use: not built: it needs a 64-bit Python\n"
    )


def test_extension_of_another_protocol_is_not_used() -> None:
    extension, reason = native._checked(SimpleNamespace(PROTOCOL=native.PROTOCOL + 1))
    assert extension is None
    assert reason == (
        f"built for protocol {native.PROTOCOL + 1}, but this package has protocol "
        f"{native.PROTOCOL}; build it again: pip install -e ."
    )


def test_status_without_core_says_not_built() -> None:
    # An entry of None in sys.modules stands for a missing module.
    program = (
        "import sys; sys.modules['collective.native._core'] = None\n"
        "from collective import native; print(native.status())"
    )
    assert python("-c", program, COLLECTIVE_DISABLE="") == (
        "not in use: not built: a wheel without it, or no C compiler at installation\n"
    )


def test_method_has_source_without_core() -> None:
    program = (
        "import sys; sys.modules['collective.native._core'] = None\n"
        "import collective, inspect\n"
        "with collective.init(size=1, rank=0) as comm:\n"
        "    print(inspect.getsource(comm.all_reduce), end='')"
    )
    source = inspect.getsource(inspect.unwrap(collective.Communicator.all_reduce))
    assert python("-c", program, COLLECTIVE_DISABLE="") == source


def test_variable_switches_core_off() -> None:
    program = "from collective import native; print(native.status(), native.chosen.extension)"
    assert python("-c", program, COLLECTIVE_DISABLE="native") == "not in use: switched off None\n"


def test_setting_switches_core_off() -> None:
    program = (
        "import collective; from collective import native\n"
        "collective.init(disable='native').close(); print(native.status())"
    )
    assert python("-c", program, COLLECTIVE_DISABLE="") == "not in use: switched off\n"


def test_fold_is_reference_when_core_is_off(chosen: None) -> None:
    native.switch(False)
    reference = arithmetic.reference("max", BY_NAME["float32"])
    assert arithmetic.fold(as_op("max"), BY_NAME["float32"]) is reference
    assert native.fold("max", BY_NAME["float32"].code, reference) is reference


def test_core_knows_dtype_codes() -> None:
    core = pytest.importorskip("collective.native._core", reason="the native core is not built")
    for dtype in BY_NAME.values():
        function = core.make_fold("max", dtype.code, None)
        assert (function is None) == (dtype.kind == "c" or dtype.name.startswith("float8")), dtype
        if function is not None:
            a, b = np.zeros(3, dtype.storage), np.ones(3, dtype.storage)
            function(a, b, out=a)
            np.testing.assert_array_equal(a, b)
