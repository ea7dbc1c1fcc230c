"""Arrays that only speak DLPack: every rank gets results of one kind from every call."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.memory import nested
from tests.support.on_ranks import on_ranks, ranks_of

ranks = ranks_of(("threads", 3), ("shm", 2))


class Producer:
    """An array of a framework that has no adapter, and whose module has no ``from_dlpack``."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _frozen(array: Any) -> Producer:
    """Return a producer whose memory may not be written to, as JAX's."""
    made = Producer(array)
    made.array.flags.writeable = False
    return made


# Each takes this rank's array, or a structure of such, and returns what the call does.
CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "scan": lambda comm, x: comm.scan(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1),
    "broadcast in the background": lambda comm, x: comm.broadcast(x, async_op=True).wait(),
    "broadcast to None": lambda comm, x: comm.broadcast(x if comm.rank == 1 else None, root=1),
    "scatter": lambda comm, x: comm.scatter(x, root=1),
    "scatter to None": lambda comm, x: comm.scatter(x if comm.rank == 1 else None, root=1),
    "gather": lambda comm, x: comm.gather(x, root=1),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "sendrecv": lambda comm, x: comm.sendrecv(
        x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    ),
    "broadcast_object": lambda comm, x: comm.broadcast_object(x, root=1),
    "all_gather_object": lambda comm, x: comm.all_gather_object(x),
    "scatter_object": lambda comm, x: comm.scatter_object([x] * comm.size),
}


@pytest.mark.parametrize("make", [Producer, _frozen])
@pytest.mark.parametrize("structure", [False, True], ids=["alone", "in a structure"])
@pytest.mark.parametrize("call", CALLS)
@on_ranks("ranks")
def test_producer_results_are_numpy_on_every_rank(
    comm: Communicator, call: str, structure: bool, make: Callable[[Any], Producer]
) -> None:
    x: Any = make(np.arange(6.0) + comm.rank)
    if structure:
        x = {"a": x, "b": [make(np.arange(6, dtype=np.int32)), np.ones(6, np.float32)]}
    found = CALLS[call](comm, x)
    leaves = [] if found is None else nested.flatten(found)
    assert {type(leaf) for leaf in leaves} <= {np.ndarray}
    for leaf in leaves:
        leaf += 1  # as a result may be, whoever has it


@on_ranks("ranks")
def test_producer_broadcast_has_the_values_of_the_root(comm: Communicator) -> None:
    for make in (Producer, _frozen):
        found = comm.broadcast(make(np.arange(6.0) + comm.rank), root=1)
        assert found.tolist() == [1, 2, 3, 4, 5, 6]


@on_ranks("ranks")
def test_producer_broadcast_returns_the_roots_writable_memory(comm: Communicator) -> None:
    x = Producer(np.arange(6.0))
    found = comm.broadcast(x, root=0)
    assert np.may_share_memory(found, x.array) == (comm.rank == 0)


@on_ranks("ranks")
def test_producer_given_as_out_is_returned(comm: Communicator) -> None:
    x = Producer(np.arange(6.0) + comm.rank)
    assert comm.broadcast(x, root=1, out=x) is x
    assert comm.all_reduce(x, out=x) is x


@on_ranks("ranks")
def test_structure_without_producers_is_returned_by_the_root_itself(comm: Communicator) -> None:
    x = {"a": np.arange(3.0)}
    assert (comm.broadcast(x, root=1) is x) == (comm.rank == 1)
    assert (comm.broadcast_object(x, root=1) is x) == (comm.rank == 1)


def test_producer_of_a_module_with_from_dlpack_is_returned_by_the_root_itself(
    monkeypatch: pytest.MonkeyPatch, ranks: Any
) -> None:
    module: Any = types.ModuleType("a_module_that_takes")

    class Taking(Producer):
        pass

    Taking.__module__ = "a_module_that_takes.arrays"
    module.from_dlpack = lambda array: Taking(np.from_dlpack(array))
    monkeypatch.setitem(sys.modules, "a_module_that_takes", module)

    def program(comm: Communicator) -> None:
        x = Taking(np.arange(3.0))
        found = comm.broadcast(x, root=0)
        assert type(found) is Taking
        assert (found is x) == (comm.rank == 0)

    from collective.testing import run_ranks

    run_ranks(2, program, backend="threads")
