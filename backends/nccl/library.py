"""The NCCL library: finding it, loading it once, the features of its version, and its errors."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import threading
from pathlib import Path
from typing import Any

from collective.errors import BackendError, BackendUnavailableError, UnsupportedError
from collective.memory.dtypes import DType

from .prototypes import DTYPES, FUNCTIONS, IN_PROGRESS, OLDEST, RESULTS, UniqueId, version_text

#: The environment variable that names the library.
VARIABLE = "COLLECTIVE_NCCL_LIBRARY"
_SONAME = "libnccl.so.2"

#: The features in which versions differ, for ``collective doctor``. A value is the name of the
#: function that a feature came with, or the code of the first version that has the feature.
FEATURES: dict[str, str | int] = {
    "fp8": 22403,
    "windows": "ncclCommWindowRegister",
}

# The linker's cache, which holds paths that end with a zero byte.
_CACHE = Path("/etc/ld.so.cache")
_FOLDERS = ("/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")


class NcclLibrary:
    """NCCL library that has been loaded.

    Attributes:
        path: path of the file, or the name under which the system's linker finds it.
        version: code of the version, such as 23203.
        text: the version as text, such as ``"2.32.3"``.
    """

    def __init__(self, handle: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._handle = handle
        self._functions: dict[str, Any] = {}
        version = ctypes.c_int()
        self.version = 0
        self.check(self.function("ncclGetVersion")(ctypes.byref(version)), "ncclGetVersion")
        self.version = version.value
        self.text = version_text(version.value)
        if self.version < OLDEST:
            raise BackendUnavailableError(
                f"nccl: {path} is NCCL {self.text}; {version_text(OLDEST)} is the oldest version "
                f"that is supported. Install a newer one: {install_command()}"
            )

    def has(self, name: str) -> bool:
        """Return whether this library has a function, or one of :data:`FEATURES`."""
        needed = FEATURES.get(name, name)
        if isinstance(needed, int):
            return self.version >= needed
        return hasattr(self._handle, needed)

    def features(self) -> dict[str, bool]:
        """Return which of :data:`FEATURES` this library has."""
        return {name: self.has(name) for name in FEATURES}

    def function(self, name: str) -> Any:
        """Return a function of :data:`~.prototypes.FUNCTIONS`; it releases the GIL.

        Raises:
            UnsupportedError: this version has no such function; the error names a version that
                does.
        """
        function = self._functions.get(name)
        if function is None:
            prototype = FUNCTIONS[name]
            function = getattr(self._handle, name, None)
            if function is None:
                raise UnsupportedError(
                    f"{name}: NCCL {self.text} ({self.path}) does not have it; version "
                    f"{version_text(prototype.since)} brings it. Install a newer one: "
                    f"{install_command()}"
                )
            function.argtypes, function.restype = prototype.arguments, prototype.result
            self._functions[name] = function
        return function

    def check(self, code: int, what: str, comm: int = 0) -> None:
        """Raise the error that a result code means; accept success and "in progress".

        Args:
            code: NCCL's result code.
            what: the call, and the rank that made it.
            comm: the handle of the communicator, if there is one.

        Raises:
            BackendError: the code is an error. The text has the code, NCCL's own message and a
                remedy.
        """
        if code not in (0, IN_PROGRESS):
            raise BackendError(self.words(code, what, comm), "nccl", code)

    def words(self, code: int, what: str, comm: int = 0) -> str:
        """Return the text of the error that :meth:`check` raises."""
        general = _decoded(self.function("ncclGetErrorString")(code))
        last = _decoded(self.function("ncclGetLastError")(comm))
        message = f"{general}: {last}" if last else general
        name = RESULTS.get(code, "ncclResult_t")
        return f"{what}: {message.rstrip('. ')} ({name}, {code}; NCCL {self.text}). " + _remedy(
            code, message
        )

    def unique_id(self) -> bytes:
        """Return a new unique id for a communicator, which one rank hands to the other ranks."""
        identity = UniqueId()
        self.check(self.function("ncclGetUniqueId")(ctypes.byref(identity)), "ncclGetUniqueId")
        return bytes(identity)

    def dtype(self, dtype: DType) -> int | None:
        """Return NCCL's code of an element type, None if this library cannot reduce the type."""
        feature = "fp8" if dtype.name.startswith("float8") else dtype.name
        if feature in FEATURES and not self.has(feature):
            return None
        return DTYPES.get(dtype.name)


