"""DLPack capsules, read and made here, against those of NumPy and PyTorch."""

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

__all__ = ["gpu"]  # a fixture

CPU = (dlpack.CPU, 0)
NATIVE = sorted(set(BY_NAME) - set(FOREIGN))


class Owner:
    """What keeps memory alive, and can be watched."""


class Exporter:
    """An array of an unknown framework: a capsule and where it is."""

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


def seen(found: dlpack.Lent) -> np.ndarray:
    """Return a copy of what was lent, by address and strides alone."""
    if 0 in found.shape:
        return np.empty(found.shape, found.dtype.storage)
    size = found.dtype.itemsize
    reach = [(n - 1) * s for n, s in zip(found.shape, found.strides)]
    low = sum(r for r in reach if r < 0)
    high = sum(r for r in reach if r > 0) + size
    raw = ctypes.string_at(found.address + low, high - low)
    return np.ndarray(found.shape, found.dtype.storage, raw, -low, found.strides).copy()


# -- reading -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, (1, 0)], ids=["0", "1"])
@pytest.mark.parametrize("name", NATIVE)
def test_numpy_is_read_where_it_is(name, version):
    x = np.arange(12).astype(name).reshape(3, 4)
    found = dlpack.take(x.__dlpack__(max_version=version))
    assert found.dtype is BY_NAME[name]
    assert found.address == x.ctypes.data
    assert (found.shape, found.strides) == (x.shape, x.strides)
    assert found.device == CPU
    assert found.writeable
    np.testing.assert_array_equal(seen(found), x)


@pytest.mark.parametrize(
    "cut", [np.s_[::2], np.s_[:, 1], np.s_[::-1, ::-2], np.s_[..., None], np.s_[1, 1]], ids=str
)
def test_strides_and_offsets_are_read(cut):
    x = np.arange(24.0).reshape(4, 6)[cut]
    found = dlpack.take(np.asarray(x).__dlpack__())
    np.testing.assert_array_equal(seen(found), x)


def test_an_array_of_no_elements_and_one_of_no_axes_are_read():
    found = dlpack.take(np.empty((0, 3), np.float32).__dlpack__())
    assert found.shape == (0, 3)
    assert seen(dlpack.take(np.array(2.5).__dlpack__())) == 2.5


def test_read_only_memory_is_told_of():
    x = np.zeros(3)
    x.flags.writeable = False
    assert not dlpack.take(x.__dlpack__(max_version=(1, 0))).writeable


@pytest.mark.parametrize("name", ["float32", "bool", "complex64", *sorted(FOREIGN)])
def test_torch_is_read_where_it_is(name):
    torch = pytest.importorskip("torch")
    x = torch.ones((3, 4)).to(getattr(torch, name)).t()[1:]
    found = dlpack.take(x.__dlpack__())
    assert found.dtype is BY_NAME[name]
    assert found.address == x.data_ptr()
    assert found.shape == tuple(x.shape)
    assert found.strides == tuple(s * x.element_size() for s in x.stride())


@pytest.mark.parametrize("version", [None, (1, 0)], ids=["0", "1"])
def test_the_memory_is_given_back_when_it_is_dropped_and_not_before(version):
    x = np.arange(1000.0)
    watched = weakref.ref(x)
    found = dlpack.take(x.__dlpack__(max_version=version))
    del x
    gc.collect()
    assert watched() is not None
    assert seen(found)[-1] == 999
    del found
    gc.collect()
    assert watched() is None


def test_a_capsule_is_used_up():
    capsule = np.zeros(3).__dlpack__()
    kept = dlpack.take(capsule)
    assert "used_dltensor" in repr(capsule)
    with pytest.raises(InvalidArgumentError, match="no unused DLPack capsule"):
        dlpack.take(capsule)
    assert seen(kept).tolist() == [0, 0, 0]


@pytest.mark.parametrize("thing", [None, 3, object()])
def test_what_is_no_capsule_is_refused(thing):
    with pytest.raises(InvalidArgumentError, match="no unused DLPack capsule"):
        dlpack.take(thing)


@pytest.mark.parametrize(
    ("field", "value"), [("lanes", 4), ("code", 3), ("bits", 4)], ids=["lanes", "code", "bits"]
)
def test_elements_that_cannot_travel_are_refused_and_the_capsule_stays_whole(field, value):
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


def test_a_later_major_version_is_refused():
    capsule = dlpack.lend(lent(np.zeros(3), Owner()), 0)
    address = dlpack._pointer_in(id(capsule), dlpack._Versioned.name)
    dlpack._Versioned.from_address(address).major = 2
    with pytest.raises(InvalidArgumentError, match=r"version 2\.\d; 1 is understood"):
        dlpack.take(capsule)


# -- lending -----------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [None, 0], ids=["version 0", "version 1"])
@pytest.mark.parametrize("name", NATIVE)
def test_numpy_takes_what_is_lent(name, flags):
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


