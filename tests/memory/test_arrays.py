"""Conversion of frameworks' arrays to NumPy arrays over the same memory, and back."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest

from collective.errors import DeviceError, DtypeError, InvalidArgumentError, UnsupportedError
from collective.memory.arrays import adapter_like, adapter_of, is_array
from collective.memory.dtypes import BY_NAME, FOREIGN
from tests.support.on_ranks import on_ranks, ranks_of

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch")

pair = ranks_of(("threads", 2))

NATIVE = sorted(set(BY_NAME) - set(FOREIGN))
IN_TORCH = sorted(name for name in BY_NAME if hasattr(torch, name))


def _shares(a: np.ndarray, b: np.ndarray) -> bool:
    return a.__array_interface__["data"][0] == b.__array_interface__["data"][0]


# -- NumPy -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE)
def test_numpy_view_and_wrap_return_same_array(name):
    x = np.zeros((3, 4), name)
    adapter = adapter_of(x)
    array, dtype = adapter.view(x)
    assert dtype is BY_NAME[name]
    assert array is x
    assert adapter.wrap(array, dtype) is x


@pytest.mark.parametrize(
    "cut", [np.s_[::2], np.s_[::-1], np.s_[:, 1], np.s_[..., None], np.s_[0, 0]], ids=str
)
def test_numpy_view_keeps_strides(cut):
    x = np.arange(24.0).reshape(4, 6)
    view = x[cut]
    array, _ = adapter_of(view).view(view)
    assert array.shape == np.shape(view)
    np.testing.assert_array_equal(array, view)
    assert np.ndim(view) == 0 or array.strides == view.strides


@pytest.mark.parametrize("scalar", [np.float32(2.5), np.int8(-3), np.bool_(True), np.array(7)])
def test_numpy_scalar_view_has_no_dimensions(scalar):
    array, dtype = adapter_of(scalar).view(scalar)
    assert array.shape == ()
    assert dtype.name == np.asarray(scalar).dtype.name
    assert array[()] == scalar


def test_numpy_read_only_array_is_refused_as_output():
    x = np.zeros(3)
    x.flags.writeable = False
    assert adapter_of(x).view(x)[0] is x
    with pytest.raises(InvalidArgumentError, match="read-only"):
        adapter_of(x).output(x)
    with pytest.raises(InvalidArgumentError, match="read-only"):
        adapter_of(np.float32(1)).output(np.float32(1))


def test_numpy_subclass_is_viewed_as_plain_array():
    class Mine(np.ndarray):
        pass

    x = np.arange(3.0).view(Mine)
    array, _ = adapter_of(x).view(x)
    assert type(array) is np.ndarray
    assert _shares(array, x)


def test_numpy_masked_array_raises_invalid_argument():
    x = np.ma.masked_array([1.0, 2.0], [True, False])
    with pytest.raises(InvalidArgumentError, match="filled"):
        adapter_of(x)
    assert not is_array(x)


@on_ranks("pair")
def test_all_reduce_of_foreign_endianness_raises_dtype_error(comm):
    with pytest.raises(DtypeError):
        comm.all_reduce(np.ones(3, np.dtype("f8").newbyteorder()))
    assert comm.all_reduce(np.ones(3))[0] == 2.0


def test_numpy_bfloat16_round_trip_keeps_values():
    x = np.array([[1.0, -2.5], [3.0, 0.0]], ml_dtypes.bfloat16)
    for view in (x, x[::-1, ::-1], x[:, 0], x[0, 1]):
        adapter = adapter_of(view)
        array, dtype = adapter.view(view)
        assert dtype is BY_NAME["bfloat16"]
        assert array.dtype == np.uint16
        back = adapter.wrap(array, dtype)
        assert back.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(back.astype("f4"), np.asarray(view).astype("f4"))


@on_ranks("pair")
def test_all_reduce_of_unaligned_memory_succeeds(comm):
    raw = np.zeros(8 * 50_000 + 1, np.uint8)[1:].view(np.float64)
    raw[:] = comm.rank + 1
    assert not raw.flags.aligned
    comm.all_reduce(raw, out=raw)
    assert (raw[-1], comm.all_reduce(raw)[0]) == (3.0, 6.0)


# -- PyTorch -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_TORCH)
def test_torch_view_and_wrap_share_memory(name):
    x = torch.ones((3, 4), dtype=getattr(torch, name))
    adapter = adapter_of(x)
    array, dtype = adapter.view(x)
    assert dtype is BY_NAME[name]
    assert array.dtype == dtype.storage
    assert array.__array_interface__["data"][0] == x.data_ptr()
    back = adapter.wrap(array, dtype)
    assert back.dtype == x.dtype
    assert back.data_ptr() == x.data_ptr()


def test_torch_has_every_dtype():
    assert set(IN_TORCH) == set(BY_NAME)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_torch_view_keeps_strides(name):
    x = torch.arange(24, dtype=getattr(torch, name)).reshape(4, 6)
    for view in (x.t(), x[::2, 1::3], x[0], x[1, 2], x[:0]):
        array, _ = adapter_of(view).view(view)
        assert array.shape == tuple(view.shape)
        values = array if name == "float32" else array.view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(values.astype("f4"), view.float().numpy())


def test_torch_parameter_is_viewed_by_its_values():
    x = torch.nn.Parameter(torch.ones(3))
    adapter = adapter_of(x)
    array, dtype = adapter.view(x)
    assert array.__array_interface__["data"][0] == x.data_ptr()
    assert not adapter.wrap(array, dtype).requires_grad
    adapter.output(x)[0][:] = 2
    assert x.tolist() == [2, 2, 2]


def test_torch_lazy_conjugates_and_negatives_are_resolved_in_view():
    x = torch.tensor([1 + 2j, 3 - 4j])
    for lazy in (x.conj(), x.conj().imag):
        array, _ = adapter_of(lazy).view(lazy)
        np.testing.assert_array_equal(array, lazy.resolve_conj().resolve_neg().numpy())
        with pytest.raises(InvalidArgumentError, match="out"):
            adapter_of(lazy).output(lazy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.ones(3).to_mkldnn(),
    ],
    ids=["sparse", "csr", "meta", "mkldnn"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_torch_tensor_not_dense_on_cpu_raises_device_error(make):
    if "mkldnn" in repr(make.__code__.co_names) and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of PyTorch has no mkldnn")
    x = make()
    with pytest.raises(DeviceError, match="torch"):
        adapter_of(x).view(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_nested_tensor_raises_device_error():
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(DeviceError, match="torch"):
        adapter_of(x).view(x)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e8m0fnu], ids=str)
def test_torch_unsupported_dtype_raises_dtype_error(dtype):
    x = torch.empty(3, dtype=dtype)
    with pytest.raises(DtypeError, match="cannot be sent"):
        adapter_of(x).view(x)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@on_ranks("pair")
def test_float8_moves_but_all_reduce_raises_unsupported(comm, name):
    x = torch.arange(6).to(getattr(torch, name))
    with pytest.raises(UnsupportedError, match=r"float8.*'threads'.*'nccl'"):
        comm.all_reduce(x)
    received = comm.broadcast(x if comm.rank == 0 else None, like="torch")
    assert (received.dtype, received.float().tolist()) == (x.dtype, [0, 1, 2, 3, 4, 5])
    plain = np.arange(6).astype(getattr(ml_dtypes, name))
    joined = comm.all_gather(plain)
    assert joined.dtype == plain.dtype
    assert joined.astype(float).tolist() == [0, 1, 2, 3, 4, 5] * 2


@on_ranks("pair")
def test_torch_expanded_tensor_is_refused_as_output(comm):
    x = torch.full((1,), comm.rank + 1.0).expand(5)
    with pytest.raises(InvalidArgumentError, match="expanded"):
        comm.all_reduce(torch.ones(5), out=x)
    assert comm.all_reduce(x).tolist() == [3.0] * 5


# -- DLPack ------------------------------------------------------------------------------


class Exporter:
    """Array of an unknown framework that supports DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return (1, 0)


