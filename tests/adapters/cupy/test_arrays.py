"""CuPy arrays over memory of the ABI fake: views without a copy, and wrapping back to CuPy.

CuPy itself is real. The parts that need CUDA's runtime (streams, allocation, kernels) are faked.
CuPy's kernels and memory pools are therefore tested only where there is a GPU.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from collective import cuda
from collective.errors import AllocationError, DtypeError
from collective.memory.arrays import adapter_like, adapter_of
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import BY_NAME, FOREIGN
from tests.fakes import Fake, FakeArray
from tests.support.fake_gpu import gpu

cupy = pytest.importorskip("cupy")

__all__ = ["gpu"]  # a fixture

from tests.support.fake_cupy import of, over, pretend, values_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("gpu", "runtime")

NATIVE = sorted(set(BY_NAME) - set(FOREIGN))


@pytest.fixture
def runtime(monkeypatch):
    return pretend(monkeypatch.setattr)


@pytest.mark.parametrize("name", NATIVE)
def test_array_view_shares_memory_and_wraps_to_same_object(name):
    x = of(np.arange(12).astype(name).reshape(3, 4))
    adapter = adapter_of(x)
    assert adapter is adapter_like("cupy")
    array, dtype = adapter.view(x)
    assert type(array) is DeviceArray
    assert dtype is BY_NAME[name]
    assert array.address == x.data.ptr
    assert adapter.wrap(array, dtype) is x
    np.testing.assert_array_equal(array.to_host(), np.arange(12).astype(name).reshape(3, 4))


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_array_with_dtype_unknown_to_numpy_is_viewed_and_wrapped(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = getattr(ml_dtypes, name)
    x = over(FakeArray.of(np.array([1.0, -2.0]).astype(kind).view(FOREIGN[name])), kind)
    array, dtype = adapter_of(x).view(x)
    assert dtype is BY_NAME[name]
    assert array.dtype == dtype.storage
    assert adapter_of(x).wrap(array, dtype) is x
    part = adapter_of(x).wrap(array[1:], dtype)
    assert part.dtype == kind
    assert part.data.ptr == x.data.ptr + dtype.itemsize


def test_dtype_unknown_to_cupy_raises_dtype_error(monkeypatch):
    def refuse(*_, **__):
        raise TypeError("Unsupported dtype")

    adapter = adapter_like("cupy")
    array = adapter.empty((3,), BY_NAME["float32"], cuda.device(0))
    monkeypatch.setattr(cupy, "empty", refuse)
    with pytest.raises(DtypeError, match="Update CuPy, or pass like='cuda'"):
        adapter.empty((3,), BY_NAME["float32"], cuda.device(0))
    monkeypatch.setattr(cupy, "ndarray", type("ndarray", (), {"__init__": refuse}))
    with pytest.raises(DtypeError, match="Update CuPy, or pass like='cuda'"):
        adapter.wrap(array[1:], BY_NAME["float32"])


@pytest.mark.parametrize(
    "cut", [np.s_[::2], np.s_[:, 1], np.s_[::-1], np.s_[..., None], np.s_[0, 0:0]], ids=str
)
def test_array_view_keeps_strides(cut):
    values = np.arange(24.0).reshape(4, 6)
    x = of(values)[cut]
    array, dtype = adapter_of(x).view(x)
    assert array.shape == x.shape
    assert adapter_of(x).wrap(array, dtype) is x


def test_view_stream_is_current_cupy_stream_of_device(runtime, gpu: Fake):
    x, y = of(np.zeros(3)), over(FakeArray((3,), device=1))
    runtime.streams = {0: gpu.stream(0), 1: gpu.stream(1)}
    for array, ordinal in ((x, 0), (y, 1)):
        seen = adapter_of(array).view(array)[0]
        assert seen.device is cuda.device(ordinal)
        assert seen.stream.handle == runtime.streams[ordinal]
        assert adapter_of(array).current_stream(seen.device) == seen.stream


@pytest.mark.parametrize("ordinal", [0, 1])
def test_empty_allocates_cupy_array_on_given_device(runtime, ordinal):
    dtype = BY_NAME["float64"]
    adapter = adapter_like("cupy")
    array = adapter.empty((2, 3), dtype, cuda.device(ordinal))
    x = adapter.wrap(array, dtype)
    assert x is array.owner
    assert array.device is cuda.device(ordinal)
    assert (x.shape, x.dtype) == ((2, 3), np.float64)
    assert runtime.device == 0


def test_empty_without_device_uses_current_cupy_device(runtime):
    with runtime.using_device(2):
        assert adapter_like("cupy").empty((3,), BY_NAME["int8"], None).device is cuda.device(2)


def test_wrap_of_array_part_shares_memory():
    x = of(np.arange(24.0).reshape(4, 6))
    adapter = adapter_of(x)
    array, dtype = adapter.view(x)
    for part, expected in (
        (array[1:3], x[1:3]),
        (array.T, x.T),
        (array[:, ::2], x[:, ::2]),
        (array.ravel(), x.reshape(-1)),
        (array[3, 5], x[3, 5]),
    ):
        back = adapter.wrap(part, dtype)
        assert back.data.ptr == expected.data.ptr
        assert back.data.mem is x.data.mem
        assert (back.shape, back.strides) == (expected.shape, expected.strides)


def test_wrap_of_foreign_memory_keeps_owner_alive():
    x = FakeArray.of(np.arange(6.0))
    watched = weakref.ref(x)
    array, dtype = adapter_of(x).view(x)
    back = adapter_like("cupy").wrap(array, dtype)
    assert (back.data.ptr, back.strides) == (x.address, (8,))
    assert back.data.device_id == 0
    del x, array
    gc.collect()
    assert watched() is not None
    assert values_of(back).tolist() == [0, 1, 2, 3, 4, 5]
    del back
    gc.collect()
    assert watched() is None


def test_copies_run_on_active_stream(runtime, gpu: Fake):
    x = over(FakeArray((1024,), np.float32, device=1)).reshape(32, 32).T
    array, _ = adapter_of(x).view(x)
    side = cuda.device(1).new_stream()
    values = np.arange(1024, dtype=np.float32).reshape(32, 32)
    with gpu.turned("delay_us", 20_000):
        late = FakeArray.of(values, device=1, stream=side.handle)
        with cuda.on(side):
            array[...] = adapter_of(late).view(late)[0]
            copied = array.copy()
    assert runtime.kernels == [(1, side.handle, np.dtype("uint32"))] * 2
    assert runtime.device == 0
    np.testing.assert_array_equal(copied.to_host(), values)


@pytest.mark.parametrize("handle", [0, 1])
def test_legacy_stream_maps_to_cupy_null_stream(runtime, handle):
    adapter = adapter_like("cupy")
    with cuda.on(cuda.device(0).stream(handle)):
        array = adapter.empty((3,), BY_NAME["float32"], cuda.device(0))
    assert array.owner.data.mem._owner.stream == 0
    assert runtime.streams == {}


def test_empty_out_of_cupy_memory_raises_allocation_error(monkeypatch):
    def fail(*_):
        raise cupy.cuda.memory.OutOfMemoryError(10, 0, 0)

    monkeypatch.setattr(cupy, "empty", fail)
    with pytest.raises(AllocationError, match="cupy: no memory"):
        adapter_like("cupy").empty((3,), BY_NAME["float32"], cuda.device(0))


def test_wrap_of_host_array_copies_to_gpu(monkeypatch):
    copied = []
    monkeypatch.setattr(cupy, "asarray", lambda x: copied.append(x) or x)
    adapter_like("cupy").wrap(np.zeros(3, np.uint8), BY_NAME["bool"])
    assert len(copied) == 1