def load(path: str = "") -> NcclLibrary:
    """Load NCCL and return it, the same object each time.

    The search order is: ``path``, or ``$COLLECTIVE_NCCL_LIBRARY``; the folder of NVIDIA's wheel;
    the library that the system's linker knows as ``libnccl.so.2``.

    Args:
        path: the library's file. If it is set, no other place is searched.

    Raises:
        BackendUnavailableError: there is no library, it cannot be loaded, or it is too old. The
            text has the command that installs one.
    """
    path = path or os.environ.get(VARIABLE, "")
    with _lock:
        if path not in _loaded:
            _loaded[path] = _load(path)
        return _loaded[path]


_lock = threading.Lock()
_loaded: dict[str, NcclLibrary] = {}


def find(path: str = "") -> str | None:
    """Return the file that :func:`load` would load, None if there is none; load nothing."""
    path = path or os.environ.get(VARIABLE, "")
    if path:
        # The system's linker finds a bare name.
        return path if "/" not in path or os.path.exists(path) else None
    return _in_wheel() or _of_system()


def install_command() -> str:
    """Return the command that installs NCCL for this host's driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for a driver older than 580)"
    return f"pip install nvidia-nccl-cu{13 if version.value >= 13000 else 12}"


def _load(path: str) -> NcclLibrary:
    if path:
        try:
            return NcclLibrary(ctypes.CDLL(path), path)
        except OSError as error:
            raise BackendUnavailableError(
                f"nccl: the library that nccl_library or {VARIABLE} names, {path}, cannot be "
                f"loaded: {error}. Name the file libnccl.so.2 of an installed NCCL, or name none, "
                f"and NCCL is searched for. To install NCCL: {install_command()}"
            ) from error
    wheel = _in_wheel()
    failures = []
    for candidate in filter(None, (wheel, _SONAME)):
        try:
            return NcclLibrary(ctypes.CDLL(candidate), candidate)
        except OSError as error:
            failures.append(f"{candidate}: {error}")
    if wheel is None:
        failures.insert(0, "no package nvidia-nccl-cu12 or -cu13 is installed")
    raise BackendUnavailableError(
        f"nccl: no NCCL library. {'; '.join(failures)}. Install it: {install_command()}, or name "
        f"the file: {VARIABLE}=/…/libnccl.so.2"
    )


def _in_wheel() -> str | None:
    """Return the library in NVIDIA's wheel; the wheels for CUDA 12 and 13 share a folder."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError, AttributeError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(folder, "lib", _SONAME)
        if os.path.exists(path):
            return path
    return None


def _of_system() -> str | None:
    """Return the library in a place where the system's linker looks for it."""
    for folder in (*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_FOLDERS):
        path = os.path.join(folder, _SONAME)
        if folder and os.path.exists(path):
            return path
    try:
        cached = re.search(rb"/[^\0]*/libnccl\.so\.2(?=\0)", _CACHE.read_bytes())
    except OSError:
        return None
    return os.fsdecode(cached[0]) if cached and os.path.exists(cached[0]) else None


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode(errors="replace").strip()


def _remedy(code: int, message: str) -> str:
    if "Duplicate GPU" in message:
        return (
            "Give each rank of a host a GPU of its own with COLLECTIVE_DEVICE or "
            "CUDA_VISIBLE_DEVICES, and start no more ranks than the host has GPUs."
        )
    if "driver version is insufficient" in message:
        return f"This NCCL needs a newer driver. Update it, or install NCCL: {install_command()}"
    if code == 6:
        return "Another rank has ended, or its network has failed; see the other ranks' errors."
    if code in (4, 5):
        return "With NCCL_DEBUG=WARN, NCCL writes to standard error what it refuses."
    return "With NCCL_DEBUG=INFO, NCCL writes to standard error what failed."
