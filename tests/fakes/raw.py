"""Ranks that call NCCL directly through ctypes, for tests of the fake itself."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

from tests.fakes.arrays import FakeArray
from tests.fakes.handle import Fake

SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 2, 4, 5, 6, 7
SUM, PROD, MAX, MIN, AVG = range(5)
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
_WAIT_S = 40


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * 128),)


class Config(ctypes.Structure):
    """Members of ncclConfig_t that every version with a config has."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", c_int),
        ("rest", c_int * 8),
    )

    @classmethod
    def of(cls, *, blocking: bool) -> Config:
        undefined = -(2**31)
        config = cls(cls.rest.offset, 0xCAFEBEEF, 22907, int(blocking))
        config.rest[:] = [undefined] * 8
        return config


_FOLD = (c_void_p, c_void_p, c_size_t, c_int, c_int)  # send, recv, count, datatype, op
_MOVE = (c_void_p, c_void_p, c_size_t, c_int)
_END = (c_void_p, c_void_p)  # comm, stream
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommFinalize": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommCount": (c_void_p, POINTER(c_int)),
    "ncclCommUserRank": (c_void_p, POINTER(c_int)),
    "ncclCommCuDevice": (c_void_p, POINTER(c_int)),
    "ncclCommSplit": (c_void_p, c_int, c_int, POINTER(c_void_p), POINTER(Config)),
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p)),
    "ncclCommDeregister": (c_void_p, c_void_p),
    "ncclCommWindowRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p), c_int),
    "ncclCommWindowDeregister": (c_void_p, c_void_p),
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (c_void_p,),
    "ncclRedOpCreatePreMulSum": (POINTER(c_int), c_void_p, c_int, c_int, c_void_p),
    "ncclRedOpDestroy": (c_int, c_void_p),
    "ncclAllReduce": (*_FOLD, *_END),
    "ncclReduceScatter": (*_FOLD, *_END),
    "ncclReduce": (*_FOLD, c_int, *_END),
    "ncclBroadcast": (*_MOVE, c_int, *_END),
    "ncclGather": (*_MOVE, c_int, *_END),
    "ncclScatter": (*_MOVE, c_int, *_END),
    "ncclAllGather": (*_MOVE, *_END),
    "ncclAlltoAll": (*_MOVE, *_END),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, *_END),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, *_END),
    "ncclGetLastError": (c_void_p,),
    "ncclGetErrorString": (c_int,),
}


class NcclError(Exception):
    """A call of NCCL that failed.

    Attributes:
        code: the ncclResult_t.
        text: text of ncclGetLastError.
    """

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(f"{name}: {code}: {text}")
        self.code, self.text = code, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0].split(":")[0], self.code, self.text)


class Nccl(Fake):
    """The fake with NCCL's prototypes."""

    def __init__(self, version: int = 22907) -> None:
        super().__init__(version)
        for name, arguments in _PROTOTYPES.items():
            if hasattr(self.library, name):
                getattr(self.library, name).argtypes = arguments
        for name in ("ncclGetLastError", "ncclGetErrorString"):
            if hasattr(self.library, name):
                getattr(self.library, name).restype = c_char_p

    def last_error(self, comm: int | None = None) -> str:
        text: bytes = self.library.ncclGetLastError(comm)
        return text.decode()

    def call(self, name: str, *arguments: Any) -> None:
        """Call ``nccl`` + name.

        Raises:
            NcclError: the call returned neither success nor "in progress".
        """
        code = getattr(self.library, f"nccl{name}")(*arguments)
        if code not in (SUCCESS, IN_PROGRESS):
            raise NcclError(name, code, self.last_error())

    def unique_id(self) -> bytes:
        identity = UniqueId()
        self.call("GetUniqueId", identity)
        return bytes(identity)

    def state(self, comm: int) -> int:
        state = c_int()
        self.call("CommGetAsyncError", comm, state)
        return state.value

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self.call("GroupStart")
        try:
            yield
        finally:
            self.call("GroupEnd")


