"""DLPack capsules: imports from NumPy and PyTorch, and exports to them."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

from collective import cuda
from collective.errors import DeviceError, DtypeError, InvalidArgumentError
from collective.memory import dlpack
from collective.memory.arrays import adapter_of
from collective.memory.device_adapter import read_dlpack
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import BY_NAME, FOREIGN
from tests.fakes import Fake, FakeArray
from tests.support.fake_gpu import gpu
from tests.support.interpreter import run_python

pytestmark = pytest.mark.quick

__all__ = ["gpu"]  # a fixture

CPU = (dlpack.CPU, 0)
NATIVE = sorted(set(BY_NAME) - set(FOREIGN))


class Owner:
    """Owner of memory that accepts weak references."""


class Exporter:
    """Array of an unknown framework, made of a capsule and a device."""

    def __init__(self, capsule, device=CPU):
        self.capsule = capsule
        self.device = device
        self.asked = []

    def __dlpack__(self, **options):
        self.asked.append(options)
        return self.capsule

    def __dlpack_device__(self):
        return self.device


def lent(array: np.ndarray, owner, device=CPU) -> dlpack.Lent:
    address = array.__array_interface__["data"][0]
    dtype = BY_NAME[array.dtype.name]
    return dlpack.Lent(address, array.shape, array.strides, dtype, device, True, owner)


def seen(loan: dlpack.Lent) -> np.ndarray:
    """Return a copy of the lent elements, read by address and strides alone."""
    if 0 in loan.shape:
        return np.empty(loan.shape, loan.dtype.storage)
    size = loan.dtype.itemsize
    reach = [(n - 1) * s for n, s in zip(loan.shape, loan.strides)]
    low = sum(r for r in reach if r < 0)
    high = sum(r for r in reach if r > 0) + size
    raw = ctypes.string_at(loan.address + low, high - low)
    return np.ndarray(loan.shape, loan.dtype.storage, raw, -low, loan.strides).copy()


# -- reading -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0)], ids=["0", "1"])
@pytest.mark.parametrize("name", NATIVE)
def test_take_of_numpy_capsule_shares_memory(name, version):
    x = np.arange(12).astype(name).reshape(3, 4)
    loan = dlpack.take(x.__dlpack__(max_version=version))
    assert loan.dtype is BY_NAME[name]
    assert loan.address == x.ctypes.data
    assert (loan.shape, loan.strides) == (x.shape, x.strides)
    assert loan.device == CPU
    assert loan.writeable
    np.testing.assert_array_equal(seen(loan), x)


@pytest.mark.parametrize(
    "cut", [np.s_[::2], np.s_[:, 1], np.s_[::-1, ::-2], np.s_[..., None], np.s_[1, 1]], ids=str
)
def test_take_reads_strides_and_offsets(cut):
    x = np.arange(24.0).reshape(4, 6)[cut]
    loan = dlpack.take(np.asarray(x).__dlpack__())
    np.testing.assert_array_equal(seen(loan), x)


def test_take_reads_empty_array_and_zero_dimensions():
    loan = dlpack.take(np.empty((0, 3), np.float32).__dlpack__())
    assert loan.shape == (0, 3)
    assert seen(dlpack.take(np.array(2.5).__dlpack__())) == 2.5


def test_take_reports_read_only_memory():
    x = np.zeros(3)
    x.flags.writeable = False
    assert not dlpack.take(x.__dlpack__(max_version=(1, 0))).writeable


@pytest.mark.parametrize("name", ["float32", "bool", "complex64", *sorted(FOREIGN)])
def test_take_of_torch_capsule_shares_memory(name):
    torch = pytest.importorskip("torch")
    x = torch.ones((3, 4)).to(getattr(torch, name)).t()[1:]
    loan = dlpack.take(x.__dlpack__())
    assert loan.dtype is BY_NAME[name]
    assert loan.address == x.data_ptr()
    assert loan.shape == tuple(x.shape)
    assert loan.strides == tuple(s * x.element_size() for s in x.stride())


@pytest.mark.parametrize("version", [None, (1, 0)], ids=["0", "1"])
def test_take_releases_memory_when_dropped(version):
    x = np.arange(1000.0)
    watched = weakref.ref(x)
    loan = dlpack.take(x.__dlpack__(max_version=version))
    del x
    gc.collect()
    assert watched() is not None
    assert seen(loan)[-1] == 999
    del loan
    gc.collect()
    assert watched() is None


def test_take_consumes_capsule():
    capsule = np.zeros(3).__dlpack__()
    loan = dlpack.take(capsule)
    assert "used_dltensor" in repr(capsule)
    with pytest.raises(InvalidArgumentError, match="no unused DLPack capsule"):
        dlpack.take(capsule)
    assert seen(loan).tolist() == [0, 0, 0]


@pytest.mark.parametrize("thing", [None, 3, object()])
def test_take_of_non_capsule_raises_invalid_argument(thing):
    with pytest.raises(InvalidArgumentError, match="no unused DLPack capsule"):
        dlpack.take(thing)


@pytest.mark.parametrize(
    ("field", "value"), [("lanes", 4), ("code", 3), ("bits", 4)], ids=["lanes", "code", "bits"]
)
def test_take_of_unsupported_elements_leaves_capsule_unused(field, value):
    owner = Owner()
    watched = weakref.ref(owner)
    capsule = dlpack.lend(lent(np.zeros(3, np.float32), owner), 0)
    del owner
    address = dlpack._pointer_in(id(capsule), dlpack._Versioned.name)
    setattr(dlpack._Versioned.from_address(address).tensor, field, value)
    with pytest.raises(DtypeError, match="cannot travel"):
        dlpack.take(capsule)
    assert watched() is not None
    del capsule
    assert watched() is None


def test_take_of_later_major_version_raises_invalid_argument():
    capsule = dlpack.lend(lent(np.zeros(3), Owner()), 0)
    address = dlpack._pointer_in(id(capsule), dlpack._Versioned.name)
    dlpack._Versioned.from_address(address).major = 2
    with pytest.raises(InvalidArgumentError, match=r"version 2\.\d; 1 is understood"):
        dlpack.take(capsule)


# -- lending -----------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [None, 0], ids=["version 0", "version 1"])
@pytest.mark.parametrize("name", NATIVE)
def test_numpy_imports_lent_memory(name, flags):
    x = np.arange(12).astype(name).reshape(3, 4)[:, ::2].T
    owner = Owner()
    watched = weakref.ref(owner)
    y = np.from_dlpack(Exporter(dlpack.lend(lent(x, owner), flags)))
    del owner
    assert y.ctypes.data == x.ctypes.data
    assert y.strides == x.strides
    np.testing.assert_array_equal(y, x)
    assert watched() is not None
    part = y[1:]
    del y
    assert watched() is not None
    del part
    gc.collect()
    assert watched() is None


def test_torch_imports_lent_memory():
    torch = pytest.importorskip("torch")
    x = np.arange(12.0).reshape(3, 4).T
    owner = Owner()
    watched = weakref.ref(owner)
    y = torch.utils.dlpack.from_dlpack(dlpack.lend(lent(x, owner), None))
    del owner
    assert y.data_ptr() == x.ctypes.data
    np.testing.assert_array_equal(y.numpy(), x)
    y[0, 0] = 7
    assert x[0, 0] == 7
    assert watched() is not None
    del y
    assert watched() is None


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_lend_accepts_empty_and_single_element_shapes(shape):
    x = np.ones(shape, np.float32)
    y = np.from_dlpack(Exporter(dlpack.lend(lent(x, Owner()), 0)))
    assert y.shape == shape
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("flags", [None, 0, 1])
def test_unused_capsule_releases_memory(flags):
    owner = Owner()
    watched = weakref.ref(owner)
    capsule = dlpack.lend(lent(np.zeros(3), owner), flags)
    del owner
    assert watched() is not None
    del capsule
    assert watched() is None


def test_lend_and_take_round_trip_keeps_array():
    x = np.arange(6.0)[::-2]
    loan = dlpack.take(dlpack.lend(lent(x, Owner()), 1))
    np.testing.assert_array_equal(seen(loan), x)
    assert not loan.writeable
    assert loan.dtype is BY_NAME["float64"]


def test_failed_import_raises_its_error_and_releases_memory():
    owner = Owner()
    watched = weakref.ref(owner)
    capsule = dlpack.lend(lent(np.zeros(3), owner, (dlpack.CUDA, 0)), None)
    exporter = Exporter(capsule)
    del owner, capsule

    class Forgetful(Exporter):
        """Exporter that holds no reference to the capsule when the importer raises."""

        def __dlpack__(self, **options):
            return exporter.__dict__.pop("capsule")

    # If the capsule's destructor lost the pending exception, this would be a SystemError.
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported device"):
        np.from_dlpack(Forgetful(None))
    assert watched() is None


def test_deleter_may_be_called_by_foreign_threads():
    owners = [Owner() for _ in range(50)]
    watched = [weakref.ref(owner) for owner in owners]
    loans = [dlpack.take(dlpack.lend(lent(np.zeros(3), owner), None)) for owner in owners]
    addresses = [loan.owner._address for loan in loans]
    for loan in loans:
        loan.owner._deleter = None
    del owners, loans, loan
    assert None not in [w() for w in watched]
    threads = []
    for address in addresses:
        # Call the deleter without the GIL, as a framework's own threads would.
        deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            dlpack._Managed.from_address(address).deleter
        )
        threads.append(threading.Thread(target=deleter, args=(address,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert [w() for w in watched] == [None] * 50


PROGRAM = """
import ctypes, sys
import numpy as np, torch
from collective.memory import dlpack
from collective.memory.dtypes import BY_NAME

