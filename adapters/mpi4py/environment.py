"""Functions of the module itself: start and end, versions, addresses, and the like."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any

import collective

from .communicators import Comm, world
from .datatypes import Datatype
from .exceptions import CLASSES, MPIError
from .handles import Constant, Handle
from .info import Info
from .memory import address_of, buffer, bytes_of
from .refusals import refusing
from .requests import Request, Status, empty, flush

__all__ = ["Alloc_mem", "Finalize", "Get_address", "Init"]

THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
VERSION, SUBVERSION = 4, 1
MAX_PROCESSOR_NAME = MAX_OBJECT_NAME = MAX_DATAREP_STRING = 128
MAX_ERROR_STRING, MAX_PORT_NAME = 512, 256
MAX_LIBRARY_VERSION_STRING = 8192
MAX_PSET_NAME_LEN, MAX_STRINGTAG_LEN = 512, 256
_state = {"finalized": False}


def Init() -> None:
    """Do nothing: the import has connected the ranks."""
    if _state["finalized"]:
        raise MPIError(CLASSES["ERR_OTHER"], "Init: MPI is finalized")


def Init_thread(required: int = THREAD_MULTIPLE) -> int:
    """Return the level of support for threads."""
    Init()
    return THREAD_MULTIPLE


def Finalize() -> None:
    """Wait for all ranks, and end the communication."""
    if _state["finalized"]:
        return
    _state["finalized"] = True
    flush()
    world.handle._run(world.handle._Barrier())


@atexit.register
def _at_exit() -> None:
    # After an error, the other ranks learn of it, and nobody waits for them.
    if not hasattr(sys, "last_value") and world.handle is not None:
        with contextlib.suppress(MPIError, collective.CollectiveError):
            Finalize()


def Is_initialized() -> bool:
    """Return True."""
    return True


def Is_finalized() -> bool:
    """Return whether ``Finalize`` was called."""
    return _state["finalized"]


def Query_thread() -> int:
    """Return the level of support for threads."""
    return THREAD_MULTIPLE


def Is_thread_main() -> bool:
    """Return whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


def Get_version() -> tuple[int, int]:
    """Return the version of the standard that this module follows."""
    return VERSION, SUBVERSION


def Get_library_version() -> str:
    """Return name and version of the library."""
    return f"collective {collective.__version__}"


def Get_abi_version() -> tuple[int, int]:
    """Return (-1, -1): there is no library in C to link with."""
    return -1, -1


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return name and version of the library."""
    numbers = [int("".join(filter(str.isdigit, part)) or 0)
               for part in collective.__version__.split(".")[:3]]  # fmt: skip
    major, minor, micro = (*numbers, 0, 0, 0)[:3]
    return "collective", (major, minor, micro)


def Get_processor_name() -> str:
    """Return the name of this host."""
    return os.uname().nodename


def Get_hw_resource_info() -> Info:
    """Return no hints."""
    return Info.Create()  # type: ignore[no-any-return]


Get_abi_info = Get_abi_fortran_info = Get_hw_resource_info


def Wtime() -> float:
    """Return the time in seconds."""
    return time.perf_counter()


def Wtick() -> float:
    """Return the resolution of ``Wtime``."""
    return time.get_clock_info("perf_counter").resolution


def Pcontrol(level: int) -> None:
    """Do nothing: there is no profiler that the program controls."""


def Alloc_mem(size: int, info: Any = None) -> buffer:
    """Return new memory."""
    return buffer.allocate(size)


def Free_mem(mem: Any) -> None:
    """Let the memory go with its last reference."""
    if not isinstance(mem, buffer):
        raise TypeError(f"Free_mem: expected buffer, got {type(mem).__name__}")
    mem.release()


def Get_address(location: Any) -> int:
    """Return the address of an object's memory."""
    if isinstance(location, Constant):
        return int(location)
    return address_of(bytes_of(location, False))


def Aint_add(base: int, disp: int) -> int:
    """Return an address and a displacement added."""
    return _wrapped(base + disp)


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference of two addresses."""
    return _wrapped(addr1 - addr2)


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def Attach_buffer(buf: Any) -> None:
    """Keep a buffer for buffered sends. They need none, and take what memory they need."""
    bytes_of(buf, True)
    _state["attached"] = buf


def Detach_buffer() -> Any:
    """Wait for buffered sends, and return the buffer."""
    flush()
    return _state.pop("attached", None)


def Flush_buffer() -> None:
    """Wait for buffered sends."""
    flush()


def Iflush_buffer() -> Request:
    """Wait for buffered sends; the request is complete."""
    flush()
    return Request._of(empty())  # type: ignore[no-any-return]


_PORTS = ("it starts no processes in a running program, and knows no ports",
          "Start all ranks with `collective run`.")  # fmt: skip
Open_port = refusing("Open_port", *_PORTS)
Close_port = refusing("Close_port", *_PORTS)
Publish_name = refusing("Publish_name", *_PORTS)
Unpublish_name = refusing("Unpublish_name", *_PORTS)
Lookup_name = refusing("Lookup_name", *_PORTS)
Register_datarep = refusing("Register_datarep", "it has no files that ranks share", "Use NumPy.")


def _set_abort_status(status: int) -> None:
    """Do nothing: the launcher passes the exit code of the rank that failed on."""


def _comm_lock(comm: Comm, key: Any = None) -> threading.Lock:
    """Return a lock of a communicator, the same for each key."""
    return comm._live.locks.setdefault(key, threading.Lock())  # type: ignore[no-any-return]


def _comm_lock_table(comm: Comm) -> dict[Any, threading.Lock]:
    """Return the locks of a communicator."""
    return comm._live.locks  # type: ignore[no-any-return]


def _commctx_intra(comm: Comm) -> tuple[Any, int]:
    """Return a communicator for messages of a library, and the first of its tags."""
    context = comm._live
    if "shadow" not in context.__dict__:
        context.shadow = comm.Dup()
    return context.shadow, 0


def _commctx_inter(comm: Comm) -> Any:
    """Refuse intercommunicators."""
    refusing("an intercommunicator", "it has none", "Use one communicator.")()


def _typecode(datatype: Datatype) -> str | None:
    """Return the code of a datatype, or None."""
    return (datatype._inner.code or None) if datatype else None


def _typealign(datatype: Datatype) -> int | None:
    """Return the alignment of a datatype, or None."""
    return (datatype._inner.align or None) if datatype else None


def _datatype_create(datatype: Datatype, combiner: str, params: Any, free: bool = False) -> Any:
    """Return the datatype that ``decode`` has described."""
    if combiner == "NAMED":
        return datatype
    return getattr(datatype, f"Create_{combiner.lower()}")(**params)


def _datatype_decode(datatype: Datatype, mark: bool = False) -> Any:
    """Return a datatype as ``decode`` does."""
    return datatype.decode()


def _sizeof(arg: Any) -> int:
    """Return the size that a handle has in C."""
    kind = arg if isinstance(arg, type) else type(arg)
    if issubclass(kind, Status):
        return 40
    if not issubclass(kind, Handle):
        raise TypeError(f"expected a handle, got {kind.__name__}")
    return 8


def _addressof(arg: Any) -> int:
    """Return an address that stands for a handle."""
    _sizeof(arg)
    return id(arg)


def _handleof(arg: Any) -> int:
    """Return the integer that stands for what a handle names."""
    _sizeof(arg)
    return 0 if isinstance(arg, Status) else int(arg.handle)
