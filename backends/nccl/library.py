"""The NCCL library: finding it, loading it once, what its version has, and its errors."""

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

from .prototypes import DTYPES, FUNCTIONS, IN_PROGRESS, OLDEST, OPS, RESULTS, UniqueId, version_text

__all__ = ["FEATURES", "VARIABLE", "NcclLibrary", "find", "install_command", "load"]

#: The environment variable that names the library.
VARIABLE = "COLLECTIVE_NCCL_LIBRARY"
_SONAME = "libnccl.so.2"

#: What versions differ in, for ``collective doctor``: the function that brought it, or the
#: code of the version.
FEATURES: dict[str, str | int] = {
    "avg": 21003,
    "bfloat16": 21003,
    "premul_sum": "ncclRedOpCreatePreMulSum",
    "non-blocking": "ncclCommInitRankConfig",
    "split": "ncclCommSplit",
    "register": "ncclCommRegister",
    "fp8": 22403,
    "shrink": 22703,
    "windows": "ncclCommWindowRegister",
    "alltoall": "ncclAlltoAll",
}

# The linker's cache: paths, each ended by a zero byte.
_CACHE = Path("/etc/ld.so.cache")
_FOLDERS = ("/lib64", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")


class NcclLibrary:
    """NCCL, loaded.

    Attributes:
        path: of the file, or the name that the system's linker knows it by.
        version: a code such as 23203.
        text: that version as ``"2.32.3"``.
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
        if not self.has("ncclSend"):
            raise BackendUnavailableError(
                f"nccl: {path} is NCCL {self.text}; {version_text(OLDEST)} is the oldest that "
                f"serves. Install a newer one: {install_command()}"
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
            UnsupportedError: this version has none of that name; says which one does.
        """
        found = self._functions.get(name)
        if found is None:
            prototype = FUNCTIONS[name]
            found = getattr(self._handle, name, None)
            if found is None:
                raise UnsupportedError(
                    f"{name}: NCCL {self.text} ({self.path}) does not have it; version "
                    f"{version_text(prototype.since)} brings it. Install a newer one: "
                    f"{install_command()}"
                )
            found.argtypes, found.restype = prototype.arguments, prototype.result
            self._functions[name] = found
        return found

    def check(self, code: int, what: str, comm: int = 0) -> None:
        """Raise what a result code means; success and "in progress" pass.

        Args:
            what: the call, and for whom it was.
            comm: the handle of the communicator, if there is one.

        Raises:
            BackendError: with the code, NCCL's own words and, where one is known, a remedy.
        """
        if code not in (0, IN_PROGRESS):
            raise BackendError(self.words(code, what, comm), "nccl", code)

    def words(self, code: int, what: str, comm: int = 0) -> str:
        """Return in words what :meth:`check` raises."""
        general = _decoded(self.function("ncclGetErrorString")(code))
        last = ""
        if self.has("ncclGetLastError"):
            last = _decoded(self.function("ncclGetLastError")(comm))
        message = f"{general}: {last}" if last else general
        name = RESULTS.get(code, "ncclResult_t")
        return f"{what}: {message.rstrip('. ')} ({name}, {code}; NCCL {self.text}). " + _remedy(
            code, message
        )

    def unique_id(self) -> bytes:
        """Return a new name for a communicator, for one rank to hand to the others."""
        made = UniqueId()
        self.check(self.function("ncclGetUniqueId")(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made)

    def dtype(self, dtype: DType) -> int | None:
        """Return NCCL's code of an element type, None if this library cannot reduce it."""
        feature = "fp8" if dtype.name.startswith("float8") else dtype.name
        if feature in FEATURES and not self.has(feature):
            return None
        return DTYPES.get(dtype.name)

    def op(self, name: str) -> int | None:
        """Return NCCL's code of a reduction, None if this library has none for it.

        ``premul_sum`` has none: :meth:`NcclComm.premul_sum` makes one a factor.
        """
        if name == "avg" and not self.has("avg"):
            return None
        return OPS.get(name)


def load(path: str = "") -> NcclLibrary:
    """Load NCCL and return it, the same object each time.

    It is looked for in this order: ``path``, or ``$COLLECTIVE_NCCL_LIBRARY``; the folder of
    NVIDIA's wheel; what the system's linker knows as ``libnccl.so.2``.

    Args:
        path: a file. One that is given is loaded or nothing is.

    Raises:
        BackendUnavailableError: there is none, it cannot be loaded, or it is too old; with
            the command that installs one.
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
        # A bare name is for the system's linker to find.
        return path if "/" not in path or os.path.exists(path) else None
    return _in_wheel() or _of_system()


def install_command() -> str:
    """Return how NCCL is installed for the driver that is here."""
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
                f"loaded: {error}. Name the file libnccl.so.2 of an installed NCCL, or nothing, to "
                f"have it found; {install_command()} brings one."
            ) from error
    wheel = _in_wheel()
    looked = []
    for each in filter(None, (wheel, _SONAME)):
        try:
            return NcclLibrary(ctypes.CDLL(each), each)
        except OSError as error:
            looked.append(f"{each}: {error}")
    if wheel is None:
        looked.insert(0, "no package nvidia-nccl-cu12 or -cu13 is installed")
    raise BackendUnavailableError(
        f"nccl: no NCCL library. {'; '.join(looked)}. Install it: {install_command()}, or name "
        f"the file: {VARIABLE}=/…/libnccl.so.2"
    )


def _in_wheel() -> str | None:
    """Return the library in NVIDIA's wheel; those for CUDA 12 and 13 share a folder."""
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
    """Return the library where the system's linker looks for it."""
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
            "Give each rank of a host a GPU of its own: COLLECTIVE_DEVICE or CUDA_VISIBLE_DEVICES "
            "says which, and start no more ranks than there are."
        )
    if "driver version is insufficient" in message:
        return f"This NCCL is for a newer driver: {install_command()}, or update the driver."
    if code == 6:
        return "The reason is in what the other ranks say: one ended, or its network failed."
    if code in (4, 5):
        return "NCCL_DEBUG=WARN has NCCL say on standard error what it refuses."
    return "NCCL_DEBUG=INFO has NCCL say on standard error what failed."
