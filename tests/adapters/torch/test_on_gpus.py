"""PyTorch tensors on fake GPUs: views without a copy, and wrapping back to tensors."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from collective import cuda
from collective.errors import AllocationError, DeviceError, InvalidArgumentError
from collective.memory.arrays import adapter_like, adapter_of
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import BY_NAME
from tests.fakes import Fake, FakeArray
from tests.support.fake_gpu import gpu

torch = pytest.importorskip("torch")

__all__ = ["gpu"]  # a fixture

pytestmark = pytest.mark.usefixtures("gpu")

from tests.support.fake_torch import CudaTensor, cuda_of_torch, on_gpu  # noqa: E402

IN_TORCH = sorted(name for name in BY_NAME if hasattr(torch, name))


@pytest.fixture
def pretended(monkeypatch):
    with cuda_of_torch(monkeypatch) as mode:
        yield mode


def bits(x: torch.Tensor) -> list:
    """Return the elements' bits, so that NaN equals NaN and any dtype can be compared."""
    return x.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("name", IN_TORCH)
def test_tensor_view_shares_memory_and_wraps_to_same_object(pretended, name):
    x = on_gpu(torch.ones((3, 4)).to(getattr(torch, name)))
    adapter = adapter_of(x)
    array, dtype = adapter.view(x)
    assert type(array) is DeviceArray
    assert dtype is BY_NAME[name]
    assert array.dtype == dtype.storage
    assert array.address == x.data_ptr()
    assert adapter.wrap(array, dtype) is x
    assert pretended.allocated == 0


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "complex128", "bool"])
def test_tensor_view_keeps_strides(pretended, name):
    x = on_gpu(torch.arange(24).reshape(4, 6).to(getattr(torch, name)))
    for view in (x.t(), x[::2, 1::3], x[0], x[1, 2], x[:0], x[2:3].expand(3, 6)):
        array, dtype = adapter_of(view).view(view)
        assert array.shape == tuple(view.shape)
        expected = view.values.reshape(-1).view(torch.uint8).numpy()
        np.testing.assert_array_equal(array.to_host().reshape(-1).view(np.uint8), expected)
        assert adapter_of(view).wrap(array, dtype) is view


def test_tensor_view_stream_is_current_torch_stream(pretended, gpu: Fake):
    x = on_gpu(torch.zeros(3))
    other = gpu.stream(0)
    with torch.cuda.stream(torch.cuda.ExternalStream(other, device=0)):
        assert adapter_of(x).view(x)[0].stream.handle == other
        assert adapter_of(x).current_stream(cuda.device(0)).handle == other
    assert adapter_of(x).view(x)[0].stream.handle != other


def test_tensor_with_gradient_is_viewed_and_written_by_value(pretended):
    x = on_gpu(torch.ones(3)).requires_grad_()
    adapter = adapter_of(x)
    array, dtype = adapter.view(x)
    assert array.address == x.data_ptr()
    assert not adapter.wrap(array, dtype).requires_grad
    twos = on_gpu(torch.full((3,), 2.0))
    adapter.output(x)[0][...] = adapter.view(twos)[0]
    assert x.values.tolist() == [2, 2, 2]


def test_tensor_view_resolves_lazy_conjugate_and_negative(pretended):
    values = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (values.conj(), values.conj().imag):
        held = on_gpu(values).conj() if lazy.is_complex() else on_gpu(values).conj().imag
        array, _ = adapter_of(held).view(held)
        np.testing.assert_array_equal(array.to_host(), lazy.resolve_conj().resolve_neg().numpy())
        with pytest.raises(InvalidArgumentError, match="out"):
            adapter_of(held).output(held)


@pytest.mark.parametrize("name", IN_TORCH)
def test_empty_allocates_torch_tensor_on_given_device(pretended, name):
    dtype = BY_NAME[name]
    array = adapter_like("torch").empty((2, 3), dtype, cuda.device(1))
    assert pretended.allocated == 1
    assert array.flags.carray
    tensor = adapter_like("torch").wrap(array, dtype)
    assert tensor is array.owner
    assert (tensor.shape, tensor.dtype) == ((2, 3), getattr(torch, name))
    assert tensor.device == torch.device("cuda:1")


def test_empty_without_device_allocates_numpy_array():
    array = adapter_like("torch").empty((2, 3), BY_NAME["bfloat16"], None)
    assert type(array) is np.ndarray
    assert adapter_like("torch").wrap(array, BY_NAME["bfloat16"]).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8", "complex128"])
def test_wrap_of_tensor_part_shares_memory(pretended, name):
    x = on_gpu(torch.arange(24).reshape(4, 6).to(getattr(torch, name)))
    adapter = adapter_of(x)
    array, dtype = adapter.view(x)
    for part, expected in (
        (array[1:3], x[1:3]),
        (array.T, x.t()),
        (array[:, ::2], x[:, ::2]),
        (array.ravel(), x.reshape(-1)),
        (array[2:2], x[2:2]),
        (array[3, 5], x[3, 5]),
    ):
        back = adapter.wrap(part, dtype)
        assert back.dtype == x.dtype
        assert back.device == x.device
        assert back.shape == expected.shape
        assert bits(back.values) == bits(expected.values)
        assert not back.numel() or back.data_ptr() == expected.data_ptr()
    assert pretended.allocated == 0


