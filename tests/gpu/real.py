"""``nccl`` on real GPUs for the conformance suite, whose arrays are on the CPU.

In the processes of these ranks every array that goes into a call is copied to memory of a GPU,
with its strides, the call is made there, and what it has written is copied back when the call
is over (for ``async_op=True``: when its ``Work`` is). So NCCL and the driver see device pointers
and streams only, and the suite is the one that every transport has to pass.

Several ranks may be on one GPU; NCCL has to be told (see :func:`recipe`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from collective import arrays, calls, cuda
from collective.arrays import Adapter, NumpyAdapter
from collective.backends.nccl import NcclBackend
from collective.calls import Calls
from collective.cuda import layout
from collective.cuda.adapter import root_owner
from collective.cuda.array import DeviceArray
from collective.dtypes import DType
from collective.errors import CollectiveTimeoutError
from collective.point_to_point import PointToPoint
from collective.streams import StreamWork
from collective.world import World

__all__ = ["Mirrored", "OnGpus", "SharingByHostId", "SharingByOption", "recipe", "sizes"]

Array = np.ndarray[Any, Any]

_ALIGNED = 64


def sizes() -> tuple[int, ...]:
    """Return how many ranks the tests are to have: ``$GPU_TESTS_RANKS``, 2 by default."""
    return tuple(map(int, os.environ.get("GPU_TESTS_RANKS", "2").split()))


def recipe(name: str, rank: int) -> dict[str, str]:
    """Return the environment in which NCCL takes several ranks on one GPU.

    Args:
        name: ``"hostid"``, for any version: NCCL is made to believe that each rank is on a
            host of its own, so it connects them by sockets. Or ``"option"``, from 2.30 on.
        rank: this one.
    """
    if name == "option":
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    return {
        "NCCL_HOSTID": f"h{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",
        # Kernels of all ranks have to fit on the GPU at once, or they wait for ever.
        "NCCL_MAX_CTAS": "2",
    }


class OnGpus(NcclBackend):
    """The transport, a GPU a rank where there are enough, else several ranks on one."""

    name = "nccl-gpu"
    sharing: ClassVar[str] = "hostid"

    @classmethod
    def connect(cls, world: World, timeout: float) -> OnGpus:
        count = cuda.device_count()
        if world.size > count:
            os.environ.update(recipe(cls.sharing, world.rank))
        options = {**world.options, "device": str(world.local_rank % count)}
        return super().connect(replace(world, options=options), timeout)


# -- one call's arrays ------------------------------------------------------------------------


class _Mirror:
    """An array of the host and the same on the GPU."""

    def __init__(self, host: Array, device: DeviceArray, before: Array | None) -> None:
        self.host = host
        self.device = device
        self.before = before  # the bytes that it spans, as they were copied to the GPU
        self.calls = 0  # calls on their way that write to it

    def copy_back(self) -> None:
        """Copy to the host what was written on the GPU."""
        if self.before is None:
            self.host[...] = self.device.to_host()
            return
        after = _span(self.device).to_host()
        if (after == self.before).all():
            return
        elements = _within(after, self.host)
        expected, self.before = self.before.copy(), after
        _within(expected, self.host)[...] = elements
        assert (expected == after).all(), "the call has written between the elements of out"
        self.host[...] = elements


class _Call:
    """The arrays of one call.

    Attributes:
        running: whether they are all there, and the call is being made.
        awaited: whether somebody will wait for it who finishes it.
    """

    def __init__(self) -> None:
        self.running = False
        self.awaited = False
        self._mirrors: dict[Any, _Mirror] = {}
        self._written: list[_Mirror] = []

    def mirror(self, host: Array, device: cuda.Device, written: bool) -> DeviceArray:
        """Return an array on the GPU with the elements and the strides of ``host``."""
        key = host.ctypes.data, host.shape, host.strides, host.dtype.str
        found = self._mirrors.get(key)
        if not self.running and key in _on_their_way:
            # What it holds is still to be written: streams put that in order, not the host.
            found = self._mirrors[key] = _on_their_way[key]
        elif found is None or not self.running:
            found = self._mirrors[key] = _copied(host, device, found)
        if written and found not in self._written:
            self._written.append(found)
            if self.running:
                self._count(found)
        return found.device

    def start(self) -> None:
        """Take note of what will be written, as it is on its way from now on."""
        with _lock:
            for mirror in self._written:
                self._count(mirror)

    def _count(self, mirror: _Mirror) -> None:
        mirror.calls += 1
        keys = [key for key, each in self._mirrors.items() if each is mirror]
        _on_their_way.update((key, mirror) for key in keys)

    def result(self, device: DeviceArray) -> Array:
        """Return an array of the host into which a result will be copied."""
        host = np.empty(device.shape, device.dtype)
        self._written.append(_Mirror(host, device, None))
        return host

    def running_in(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``run`` as something that makes this call."""

        @_passing
        def inside() -> Any:
            before, self.running, _thread.call = getattr(_thread, "call", None), True, self
            try:
                return run()
            finally:
                _thread.call = before

        return inside

    def finish(self) -> None:
        """Copy back what was written: once."""
        for mirror in self.drop():
            mirror.copy_back()

    @contextlib.contextmanager
    def dropped_if_it_fails(self) -> Iterator[None]:
        """Forget the arrays of a call that has failed: others may come to be where they are."""
        try:
            yield
        except CollectiveTimeoutError:  # of a wait, which may be repeated
            raise
        except BaseException:
            self.drop()
            raise

    def drop(self) -> list[_Mirror]:
        """Forget the arrays; return those that were written, and that no other call writes."""
        with _lock:
            written, self._written = self._written, []
            self._mirrors.clear()
            for mirror in written:
                mirror.calls -= 1
            over = [mirror for mirror in written if mirror.calls <= 0]
            for key in [key for key, mirror in _on_their_way.items() if mirror in over]:
                del _on_their_way[key]
            return over


