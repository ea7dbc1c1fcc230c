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
    _link = Path(__file__).parent.parent / "collective" / _room
    if not _link.exists():
        _link.symlink_to(f"../{_room}")

# GNU readline, which pytest imports, tells children how wide the terminal is, behind Python's back.
os.unsetenv("COLUMNS")
# A thread of OpenMP that waits for others spins by default, on cores that other tests need.
os.environ["OMP_WAIT_POLICY"] = "passive"

# What a shell starts in the background, or nohup, ignores these, and hands that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Ranks that are processes come from one that has imported what most need: PyTorch costs each
# nearly two seconds of a processor.
preload(["tests.preloaded"])

# What ``make quick`` runs: of each room the tests that need no other transport than threads, shared
# memory and the loopback, no launcher and no GPU's fake.
QUICK = {
    f"test_{name}.py"
    for name in """
    algorithms arrays choice compression config conformance costs dlpack dtypes errors gradients
    heads objects ops pipelines recorder reduction registry rooms rows shm shm_ring split_windows
    testing tree work
    chainer_functional chainer_optimizer cupy torch_ddp torch_functional
""".split()
}
# Other transports, other numbers of ranks, in the names of tests.
_NOT_QUICK = re.compile(r"gloo|mpich|openmpi|hierarchical|_of_8|\b(threads|shm|loopback)-[148]\b")


# The files that take longest, longest first: ``make test`` hands files out in this order, so that
# none of them is left over when the others are done. The summary tells of one that is missing.
SLOW = """
    mpi_conformance hierarchical benchmarks docs conformance doctor mpi_failures faults
    gloo_conformance nccl_conformance chainermn_launch bench_command hosts parity_faults
    mpi_cuda_aware chainer_transports examples fork broken_transports torch_transports
    torch_examples training_examples packaging splits
""".split()


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
    return collection_path.name not in QUICK or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take long, and leave out the cases that are not quick."""
    order = {f"test_{name}.py": nth for nth, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
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
            known = Path(file).stem.removeprefix("test_") in SLOW
            # One file alone, as of ``make clients``, is begun when it is.
            late = taken > 60 and not known and len(seconds) > 1
            remark = "  (is not in SLOW of tests/conftest.py)" if late else ""
            terminalreporter.line(f"{taken:7.1f} s  {file}{remark}")
