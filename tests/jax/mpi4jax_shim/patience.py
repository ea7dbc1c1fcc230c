"""Plug-in of pytest: gives the programs that mpi4jax's tests start time on a busy machine."""

from __future__ import annotations

from typing import Any


def pytest_collection_modifyitems(items: Any) -> None:
    for module in {item.module for item in items}:
        program = getattr(module, "run_in_subprocess", None)
        if program is not None:
            program.__defaults__ = (120,)
