"""What holds for all tests: they run as if no launcher, setting or shell's ``&`` were there."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from collective.testing import preload

_TESTS = Path(__file__).resolve().parent
_PREFIXES = ("COLLECTIVE_", "HYDRA_", "I_MPI_", "MPI_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES |= {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}

for _name in list(os.environ):
    # The suite can be run without the native core: COLLECTIVE_NATIVE=off.
    if _name != "COLLECTIVE_NATIVE" and (_name in _NAMES or _name.startswith(_PREFIXES)):
        del os.environ[_name]

# An example takes as long as the machine is busy. Where tests/gpu runs it need not be installed.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("busy", deadline=None)
    settings.load_profile("busy")

# An sdist has no links; in the repository they are there.
for _room in ("adapters", "backends"):
    _link = _TESTS.parent / "collective" / _room
    if not _link.exists():
        _link.symlink_to(f"../{_room}")

# GNU readline, which pytest imports, tells children how wide the terminal is, behind Python's back.
os.unsetenv("COLUMNS")
# A thread of OpenMP that waits for others spins by default, on cores that other tests need.
os.environ["OMP_WAIT_POLICY"] = "passive"
# A thread of OpenBLAS spins, too, from NumPy's import on: a seventh of what all processes take.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# What a shell starts in the background, or nohup, ignores these, and hands that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Ranks that are processes come from one that has imported what most need: PyTorch costs each
# nearly two seconds of a processor.
preload(["tests.support.preloaded"])

# What ``make quick`` runs: of each room the tests that need no other transport than threads, shared
# memory and the loopback, no launcher and no GPU's fake.
QUICK = """
    adapters/chainer/functional adapters/chainer/optimizer
    adapters/cupy/arrays adapters/torch/ddp adapters/torch/functional
    algorithms/arithmetic algorithms/costs algorithms/moves
    backends/shm/ring backends/shm/transport backends/conformance
    communicator/heads communicator/objects communicator/rows
    contract/recorder contract/registry contract/work memory/arrays
    memory/dlpack memory/dtypes memory/nested meta/rooms
    package/errors package/ops start/choice start/config
    testing/kit training/splits/windows training/compression
    training/gradients training/pipelines
""".split()
# Other transports, other numbers of ranks, in the names of tests.
_NOT_QUICK = re.compile(r"gloo|mpich|openmpi|hierarchical|_of_8|\b(threads|shm|loopback)-[148]\b")


# The files that take longest, longest first: ``make test`` hands files out in this order, so that
# none of them is left over when the others are done. The summary tells of one that is missing.
SLOW = """
    backends/mpi/conformance backends/hierarchical/transport
    system/benchmarks docs/pages backends/conformance tools/doctor
    backends/mpi/failures backends/faults backends/gloo/conformance
    backends/nccl/conformance adapters/chainer/chainermn/launch
    tools/bench_command system/hosts tools/parity_faults
    backends/mpi/cuda_aware adapters/chainer/transports system/examples
    contract/forking meta/broken_transports adapters/torch/transports
    adapters/torch/plugin_programs system/training_examples system/packaging
    training/splits/cuts
""".split()


def _key(path: Path) -> str:
    """Return how QUICK and SLOW name a file of tests: ``room/module``."""
    if not path.is_relative_to(_TESTS):
        return path.stem
    room = path.relative_to(_TESTS).parent
    return str(room / path.stem.removeprefix("test_"))


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave no source of settings: no variables, and below a directory without files."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")}
    monkeypatch.setattr(os, "environ", kept)
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return inner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="what changes break first, in 2 minutes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that are not quick, without importing them."""
    if not config.getoption("quick") or collection_path.is_dir():
        return None
    return _key(collection_path) not in QUICK or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take long, and leave out the cases that are not quick."""
    order = {key: nth for nth, key in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(_key(item.path), len(order)))
    if config.getoption("quick"):
        slow = [item for item in items if _NOT_QUICK.search(item.name)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not _NOT_QUICK.search(item.name)]


def pytest_collection_finish() -> None:
    """Keep the tests themselves out of every collection of garbage: a third of a second each."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ten files that took longest, and which of them should begin earlier."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > 60:
        terminalreporter.section("slowest files")
        for file, taken in seconds.most_common(10):
            known = _key(_TESTS.parent / file) in SLOW
            # One file alone, as of ``make clients``, is begun when it is.
            late = taken > 60 and not known and len(seconds) > 1
            remark = "  (is not in SLOW of tests/conftest.py)" if late else ""
            terminalreporter.line(f"{taken:7.1f} s  {file}{remark}")
