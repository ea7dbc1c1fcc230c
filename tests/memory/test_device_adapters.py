"""Adapters for any framework's arrays on GPUs: views without copies, and results."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import numpy as np
import pytest

from collective import cuda
from collective.errors import DeviceError, DtypeError, InvalidArgumentError
from collective.memory import dlpack
from collective.memory.arrays import adapter_like, adapter_of, is_array
from collective.memory.device_adapter import CudaArrayAdapter
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import BY_NAME, FOREIGN
from tests.fakes import Fake, FakeArray
from tests.support.fake_gpu import gpu
from tests.support.interpreter import run_python

__all__ = ["gpu"]  # a fixture

pytestmark = pytest.mark.usefixtures("gpu")

NATIVE = sorted(set(BY_NAME) - set(FOREIGN))


class Stranger(FakeArray):
    """FakeArray whose ``__cuda_array_interface__`` a test can change by ``says``."""

    says: dict | None = None

    @property
    def __cuda_array_interface__(self):
        return {**super().__cuda_array_interface__, **(self.says or {})}


def stranger(values, **says) -> Stranger:
    x = Stranger.of(values)
    x.says = says
    return x


# -- __cuda_array_interface__ ------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE)
def test_cuda_interface_view_shares_memory(name):
    values = np.arange(12).astype(name).reshape(3, 4)
    x = FakeArray.of(values)
    array, dtype = adapter_of(x).view(x)
    assert type(array) is DeviceArray
    assert dtype is BY_NAME[name]
    assert array.address == x.address
    assert array.owner is x
    assert array.flags.carray
    np.testing.assert_array_equal(array.to_host(), values)


@pytest.mark.parametrize(
    "cut", [np.s_[::2], np.s_[:, 1], np.s_[::-1], np.s_[..., None], np.s_[0, 0]], ids=str
)
def test_cuda_interface_view_keeps_strides(cut):
    values = np.asarray(np.arange(24.0).reshape(4, 6)[cut])
    x = FakeArray.of(values)
    array, _ = adapter_of(x).view(x)
    assert array.shape == values.shape
    assert [s for n, s in zip(array.shape, array.strides) if n > 1] == [
        s for n, s in zip(values.shape, values.strides) if n > 1
    ]
    np.testing.assert_array_equal(array.to_host(), values)


@pytest.mark.parametrize("ordinal", [0, 2])
def test_cuda_interface_view_has_device_of_memory(ordinal):
    x = FakeArray((3,), device=ordinal)
    assert adapter_of(x).view(x)[0].device is cuda.device(ordinal)


def test_cuda_interface_view_uses_stream_of_array(gpu: Fake):
    with gpu.turned("delay_us", 20_000):
        x = FakeArray.of(np.full(100, 3.0), stream=gpu.stream(0))
        array, _ = adapter_of(x).view(x)
        assert array.stream.handle == x.stream
        # On another stream the copy would read poison.
        assert array.to_host().tolist() == [3.0] * 100


@pytest.mark.parametrize(("says", "handle"), [(None, 0), (1, 0), (2, 2)])
def test_cuda_interface_special_streams_are_understood(says, handle):
    x = stranger(np.zeros(3), stream=says)
    assert adapter_of(x).view(x)[0].stream.handle == handle


def test_cuda_interface_version_2_means_default_stream():
    class Two(FakeArray):
        @property
        def __cuda_array_interface__(self):
            interface = super().__cuda_array_interface__
            del interface["stream"]
            return {**interface, "version": 2}

    x = Two((3,))
    assert adapter_of(x).view(x)[0].stream == cuda.device(0).stream(0)


@pytest.mark.parametrize(
    ("says", "error", "text"),
    [
        ({"version": 1}, InvalidArgumentError, "version 1"),
        ({"mask": object()}, InvalidArgumentError, "masks do not travel"),
        ({"stream": 0}, InvalidArgumentError, "stream 0"),
        ({"stream": "1"}, InvalidArgumentError, "stream '1'"),
        ({"typestr": ">f8"}, DtypeError, "cannot travel"),
        ({"typestr": "|V8"}, DtypeError, "cannot travel"),
        ({"typestr": "<M8[s]"}, DtypeError, "cannot travel"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_cuda_interface_with_unsupported_field_raises(says, error, text):
    x = stranger(np.zeros(3), **says)
    if "V8" in str(says):
        x.dtype = np.dtype([("a", "f8")])
    with pytest.raises(error, match=text):
        adapter_of(x).view(x)


def test_cuda_interface_of_host_memory_raises_device_error():
    host = np.zeros(3)
    x = stranger(np.zeros(3), data=(host.ctypes.data, False))
    with pytest.raises(DeviceError, match="host memory"):
        adapter_of(x).view(x)


def test_cuda_interface_read_only_array_is_refused_as_output():
    x = FakeArray.of(np.arange(3.0))
    adapter_of(x).output(x)[0][...] = adapter_of(x).view(FakeArray.of(np.ones(3)))[0]
    assert x.get().tolist() == [1, 1, 1]
    x.readonly = True
    assert adapter_of(x).view(x)[0].to_host().tolist() == [1, 1, 1]
    with pytest.raises(InvalidArgumentError, match="read-only; pass a writable one"):
        adapter_of(x).output(x)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_cuda_interface_view_accepts_empty_array(shape):
    x = FakeArray(shape)
    array, dtype = adapter_of(x).view(x)
    assert array.shape == shape
    assert dtype is BY_NAME["float32"]
    assert array.to_host().shape == shape


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_cuda_interface_view_recognises_foreign_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.0, -2.0, 0.5]).astype(getattr(ml_dtypes, name))
    x = Stranger.of(values)
    array, dtype = adapter_of(x).view(x)
    assert dtype is BY_NAME[name]
    np.testing.assert_array_equal(array.to_host(), values.view(FOREIGN[name]))
    back = adapter_of(x).wrap(array, dtype)
    assert back.dtype == values.dtype
    again, dtype_again = adapter_of(back).view(back)
    assert dtype_again is dtype
    assert again.address == x.address


def test_cuda_interface_view_keeps_array_alive():
    x = FakeArray.of(np.arange(4.0))
    watched = weakref.ref(x)
    part = adapter_of(x).view(x)[0][1:]
    del x
    gc.collect()
    assert watched() is not None
    assert part.to_host().tolist() == [1, 2, 3]
    del part
    gc.collect()
    assert watched() is None


def test_device_array_view_is_same_array():
    x = FakeArray.of(np.arange(3.0))
    array, _ = adapter_of(x).view(x)
    adapter = adapter_of(array)
    assert adapter is adapter_like("cuda")
    assert adapter.view(array) == (array, BY_NAME["float64"])
    assert adapter.wrap(array, BY_NAME["float64"]) is array
    assert is_array(array)
    array.writeable = False
    with pytest.raises(InvalidArgumentError, match="read-only"):
        adapter.output(array)


def module_with(monkeypatch, **functions) -> type:
    """Return an array class of a framework whose module has these functions."""
    name = "framework_of_" + "_and_".join(functions or ["nothing"])
    module = types.ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return type("Theirs", (FakeArray,), {"__module__": f"{name}.arrays"})


def test_result_is_passed_to_from_dlpack_of_module(monkeypatch):
    imports = []

    def from_dlpack(x):
        imports.append(dlpack.take(x.__dlpack__(stream=1, max_version=(1, 0))))
        assert x.__dlpack_device__() == (2, 0)
        assert x.__cuda_array_interface__["version"] == 3
        return "theirs"

    x = module_with(monkeypatch, from_dlpack=from_dlpack)((3,))
    adapter = adapter_of(x)
    memory = adapter.empty((3,), BY_NAME["float32"], cuda.device(0))
    assert adapter.wrap(memory, BY_NAME["float32"]) == "theirs"
    assert imports[0].address == memory.address


def test_bfloat16_result_is_exported_with_its_dtype(monkeypatch):
    def from_dlpack(x):
        assert not hasattr(x, "__cuda_array_interface__")
        return dlpack.take(x.__dlpack__()).dtype.name

    x = module_with(monkeypatch, from_dlpack=from_dlpack)((3,))
    bfloat16 = BY_NAME["bfloat16"]
    memory = adapter_of(x).empty((3,), bfloat16, cuda.device(0))
    assert adapter_of(x).wrap(memory, bfloat16) == "bfloat16"


def test_result_is_device_array_without_from_dlpack(monkeypatch):
    def refuse(x):
        raise BufferError("not these")

    for functions in ({}, {"from_dlpack": refuse}):
        x = module_with(monkeypatch, **functions)((3,))
        memory = adapter_of(x).empty((3,), BY_NAME["float32"], cuda.device(0))
        assert adapter_of(x).wrap(memory, BY_NAME["float32"]) is memory


def test_numba_result_is_made_by_as_cuda_array(monkeypatch):
    numba = types.ModuleType("numba")
    numba.cuda = types.ModuleType("numba.cuda")
    numba.cuda.as_cuda_array = lambda x: x.__cuda_array_interface__["data"][0]
    monkeypatch.setitem(sys.modules, "numba", numba)
    monkeypatch.setitem(sys.modules, "numba.cuda", numba.cuda)
    memory = adapter_like("cuda").empty((3,), BY_NAME["float32"], cuda.device(0))
    assert CudaArrayAdapter("numba").wrap(memory, BY_NAME["float32"]) == memory.address


def test_new_memory_is_freed_after_streams_that_use_it(gpu: Fake):
    adapter = adapter_like("cuda")
    memory = adapter.empty((2, 3), BY_NAME["float64"], cuda.device(1))
    assert memory.shape == (2, 3)
    assert memory.device is cuda.device(1)
    assert cuda.owner_of(memory.address) == 1
    side = cuda.device(1).new_stream()
    adapter.used_on(memory[1:], side)
    gpu.clear_log()
    address = memory.address
    del memory
    gc.collect()
    log = gpu.log()
    freed = [n for n, line in enumerate(log) if "cuMemFreeAsync" in line and f"{address:x}" in line]
    waited = [n for n, line in enumerate(log) if "cuStreamWaitEvent" in line]
    assert len(freed) == 1
    assert waited[0] < freed[0]


def test_new_memory_belongs_to_stream_of_input(gpu: Fake):
    x = FakeArray.of(np.arange(3.0), stream=gpu.stream(0))
    array, dtype = adapter_of(x).view(x)
    adapter = adapter_of(x)
    assert adapter.current_stream(array.device, array.stream) is array.stream
    memory = adapter.empty((3,), dtype, array.device, array.stream)
    assert memory.stream is array.stream
    assert memory.owner.stream is array.stream
    assert adapter.current_stream(array.device) == array.device.stream(0)


def test_numpy_empty_on_gpu_raises_device_error():
    with pytest.raises(DeviceError, match="like='cuda'"):
        adapter_like("numpy").empty((3,), BY_NAME["float32"], cuda.device(0))
    memory = adapter_like("numpy").empty((3,), BY_NAME["bfloat16"], None)
    assert (memory.shape, memory.dtype) == ((3,), np.uint16)


def test_adapter_like_unknown_name_lists_known_names():
    with pytest.raises(InvalidArgumentError, match="cuda, cupy, jax, numpy, torch"):
        adapter_like("gpu")


def test_cpu_arrays_import_no_cuda_module():
    pytest.importorskip("torch")
    program = """
import sys
import numpy, torch
from collective.memory.arrays import adapter_of
for x in (numpy.ones(3), torch.ones(3), torch.ones(3, dtype=torch.bfloat16)):
    adapter = adapter_of(x)
    adapter.wrap(*adapter.output(x))
from collective.cuda import library as cuda_driver
late = ("cuda.adapter", "cuda.array", "cuda.copies", "dlpack")
print(cuda_driver._drivers, [name for name in sys.modules if name.startswith("collective.")
       and name.rpartition(".")[2] in late])
"""
    done = run_python("-c", program)
    assert done.stdout.strip() == "{} []", done.stderr