def test_torch_takes_what_is_lent():
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
def test_shapes_without_strides_to_speak_of_are_lent(shape):
    x = np.ones(shape, np.float32)
    y = np.from_dlpack(Exporter(dlpack.lend(lent(x, Owner()), 0)))
    assert y.shape == shape
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("flags", [None, 0, 1])
def test_a_capsule_that_nobody_takes_gives_the_memory_back(flags):
    owner = Owner()
    watched = weakref.ref(owner)
    capsule = dlpack.lend(lent(np.zeros(3), owner), flags)
    del owner
    assert watched() is not None
    del capsule
    assert watched() is None


def test_what_is_lent_comes_back_as_it_was():
    x = np.arange(6.0)[::-2]
    found = dlpack.take(dlpack.lend(lent(x, Owner()), 1))
    np.testing.assert_array_equal(seen(found), x)
    assert not found.writeable
    assert found.dtype is BY_NAME["float64"]


def test_a_taker_that_raises_is_heard_and_gives_the_memory_back():
    owner = Owner()
    watched = weakref.ref(owner)
    capsule = dlpack.lend(lent(np.zeros(3), owner, (dlpack.CUDA, 0)), None)
    exporter = Exporter(capsule)
    del owner, capsule

    class Forgetful(Exporter):
        """Has no reference to the capsule left when the taker raises over it."""

        def __dlpack__(self, **options):
            return exporter.__dict__.pop("capsule")

    # Not a SystemError, as when the exception under way is lost in the capsule's destructor.
    with pytest.raises((RuntimeError, BufferError), match=r"[Uu]nsupported device"):
        np.from_dlpack(Forgetful(None))
    assert watched() is None


def test_the_deleter_may_be_called_by_threads_that_python_did_not_start():
    owners = [Owner() for _ in range(50)]
    watched = [weakref.ref(owner) for owner in owners]
    taken = [dlpack.take(dlpack.lend(lent(np.zeros(3), owner), None)) for owner in owners]
    addresses = [found.owner._address for found in taken]
    for found in taken:
        found.owner._deleter = None
    del owners, taken, found
    assert None not in [w() for w in watched]
    threads = []
    for address in addresses:
        # Without the GIL, as a framework's own threads would.
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


@pytest.mark.parametrize("keeper", ["tensor", "capsule", "for ever", "dropped"])
def test_takers_may_outlive_the_interpreter(keeper):
    pytest.importorskip("torch")
    done = run_python("-X", "faulthandler", "-c", PROGRAM, keeper)
    assert done.returncode == 0, done.stderr
    # The end of the process frees what nobody can call Python for by then.
    assert done.stdout.split() == (["freed", "end"] if keeper == "dropped" else ["end"])
    assert done.stderr == ""


# -- GPUs --------------------------------------------------------------------------------


def on_gpu(values: np.ndarray, stream: int | None = None) -> DeviceArray:
    x = FakeArray.of(values, stream=stream)
    return adapter_of(x).view(x)[0]


def test_an_array_on_a_gpu_is_read_where_it_is(gpu: Fake):
    x = on_gpu(np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2])
    y, dtype = read_dlpack(x)
    assert dtype is BY_NAME["float32"]
    assert (y.address, y.shape, y.strides) == (x.address, x.shape, x.strides)
    assert y.device is x.device
    assert y.stream == x.device.stream(0)
    np.testing.assert_array_equal(y.to_host(), [[0, 2], [4, 6], [8, 10]])


def test_the_producer_is_told_the_legacy_stream_and_waits_for_its_own(gpu: Fake):
    with gpu.turned("delay_us", 20_000):
        x = on_gpu(np.full(1000, 3.0))
        y, _ = read_dlpack(x)
        # Would be poison without the wait.
        np.testing.assert_array_equal(y.to_host(), np.full(1000, 3.0))


def test_a_stream_of_the_takers_waits_for_the_arrays(gpu: Fake):
    with gpu.turned("delay_us", 20_000):
        x = on_gpu(np.full(1000, 3.0))
        taker = gpu.stream(0)
        found = dlpack.take(x.__dlpack__(stream=taker))
        y = DeviceArray(found.address, (1000,), "f8", x.device, x.device.stream(taker))
        np.testing.assert_array_equal(y.to_host(), np.full(1000, 3.0))


def waits(gpu: Fake) -> int:
    return len(gpu.log("cuStreamWaitEvent"))


def test_no_wait_is_made_for_the_same_stream_or_none(gpu: Fake):
    x = on_gpu(np.zeros(3))
    before = waits(gpu)
    x.__dlpack__(stream=-1)
    x.__dlpack__(stream=x.stream.handle)
    assert waits(gpu) == before
    x.__dlpack__(stream=2)
    x.__dlpack__()
    assert waits(gpu) == before + 2


@pytest.mark.parametrize("stream", [0, -2, True, "1", 1.0])
def test_streams_that_are_none_are_refused(gpu: Fake, stream):
    with pytest.raises(InvalidArgumentError, match="stream"):
        on_gpu(np.zeros(3)).__dlpack__(stream=stream)


