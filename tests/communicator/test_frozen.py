"""Arrays that never change, and arrays on devices whose memory no transport reaches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.memory import arrays
from collective.memory.arrays import Adapter, Distant
from collective.memory.buffer import aligned
from collective.memory.dtypes import DType, from_numpy
from collective.testing import run_ranks


class Frozen:
    """Array that never changes: its memory is read-only, and it keeps a copy to prove that."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.before = array.copy()


class FrozenAdapter(Adapter):
    name = "frozen"
    immutable = True

    def view(self, x: Any) -> tuple[Any, DType]:
        array = x.array.view()
        array.flags.writeable = False
        return array, from_numpy(array.dtype)

    def output(self, x: Any) -> tuple[Any, DType]:
        raise InvalidArgumentError("out: frozen")

    def wrap(self, array: Any, dtype: DType) -> Any:
        return Frozen(array)

    def empty(self, shape: Any, dtype: DType, device: Any, stream: Any = None) -> Any:
        return aligned(shape, dtype.storage)


class Far(Distant):
    """Array on a device: the host reads and writes only copies."""

    def __init__(self, shape: Any, device: str) -> None:
        super().__init__(shape, np.dtype("float32"), device)
        self.values = np.zeros(shape, np.float32)

    def to_host(self) -> np.ndarray[Any, Any]:
        return self.values.copy()

    def fill_from_host(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values.copy()


class FarAdapter(Adapter):
    name = "far"

    def view(self, x: Any) -> tuple[Any, DType]:
        return x, from_numpy(x.dtype)

    def wrap(self, array: Any, dtype: DType) -> Any:
        return array

    def empty(self, shape: Any, dtype: DType, device: Any, stream: Any = None) -> Any:
        return Far(shape, device)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arrays.known, Frozen, FrozenAdapter())
    monkeypatch.setitem(arrays.known, Far, FarAdapter())


def _addresses(comm: Communicator) -> list[int]:
    x = Frozen(np.ones(1000, np.float32))
    results = [comm.all_reduce(x), *comm.all_reduce([x, x]), comm.all_gather(x)]
    return [result.array.__array_interface__["data"][0] % 64 for result in results]


def test_results_of_frozen_arrays_lie_in_their_frameworks_memory() -> None:
    assert run_ranks(2, _addresses) == [[0] * 4] * 2


def _far(comm: Communicator) -> list[Any]:
    x = Far((3,), "far:1")
    x.fill_from_host(np.full(3, comm.rank + 1, np.float32))
    out = np.empty(3, np.float32)
    results: list[Any] = [
        comm.all_reduce(x), comm.all_reduce([x])[0], comm.broadcast(x, root=1),
        comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank, like=x),
    ]  # fmt: skip
    assert comm.all_reduce(x, out=out) is out
    mixed = comm.all_gather(x if comm.rank == 0 else x.values)
    return [
        [(type(r) is Far, r.device, r.values.tolist()) for r in results], out.tolist(),
        (mixed.values if comm.rank == 0 else mixed).tolist(),
    ]  # fmt: skip


def test_far_arrays_come_back_to_their_device() -> None:
    for rank, (results, out, mixed) in enumerate(run_ranks(2, _far)):
        values = [[3.0] * 3, [3.0] * 3, [2.0] * 3, [2.0 - rank] * 3]
        assert results == [(True, "far:1", value) for value in values]
        assert out == [3.0] * 3
        assert mixed == [1.0] * 3 + [2.0] * 3
