"""The fake's shared library in Python: knobs, log, and checked calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from tests.fakes.build import build

POISON = 0xCB  # each byte of an unwritten output and of freed memory

VERSION = 22907  # default version of NCCL

_contexts: dict[tuple[str, int], int] = {}  # by library and device


def library_path(version: int = VERSION) -> str:
    """Return the path of the fake for a version of NCCL; compile it if needed."""
    return str(build(version))


def environment(version: int = VERSION, **knobs: int) -> dict[str, str]:
    """Return the environment variables with which `collective` uses the fake.

    Args:
        version: code of the NCCL version that the fake claims to be.
        knobs: settings by name, ``delay_us=0`` for FAKE_DELAY_US; README.md lists them.
    """
    path = library_path(version)
    variables = {"COLLECTIVE_NCCL_LIBRARY": path, "COLLECTIVE_CUDA_LIBRARY": path}
    return variables | {f"FAKE_{name.upper()}": str(value) for name, value in knobs.items()}


class Fake:
    """Handle of the fake in this process. All handles of one version share its state.

    Args:
        version: version of NCCL; by default that of the current environment, if
            :func:`environment` is in force.

    Attributes:
        library: the ctypes library.
    """

    def __init__(self, version: int | None = None) -> None:
        path = os.environ.get("COLLECTIVE_CUDA_LIBRARY", "")
        loaded = version is None and os.path.exists(path)
        self.library = ctypes.CDLL(path if loaded else library_path(version or VERSION))
        self.library.fake_knob.argtypes = [ctypes.c_char_p, ctypes.c_long]
        self.library.fake_log_size.restype = ctypes.c_size_t
        self.library.fake_log_read.restype = ctypes.c_size_t
        self.library.fake_log_read.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self.library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]

    def knob(self, name: str, value: int) -> None:
        """Set a knob while the fake runs, as in ``knob("delay_us", 0)``.

        Raises:
            KeyError: there is no such knob.
        """
        if self.library.fake_knob(name.upper().encode(), value):
            raise KeyError(name)

    @contextlib.contextmanager
    def turned(self, name: str, value: int, back: int = 0) -> Iterator[None]:
        """Set a knob for the length of a block, and then to ``back``."""
        self.knob(name, value)
        try:
            yield
        finally:
            self.knob(name, back)

    def log(self, containing: str = "") -> list[str]:
        """Return the calls so far, the oldest first, as ``ncclAllReduce(sendbuff=0x…, …)``."""
        room = self.library.fake_log_size() + 65536
        text = ctypes.create_string_buffer(room)
        used = self.library.fake_log_read(text, room)
        lines = text.raw[:used].decode(errors="replace").splitlines()
        return [line for line in lines if containing in line]

    def clear_log(self) -> None:
        self.library.fake_log_clear()

    def reset_error(self) -> None:
        """Clear the sticky error after a use of freed memory."""
        self.library.fake_reset_error()

    def cuda(self, name: str, *arguments: object) -> None:
        """Call a function of the driver.

        Raises:
            OSError: the function did not return CUDA_SUCCESS; ``errno`` is its result code.
        """
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise OSError(code, f"{name}: {(text.value or b'?').decode()}")

    def context(self, device: int) -> int:
        """Return the primary context of a device, which is kept for the life of the process."""
        key = self.library._name, device
        if key not in _contexts:
            self.cuda("cuInit", 0)
            context = ctypes.c_void_p()
            self.cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            assert context.value is not None
            _contexts[key] = context.value
        return _contexts[key]

    @contextlib.contextmanager
    def active(self, device: int) -> Iterator[None]:
        """Make a device's context current in this thread for the length of a block."""
        self.cuda("cuCtxPushCurrent_v2", self.context(device))
        try:
            yield
        finally:
            self.cuda("cuCtxPopCurrent_v2", None)

    def stream(self, device: int) -> int:
        """Return the handle of a new stream that does not synchronise with the legacy stream."""
        handle = ctypes.c_void_p()
        with self.active(device):
            self.cuda("cuStreamCreate", ctypes.byref(handle), 1)
        assert handle.value is not None
        return handle.value

    def synchronize(self, stream: int, device: int = 0) -> None:
        """Wait until all work on the stream is done."""
        with self.active(device):
            self.cuda("cuStreamSynchronize", ctypes.c_void_p(stream))
