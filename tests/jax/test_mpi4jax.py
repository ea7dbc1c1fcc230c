"""mpi4jax's own tests over :mod:`collective.adapters.jax.functional`, by a shim of its functions.

The tests are in mpi4jax's source archive, which is kept in the environment after the first run.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, run_python

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

VERSION = "0.9.1.post2"
SHIM = Path(__file__).with_name("mpi4jax_shim")
#: Tests of mpi4jax's own log, of its bridge to MPI, and of the text of MPI's error.
INTERNALS = {
    "test_abort_on_error", "test_debug_logging", "test_mpi_abi_compatibility_check",
    "test_mpi_abi_info", "test_mpi_abi_skip_check", "test_set_logging_from_envvar",
}  # fmt: skip
PASSED = 94 - len(INTERNALS)  # in the folder collective_ops


@pytest.fixture(scope="module")
def source() -> Path:
    """Return the folder of mpi4jax's sources."""
    folder = Path(sys.prefix) / f"mpi4jax-{VERSION}"
    archive = folder.with_suffix(folder.suffix + ".tar.gz")
    if not archive.exists():
        done = run_python(
            "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "mpi4jax",
            "--dest", archive.parent, f"mpi4jax=={VERSION}", timeout=600.0,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"pip cannot download mpi4jax {VERSION}")
    if not folder.exists():
        with tarfile.open(archive) as file:
            file.extractall(archive.parent, filter="data")
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 4])
def test_tests_of_mpi4jax_pass(source: Path, size: int, tmp_path: Path) -> None:
    others = ("test_jax_transforms.py", "test_has_cuda.py", "test_has_sycl.py")
    done = run_python(
        "-m", "collective", "run", "-n", size, "--backend", "shm", "-m", "pytest",
        source / "tests" / "collective_ops", *(source / "tests" / name for name in others),
        "-c", "/dev/null", "-p", "patience", "-p", "no:cacheprovider", "-rf", "--tb=short",
        "--timeout=200", cwd=tmp_path, timeout=850.0,
        COLLECTIVE_TIMEOUT="60", PYTHONPATH=f"{SHIM}:{ROOT}", TMPDIR=str(tmp_path),
    )  # fmt: skip
    for rank in range(size):
        output = "\n".join(re.findall(rf"^\[{rank}\] (.*)$", done.stdout, re.MULTILINE))
        failed = set(re.findall(r"^FAILED \S+::(\w+)", output, re.MULTILINE))
        assert failed <= INTERNALS, f"rank {rank}:\n{output}"
        if rank == 0:  # rank 0 skips no test
            assert failed == INTERNALS, f"rank {rank}:\n{output}"
            assert f"{len(failed)} failed, {PASSED + len(others)} passed" in output
