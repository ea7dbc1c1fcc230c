"""The GPUs that NVIDIA's driver shows, by the driver alone; and NCCL for them."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from collective import BackendUnavailableError, CollectiveTimeoutError
from collective.inner import Deadline

_START_S = 6.0  # NCCL usually starts in a fraction of a second
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CUdevice_attribute


def facts() -> dict[str, Any]:
    """Return the GPUs of this host that this process may use.

    Returns:
        ``driver`` and ``cuda``, the versions of the driver and of the newest CUDA that the
        driver supports; ``devices``, each with ``name``, ``memory_bytes`` and ``compute``;
        ``reason``, why there are none.
    """
    found: dict[str, Any] = {"driver": "", "cuda": "", "devices": [], "reason": ""}
    library = os.environ.get("COLLECTIVE_CUDA_LIBRARY") or "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        found["reason"] = f"no NVIDIA driver: {library} cannot be loaded"
        return found
    found["driver"] = _driver()
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
        found["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    for code in (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))):
        if code != 0:
            found["reason"] = f"the NVIDIA driver reports: {_words(cuda, code)}"
            return found
    found["devices"] = [_device(cuda, ordinal) for ordinal in range(count.value)]
    if not count.value:
        found["reason"] = "the NVIDIA driver shows no GPU"
    return found


def _device(cuda: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_MINOR, device)
    return {
        "name": name.value.decode(errors="replace"),
        "memory_bytes": memory.value,
        "compute": f"{major.value}.{minor.value}",
    }


def _words(cuda: ctypes.CDLL, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode(errors='replace')} (CUresult {code})"


def _driver() -> str:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    version = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlSystemGetDriverVersion(version, len(version)) != 0:
        return ""
    nvml.nvmlShutdown()
    return version.value.decode(errors="replace")


# -- NCCL -------------------------------------------------------------------------------------


def nccl_facts() -> dict[str, Any]:
    """Return the facts about the NCCL library.

    Returns:
        ``path`` and ``version`` of the library; ``features``, whether this version has each;
        ``error``, why there is no library, and ``install``, the command to install one.
    """
    # Imported here: facts() must work without it.
    from collective.backends.nccl import library

    found = {"path": "", "version": "", "features": {}, "error": ""}
    try:
        loaded = library.load()
    except BackendUnavailableError as error:
        return {**found, "error": str(error), "install": library.install_command()}
    return {
        "path": loaded.path,
        "version": loaded.text,
        "features": loaded.features(),
        "error": "",
        "install": "",
    }


def try_nccl() -> None:
    """Create an NCCL communicator of this process alone, on its first GPU, and destroy it.

    Raises:
        CollectiveError: there is no library, no driver or no GPU, or NCCL fails.
    """
    # Imported here: these modules import the reductions.
    from collective.backends.nccl import library
    from collective.backends.nccl.engine import NcclComm
    from collective.inner import cuda

    nccl = library.load()
    cuda.driver()
    device = cuda.device(0)
    deadline = Deadline(_START_S)

    def poll() -> None:
        if deadline.expired:
            raise CollectiveTimeoutError(
                f"nccl: timed out: NCCL {nccl.text} did not start within {_START_S:g} s. "
                "Set NCCL_DEBUG=INFO to see on standard error what NCCL waits for."
            )

    NcclComm.create(nccl, nccl.unique_id(), 0, 1, device, poll).destroy(poll)
