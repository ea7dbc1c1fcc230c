"""Transports with one deliberate fault each, for tests that have to find the fault.

The module is importable, so ranks in processes can use the classes by name.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np

from collective.backends.shm import ShmBackend
from collective.backends.threads import ThreadsBackend
from collective.contract.backend import Plan
from collective.contract.failure import Failure
from collective.contract.world import World
from collective.errors import CollectiveTimeoutError
from collective.memory.buffer import Buffer
from collective.ops import ReduceOp, as_op
from collective.request import Request
from tests.support.loopback import Loopback, _Message

#: Event that lets hanging ranks continue when the test is over.
released = threading.Event()


# Lending sends messages up to this size at once: a head with its payload.
_SHORT_BYTES = 4 << 10


def _another(buffer: Buffer, array: np.ndarray[Any, Any]) -> Buffer:
    return Buffer(array, buffer.dtype)


def _altered(request: Request, **changes: Any) -> Request:
    """Return a copy of the request with changes; its digest stays, so the ranks see equal calls."""
    other = copy.copy(request)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


class WrongRoot(ThreadsBackend):
    """Transport that broadcasts the array of the rank after the root."""

    def broadcast(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        other = _altered(request, root=(request.root + 1) % self.size)
        super().broadcast(other, src, dst, timeout)


class WrongOrder(ThreadsBackend):
    """Transport that joins the ranks' arrays in reverse order."""

    def all_gather(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_gather(request, src, dst, timeout)
        pieces = np.split(dst.array.copy(), np.cumsum(request.elements)[:-1])
        dst.array[:] = np.concatenate(pieces[::-1])


class LostTail(Loopback):
    """Transport that loses the last bytes of long messages."""

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        source = super().recv(dst, src, tag, timeout)
        if dst.nbytes > 65_536:
            dst.bytes().array[-5:] = 0
        return source


class Aliasing(ThreadsBackend):
    """Transport that writes the result of an all_reduce into the input, too."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_reduce(request, src, dst, timeout)
        src.array[:] = dst.array


class Rewriting(ThreadsBackend):
    """Transport that rewrites the root's array in a broadcast, which holds the result already."""

    def broadcast(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().broadcast(request, src, dst, timeout)
        dst.array[:] = dst.array.copy()


class Stale(ThreadsBackend):
    """Transport that repeats the first result for every equal call."""

    def reduce_scatter(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().reduce_scatter(request, src, dst, timeout)
        known = self.__dict__.setdefault("_known", {})
        dst.array[:] = known.setdefault(request.digest, dst.array.copy())


class SwappedTags(Loopback):
    """Transport that swaps messages of tag 7 and tag 1."""

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        return super().recv(dst, src, {1: 7, 7: 1}.get(tag, tag), timeout)


class DroppedRank(ThreadsBackend):
    """Transport that omits the last rank's contribution."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if self.rank == self.size - 1 and self.size > 1:
            src = _another(src, np.zeros_like(src.array))
        super().all_reduce(request, src, dst, timeout)


class WrongDtype(ThreadsBackend):
    """Transport that reduces everything as integers."""

    def reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if src.dtype.kind == "f" and src.dtype.name != "bfloat16":
            src = _another(src, src.array.astype(np.int64).astype(src.array.dtype))
        super().reduce(request, src, dst, timeout)


class Saturating(ThreadsBackend):
    """Transport whose sums and products of narrow integers saturate, as in vector units."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        narrow, name = src.dtype.kind in "iu" and src.dtype.itemsize < 4, request.op.name
        if narrow and name in ("sum", "prod"):
            op = ReduceOp("user", function=_saturated(name, src.array.dtype))
            request = _altered(request, op=op)
        super().all_reduce(request, src, dst, timeout)


def _saturated(name: str, dtype: np.dtype[Any]) -> Any:
    fold, limits = {"sum": np.add, "prod": np.multiply}[name], np.iinfo(dtype)
    return lambda a, b: np.clip(fold(a, b, dtype=np.int64), limits.min, limits.max)


class Platform(ThreadsBackend):
    """Transport that leaves zeros and NaN to NumPy, and so to the processor and the order."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        function = {"min": np.minimum, "max": np.maximum}.get(request.op.name)
        if function is not None:
            request = _altered(request, op=ReduceOp("user", function=function))
        super().all_reduce(request, src, dst, timeout)


class Bytewise(ThreadsBackend):
    """Transport that reduces the bytes of booleans as integers."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if src.dtype.kind == "b":
            src, dst = src.bytes(), dst.bytes()
        super().all_reduce(request, src, dst, timeout)


class RawFirst(ThreadsBackend):
    """Transport that copies the bytes of the first rank's input to its result of a scan."""

    def scan(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        own_input = src.array.copy()
        super().scan(request, src, dst, timeout)
        if self.rank == 0 and request.op.name not in ("land", "lor"):
            dst.array[:] = own_input


class Tidying(ThreadsBackend):
    """Transport that normalises moved booleans to the bytes 0 and 1."""

    def all_gather(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_gather(request, src, dst, timeout)
        if dst.dtype.kind == "b":
            np.not_equal(dst.bytes().array, 0, out=dst.array)


class Hanging(ThreadsBackend):
    """Transport whose rank 1 never leaves a barrier."""

    def barrier(self, request: Request, src: None, dst: None, timeout: float) -> None:
        super().barrier(request, src, dst, timeout)
        if self.rank == 1:
            released.wait()


class Crashing(ShmBackend):
    """Transport whose rank 1 is killed in all_gather."""

    def plan(self, request: Request) -> Plan:
        return self._kill if request.operation == "all_gather" else super().plan(request)

    def _kill(self, src: Any, dst: Any, timeout: float) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.recv(dst, 1, 0, timeout)  # This message never comes.


class Raising(ThreadsBackend):
    """Transport that passes on an error of the library below."""

    def scan(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if self.rank == 1:
            raise OSError("the cable is loose")
        super().scan(request, src, dst, timeout)


class Swallowing(ThreadsBackend):
    """Transport that continues with the left operand when a user's operator raises."""

    def scan(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        op = request.op
        if op.function is not None:
            request = _altered(request, op=dataclasses.replace(op, function=_or_left(op.function)))
        super().scan(request, src, dst, timeout)


def _or_left(function: Any) -> Any:
    def fold(a: Any, b: Any) -> Any:
        try:
            return function(a, b)
        except Exception:
            return a

    return fold


class Undivided(ThreadsBackend):
    """Transport whose average lacks the division."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if request.op.name == "avg":
            request = _altered(request, op=as_op("sum"))
        super().all_reduce(request, src, dst, timeout)


class Disordered(Loopback):
    """Transport that ignores ``order="rank"`` and folds in the fastest order."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_reduce(_altered(request, ordered=False), src, dst, timeout)


class Commuting(Loopback):
    """Transport that treats every operator as commutative, and folds from the last rank down."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        function = request.op.function
        if function is not None:
            op = dataclasses.replace(request.op, function=lambda a, b: function(b, a))
            request = _altered(request, op=op)
        super().all_reduce(request, src, dst, timeout)


class Impatient(ThreadsBackend):
    """Transport whose barrier does not wait."""

    def barrier(self, request: Request, src: None, dst: None, timeout: float) -> None:
        pass


class Unchecked(Loopback):
    """Transport that claims to compare calls and does not."""

    capabilities = dataclasses.replace(Loopback.capabilities, checks_calls=True)


class Early(Loopback):
    """Transport whose send returns before the message has left the sender's memory."""

    def send(self, src: Buffer, dst: int, tag: int, timeout: float) -> None:
        hub = self._hub
        with hub.lock:
            self._check("send")
            message = _Message(src.bytes().array, hub.sent)
            hub.sent += 1
            hub.mail.setdefault((self.rank, dst, tag), deque()).append(message)
            hub.woken[dst].notify_all()


class Deaf(ThreadsBackend):
    """Transport that does not announce its end, although it claims that peers notice it."""

    _kept: ClassVar[list[ThreadsBackend]] = []

    def close(self) -> None:
        self._kept.append(self)  # Its garbage collection would announce the end.


class Lingering(Loopback):
    """Transport whose close does not end the calls in which other threads of its rank wait."""

    def close(self) -> None:
        with self._hub.lock:
            self._hub.left.add(self.rank)
            self._hub.wake_all()


class Lending(Loopback):
    """Transport whose long sends time out, but leave the sender's memory to the receiver."""

    def send(self, src: Buffer, dst: int, tag: int, timeout: float) -> None:
        if src.nbytes <= _SHORT_BYTES:
            super().send(src, dst, tag, timeout)
            return
        with self._hub.lock:
            message = _Message(src.bytes().array, self._hub.sent)
            self._hub.mail.setdefault((self.rank, dst, tag), deque()).append(message)
            self._hub.woken[dst].notify_all()
        raise CollectiveTimeoutError("send: timed out", (dst,))


class Secretive(ThreadsBackend):
    """Transport that does not report an exception of the program to its peers."""

    def abort(self, failure: Failure) -> None:
        if failure.kind != "failed":
            super().abort(failure)


class Alone(ThreadsBackend):
    """Transport whose ranks reconnect alone, whatever the ranks have agreed on."""

    def reconnect(self, world: World, timeout: float) -> ThreadsBackend:
        alone = dataclasses.replace(
            world, rank=0, size=1, local_rank=0, local_size=1, job=f"{world.job}.{world.rank}"
        )
        return super().reconnect(alone, timeout)


class Unhospitable(ThreadsBackend):
    """Transport that rotates the ranks of a new generation, so that a joining rank comes first."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> Self:
        turned = (world.rank + 1) % world.size if ".1" in world.job else world.rank
        return super().connect(dataclasses.replace(world, rank=turned), timeout)


class Slandering(ThreadsBackend):
    """Transport that reports the living last rank as lost."""

    def lost(self) -> set[int]:
        return {*super().lost(), self.size - 1} - {self.rank}


class Laconic(ThreadsBackend):
    """Transport whose timeout errors do not say that they are timeouts."""

    def barrier(self, request: Request, src: None, dst: None, timeout: float) -> None:
        try:
            super().barrier(request, src, dst, timeout)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError("barrier: no", error.ranks) from error


class Unwaking(Loopback):
    """Transport whose abort does not wake a waiting ``recv``, which ends only at its timeout."""

    def abort(self, failure: Failure) -> None:
        with self._hub.lock:
            self._hub.failure = failure


class Ignoring(Unwaking):
    """Variant of Unwaking in which a program's ``recv`` also ignores its timeout."""

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        with self._hub.lock:
            self._check("recv")
        if tag >= 0:
            released.wait()
        return super().recv(dst, src, tag, timeout)


class SortedGroups(ThreadsBackend):
    """Transport that ignores the order of a group's members."""

    def group(self, ranks: Sequence[int], timeout: float) -> ThreadsBackend:
        return super().group(sorted(ranks), timeout)


class Overrunning(ThreadsBackend):
    """Transport that changes the byte after the result."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_reduce(request, src, dst, timeout)
        memory = dst.array.base
        if isinstance(memory, np.ndarray) and memory.dtype == np.uint8:
            start = dst.array.ctypes.data - memory.ctypes.data + dst.nbytes
            memory[start : start + 1] ^= 1


class MixedUp(Loopback):
    """Transport that mixes its own messages with those of users."""

    def send(self, src: Buffer, dst: int, tag: int, timeout: float) -> None:
        super().send(src, dst, 0 if tag == -1 else tag, timeout)

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        return super().recv(dst, src, 0 if tag == -1 else tag, timeout)


class Forgiving(Loopback):
    """Transport whose ``recv`` still returns waiting messages after an abort."""

    def abort(self, failure: Failure) -> None:
        # Wait until all background sends have queued their messages. Otherwise there is no message
        # to return, or a send fails, and its rank's communicator refuses a recv that the transport
        # would accept.
        end = time.monotonic() + 10.0
        while time.monotonic() < end:
            with self._hub.lock:
                receivers = [dst for _, dst, tag in self._hub.mail if tag >= 0]
            if all(receivers.count(rank) >= 2 for rank in range(self.size)):
                break
            time.sleep(0.001)
        super().abort(failure)

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        hub = self._hub
        with hub.lock:
            message = self._next(src, tag)
        if message is None:
            return super().recv(dst, src, tag, timeout)
        np.copyto(dst.bytes().array, message[1].data)
        return message[0]
