"""The native core is compiled for musl, the C library of Alpine Linux, and its ranks run with it.

The tests need musl-gcc (Debian's package musl-tools). They take no Python that was built for musl:
the core is linked, and its protocols run in programs whose ranks are threads. ``musl.sh`` runs
the whole package in such a Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.native.threads import PROGRAMS, build, run
from tests.support.interpreter import ROOT

COMPILER = os.environ.get("MUSL_CC", "musl-gcc")
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(
        shutil.which(COMPILER) is None, reason="no musl-gcc: install musl-tools, or set MUSL_CC"
    ),
]


def test_core_compiles_and_links_without_warning(tmp_path: Path) -> None:
    flags = "-std=gnu11 -O1 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror".split()
    folder = sysconfig.get_path("include")
    sources = sorted((ROOT / "collective" / "native").glob("*.c"))
    core = tmp_path / "_core.so"
    done = subprocess.run(
        [COMPILER, *flags, f"-I{folder}", "-o", core, *sources], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert b"PyInit__core" in core.read_bytes()
    # The loader of musl has this name, and the C library of musl has no version of a symbol.
    assert b"GLIBC_" not in core.read_bytes()


@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_as_threads_call_correctly(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", COMPILER)
    built = build(program, "none", tmp_path)
    assert built is not None
    assert b"ld-musl" in built.read_bytes()
    assert run([str(built)], ranks=3, calls=300, nbytes=4096, seed=1) == "300 calls of 3 ranks\n"
