"""The machine of a run, the load from other processes, and the frame of a benchmark's run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from collective.tools.show import parse_size, size_name, write

__all__ = ["Observer", "headline", "measured"]


class Observer:
    """Observer of a run, which reports the machine and the load from other processes."""

    def __init__(self) -> None:
        self._date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._start = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def machine(self) -> dict[str, Any]:
        """Return the machine, and ``others``: the number of cores that other processes took.

        The time of our own ranks counts as our own only after they have ended.
        """
        wall = time.monotonic() - self._start
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return {
            "date": self._date,
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "others": max(0.0, others / wall),
            "seconds": wall,
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "numpy": np.__version__,
        }


def headline(machine: dict[str, Any]) -> str:
    """Return the date and the machine of a run, in one line."""
    return (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, of which "
        f"{machine['others']:.1f} taken by others"
    )


def measured(options: argparse.Namespace, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``measure`` with the ``machine``, and write it for ``--json``.

    Args:
        options: options of :func:`collective.tools.show.add_outputs`. With ``--from`` nothing is
            measured, and the result is that of an earlier run.
        measure: function whose result can be written as JSON.
    """
    earlier: Path | None = getattr(options, "earlier", None)
    if earlier is not None:
        found: dict[str, Any] = json.loads(earlier.read_text())
        return found
    observer = Observer()
    found = measure()
    run = {**found, "machine": observer.machine()}
    write(options.json, run)
    return run


def _cpu() -> str:
    """Return the processor's name and the size of its last-level cache, which matters here."""
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if not cache.exists():
        return name
    return f"{name}, {size_name(parse_size(cache.read_text()))} L3"


def _busy_seconds() -> float:
    """Return the time that all cores together have been busy, or stolen, since boot."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = fields
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