def test_wrap_of_byte_part_has_requested_dtype(pretended):
    x = on_gpu(torch.zeros(48, dtype=torch.uint8))
    adapter = adapter_of(x)
    array = adapter.view(x)[0][8:40].view(np.float64).reshape(2, 2)
    array[...] = adapter.view(on_gpu(torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64)))[0]
    back = adapter.wrap(array.T, BY_NAME["float64"])
    assert back.values.tolist() == [[1, 3], [2, 4]]
    assert back.data_ptr() == x.data_ptr() + 8


def test_wrap_of_foreign_memory_keeps_owner_alive(pretended):
    x = FakeArray.of(np.arange(12.0).reshape(3, 4)[:, ::2])
    watched = weakref.ref(x)
    array, dtype = adapter_of(x).view(x)
    tensor = adapter_like("torch").wrap(array, dtype)
    assert type(tensor) is CudaTensor
    assert tensor.data_ptr() == x.address
    assert tensor.values.tolist() == [[0, 2], [4, 6], [8, 10]]
    del x, array
    gc.collect()
    assert watched() is not None
    del tensor
    gc.collect()
    assert watched() is None


def test_wrap_of_negative_strides_copies(pretended):
    x = FakeArray.of(np.arange(6.0)[::-2])
    tensor = adapter_like("torch").wrap(*adapter_of(x).view(x))
    assert tensor.values.tolist() == [5, 3, 1]
    y = on_gpu(torch.zeros(3, dtype=torch.float64))
    adapter_of(y).output(y)[0][...] = adapter_of(x).view(x)[0]
    assert y.values.tolist() == [5, 3, 1]


def test_strided_copy_uses_torch_and_leaves_gaps(pretended, gpu: Fake):
    x = on_gpu(torch.arange(12.0).reshape(3, 4).t())
    y = on_gpu(torch.full((4, 6), -1.0))
    target = adapter_of(y).output(y[:, ::2])[0]
    before = len(gpu.log("cuMemcpy"))
    target[...] = adapter_of(x).view(x)[0]
    assert len(gpu.log("cuMemcpy")) == before
    assert torch.equal(y.values[:, ::2], x.values)
    assert (y.values[:, 1::2] == -1).all()


def test_copies_run_on_active_stream(pretended, gpu: Fake):
    x = on_gpu(torch.zeros(4, 3))
    device = cuda.device(0)
    side = device.new_stream()
    with gpu.turned("delay_us", 20_000):
        late = FakeArray.of(np.arange(12.0, dtype=np.float32).reshape(3, 4).T, stream=side.handle)
        source = adapter_of(late).view(late)[0]
        target = adapter_of(x).output(x)[0]
        with cuda.on(side):
            # A copy on torch's current stream would read poison, because it would not wait.
            target[...] = source
            copied = target.copy()
    assert x.values.tolist() == late.get().tolist()
    assert copied.stream == side
    assert (
        adapter_like("torch").wrap(copied, BY_NAME["float32"]).values.tolist() == x.values.tolist()
    )


def test_copy_into_inference_tensor_succeeds(pretended):
    with torch.inference_mode():
        x = on_gpu(torch.zeros(4, 3))
    values = on_gpu(torch.arange(12.0).reshape(3, 4).t())
    adapter_of(x).output(x)[0][...] = adapter_of(values).view(values)[0]
    assert torch.equal(x.values, values.values)


def test_used_on_records_stream_with_torch(pretended):
    x = on_gpu(torch.zeros(3))
    side = cuda.device(0).new_stream()
    adapter = adapter_of(x)
    adapter.used_on(x, side)
    adapter.used_on(adapter.view(x)[0][1:], side)
    adapter.used_on(torch.zeros(3), side)
    assert x.used_on == [side.handle] * 2


@pytest.mark.parametrize("handle", [0, 1])
def test_legacy_stream_maps_to_torch_default_stream(pretended, handle):
    x = on_gpu(torch.zeros(3))
    adapter_of(x).used_on(x, cuda.device(0).stream(handle))
    assert x.used_on == [0]


def test_tensor_without_memory_raises_device_error(pretended):
    class Sharded(CudaTensor):
        def data_ptr(self):
            return 0

    x = Sharded(torch.zeros(3))
    with pytest.raises(DeviceError, match="to_local"):
        adapter_of(x).view(x)


def test_tensor_on_meta_device_raises_device_error():
    x = torch.empty(3, device="meta")
    with pytest.raises(DeviceError, match="NVIDIA GPU"):
        adapter_of(x).view(x)


def test_tensor_of_amd_build_raises_device_error(pretended, monkeypatch):
    x = on_gpu(torch.zeros(3))
    assert adapter_of(x).spot(x) is not None
    monkeypatch.setattr("collective.adapters.torch.cuda_arrays._FOR_AMD", True)
    assert adapter_of(x).spot(x) is None
    with pytest.raises(DeviceError, match="AMD"):
        adapter_of(x).view(x)


def test_empty_out_of_torch_memory_raises_allocation_error(pretended, monkeypatch):
    def fail(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(AllocationError, match="Tried to allocate 1 TiB"):
        adapter_like("torch").empty((3,), BY_NAME["float32"], cuda.device(0))
