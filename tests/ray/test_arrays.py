"""Arrays that pass from actor to actor; ``make test-in ENV=ray`` installs Ray and runs this."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make test-in ENV=ray` does that", allow_module_level=True)

import ray
import torch

import collective
import collective.launch.ray
from collective.launch.ray.arrays import NumpyTransport, SharedMemoryTransport


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Maker:
    def __init__(self) -> None:
        self.kept: Any = None

    @ray.method(tensor_transport="collective")
    def tensors(self) -> dict[str, Any]:
        self.kept = torch.arange(6.0).reshape(2, 3)
        return {"x": self.kept, "half": torch.ones(3, dtype=torch.bfloat16), "none": torch.empty(0)}

    @ray.method(tensor_transport="collective_numpy")
    def array(self) -> Any:
        self.kept = np.arange(6.0).reshape(2, 3).T
        return self.kept

    def change_and_read(self, x: Any) -> float:
        before = float(x.sum())
        x[...] = 0
        return before

    def pieces(self, value: dict[str, Any]) -> list[Any]:
        x = value["x"]
        return [x.tolist(), str(value["half"].dtype), tuple(value["none"].shape)]

    def value(self) -> float:
        return float(self.kept.sum())

    def memories(self) -> int:
        folder = Path("/proc/self/fd")
        links = [os.readlink(f) for f in folder.iterdir() if f.is_symlink()]
        return sum("collective-ray" in link for link in links)


@pytest.fixture(scope="module")
def makers(cluster: None) -> list[Any]:
    return [Maker.remote() for _ in range(2)]


def test_tensors_reach_another_actor(makers: list[Any]) -> None:
    call = makers[1].pieces.remote(makers[0].tensors.remote())
    assert ray.get(call, timeout=60) == [[[0, 1, 2], [3, 4, 5]], "torch.bfloat16", (0,)]


def test_array_is_changed_by_its_receiver_alone(makers: list[Any]) -> None:
    made = makers[0].array.remote()
    for _ in range(2):
        assert ray.get(makers[1].change_and_read.remote(made), timeout=60) == 15.0
    assert ray.get(makers[0].value.remote()) == 15.0


def test_driver_on_the_host_of_the_maker_gets_arrays(makers: list[Any]) -> None:
    assert ray.get(makers[0].array.remote(), timeout=60).sum() == 15.0


def test_memory_ends_with_the_reference(makers: list[Any]) -> None:
    made = makers[0].array.remote()
    assert ray.get(makers[1].change_and_read.remote(made), timeout=60) == 15.0
    assert ray.get(makers[0].memories.remote()) >= 1
    del made
    for _ in range(600):
        if ray.get(makers[0].memories.remote()) == 0:
            return
    pytest.fail("the memory is still there")


@pytest.mark.parametrize(
    "x",
    [torch.arange(5), torch.tensor(2.5), torch.ones(2, 2).T, torch.ones(3) * 1j, torch.empty(2, 0)],
)  # fmt: skip
def test_transport_returns_equal_tensors(x: torch.Tensor) -> None:
    transport = SharedMemoryTransport()
    described = transport.extract_tensor_transport_metadata("object", [x, x])
    for y in transport.recv_multiple_tensors("object", described, None):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype
    transport.garbage_collect("object", described, [])


@pytest.mark.parametrize(
    "x", [np.array(2.5), np.zeros(2, "M8[s]"), np.zeros(2, "i4,f8"), np.ones(0)]
)
def test_transport_returns_equal_arrays(x: Any) -> None:
    transport = NumpyTransport()
    described = transport.extract_tensor_transport_metadata("object", [x])
    (y,) = transport.recv_multiple_tensors("object", described, None)
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def test_released_memory_raises_peer_lost() -> None:
    transport = NumpyTransport()
    described = transport.extract_tensor_transport_metadata("object", [np.ones(3)])
    transport.garbage_collect("object", described, [])
    with pytest.raises(collective.PeerLostError, match="Keep the actor that made the arrays alive"):
        transport.recv_multiple_tensors("object", described, None)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_array_described_again_leaves_one_memory() -> None:
    transport = NumpyTransport()
    before = _open_files()
    for _ in range(3):  # Ray does so if the reply of a task was lost
        described = transport.extract_tensor_transport_metadata("object", [np.ones(3)])
    assert _open_files() == before + 1
    (y,) = transport.recv_multiple_tensors("object", described, None)
    assert y.tolist() == [1.0, 1.0, 1.0]
    del y  # its mapping has a descriptor of its own
    transport.garbage_collect("object", described, [])
    assert _open_files() == before


def test_array_that_cannot_be_copied_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("planted")

    before = _open_files()
    monkeypatch.setattr(os, "truncate", fail)
    with pytest.raises(OSError, match="planted"):
        NumpyTransport().extract_tensor_transport_metadata("object", [np.ones(3)])
    assert _open_files() == before


def test_arrays_of_another_host_are_refused() -> None:
    transport = NumpyTransport()
    described = transport.extract_tensor_transport_metadata("object", [np.ones(3)])
    described.host = "another"
    with pytest.raises(collective.DeviceError, match="place them on one node"):
        transport.recv_multiple_tensors("object", described, None)


def test_array_of_objects_is_refused() -> None:
    with pytest.raises(collective.UnsupportedError, match="dtype object"):
        NumpyTransport().extract_tensor_transport_metadata("object", [np.array([None])])
