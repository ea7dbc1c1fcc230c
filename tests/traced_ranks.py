"""Ranks, as threads of this process, that write traces."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collective.communicator import Communicator
from collective.contract.world import World
from collective.start.connecting import connect
from collective.start.memory_store import MemoryStore
from collective.trace import tracer as trace

__all__ = ["traced_ranks"]


def traced_ranks(
    directory: Path,
    size: int,
    program: Callable[[Communicator], Any],
    traces: Callable[[int], bool] = lambda rank: True,
) -> list[Any]:
    """Run ``program`` on every rank; return what came of each, an exception if it raised.

    Args:
        traces: which ranks trace.
    """
    results: list[Any] = [None] * size
    job, store = f"traced-{secrets.token_hex(4)}", MemoryStore()

    def rank(number: int) -> None:
        world = World(number, size, number, size, socket.gethostname(), "none", job, store)
        where = str(directory) if traces(number) else ""
        try:
            with connect(world, "threads", timeout=20.0, trace=where) as comm:
                results[number] = program(comm)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(n,), name=f"rank-{n}") for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for tracer in [one for one in trace._open if one.directory == str(directory)]:
        tracer.close()
    return results