def test_memory_on_a_gpu_is_not_lent_to_the_cpu(gpu: Fake):
    x = on_gpu(np.zeros(3))
    assert x.__dlpack_device__() == (2, 0)
    x.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="to_host"):
        x.__dlpack__(dl_device=(1, 0))


def test_read_only_memory_is_lent_only_to_who_knows_the_flag(gpu: Fake):
    x = on_gpu(np.zeros(3))
    x.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        x.__dlpack__()
    assert not dlpack.take(x.__dlpack__(max_version=(1, 0))).writeable
    copied = dlpack.take(x.__dlpack__(copy=True))
    assert copied.address != x.address


def test_version_1_is_lent_to_who_reads_it(gpu: Fake):
    x = on_gpu(np.zeros(3))
    assert '"dltensor"' in repr(x.__dlpack__(max_version=(0, 8)))
    assert '"dltensor_versioned"' in repr(x.__dlpack__(max_version=(1, 2)))


def test_a_copy_is_marked_as_one(gpu: Fake):
    x = on_gpu(np.arange(3.0))
    capsule = x.__dlpack__(copy=True, max_version=(1, 0))
    address = dlpack._pointer_in(id(capsule), dlpack._Versioned.name)
    assert dlpack._Versioned.from_address(address).flags == 2
    x[...] = on_gpu(np.zeros(3))
    np.testing.assert_array_equal(read_dlpack(Exporter(capsule))[0].to_host(), [0.0, 1.0, 2.0])


def test_the_array_lives_until_the_taker_is_done(gpu: Fake):
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


def test_bfloat16_is_lent_by_its_name(gpu: Fake):
    x = on_gpu(np.array([1.0, 2.0], ml_dtypes.bfloat16).view(np.uint16))
    assert dlpack.take(x.__dlpack__()).dtype.name == "uint16"
    found = dlpack.take(dlpack.export(x, dtype=BY_NAME["bfloat16"]))
    assert found.dtype.name == "bfloat16"


@pytest.mark.parametrize("kind", [dlpack.CUDA_MANAGED, dlpack.CUDA])
def test_managed_memory_is_read_as_a_gpus(gpu: Fake, kind):
    x = on_gpu(np.arange(3.0))
    cuda.device(0).stream(x.stream.handle).synchronize()
    made = dlpack.Lent(x.address, (3,), (8,), BY_NAME["float64"], (kind, 0), True, x)
    array, _ = adapter_of(Exporter(None)).view(Exporter(dlpack.lend(made, 0), (kind, 0)))
    np.testing.assert_array_equal(array.to_host(), [0, 1, 2])


def test_page_locked_host_memory_is_the_cpus():
    x = np.arange(3.0)
    device = (dlpack.CUDA_HOST, 0)
    exporter = Exporter(dlpack.lend(lent(x, Owner(), device), 0), device)
    array, dtype = adapter_of(exporter).view(exporter)
    assert type(array) is np.ndarray
    assert array.ctypes.data == x.ctypes.data
    assert dtype is BY_NAME["float64"]


@pytest.mark.parametrize("device", [(10, 0), (8, 0), (4, 0)], ids=["ROCm", "Metal", "OpenCL"])
def test_other_devices_are_refused(device):
    exporter = Exporter(None, device)
    with pytest.raises(DeviceError, match=rf"\({device[0]}, 0\).*NVIDIA"):
        adapter_of(exporter).view(exporter)


def test_a_producer_that_says_one_device_and_lends_another_is_refused(gpu: Fake):
    exporter = Exporter(dlpack.lend(lent(np.zeros(3), Owner()), 0), (2, 0))
    with pytest.raises(DeviceError, match="DLPack device"):
        adapter_of(exporter).view(exporter)


def test_producers_older_than_version_1_are_asked_their_way(gpu: Fake):
    class Old(Exporter):
        def __dlpack__(self, *, stream=None):
            self.asked.append(stream)
            return self.capsule

    x = on_gpu(np.arange(3.0))
    old = Old(x.__dlpack__(stream=1), (2, 0))
    np.testing.assert_array_equal(adapter_of(old).view(old)[0].to_host(), [0, 1, 2])
    assert old.asked == [dlpack.LEGACY]


def test_a_producer_that_cannot_lend_is_told_of(gpu: Fake):
    class Unwilling(Exporter):
        def __dlpack__(self, **options):
            raise BufferError("it requires a gradient")

    x = Unwilling(None, (2, 0))
    with pytest.raises(InvalidArgumentError, match="it requires a gradient"):
        adapter_of(x).view(x)


def test_read_only_arrays_are_no_outputs(gpu: Fake):
    x = on_gpu(np.zeros(3))
    x.writeable = False

    class Frozen(Exporter):
        def __dlpack__(self, **options):
            return x.__dlpack__(**options)

    frozen = Frozen(None, (2, 0))
    assert not adapter_of(frozen).view(frozen)[0].writeable
    with pytest.raises(InvalidArgumentError, match="read-only"):
        adapter_of(frozen).output(frozen)
