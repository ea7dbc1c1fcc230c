"""The machine of a run, the load from other processes, and the frame of a benchmark's run."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from collective.platform import busy_seconds, cache_bytes, cpu_name, usable_cores
from collective.tools.show import size_name, write


class Observer:
    """Observer of a run, which reports the machine and the load from other processes."""

    def __init__(self) -> None:
        self._date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._start = time.monotonic()
        self._busy, self._own = busy_seconds(), _own_seconds()

    def others(self) -> float:
        """Return the number of the usable cores that other processes took since the start.

        The time of our own ranks counts as our own only after they have ended.
        """
        wall = time.monotonic() - self._start
        others = busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, others / wall)

    def machine(self) -> dict[str, Any]:
        """Return the machine, and its :meth:`others`."""
        return {
            "date": self._date,
            "cpu": _cpu(),
            "cores": usable_cores(),
            "others": self.others(),
            "seconds": time.monotonic() - self._start,
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "numpy": np.__version__,
        }


def headline(machine: Mapping[str, Any]) -> str:
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
    name = cpu_name() or platform.processor() or platform.machine()
    cache = cache_bytes()
    return name if cache is None else f"{name}, {size_name(cache)} L3"


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