def test_dlpack_view_shares_memory():
    x = Exporter(np.arange(6.0).reshape(2, 3)[:, ::2])
    array, dtype = adapter_of(x).view(x)
    assert dtype is BY_NAME["float64"]
    assert _shares(array, x.array)
    np.testing.assert_array_equal(array, x.array)


@on_ranks("pair")
def test_dlpack_result_is_numpy_without_from_dlpack(comm):
    total = comm.all_reduce(Exporter(np.full(3, comm.rank + 1.0)))
    assert type(total) is np.ndarray
    assert total.tolist() == [3, 3, 3]


def test_dlpack_result_is_same_class_with_from_dlpack(monkeypatch):
    module = types.ModuleType("framework_of_a_stranger")
    module.from_dlpack = lambda array: Stranger(np.from_dlpack(array))

    class Stranger(Exporter):
        pass

    Stranger.__module__ = "framework_of_a_stranger.arrays"
    monkeypatch.setitem(sys.modules, "framework_of_a_stranger", module)
    x = Stranger(np.arange(3))
    adapter = adapter_of(x)
    back = adapter.wrap(*adapter.view(x))
    assert type(back) is Stranger
    assert back.array.tolist() == [0, 1, 2]


def _in_namespace(from_dlpack):
    """Return the class of arrays whose namespace has that function, and whose module has none."""
    space = types.SimpleNamespace(from_dlpack=from_dlpack)

    class Spaced(Exporter):
        __module__ = "a_module_that_is_not_there"

        def __array_namespace__(self):
            return space

    return Spaced