class Owner:
    def __del__(self):
        print("freed", flush=True)

x = np.ones(3)
lent = dlpack.Lent(x.ctypes.data, (3,), (8,), BY_NAME["float64"], (1, 0), True, Owner())
capsule = dlpack.lend(lent, None)
del lent
if sys.argv[1] == "tensor":
    sys.kept = torch.utils.dlpack.from_dlpack(capsule)
    del capsule
elif sys.argv[1] == "capsule":
    sys.kept = capsule
    del capsule
elif sys.argv[1] == "for ever":
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch.utils.dlpack.from_dlpack(capsule)))
elif sys.argv[1] == "dropped":
    del capsule
print("end", flush=True)
"""


@pytest.mark.whole
@pytest.mark.parametrize("keeper", ["tensor", "capsule", "for ever", "dropped"])
def test_lent_memory_may_outlive_interpreter(keeper):
    pytest.importorskip("torch")
    done = run_python("-X", "faulthandler", "-c", PROGRAM, keeper)
    assert done.returncode == 0, done.stderr
    # After the end of the interpreter the deleter cannot call Python: the process frees the memory.
    assert done.stdout.split() == (["freed", "end"] if keeper == "dropped" else ["end"])
    assert done.stderr == ""


# -- GPUs --------------------------------------------------------------------------------


def on_gpu(values: np.ndarray, stream: int | None = None) -> DeviceArray:
    x = FakeArray.of(values, stream=stream)
    return adapter_of(x).view(x)[0]


def test_gpu_array_import_shares_memory(gpu: Fake):
    x = on_gpu(np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2])
    y, dtype = read_dlpack(x)
    assert dtype is BY_NAME["float32"]
    assert (y.address, y.shape, y.strides) == (x.address, x.shape, x.strides)
    assert y.device is x.device
    assert y.stream == x.device.stream(0)
    np.testing.assert_array_equal(y.to_host(), [[0, 2], [4, 6], [8, 10]])


def test_gpu_import_waits_for_stream_of_producer(gpu: Fake):
    with gpu.turned("delay_us", 20_000):
        x = on_gpu(np.full(1000, 3.0))
        y, _ = read_dlpack(x)
        # Without the wait the values would be poison.
        np.testing.assert_array_equal(y.to_host(), np.full(1000, 3.0))


def test_gpu_export_makes_stream_of_importer_wait(gpu: Fake):
    with gpu.turned("delay_us", 20_000):
        x = on_gpu(np.full(1000, 3.0))
        taker = gpu.stream(0)
        loan = dlpack.take(x.__dlpack__(stream=taker))
        y = DeviceArray(loan.address, (1000,), "f8", x.device, x.device.stream(taker))
        np.testing.assert_array_equal(y.to_host(), np.full(1000, 3.0))


def waits(gpu: Fake) -> int:
    return len(gpu.log("cuStreamWaitEvent"))


def test_gpu_export_to_same_or_no_stream_does_not_wait(gpu: Fake):
    x = on_gpu(np.zeros(3))
    before = waits(gpu)
    x.__dlpack__(stream=-1)
    x.__dlpack__(stream=x.stream.handle)
    assert waits(gpu) == before
    x.__dlpack__(stream=2)
    x.__dlpack__()
    assert waits(gpu) == before + 2


@pytest.mark.parametrize("stream", [0, -2, True, "1", 1.0])
def test_gpu_export_to_invalid_stream_raises_invalid_argument(gpu: Fake, stream):
    with pytest.raises(InvalidArgumentError, match="stream"):
        on_gpu(np.zeros(3)).__dlpack__(stream=stream)


def test_gpu_export_to_cpu_raises_buffer_error(gpu: Fake):
    x = on_gpu(np.zeros(3))
    assert x.__dlpack_device__() == (2, 0)
    x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="to_host"):
        x.__dlpack__(dl_device=(1, 0))


def test_gpu_export_of_read_only_needs_version_1_or_copy(gpu: Fake):
    x = on_gpu(np.zeros(3))
    x.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        x.__dlpack__()
    assert not dlpack.take(x.__dlpack__(max_version=(1, 0))).writeable
    copied = dlpack.take(x.__dlpack__(copy=True))
    assert copied.address != x.address


def test_gpu_export_uses_version_1_if_importer_reads_it(gpu: Fake):
    x = on_gpu(np.zeros(3))
    assert '"dltensor"' in repr(x.__dlpack__(max_version=(0, 8)))
    assert '"dltensor_versioned"' in repr(x.__dlpack__(max_version=(1, 2)))


def test_gpu_export_marks_copy(gpu: Fake):
    x = on_gpu(np.arange(3.0))
    capsule = x.__dlpack__(copy=True, max_version=(1, 0))
    address = dlpack._pointer_in(id(capsule), dlpack._Versioned.name)
    assert dlpack._Versioned.from_address(address).flags == 2
    x[...] = on_gpu(np.zeros(3))
    np.testing.assert_array_equal(read_dlpack(Exporter(capsule))[0].to_host(), [0.0, 1.0, 2.0])


def test_gpu_export_keeps_array_alive(gpu: Fake):
    x = on_gpu(np.zeros(3))
    watched = weakref.ref(x)
    y, _ = read_dlpack(x)
    del x
    gc.collect()
    assert watched() is not None
    part = y[1:]
    del y
    assert watched() is not None
    del part
    gc.collect()
    assert watched() is None


def test_gpu_export_of_bfloat16_keeps_dtype(gpu: Fake):
    x = on_gpu(np.array([1.0, 2.0], ml_dtypes.bfloat16).view(np.uint16))
    assert dlpack.take(x.__dlpack__()).dtype.name == "uint16"
    loan = dlpack.take(dlpack.export(x, dtype=BY_NAME["bfloat16"]))
    assert loan.dtype.name == "bfloat16"


@pytest.mark.parametrize("kind", [dlpack.CUDA_MANAGED, dlpack.CUDA])
def test_managed_memory_is_viewed_as_gpu_memory(gpu: Fake, kind):
    x = on_gpu(np.arange(3.0))
    cuda.device(0).stream(x.stream.handle).synchronize()
    loan = dlpack.Lent(x.address, (3,), (8,), BY_NAME["float64"], (kind, 0), True, x)
    array, _ = adapter_of(Exporter(None)).view(Exporter(dlpack.lend(loan, 0), (kind, 0)))
    np.testing.assert_array_equal(array.to_host(), [0, 1, 2])


def test_page_locked_host_memory_is_viewed_as_numpy():
    x = np.arange(3.0)
    device = (dlpack.CUDA_HOST, 0)
    exporter = Exporter(dlpack.lend(lent(x, Owner(), device), 0), device)
    array, dtype = adapter_of(exporter).view(exporter)
    assert type(array) is np.ndarray
    assert array.ctypes.data == x.ctypes.data
    assert dtype is BY_NAME["float64"]


@pytest.mark.parametrize("device", [(10, 0), (8, 0), (4, 0)], ids=["ROCm", "Metal", "OpenCL"])
def test_import_from_unsupported_device_raises_device_error(device):
    exporter = Exporter(None, device)
    with pytest.raises(DeviceError, match=rf"\({device[0]}, 0\).*NVIDIA"):
        adapter_of(exporter).view(exporter)


def test_import_with_contradicting_device_raises_device_error(gpu: Fake):
    exporter = Exporter(dlpack.lend(lent(np.zeros(3), Owner()), 0), (2, 0))
    with pytest.raises(DeviceError, match="DLPack device"):
        adapter_of(exporter).view(exporter)


def test_import_from_old_producer_passes_stream_only(gpu: Fake):
    class Old(Exporter):
        def __dlpack__(self, *, stream=None):
            self.asked.append(stream)
            return self.capsule

    x = on_gpu(np.arange(3.0))
    old = Old(x.__dlpack__(stream=1), (2, 0))
    np.testing.assert_array_equal(adapter_of(old).view(old)[0].to_host(), [0, 1, 2])
    assert old.asked == [dlpack.LEGACY]


def test_import_error_names_reason_of_producer(gpu: Fake):
    class Unwilling(Exporter):
        def __dlpack__(self, **options):
            raise BufferError("it requires a gradient")

    x = Unwilling(None, (2, 0))
    with pytest.raises(InvalidArgumentError, match="it requires a gradient"):
        adapter_of(x).view(x)


def test_import_of_read_only_array_is_refused_as_output(gpu: Fake):
    x = on_gpu(np.zeros(3))
    x.writeable = False

    class Frozen(Exporter):
        def __dlpack__(self, **options):
            return x.__dlpack__(**options)

    frozen = Frozen(None, (2, 0))
    assert not adapter_of(frozen).view(frozen)[0].writeable
    with pytest.raises(InvalidArgumentError, match="read-only"):
        adapter_of(frozen).output(frozen)