def _passing(function: Any) -> Any:
    """Let a frame pass for one of the library's own in reports of where a call was made."""
    function.__code__ = function.__code__.replace(co_filename=calls.__file__)
    return function


_thread = threading.local()
_on_their_way: dict[Any, _Mirror] = {}
_lock = threading.RLock()


def _current() -> _Call:
    """Return the call that this thread makes, or is about to make."""
    found: _Call | None = getattr(_thread, "call", None)
    if found is None:
        found = _thread.call = _Call()
    return found


def _bounds(array: Any) -> tuple[int, int]:
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.address
    return layout.bounds(address, array.shape, array.strides, array.dtype.itemsize)


def _span(device: DeviceArray) -> DeviceArray:
    """Return the bytes that an array spans, those between its elements too."""
    low, high = _bounds(device)
    return DeviceArray(low, (high - low,), np.uint8, device.device, device.stream, owner=device)


def _within(raw: Array, host: Array) -> Array:
    """Return the elements in bytes that are a copy of those that ``host`` spans."""
    offset = host.ctypes.data - _bounds(host)[0] if host.size else 0
    return np.ndarray(host.shape, host.dtype, raw.data if raw.size else b"", offset, host.strides)


def _copied(host: Array, device: cuda.Device, earlier: _Mirror | None) -> _Mirror:
    window = _windows.find(host)
    stream = _stream(device)
    low, high = _bounds(host)
    before = np.empty(high - low, np.uint8)
    if high > low:
        ctypes.memmove(before.ctypes.data, low, high - low)
    if window is not None:
        address, owner = window
    elif earlier is not None:
        address, owner = earlier.device.address, earlier.device.owner
    else:
        owner = cuda.allocate(device, high - low, stream)
        address = owner.address + (host.ctypes.data - low if host.size else 0)
    made = DeviceArray(
        address, host.shape, host.dtype, device, stream,
        strides=host.strides, owner=owner, writeable=host.flags.writeable,
    )  # fmt: skip
    if high > low:
        _span(made).fill_from_host(before)
    return _Mirror(host, made, before)


