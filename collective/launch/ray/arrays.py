"""Transports for arrays that are results of one actor and arguments of another, on one host.

Ray calls this "direct transport". The actor that made the arrays copies them once, into shared
memory that is in no file system. The actor that gets them maps this memory privately: the system
copies a page when the actor writes to it. So both actors may change their arrays.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import mmap
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from collective import DeviceError, PeerLostError, UnsupportedError
from collective.inner import platform
from collective.start.meeting import host_id

__all__ = ["NumpyTransport", "SharedArrays", "SharedMemoryTransport", "register_transports"]

_NAME = "collective-ray"
_ALIGNED = 64

_managers: Any = importlib.import_module("ray.experimental.rdt.tensor_transport_manager")
# Untyped, because mypy also runs where Ray is not installed.
_Metadata: Any = _managers.TensorTransportMetadata
_Manager: Any = _managers.TensorTransportManager


@dataclass
class SharedArrays(_Metadata):  # type: ignore[misc]
    """Description of the arrays of one object, which Ray passes to the receiver.

    Attributes:
        name: id of the object.
        path: path of their memory; empty if they have no elements.
        nbytes: length of the memory.
        offsets: offset of each array.
        host: text that only processes on one host share.
        owner: words for the process that has the memory.
    """

    name: str = ""
    path: str = ""
    nbytes: int = 0
    offsets: list[int] = field(default_factory=list)
    host: str = ""
    owner: str = ""


class SharedMemoryTransport(_Manager):  # type: ignore[misc]
    """Transport of torch's tensors on the CPU; see the module."""

    name = "COLLECTIVE"

    def __init__(self) -> None:
        # Descriptors and paths by objects.
        self._memories: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def tensor_transport_backend(self) -> str:
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> SharedArrays:
        """Copy the arrays into shared memory and describe it."""
        views = [self._bytes_of(x) for x in rdt_object]
        offsets, end = [], 0
        for view in views:
            offsets.append(end)
            end += -(-view.nbytes // _ALIGNED) * _ALIGNED
        path = ""
        if end:
            descriptor, path = platform.shared_file(_NAME)
            try:
                _fill(descriptor, end, offsets, views)
            except BaseException:  # such as memory that is not there
                _remove(descriptor, path)
                raise
            with self._lock:
                former = self._memories.pop(obj_id, None)
                self._memories[obj_id] = descriptor, path
            # Ray describes an object again if the reply of its task was lost, and the first
            # description with it.
            if former is not None:
                _remove(*former)
        return SharedArrays(
            [(x.shape, x.dtype) for x in rdt_object], "cpu", obj_id, path, end, offsets, host_id(),
            f"process {os.getpid()} on {socket.gethostname()}",
        )  # fmt: skip

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> Any:
        return _managers.CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: SharedArrays,
        communicator_metadata: Any,
        target_buffers: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Map the memory and return arrays in it, or copy it into ``target_buffers``."""
        found = tensor_transport_metadata
        if found.host != host_id():
            raise DeviceError(
                f"{self.name}: the arrays of object {found.name[:16]} are in the memory of another "
                f"host ({found.owner}). This transport serves actors of one host: place them on "
                "one node, or omit tensor_transport."
            )
        memory = self._mapped(found)
        arrays = [
            self._array_of(memory[offset:], shape, dtype)
            for offset, (shape, dtype) in zip(found.offsets, found.tensor_meta)
        ]
        for target, x in zip(target_buffers or (), arrays):
            target[...] = x
        return list(target_buffers) if target_buffers else arrays

    def send_multiple_tensors(
        self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        raise UnsupportedError(f"{self.name}: the receiver maps the memory, and nothing is sent.")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: SharedArrays, tensors: list[Any]
    ) -> None:
        """Release the memory; receivers that have mapped it keep it."""
        with self._lock:
            memory = self._memories.pop(obj_id, None)
        if memory is not None:
            _remove(*memory)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Do nothing: no process waits for another one."""

    def _mapped(self, found: SharedArrays) -> np.ndarray[Any, Any]:
        if not found.nbytes:
            return np.empty(0, np.uint8)
        try:
            if not platform.still_leads_to(found.path, _NAME):
                raise FileNotFoundError(found.path)
            descriptor = os.open(found.path, os.O_RDONLY)
        except OSError as error:
            raise PeerLostError(
                f"{self.name}: the memory of object {found.name[:16]} is gone, since {found.owner} "
                f"has ended or released it ({error}). Keep the actor that made the arrays alive "
                "until they have been received."
            ) from error
        try:
            mapped = mmap.mmap(
                descriptor, found.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(descriptor)
        return np.frombuffer(mapped, np.uint8)  # keeps the mapping

    def _bytes_of(self, x: Any) -> np.ndarray[Any, Any]:
        torch = importlib.import_module("torch")
        if x.device.type != "cpu":
            raise DeviceError(
                f"{self.name}: the tensor is on {x.device}; this transport takes tensors on the "
                "CPU. Use x.cpu(), or another tensor_transport."
            )
        view: np.ndarray[Any, Any] = (
            x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        ).numpy()
        return view

    def _array_of(self, memory: np.ndarray[Any, Any], shape: Any, dtype: Any) -> Any:
        torch = importlib.import_module("torch")
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).reshape(shape)


class NumpyTransport(SharedMemoryTransport):
    """The same transport for NumPy's arrays."""

    name = "COLLECTIVE_NUMPY"

    def _bytes_of(self, x: Any) -> np.ndarray[Any, Any]:
        if x.dtype.hasobject:
            raise UnsupportedError(
                f"{self.name}: an array of Python objects (dtype {x.dtype}) has no memory that "
                "another process can use. Omit tensor_transport."
            )
        view: np.ndarray[Any, Any] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        return view

    def _array_of(self, memory: np.ndarray[Any, Any], shape: Any, dtype: Any) -> Any:
        count = math.prod(shape)
        return memory[: count * dtype.itemsize].view(dtype).reshape(shape)


def _fill(
    descriptor: int, nbytes: int, offsets: Sequence[int], views: Sequence[np.ndarray[Any, Any]]
) -> None:
    """Copy arrays to their offsets in a new shared file."""
    os.truncate(descriptor, nbytes)
    platform.fix_length(descriptor)
    with mmap.mmap(descriptor, nbytes) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        for offset, view in zip(offsets, views):
            memory[offset : offset + view.nbytes] = view
        del memory  # else the mapping could not be closed


def _remove(descriptor: int, path: str) -> None:
    """Release a shared file; processes that have mapped it keep its memory."""
    os.close(descriptor)
    if platform.is_file(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def register_transports() -> None:
    """Register the transports with Ray in this process, unless they are registered.

    A method with ``@ray.method(tensor_transport="collective")`` returns tensors of PyTorch, one
    with ``"collective_numpy"`` returns arrays of NumPy. Ray checks these names when a program
    defines the method. Without PyTorch there is no transport of tensors.
    """
    util = importlib.import_module("ray.experimental.rdt.util")
    kinds: dict[type[SharedMemoryTransport], Any] = {NumpyTransport: np.ndarray}
    if importlib.util.find_spec("torch") is not None:
        kinds[SharedMemoryTransport] = importlib.import_module("torch").Tensor
    for kind, data_type in kinds.items():
        if kind.name not in util.transport_manager_info:
            util.register_tensor_transport(kind.name, ["cpu"], kind, data_type)
