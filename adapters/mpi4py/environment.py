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

from .communicators import world
from .datatypes import Datatype
from .exceptions import CLASSES, MPIError, refusing
from .handles import Constant, Handle
from .info import Info
from .memory import address_of, buffer, bytes_of
from .operations import Status, flush

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
    world.handle._Barrier().run()


@atexit.register
def _at_exit() -> None:
    # After an error, the other ranks learn of it, and nobody waits for them.
    if not hasattr(sys, "last_value") and world.handle is not None:
        with contextlib.suppress(MPIError, collective.CollectiveError):
            Finalize()


def Is_finalized() -> bool:
    """Return whether ``Finalize`` was called."""
    return _state["finalized"]


def Is_thread_main() -> bool:
    """Return whether this is the main thread."""
    return threading.current_thread() is threading.main_thread()


Wtime = time.perf_counter


def _returning(name: str, value: Any, what: str) -> Any:
    """Return a function of the module whose result never changes."""

    def function() -> Any:
        return value

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Return {what}."
    return function


_release = [int("".join(filter(str.isdigit, part)) or 0)
            for part in f"{collective.__version__}.0.0".split(".")[:3]]  # fmt: skip
for _name, _value, _what in (
    ("Is_initialized", True, "True"),
    ("Query_thread", THREAD_MULTIPLE, "the level of support for threads"),
    ("Get_version", (VERSION, SUBVERSION), "the version of the standard that this module follows"),
    ("Get_library_version", f"collective {collective.__version__}", "name and version"),
    ("get_vendor", ("collective", tuple(_release)), "name and version of the library"),
    ("Get_abi_version", (-1, -1), "(-1, -1): there is no library in C to link with"),
    ("Get_processor_name", os.uname().nodename, "the name of this host"),
    ("Wtick", time.get_clock_info("perf_counter").resolution, "the resolution of ``Wtime``"),
):
    globals()[_name] = _returning(_name, _value, _what)


def Get_hw_resource_info() -> Info:
    """Return no hints."""
    return Info.Create()  # type: ignore[no-any-return]


Get_abi_info = Get_abi_fortran_info = Get_hw_resource_info


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
    return (base + disp + 2**63) % 2**64 - 2**63


def Aint_diff(addr1: int, addr2: int) -> int:
    """Return the difference of two addresses."""
    return Aint_add(addr1, -addr2)


_PORTS = ("it starts no processes in a running program, and knows no ports",
          "Start all ranks with `collective run`.")  # fmt: skip
Open_port = Close_port = Publish_name = Unpublish_name = Lookup_name = refusing(
    "a port, or a published name", *_PORTS
)
Register_datarep = refusing("Register_datarep", "it has no files that ranks share", "Use NumPy.")


def _typealign(datatype: Datatype) -> int | None:
    """Return the alignment of a predefined datatype, or None."""
    return (datatype._inner.align or None) if datatype and datatype.is_predefined else None


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
