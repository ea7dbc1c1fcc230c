"""What holds for all tests: they run as if no launcher, setting or shell's ``&`` were there."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

_PREFIXES = ("COLLECTIVE_", "HYDRA_", "I_MPI_", "MPI_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NAMES |= {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}

for _name in list(os.environ):
    if _name in _NAMES or _name.startswith(_PREFIXES):
        del os.environ[_name]

# What a shell starts in the background, or nohup, ignores these, and hands that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ten files that took longest."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > 60:
        terminalreporter.section("slowest files")
        for file, taken in seconds.most_common(10):
            terminalreporter.line(f"{taken:7.1f} s  {file}")
