"""Library of the CUDA driver: its functions, its errors, and its state after a fork.

The driver comes with the GPU and has one ABI for all CUDA versions from 11.2 on, so no part
of the CUDA toolkit has to be installed. :mod:`collective.cuda` uses this module.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import TYPE_CHECKING, Any, NoReturn

from collective.errors import AllocationError, BackendError, BackendUnavailableError

#: Environment variable that names another library than the system's.
LIBRARY = "COLLECTIVE_CUDA_LIBRARY"
_DRIVER = "libcuda.so.1"

# Values of CUresult.
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_DEVICE = 100
INVALID_CONTEXT = 201
NOT_READY = 600
_NOT_INITIALIZED, _DEINITIALIZED = 3, 4
# After one of these errors the context is lost, and every later call returns the same code.
_STICKY = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999}
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED

# Callers pass pointers and handles as ints. ctypes converts an int to c_void_p faster than to
# c_uint64.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamGetCtx": (c_void_p, POINTER(c_void_p)),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventSynchronize": (c_void_p,),
    "cuMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_void_p), c_size_t),
    "cuMemFree_v2": (c_void_p,),
    "cuMemAllocAsync": (POINTER(c_void_p), c_size_t, c_void_p),
    "cuMemFreeAsync": (c_void_p, c_void_p),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuPointerGetAttribute": (c_void_p, c_int, c_void_p),
}

Function = Callable[..., int]


class Copy2D(Structure):
    """CUDA_MEMCPY2D, for unified addresses: the driver finds the kind of memory by the address."""

    _fields_ = [
        ("src_x", c_size_t),
        ("src_y", c_size_t),
        ("src_type", c_int),
        ("src_host", c_void_p),
        ("src", c_void_p),
        ("src_array", c_void_p),
        ("src_pitch", c_size_t),
        ("dst_x", c_size_t),
        ("dst_y", c_size_t),
        ("dst_type", c_int),
        ("dst_host", c_void_p),
        ("dst", c_void_p),
        ("dst_array", c_void_p),
        ("dst_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    ]

    def __init__(self) -> None:
        super().__init__(src_type=_UNIFIED, dst_type=_UNIFIED)


class _ContextPointer(threading.local):
    """Variable of a thread, into which the driver writes the thread's context."""

    def __init__(self) -> None:
        self.context = c_void_p()
        self.address = ctypes.addressof(self.context)


class Entered:
    """Context manager that makes a CUDA context current in this thread."""

    __slots__ = ("_context", "_driver", "_pushed")

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context
        self._pushed = False

    def __enter__(self) -> None:
        driver = self._driver
        if driver.current() != self._context:
            driver.check(driver.cuCtxPushCurrent_v2(self._context), "context")
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            self._pushed = False
            driver = self._driver
            driver.check(driver.cuCtxPopCurrent_v2(driver.scratch), "context")