def test_dlpack_result_is_same_class_with_from_dlpack_in_its_namespace():
    spaced = _in_namespace(lambda array: spaced(np.from_dlpack(array)))
    adapter = adapter_of(spaced(np.arange(3)))
    back = adapter.wrap(*adapter.view(spaced(np.arange(3))))
    assert type(back) is spaced
    assert back.array.tolist() == [0, 1, 2]


def test_dlpack_result_is_numpy_if_the_framework_refuses_the_array():
    def refuse(array):
        raise BufferError("no such dtype here")

    x = _in_namespace(refuse)(np.arange(3))
    assert type(adapter_of(x).wrap(*adapter_of(x).view(x))) is np.ndarray


def test_dlpack_result_for_tensorflow_passes_a_capsule(monkeypatch):
    class Tensor(Exporter):
        __module__ = "tensorflow.python.framework.ops"

    def from_dlpack(capsule):
        assert "dltensor" in repr(capsule)
        return Tensor(np.zeros(3))

    module = types.ModuleType("tensorflow")
    module.experimental = types.SimpleNamespace(
        dlpack=types.SimpleNamespace(from_dlpack=from_dlpack)
    )
    monkeypatch.setitem(sys.modules, "tensorflow", module)
    x = Tensor(np.arange(3))
    assert type(adapter_of(x).wrap(*adapter_of(x).view(x))) is Tensor


def test_dlpack_bfloat16_result_is_numpy():
    adapter = adapter_of(Exporter(np.zeros(1)))
    back = adapter.wrap(np.zeros(2, np.uint16), BY_NAME["bfloat16"])
    assert back.dtype == ml_dtypes.bfloat16


def test_dlpack_unsupported_export_raises_dtype_error():
    x = Exporter(np.zeros(2, "U1"))
    with pytest.raises(DtypeError, match="DLPack"):
        adapter_of(x).view(x)


def test_dlpack_result_of_missing_module_is_numpy():
    class Orphan(Exporter):
        __module__ = "a_module_that_is_not_there"

    x = Orphan(np.zeros(2))
    assert type(adapter_of(x).wrap(*adapter_of(x).view(x))) is np.ndarray


# -- names -------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [1, 1.5, "text", None, [1.0], object(), {"a": 1}])
def test_adapter_of_non_array_raises_invalid_argument(thing):
    assert not is_array(thing)
    with pytest.raises(InvalidArgumentError, match=r"is not an array\. Pass a NumPy array"):
        adapter_of(thing)


def test_adapter_like_accepts_name_or_array():
    assert adapter_like("numpy") is adapter_of(np.zeros(1))
    assert adapter_like("torch") is adapter_of(torch.zeros(1))
    assert adapter_like(torch.zeros(1)) is adapter_like("torch")
    with pytest.raises(InvalidArgumentError, match="numpy, torch"):
        adapter_like("tensorflow")


def test_adapter_like_of_missing_framework_recommends_installation(monkeypatch):
    import collective.memory.arrays as arrays

    monkeypatch.setitem(arrays._FRAMEWORKS, "absent", ("collective.adapters.absent", "Adapter"))
    with pytest.raises(InvalidArgumentError, match=r"pip install .*\[absent\]"):
        adapter_like("absent")
