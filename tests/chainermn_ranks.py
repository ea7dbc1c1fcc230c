"""Ranks with a ChainerMN communicator over our transports."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

import collective
from collective.testing import RankPool
from tests.mpi_launches import launch_of, needs

__all__ = ["EVERYWHERE", "QUIETLY", "WORLDS", "Ranks", "run"]

World = tuple[str, int]
# Seconds that a call may take.
CALL_S = 15.0
WORLDS: list[World] = [("shm", 2), ("shm", 4), ("gloo", 2), ("threads", 2)]
_MPI = pytest.param(("mpi", 2), marks=needs("mpich"), id="mpi-2")
EVERYWHERE = pytest.mark.parametrize(
    "world", [*(pytest.param(p, id=f"{p[0]}-{p[1]}") for p in WORLDS), _MPI]
)
# Where ranks are threads of the tests' process: ChainerMN calls itself experimental.
QUIETLY = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Ranks:
    """Runs functions on ranks; starts processes when first needed."""

    def __init__(self) -> None:
        self._pools: dict[World, RankPool] = {}

    def __call__(
        self, world: World, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        """Run ``function(comm, …)`` on every rank, with a ChainerMN communicator of its own."""
        transport, size = world
        # The processes of shm serve gloo as well: starting some takes longer than what they do.
        home = ("shm" if transport == "gloo" else transport), size
        if home not in self._pools:
            more = {"mpiexec": launch_of("mpich")} if transport == "mpi" else {}
            self._pools[home] = RankPool(size, home[0], timeout=40.0, **more)
        shared = options.pop("shared", True)
        with tempfile.TemporaryDirectory() as directory:
            found: list[Any] = self._pools[home].run(
                _member, transport, directory, function, args,
                shared=shared, call_timeout=CALL_S, **options,
            )  # fmt: skip
        return found

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _member(
    comm: Any, transport: str, directory: str, function: Callable[..., Any], args: Any
) -> Any:
    import collective.adapters.chainer.chainermn as layer

    if transport != "gloo":
        return function(layer.create_communicator(comm), *args)
    settings = {"rank": comm.rank, "size": comm.size, "store": directory, "timeout": CALL_S}
    settings.update(local_rank=comm.rank, local_size=comm.size)
    with collective.init("gloo", **settings) as over_gloo:
        return function(layer.create_communicator(over_gloo), *args)


#: Runs a function on ranks: ``run((transport, size), function, …)``. Kept for all modules.
run = Ranks()
atexit.register(run.close)
