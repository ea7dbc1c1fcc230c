"""The part of NCCL's C interface that is used: functions, codes and the configuration struct.

Each function is listed with the first version that provides the function.
``tests/backends/nccl/test_library.py`` compares all of this with the real ``nccl.h``.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

#: The oldest version that is supported: the first one that splits communicators and registers
#: memory.
OLDEST = 21901

#: Value of a configuration field that lets NCCL choose (``INT_MIN``).
UNDEFINED = -(2**31)
_MAGIC = 0xCAFEBEEF
# A version whose struct has at least the fields of ours; see NcclConfig.
_CONFIG_VERSION = 22703

#: Flag of ``ncclCommWindowRegister``: the memory is at the same offset on every rank.
WINDOW_SYMMETRIC = 1
#: Argument of ``ncclRedOpCreatePreMulSum``: the factor is in host memory, and NCCL reads it at
#: once.
SCALAR_ON_HOST = 1

#: ``ncclResult_t``.
RESULTS = {
    0: "ncclSuccess",
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
    7: "ncclInProgress",
    8: "ncclTimeout",
}

#: The result code of a call that is still running in the background.
IN_PROGRESS = 7

#: Codes of ``ncclDataType_t``, by our names of the types that NCCL can reduce.
DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
#: Bytes per element, by NCCL's code; the last two are the floating-point types of 8 bits.
ITEMSIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)

#: Codes of ``ncclRedOp_t``, by our names of the operators.
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``, by which the ranks of a new communicator find each other."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class NcclConfig(ctypes.Structure):
    """Leading fields of ``ncclConfig_t``.

    New versions add fields at the struct's end. A library reads only the fields that both this
    struct and its own version have, and uses defaults for the rest. So this struct works with all
    versions.
    """

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
    )


def new_config(**fields: Any) -> NcclConfig:
    """Return a configuration with these fields; NCCL chooses the values of all other fields."""
    config = NcclConfig()
    for name, kind in NcclConfig._fields_:
        if kind is ctypes.c_int:
            setattr(config, name, UNDEFINED)
    config.size = ctypes.sizeof(NcclConfig)
    config.magic = _MAGIC
    config.version = _CONFIG_VERSION
    for name, value in fields.items():
        setattr(config, name, value)
    return config


class Prototype(NamedTuple):
    """Prototype of a function of NCCL.

    Attributes:
        arguments: ctypes types, in order. Every pointer is a ``void *``: ctypes passes a plain
            integer fastest, and ``byref`` fits, too.
        since: the code of the first version that has the function.
        result: type of the result, ``ncclResult_t`` except for two functions.
    """

    arguments: tuple[Any, ...]
    since: int
    result: Any = ctypes.c_int


_int, _size, _pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_comm = _stream = _handle = _pointer
_dtype = _op = _rank = _int

#: Every function that is called, by name.
FUNCTIONS: dict[str, Prototype] = {
    # the library
    "ncclGetVersion": Prototype((_pointer,), 2000),
    "ncclGetUniqueId": Prototype((_pointer,), 2000),
    "ncclGetErrorString": Prototype((_int,), 2000, ctypes.c_char_p),
    "ncclGetLastError": Prototype((_comm,), 21304, ctypes.c_char_p),
    # communicators
    "ncclCommInitRankConfig": Prototype((_pointer, _int, UniqueId, _rank, _pointer), 21403),
    "ncclCommSplit": Prototype((_comm, _int, _int, _pointer, _pointer), 21801),
    "ncclCommFinalize": Prototype((_comm,), 21403),
    "ncclCommDestroy": Prototype((_comm,), 2000),
    "ncclCommAbort": Prototype((_comm,), 2402),
    "ncclCommGetAsyncError": Prototype((_comm, _pointer), 2402),
    # groups
    "ncclGroupStart": Prototype((), 2000),
    "ncclGroupEnd": Prototype((), 2000),
    # operators
    "ncclRedOpCreatePreMulSum": Prototype((_pointer, _pointer, _dtype, _int, _comm), 21104),
    "ncclRedOpDestroy": Prototype((_op, _comm), 21104),
    # operations
    "ncclAllReduce": Prototype((_pointer, _pointer, _size, _dtype, _op, _comm, _stream), 2000),
    "ncclBroadcast": Prototype((_pointer, _pointer, _size, _dtype, _rank, _comm, _stream), 2202),
    "ncclReduce": Prototype((_pointer, _pointer, _size, _dtype, _op, _rank, _comm, _stream), 2000),
    "ncclReduceScatter": Prototype((_pointer, _pointer, _size, _dtype, _op, _comm, _stream), 2000),
    "ncclAllGather": Prototype((_pointer, _pointer, _size, _dtype, _comm, _stream), 2000),
    "ncclSend": Prototype((_pointer, _size, _dtype, _rank, _comm, _stream), 2703),
    "ncclRecv": Prototype((_pointer, _size, _dtype, _rank, _comm, _stream), 2703),
    # memory
    "ncclMemAlloc": Prototype((_pointer, _size), 21901),
    "ncclMemFree": Prototype((_pointer,), 21901),
    "ncclCommRegister": Prototype((_comm, _pointer, _size, _pointer), 21901),
    "ncclCommDeregister": Prototype((_comm, _handle), 21901),
    "ncclCommWindowRegister": Prototype((_comm, _pointer, _size, _pointer, _int), 22703),
    "ncclCommWindowDeregister": Prototype((_comm, _handle), 22703),
}


def version_text(code: int) -> str:
    """Return the text of a version's code, ``"2.32.3"`` for 23203.

    Codes of versions up to 2.8 have one digit less.
    """
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"
