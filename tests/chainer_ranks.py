"""Ranks for the tests of Chainer's adapters and of ChainerMN, kept until all tests are over.

A process takes long to import Chainer, so the modules share those that have.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from collective.testing import RankPool
from tests.mpi_launches import launch_of, needs

__all__ = ["EVERYWHERE", "FEW", "QUIETLY", "as_chainermn", "as_it_is", "on", "run"]

#: Worlds for :func:`on`, by transport and number of ranks.
EVERYWHERE: tuple[Any, ...] = (
    "shm-2", "shm-4", "gloo-2", "threads-2", pytest.param("mpi-2", marks=needs("mpich")),
)  # fmt: skip
FEW = "shm-4", "threads-2"
# Where ranks are threads of the tests' process: ChainerMN calls itself experimental.
QUIETLY = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

_pools: dict[str, RankPool] = {}


@atexit.register
def _close() -> None:
    for pool in _pools.values():
        pool.close()


def run(world: str, program: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return what ``program(comm, …)`` returns on the ranks of a world, such as ``"shm-2"``."""
    if world not in _pools:
        backend, _, size = world.partition("-")
        launch = {"mpiexec": launch_of("mpich")} if backend == "mpi" else {}
        _pools[world] = RankPool(int(size), backend, timeout=60.0, **launch)
    return _pools[world].run(program, *args, **options)


def on(*worlds: Any, chainermn: bool = False) -> Callable[[Callable[..., None]], Any]:
    """Make a test of what each rank of these worlds does, one world after the other.

    Its first argument is the communicator; the others are fixtures and parameters. As an attribute
    ``program`` it has the function itself.

    Args:
        chainermn: whether the communicator is to be ChainerMN's over ours.
    """

    def test_of(program: Callable[..., None]) -> Any:
        def test(world: str, **given: Any) -> None:
            if chainermn:
                run(world, as_chainermn, test, shared=True, call_timeout=15.0, **given)
            else:
                run(world, as_it_is, test, **given)

        # By its name in the module, the test is found where a rank is another process.
        functools.update_wrapper(test, program)
        others = list(inspect.signature(program).parameters.values())[1:]
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([world, *others])  # type: ignore[attr-defined]
        test.program = program  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test)

    return test_of


def as_it_is(comm: Any, test: Any, **given: Any) -> Any:
    """Run a function, or that of a test, with a communicator."""
    return getattr(test, "program", test)(comm, **given)


def as_chainermn(comm: Any, test: Any, **given: Any) -> Any:
    """Run a function, or that of a test, with a ChainerMN communicator over ``comm``."""
    from collective.adapters.chainer.chainermn import create_communicator

    return as_it_is(create_communicator(comm), test, **given)