class _Windows:
    """Memory of ``comm.empty()``: an array of the host for each, with its part of the GPU."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int, weakref.ref[Any]]] = []

    def open(self, device: DeviceArray) -> Array:
        """Return the array of the host for memory that NCCL knows."""
        raw: Any = (ctypes.c_char * (device.nbytes + _ALIGNED))()
        raw.on_gpu = device
        start = -ctypes.addressof(raw) % _ALIGNED
        low = ctypes.addressof(raw) + start
        self._known = [known for known in self._known if known[2]() is not None]
        self._known.append((low, low + device.nbytes, weakref.ref(raw)))
        flat = np.frombuffer(raw, np.uint8)[start : start + device.nbytes]
        return flat.view(device.dtype).reshape(device.shape)

    def find(self, host: Array) -> tuple[int, DeviceArray] | None:
        """Return where on the GPU an array is that lies in such memory, and its owner."""
        low, high = _bounds(host)
        for start, end, raw in self._known:
            if start <= low and high <= end and low < high:
                kept = raw()
                if kept is not None:
                    return kept.on_gpu.address + host.ctypes.data - start, kept.on_gpu
        return None


_windows = _Windows()
_streams: dict[int, cuda.Stream] = {}


def _stream(device: cuda.Device) -> cuda.Stream:
    """Return the current stream of these arrays: one that waits for no other by itself."""
    if device.ordinal not in _streams:
        _streams[device.ordinal] = device.new_stream()
    return _streams[device.ordinal]


# -- in the place of the adapters and of what every call goes through ----------------------------


class _OnGpu(Adapter):
    """Arrays of the host as those of a GPU, over an adapter that sees them as they are."""

    def __init__(self, host: Adapter, ordinal: int) -> None:
        self.name = host.name  # type: ignore[misc]
        self._host = host
        self._ordinal = ordinal

    def accepts(self, x: Any) -> bool:
        return self._host.accepts(x)

    def _device(self) -> cuda.Device:
        return cuda.device(self._ordinal)

    def view(self, x: Any) -> tuple[Any, DType]:
        array, dtype = self._host.view(x)
        return _current().mirror(array, self._device(), False), dtype

    def output(self, x: Any) -> tuple[Any, DType]:
        array, dtype = self._host.output(x)
        return _current().mirror(array, self._device(), True), dtype

    def empty(self, shape: Any, dtype: DType, device: Any, stream: Any = None) -> Any:
        stream = cuda.in_force(_stream(self._device()))
        model = DeviceArray(0, (0,), dtype.storage, self._device(), stream)
        return model.allocate(shape)

    def current_stream(self, device: cuda.Device, stream: Any = None) -> cuda.Stream:
        return _stream(device)

    def wrap(self, array: Any, dtype: DType) -> Any:
        if isinstance(array, DeviceArray):
            owner = root_owner(array)
            if type(owner).__module__ == "collective.backends.nccl.memory":
                array = _windows.open(array)
            else:
                call = _current()
                array = call.result(array) if call.running else array.to_host()
        return self._host.wrap(array, dtype)


def _pretend(ordinal: int) -> None:
    """In this process, take arrays of the host to the GPU from now on."""
    if isinstance(arrays.adapter_like("numpy"), _OnGpu):
        return
    find, load = arrays._find, arrays._load

    def on_gpu(adapter: Adapter) -> Adapter:
        return adapter if isinstance(adapter, _OnGpu) else _OnGpu(adapter, ordinal)

    arrays._find = lambda x: on_gpu(find(x))
    arrays._load = lambda framework: on_gpu(load(framework))
    numpy = _OnGpu(NumpyAdapter(), ordinal)
    arrays._by_type.clear()
    arrays._by_name.clear()
    arrays._by_type[np.ndarray] = arrays._by_name["numpy"] = arrays._by_name["cuda"] = numpy
    Calls._go = _mirroring(Calls._go)  # type: ignore[method-assign]
    PointToPoint._post = _mirroring(PointToPoint._post)  # type: ignore[method-assign]
    Calls._stream_work = _noted(Calls._stream_work)  # type: ignore[method-assign]
    done = StreamWork.done
    StreamWork.wait = _finishing(StreamWork.synchronize)  # type: ignore[method-assign]
    StreamWork.synchronize = StreamWork.wait  # type: ignore[method-assign]
    StreamWork.done = _finishing(done)  # type: ignore[method-assign]


def _mirroring(go: Any) -> Any:
    """Return ``_go`` or ``_post`` as what copies back when a call is over."""

    @_passing
    def call(self: Calls, what: Any, run: Any, async_op: bool, *near: Any) -> Any:
        mine = _current()
        if mine.running:  # a step of a call
            return go(self, what, run, async_op, *near)
        _thread.call, _thread.starting = None, mine
        mine.start()
        inside = mine.running_in(run)

        @_passing
        def finished() -> Any:
            with mine.dropped_if_it_fails():
                result = inside()
                if not mine.awaited:
                    stream = cuda.in_force(_stream(self._backend.device))
                    self._backend.synchronize_event(stream.record(), str(what), None)
                    mine.finish()
                return result

        try:
            return go(self, what, finished, async_op, *near)
        finally:
            _thread.starting = None

    return functools.wraps(go)(call)


def _noted(make: Any) -> Any:
    """Return ``_stream_work`` as what notes whose work it is."""

    @functools.wraps(make)
    def made(*args: Any) -> Any:
        work = make(*args)
        work.mirrored = _thread.starting
        work.mirrored.awaited = True
        weakref.finalize(work, work.mirrored.drop).atexit = False
        return work

    return made


def _finishing(wait: Any) -> Any:
    @functools.wraps(wait)
    def waited(self: Any, *args: Any, **options: Any) -> Any:
        with self.mirrored.dropped_if_it_fails():
            result = wait(self, *args, **options)
            if result is not False:  # done() says that it is not
                self.mirrored.finish()
            return result

    return waited


class Mirrored(OnGpus):
    """The transport for arrays that are NumPy's."""

    name = "nccl-mirrored"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Mirrored:
        _pretend(world.local_rank % cuda.device_count())
        return super().connect(world, timeout)


class SharingByHostId(Mirrored):
    """Several ranks on one GPU, as if each were on a host of its own."""

    name = "nccl-hostid"


class SharingByOption(Mirrored):
    """Several ranks on one GPU, as NCCL allows from 2.30 on."""

    name = "nccl-multirank"
    sharing = "option"
