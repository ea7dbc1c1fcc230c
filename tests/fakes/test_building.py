"""The ABI fake: its build, and the exit of processes that use it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import build, compiler, environment, library_path
from tests.support.interpreter import ROOT, printed, run_python

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

NOT_INITIALIZED = 3


def test_build_is_cached_by_version():
    assert build(22907) == build(22907) != build(21403)
    assert environment(delay_us=3) == {
        "COLLECTIVE_NCCL_LIBRARY": library_path(),
        "COLLECTIVE_CUDA_LIBRARY": library_path(),
        "FAKE_DELAY_US": "3",
    }


def test_build_without_compiler_raises_runtime_error(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C compiler"):
        build.__wrapped__(22907)


def real_headers():
    """Return the folders with NVIDIA's headers: the named ones, or those of the wheels."""
    named = os.environ.get("FAKE_REAL_HEADERS")
    if named:
        return named.split(":")
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec and spec.submodule_search_locations) or ()]
    folders = [folder for root in roots for folder in root.glob("*/include")]
    folders += [folder / "cccl" for folder in folders]
    for header in ("cuda.h", "nccl.h", "crt/host_defines.h", "nv/target"):
        if not any((folder / header).exists() for folder in folders):
            pytest.skip(f"no {header}: pip install --group abi, or set FAKE_REAL_HEADERS=dir:dir")
    return folders


def test_definitions_match_real_headers():
    headers = real_headers()
    folder = os.path.dirname(sys.modules["tests.fakes"].__file__)
    sources = [os.path.join(folder, n) for n in os.listdir(folder) if n.endswith(".c")]
    command = [*compiler(), "-std=c11", "-fsyntax-only", "-Werror", "-DREAL_HEADERS"]
    subprocess.run([*command, *(f"-I{d}" for d in headers), *sources], check=True)


_AT_EXIT = """
import sys; sys.path.insert(0, {root!r})
import numpy as np
from tests.fakes import Fake, FakeArray
fake = Fake()
arrays = [FakeArray.of(np.arange(1000.0), stream=fake.stream(0)) for _ in range(5)]
{then}
"""


@pytest.mark.whole
@pytest.mark.parametrize(
    "then",
    ["fake.knob('hold', 1); FakeArray.of(np.zeros(9))", "fake.knob('delay_us', 3000)", ""],
    ids=["held", "slow", "plain"],
)
def test_interpreter_exits_with_work_on_streams(then):
    script = _AT_EXIT.format(root=str(ROOT), then=then)
    result = run_python("-c", script)
    assert (result.returncode, result.stderr) == (0, "")


def in_python(script, **variables):
    head = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ctypes, os\n"
    head += "from tests.fakes import Fake; fake = Fake(); fake.cuda('cuInit', 0)\n"
    return printed("-W", "ignore", "-c", head + script, **variables).split()


def test_forked_child_gets_not_initialized():
    script = """
child = os.fork()
if not child:
    os._exit(fake.library.cuInit(0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_python(script) == [str(NOT_INITIALIZED)]


def test_device_count_respects_visible_devices():
    script = """
count, bus = ctypes.c_int(), ctypes.create_string_buffer(20)
fake.cuda("cuDeviceGetCount", ctypes.byref(count))
fake.cuda("cuDeviceGetPCIBusId", bus, 20, 0)
print(count.value, bus.value.decode())
"""
    assert in_python(script, FAKE_DEVICES="8", CUDA_VISIBLE_DEVICES="5,2") == ["2", "0000:06:00.0"]
