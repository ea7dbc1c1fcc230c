"""The adapters with the real frameworks on an NVIDIA GPU; skipped where there is none."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from collective import cuda
from collective.memory.arrays import adapter_like, adapter_of
from collective.memory.dtypes import BY_NAME

if not cuda.device_count():
    pytest.skip("needs a GPU", allow_module_level=True)


class Torch:
    name = "torch"

    def __init__(self) -> None:
        self.module = pytest.importorskip("torch")
        if not self.module.cuda.is_available():
            pytest.skip("needs a build of PyTorch with CUDA")

    def of(self, values: np.ndarray):
        return self.module.from_numpy(values).to("cuda:0")

    def get(self, x) -> np.ndarray:
        return x.cpu().numpy()

    def side(self):
        return self.module.cuda.stream(self.module.cuda.Stream())

    def transposed(self, x):
        return x.t()


class Cupy(Torch):
    name = "cupy"

    def __init__(self) -> None:
        self.module = pytest.importorskip("cupy")

    def of(self, values: np.ndarray):
        return self.module.asarray(values)

    def get(self, x) -> np.ndarray:
        return self.module.asnumpy(x)

    def side(self):
        return self.module.cuda.Stream(non_blocking=True)

    def transposed(self, x):
        return x.T


@pytest.fixture(params=[Torch, Cupy], ids=lambda cls: cls.name)
def framework(request):
    return request.param()


VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def test_array_view_shares_memory_and_wraps_to_same_object(framework):
    x = framework.of(VALUES)
    array, dtype = adapter_of(x).view(x)
    np.testing.assert_array_equal(array.to_host(), VALUES)
    assert cuda.owner_of(array.address) == 0
    assert adapter_of(x).wrap(array, dtype) is x


def test_strided_copies_on_user_stream_are_exact(framework):
    with framework.side():
        x = framework.transposed(framework.of(VALUES))
        array, dtype = adapter_of(x).view(x)
        assert array.stream == adapter_of(x).current_stream(array.device)
        target = adapter_of(x).empty((6, 4), dtype, array.device)
        target[...] = array
        np.testing.assert_array_equal(framework.get(adapter_of(x).wrap(target, dtype)), VALUES.T)
        part = adapter_of(x).wrap(target[1:, ::2], dtype)
        np.testing.assert_array_equal(framework.get(part), VALUES.T[1:, ::2])


def test_strided_copies_on_library_stream_are_exact(framework):
    x = framework.transposed(framework.of(VALUES))
    array, dtype = adapter_of(x).view(x)
    side = cuda.device(0).new_stream()
    side.wait_for(array.stream)
    with cuda.on(side):
        copied = array.copy()
        copied[1:3] = copied[3:5]
    side.synchronize()
    expected = VALUES.T.copy()
    expected[1:3] = expected[3:5]
    np.testing.assert_array_equal(framework.get(adapter_of(x).wrap(copied, dtype)), expected)
    # Freeing the copy returns its memory to the allocator. The allocator then records an event on
    # `side`, so that stream must still exist.
    adapter_of(x).used_on(copied, side)
    del copied
    gc.collect()


def test_wrap_of_cuda_memory_gives_framework_array(framework):
    array = adapter_like("cuda").empty((4, 6), BY_NAME["float32"], cuda.device(0))
    array.fill_from_host(VALUES)
    array.stream.synchronize()
    x = adapter_like(framework.name).wrap(array, BY_NAME["float32"])
    del array
    gc.collect()
    np.testing.assert_array_equal(framework.get(x), VALUES)


def test_dlpack_import_by_other_framework_shares_values(framework):
    array, _ = adapter_of(x := framework.of(VALUES)).view(x)
    for other in ("torch", "cupy"):
        module = pytest.importorskip(other)
        taken = module.from_dlpack(array)
        assert tuple(taken.shape) == (4, 6)
        assert float(taken[3, 5]) == 23


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_tensor_with_dtype_unknown_to_numpy_is_viewed_and_wrapped(name):
    torch = Torch().module
    x = torch.arange(6, device="cuda:0").to(getattr(torch, name))
    array, dtype = adapter_of(x).view(x)
    back = adapter_of(x).wrap(array[1:].copy(), dtype)
    assert back.dtype is x.dtype
    assert back.float().tolist() == [1, 2, 3, 4, 5]