class Driver:
    """Functions of the driver, by their names in C. They return a CUresult.

    The functions release the GIL. Even a call that only enqueues work blocks while the GPU's queue
    is full, and another thread of this process may have to empty the queue. The one exception,
    cuCtxGetCurrent, only reads a variable of the thread.

    Attributes:
        path: path of the library.
        version: newest CUDA version that the driver supports, such as ``13000`` for 13.0.
        forked: whether this process is a forked child, in which no function works.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Function:
            """Return a driver function of the table ``_PROTOTYPES``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.forked = False
        library = _open(path, ctypes.CDLL)
        for name, arguments in _PROTOTYPES.items():
            setattr(self, name, _function(library, name, arguments, path))
        library = _open(path, ctypes.PyDLL)
        self.cuCtxGetCurrent = _function(library, "cuCtxGetCurrent", (c_void_p,), path)
        self._answer = _ContextPointer()
        self._primary: dict[int, int] = {}
        self._lock = threading.Lock()
        code = self.cuInit(0)
        if code:
            raise BackendUnavailableError(
                f"cuda: the driver {path} does not start: {self.words(code)}. "
                + (
                    "CUDA_VISIBLE_DEVICES may hide the GPUs."
                    if code == NO_DEVICE
                    else "Run nvidia-smi for details."
                )
            )
        version = c_int()
        self.check(self.cuDriverGetVersion(version), "version")
        self.version = version.value
        os.register_at_fork(after_in_child=self._refuse)

    @property
    def scratch(self) -> int:
        """Address to which the driver may write a pointer that is not needed."""
        return self._answer.address

    def current(self) -> int:
        """Return the context that is current in this thread, 0 if there is none."""
        answer = self._answer
        code = self.cuCtxGetCurrent(answer.address)
        if code:
            self.fail(code, "context")
        return answer.context.value or 0

    def primary(self, ordinal: int) -> int:
        """Return the primary context of a GPU, which the CUDA runtime uses, too.

        The context is never released.
        """
        primary = self._primary.get(ordinal)
        if primary is None:
            with self._lock:
                primary = self._primary.get(ordinal)
                if primary is None:
                    device, context = c_int(), c_void_p()
                    self.check(self.cuDeviceGet(device, ordinal), f"cuda:{ordinal}")
                    code = self.cuDevicePrimaryCtxRetain(context, device.value)
                    self.check(code, f"cuda:{ordinal}: context")
                    primary = self._primary[ordinal] = context.value or 0
        return primary

    def some(self) -> int:
        """Return any context, for calls that need one; make no further one if there is one."""
        return self.current() or next(iter(self._primary.values()), 0) or self.primary(0)

    def words(self, code: int) -> str:
        """Return the driver's description and name of ``code``."""
        name, text = c_char_p(), c_char_p()
        self.cuGetErrorName(code, name)
        self.cuGetErrorString(code, text)
        description = (text.value or b"unknown error").decode(errors="replace")
        return f"{description} ({(name.value or b'CUresult').decode(errors='replace')}, {code})"

    def check(self, code: int, what: str) -> None:
        """Raise the error for ``code``, unless it is 0.

        Args:
            what: name of the operation, for the error text.

        Raises:
            AllocationError: there is no memory left.
            BackendError: any other error; it carries the code.
        """
        if code:
            self.fail(code, what)

    def fail(self, code: int, what: str) -> NoReturn:
        """Raise the error for ``code``, which is not 0; see :meth:`check`."""
        words = self.words(code)
        if code == OUT_OF_MEMORY:
            raise AllocationError(f"cuda: {what}: {words}. Free memory, or use less at once.")
        hint = ""
        if code in _STICKY:
            hint = (
                " Work enqueued earlier, maybe by other code of this program, has broken the "
                "GPU's context; nothing on this GPU works in this process any more. Start the "
                "process again; with CUDA_LAUNCH_BLOCKING=1 the call at fault raises itself."
            )
        elif code in (_NOT_INITIALIZED, _DEINITIALIZED):
            hint = " The driver does not run: this process is about to end, or was forked."
        raise BackendError(f"cuda: {what}: {words}.{hint}", backend="cuda", code=code)

    def _refuse(self) -> None:
        """Make every function raise: a forked child cannot use CUDA."""
        self.forked = True

        def refuse(*_: object) -> NoReturn:
            raise _forked()

        for name in (*_PROTOTYPES, "cuCtxGetCurrent"):
            setattr(self, name, refuse)


def _forked() -> BackendError:
    return BackendError(
        "cuda: this process was forked after its parent had used the driver, which CUDA does not "
        "support. Start it by multiprocessing's 'spawn' or 'forkserver', or fork first.",
        backend="cuda",
        code=_NOT_INITIALIZED,
    )


_lock = threading.Lock()
_drivers: dict[str, Driver] = {}


def load() -> Driver:
    """Return the driver, loaded and initialised by the first call.

    The library is ``$COLLECTIVE_CUDA_LIBRARY`` or ``libcuda.so.1``. After a failure, the next call
    tries again.

    Raises:
        BackendUnavailableError: there is no driver, or no GPU that this process may use.
        BackendError: this process was forked from a process that had loaded the driver.
    """
    path = os.environ.get(LIBRARY) or _DRIVER
    loaded = _drivers.get(path)
    if loaded is None:
        with _lock:
            loaded = _drivers.get(path)
            if loaded is None:
                loaded = _drivers[path] = Driver(path)
    if loaded.forked:
        raise _forked()
    return loaded


def check_driver() -> None:
    """Check that there is a driver, and leave it uninitialised.

    Raises:
        BackendUnavailableError: there is none.
    """
    _open(os.environ.get(LIBRARY) or _DRIVER, ctypes.CDLL)


def _open(path: str, kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    try:
        return kind(path)
    except OSError as error:
        raise BackendUnavailableError(
            f"cuda: {path} cannot be loaded: {error}. It comes with NVIDIA's driver for Linux: "
            "check the driver with nvidia-smi; start a container with --gpus all. Set "
            f"{LIBRARY} to load another file."
        ) from error


def _function(library: ctypes.CDLL, name: str, arguments: tuple[Any, ...], path: str) -> Function:
    try:
        function = getattr(library, name)
    except AttributeError:
        # Raise only when the function is called: a driver may be too old for a single function.
        return functools.partial(_lacking, path, name)
    function.argtypes = arguments
    function.restype = c_int
    return function  # type: ignore[no-any-return]


def _lacking(path: str, name: str, *_: object) -> int:
    raise BackendUnavailableError(
        f"cuda: {path} has no {name}; the driver is older than CUDA 11.2. Update it."
    )
