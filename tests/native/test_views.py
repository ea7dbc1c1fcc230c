"""Views of arrays in C: they equal the adapters' views, or C leaves the array to them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from collective.memory.arrays import adapter_of
from collective.memory.dtypes import BY_CODE, BY_NAME

core = pytest.importorskip("collective.native._core", reason="the native core is not built")

Array = np.ndarray[Any, Any]
NUMPY = [name for name in BY_NAME if hasattr(np, name) or name == "bool"]


def see_as_the_adapter(x: Any) -> None:
    seen = core.view(x)
    assert seen is not None
    address, nbytes, code, shape, writable = seen
    array, dtype = adapter_of(x).view(x)
    assert BY_CODE[code] is dtype
    assert (nbytes, shape, writable) == (array.nbytes, array.shape, array.flags.writeable)
    if array.size:
        assert address == array.ctypes.data


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("name", NUMPY)
def test_view_of_numpy_dtype_equals_adapter(name: str) -> None:
    see_as_the_adapter(np.zeros((2, 3), BY_NAME[name].storage))


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.zeros(()), id="0-d"),
        pytest.param(np.zeros((0, 3)), id="empty"),
        pytest.param(np.zeros((3, 1, 2))[::2, :, :][:1], id="contiguous-by-length-1"),
        pytest.param(np.zeros((1,) * 8), id="8-d"),
        pytest.param(np.zeros(4, np.longlong), id="longlong"),
        pytest.param(read_only(np.zeros(4)), id="read-only"),
    ],
)
def test_view_of_numpy_shape_equals_adapter(array: Array) -> None:
    see_as_the_adapter(array)


class Own(np.ndarray):  # type: ignore[type-arg]
    """Subclass of ndarray, as a program may define it."""


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(np.zeros((2, 3)).T, id="strides"),
        pytest.param(np.zeros(9, np.uint8)[1:].view(np.float32), id="unaligned"),
        pytest.param(np.zeros(4, ">f4"), id="byte-order"),
        pytest.param(np.zeros(4, np.longdouble), id="longdouble"),
        pytest.param(np.zeros(4, "f4,f4"), id="record"),
        pytest.param(np.zeros(4, "M8[s]"), id="date"),
        pytest.param(np.zeros(4, object), id="object"),
        pytest.param(np.zeros(4).view(Own), id="subclass"),
        pytest.param(np.zeros((1,) * 9), id="9-d"),
        pytest.param(np.float32(1), id="scalar"),
        pytest.param([1.0], id="list"),
        pytest.param(None, id="None"),
    ],
)
def test_view_of_unsupported_object_is_none(x: Any) -> None:
    assert core.view(x) is None


def test_view_of_dtype_missing_in_numpy_is_none() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert core.view(np.zeros(4, ml_dtypes.bfloat16)) is None


@pytest.fixture(name="torch", scope="module")
def _torch() -> Any:
    torch = pytest.importorskip("torch")
    adapter_of(torch.zeros(1))
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this PyTorch has no functions of DLPack's")
    return torch


@pytest.mark.parametrize("name", [name for name in BY_NAME if not name.startswith("float8")])
def test_view_of_torch_dtype_equals_adapter(torch: Any, name: str) -> None:
    see_as_the_adapter(torch.zeros((2, 3), dtype=getattr(torch, name)))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda torch: torch.zeros(()), id="0-d"),
        pytest.param(lambda torch: torch.zeros((0, 3)), id="empty"),
        pytest.param(lambda torch: torch.zeros((8, 2))[3:5], id="offset"),
        pytest.param(lambda torch: torch.zeros(4, requires_grad=True), id="requires-grad"),
        pytest.param(lambda torch: torch.nn.Parameter(torch.zeros(4)), id="parameter"),
    ],
)
def test_view_of_torch_shape_equals_adapter(torch: Any, make: Any) -> None:
    see_as_the_adapter(make(torch))


def _subclass(torch: Any) -> Any:
    return type("Own", (torch.Tensor,), {})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda torch: torch.zeros((2, 3)).T, id="strides"),
        pytest.param(lambda torch: torch.zeros(1).expand(4), id="expanded"),
        pytest.param(lambda torch: torch.zeros(4, dtype=torch.complex64).conj(), id="conjugated"),
        pytest.param(lambda torch: torch.ones(1, dtype=torch.cfloat).conj().imag, id="negated"),
        pytest.param(lambda torch: torch.zeros(4, device="meta"), id="meta"),
        pytest.param(lambda torch: torch._efficientzerotensor(4), id="without-memory"),
        pytest.param(lambda torch: torch.zeros(4).to_sparse(), id="sparse"),
        pytest.param(lambda torch: torch.zeros(4, dtype=torch.float8_e5m2), id="float8"),
        pytest.param(lambda torch: torch.zeros(4).as_subclass(_subclass(torch)), id="subclass"),
    ],
)
def test_view_of_unsupported_tensor_is_none(torch: Any, make: Any) -> None:
    assert core.view(make(torch)) is None


def test_view_keeps_no_array() -> None:
    array = np.zeros(4)
    before = sys.getrefcount(array)
    for _ in range(100):
        core.view(array)
    assert sys.getrefcount(array) == before