class Rank:
    """Rank of a communicator, with its own stream on its device."""

    def __init__(self, nccl: Nccl, identity: bytes, rank: int, size: int, device: int) -> None:
        self.nccl, self.rank, self.size, self.device = nccl, rank, size, device
        self.identity = identity
        self.stream = nccl.stream(device)
        self.comm = 0

    def init(self, blocking: bool = True) -> Rank:
        comm = c_void_p()
        identity = UniqueId.from_buffer_copy(self.identity)
        with self.nccl.active(self.device):
            if blocking:
                self.nccl.call("CommInitRank", comm, self.size, identity, self.rank)
            else:
                config = Config.of(blocking=False)
                self.nccl.call("CommInitRankConfig", comm, self.size, identity, self.rank, config)
        self.comm = comm.value or 0
        return self

    def until_error(self) -> int:
        """Wait until the asynchronous state is an error, and return the error."""
        pause = threading.Event()
        while (state := self.nccl.state(self.comm)) in (SUCCESS, IN_PROGRESS):
            pause.wait(0.0005)
        return state

    def poll(self, comm: int | None = None) -> int:
        """Wait until the asynchronous state is not "in progress", and return the state."""
        pause = threading.Event()
        while (state := self.nccl.state(comm or self.comm)) == IN_PROGRESS:
            pause.wait(0.0005)
        return state

    def array(self, values: Any) -> FakeArray:
        return FakeArray.of(values, self.device, self.stream)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> FakeArray:
        shape = shape if isinstance(shape, tuple) else (shape,)
        return FakeArray(shape, dtype, device=self.device, stream=self.stream)

    def call(self, name: str, *arguments: Any, comm: int | None = None, stream: int = 0) -> None:
        """Call a collective, a send or a recv; arrays are replaced by their addresses."""
        plain = [a.address if isinstance(a, FakeArray) else a for a in arguments]
        self.nccl.call(name, *plain, comm or self.comm, stream or self.stream)

    def synchronize(self) -> None:
        self.nccl.synchronize(self.stream, self.device)

    def destroy(self) -> None:
        self.nccl.call("CommDestroy", self.comm)

    def abort(self) -> None:
        self.nccl.call("CommAbort", self.comm)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name, from ml_dtypes if NumPy lacks the dtype."""
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def in_threads(size: int, work: Callable[[Rank], Any], init: bool = True) -> list[Any]:
    """Run ``work`` on ranks that are threads of this process; return the results by rank.

    Raises:
        BaseException: first exception of a rank.
        TimeoutError: a rank did not return in time.
    """
    nccl = Nccl()
    nccl.context(0)
    identity = nccl.unique_id()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(number: int) -> None:
        rank = Rank(nccl, identity, number, size, number)
        try:
            results[number] = work(rank.init() if init else rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S if not errors else 2)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a rank did not return in time")
    return results


def _process(
    connection: Any,
    work: Callable[[Rank], Any],
    init: bool,
    number: int,
    size: int,
    identity: bytes,
) -> None:
    nccl = Nccl()
    nccl.context(0)
    rank = Rank(nccl, identity, number, size, number)
    try:
        connection.send((True, work(rank.init() if init else rank)))
    except BaseException as error:
        connection.send((False, error))


def in_processes(size: int, work: Callable[[Rank], Any], init: bool = True) -> list[Any]:
    """Run ``work``, a function of a module, on ranks that are processes; return the results.

    If a process died without a result, its result is ``SystemExit`` with its exit status.

    Raises:
        BaseException: first exception of a rank.
        TimeoutError: a rank did not return in time.
    """
    context = multiprocessing.get_context("spawn")
    identity = Nccl().unique_id()
    ends, processes, results = [], [], []
    for number in range(size):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, work, init, number, size, identity)
        process = context.Process(target=_process, args=arguments, daemon=True)
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        for end, process in zip(ends, processes):
            if not end.poll(_WAIT_S):
                raise TimeoutError("a rank did not return in time")
            try:
                succeeded, result = end.recv()
            except EOFError:
                process.join(_WAIT_S)
                succeeded, result = True, SystemExit(process.exitcode)
            if not succeeded:
                raise result
            results.append(result)
    finally:
        for end, process in zip(ends, processes):
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            end.close()
    return results
