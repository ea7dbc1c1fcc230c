"""Ranks in a process group of torch.distributed over this library's transports.

Use :func:`in_groups` to make a test of a function that each rank runs, or :func:`run_in_group`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import os
import secrets
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from collective.testing import RankPool
from tests.support.interpreter import ROOT

__all__ = ["in_groups", "installed", "run_in_group"]

TIMEOUT_S = 20.0
# Seconds within which threads notice that they are not needed any more.
LEAVE_S = 5.0


# The pools serve all modules: the start of a process takes longer than its work here.
_pools: dict[int, RankPool] = {}


@atexit.register
def _close() -> None:
    for pool in _pools.values():
        pool.close()


def run_in_group(world: tuple[str, int], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``function(rank, size, …)`` on every rank in a new process group; return the results."""
    transport, size = world
    if size not in _pools:
        _pools[size] = RankPool(size, "shm", timeout=45.0)
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, secrets.token_hex(4)))
        results: list[Any] = _pools[size].run(_member, transport, store, function, args)
    return results


def _member(comm: Any, transport: str, path: str, function: Callable[..., Any], args: Any) -> Any:
    import torch
    import torch.distributed as dist

    import collective.adapters.torch  # noqa: F401

    torch.set_num_threads(1)
    os.environ["COLLECTIVE_BACKEND"] = transport
    before, mapped = _threads(), _mapped()
    dist.init_process_group(
        "collective",
        store=dist.FileStore(path, comm.size),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        result = function(comm.rank, comm.size, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        del os.environ["COLLECTIVE_BACKEND"]
    end = time.monotonic() + LEAVE_S
    while (left := _threads() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left, f"threads are left: {left}"
    if _mapped() > mapped:
        gc.collect()
    assert _mapped() <= mapped, "shared memory is left"
    return result


def _threads() -> set[threading.Thread]:
    # The gloo transport has two threads that live as long as the process.
    return {t for t in threading.enumerate() if not t.name.startswith("collective-gloo")}


def _mapped() -> int:
    """Return the number of shared-memory mappings of this process."""
    return Path("/proc/self/maps").read_text().count("memfd:collective")


def installed(folder: Path) -> str:
    """Return a folder for PYTHONPATH with which torch finds the backend, as after an install."""
    site = folder / "site"
    metadata = site / "anything-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: anything\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\ncollective = collective_autoload:autoload\n"
    )
    autoload = ROOT / "adapters" / "torch" / "autoload"
    (site / "collective_autoload").symlink_to(autoload)
    return str(site)


def in_groups(*worlds: tuple[str, int]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that makes a test of a function of rank, size and fixtures.

    Each rank of a process group runs the function, in each of ``worlds``.
    """

    def make(program: Callable[..., None]) -> Any:
        _, _, *fixtures = inspect.signature(program).parameters.values()

        @functools.wraps(program)
        def test(world: tuple[str, int], **given: Any) -> None:
            run_in_group(world, _quietly, program, *(given[each.name] for each in fixtures))

        untyped: Any = test
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        untyped.__signature__ = inspect.Signature([world, *fixtures])
        program.__qualname__ += (
            ".__wrapped__"  # The ranks' processes find the function by this name.
        )
        return pytest.mark.parametrize("world", worlds, ids=lambda w: f"{w[0]}-{w[1]}")(test)

    return make


def _quietly(rank: int, size: int, program: Callable[..., None], *args: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own deprecated calls.
        program(rank, size, *args)
