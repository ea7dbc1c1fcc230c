"""Arrays that have only DLPack: every rank gets results of the same class from every call."""

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
    """Array of a framework without an adapter, whose module has no ``from_dlpack``."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _frozen(array: Any) -> Producer:
    """Return a producer whose memory is read-only, like JAX's."""
    producer = Producer(array)
    producer.array.flags.writeable = False
    return producer


# Each function takes this rank's array, or a structure of arrays, and returns the call's result.
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
    result = CALLS[call](comm, x)
    leaves = [] if result is None else nested.flatten(result)
    assert {type(leaf) for leaf in leaves} <= {np.ndarray}
    for leaf in leaves:
        leaf += 1  # a result is writable on every rank


@on_ranks("ranks")
def test_producer_broadcast_has_values_of_root(comm: Communicator) -> None:
    for make in (Producer, _frozen):
        result = comm.broadcast(make(np.arange(6.0) + comm.rank), root=1)
        assert result.tolist() == [1, 2, 3, 4, 5, 6]


@on_ranks("ranks")
def test_producer_broadcast_shares_writable_memory_at_root_only(comm: Communicator) -> None:
    x = Producer(np.arange(6.0))
    result = comm.broadcast(x, root=0)
    assert np.may_share_memory(result, x.array) == (comm.rank == 0)


@on_ranks("ranks")
def test_producer_given_as_out_is_returned(comm: Communicator) -> None:
    x = Producer(np.arange(6.0) + comm.rank)
    assert comm.broadcast(x, root=1, out=x) is x
    assert comm.all_reduce(x, out=x) is x


@on_ranks("ranks")
def test_broadcast_of_structure_returns_same_object_at_root(comm: Communicator) -> None:
    x = {"a": np.arange(3.0)}
    assert (comm.broadcast(x, root=1) is x) == (comm.rank == 1)
    assert (comm.broadcast_object(x, root=1) is x) == (comm.rank == 1)


def test_producer_with_from_dlpack_is_same_object_at_root(
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
        result = comm.broadcast(x, root=0)
        assert type(result) is Taking
        assert (result is x) == (comm.rank == 0)

    from collective.testing import run_ranks

    run_ranks(2, program, backend="threads")
