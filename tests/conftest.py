"""Setup of all tests: they run without a launcher's variables, settings, or ignored signals."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent

# The repository has these links, an sdist does not. The package needs them when it is imported.
for _room in ("adapters", "backends"):
    _link = _TESTS.parent / "collective" / _room
    if not _link.exists():
        _link.symlink_to(f"../{_room}")

from collective.testing import preload  # noqa: E402
from tests.support.selection import SLOW, WHOLE, key, may_run, one_of_each  # noqa: E402

_PREFIXES = ("COLLECTIVE_", "HYDRA_", "I_MPI_", "MPI_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES |= {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}

for _name in list(os.environ):
    # COLLECTIVE_DISABLE stays, because the suite can run without the native core (=native).
    if _name != "COLLECTIVE_DISABLE" and (_name in _NAMES or _name.startswith(_PREFIXES)):
        del os.environ[_name]

# On a busy machine an example of Hypothesis may exceed any deadline. A machine that runs only
# tests/gpu may lack Hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("busy", deadline=None)
    settings.load_profile("busy")

# GNU readline, which pytest imports, sets COLUMNS for child processes without os.environ.
os.unsetenv("COLUMNS")
# By default a waiting OpenMP thread spins, on cores that other tests need.
os.environ["OMP_WAIT_POLICY"] = "passive"
# OpenBLAS threads spin, too, from the import of NumPy on: a seventh of all processor time.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A process started by nohup, or in the background of a shell, ignores these signals, and its
# children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Ranks that are processes are forked from a process with the common modules, because the import of
# PyTorch takes each rank nearly 2 s of processor time.
preload(["tests.support.preloaded"])


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Remove all sources of settings: delete variables, and change to a folder without files."""
    environ = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")}
    monkeypatch.setattr(os, "environ", environ)
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return inner


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once",
        action="store_true",
        help="prove each fact once; tests/support/selection.py says how",
    )
    parser.addoption("--quick", action="store_true", help="run only the quick tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the files that --quick or --once omits, without importing them."""
    if collection_path.suffix != ".py":
        return None
    if config.getoption("quick") or config.getoption("once"):
        mark = "quick" if config.getoption("quick") else "once"
        return not may_run(collection_path, mark) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the cases that --quick or --once omits, and put the slow files first."""
    kept = items
    if config.getoption("quick"):
        kept = one_of_each([item for item in kept if item.get_closest_marker("quick")])
    elif config.getoption("once"):
        kept = one_of_each(kept, WHOLE)
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    order = {file: nth for nth, file in enumerate(SLOW)}
    items[:] = sorted(kept, key=lambda item: order.get(key(item.path), len(order)))


def pytest_collection_finish() -> None:
    """Exclude the test modules from garbage collections, each of which would take 0.3 s longer."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ten slowest files, and mark slow files that SLOW does not list."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > 60:
        terminalreporter.section("slowest files")
        for file, taken in seconds.most_common(10):
            known = key(_TESTS.parent / file) in SLOW
            # The order does not matter for a single file, as in ``make test-in ENV=clients``.
            late = taken > 60 and not known and len(seconds) > 1
            remark = "  (is not in SLOW of tests/support/selection.py)" if late else ""
            terminalreporter.line(f"{taken:7.1f} s  {file}{remark}")
