"""Plug-in of pytest: makes mpi4jax's tests independent of the time that a rank needs."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any


def pytest_collection_modifyitems(items: Any) -> None:
    for module in {item.module for item in items}:
        program = getattr(module, "run_in_subprocess", None)
        if program is not None:
            program.__defaults__ = (120,)
        if module.__name__.endswith("test_barrier"):
            module.time = SimpleNamespace(sleep=_sleep_after_all)


def _sleep_after_all(seconds: float) -> None:
    """Sleep once all ranks are here.

    Rank 0 empties a file before it sleeps, and the other ranks write to the file afterwards. A rank
    0 that was late by 0.2 seconds would remove what they have written.
    """
    from mpi4py import MPI

    MPI.COMM_WORLD.inner.barrier()
    time.sleep(seconds)
