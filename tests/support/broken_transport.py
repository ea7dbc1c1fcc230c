"""Transports that are wrong on purpose, each in one way; importable by ranks' processes."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

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

if TYPE_CHECKING:
    from typing_extensions import Self

#: Lets the ranks that hang go on, when the test is over.
released = threading.Event()


# What Lending sends at once: a message's head, with what fits into it.
_SHORT_BYTES = 4 << 10


def _another(buffer: Buffer, array: np.ndarray[Any, Any]) -> Buffer:
    return Buffer(array, buffer.dtype)


def _altered(request: Request, **changes: Any) -> Request:
    """Return the same request, as all ranks will find, and something else for the transport."""
    other = copy.copy(request)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


class WrongRoot(ThreadsBackend):
    """Broadcasts what the rank after the root has."""

    def broadcast(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        other = _altered(request, root=(request.root + 1) % self.size)
        super().broadcast(other, src, dst, timeout)


class WrongOrder(ThreadsBackend):
    """Joins the ranks' arrays last rank first."""

    def all_gather(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_gather(request, src, dst, timeout)
        pieces = np.split(dst.array.copy(), np.cumsum(request.elements)[:-1])
        dst.array[:] = np.concatenate(pieces[::-1])


class LostTail(Loopback):
    """Loses the last bytes of long messages."""

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        source = super().recv(dst, src, tag, timeout)
        if dst.nbytes > 65_536:
            dst.bytes().array[-5:] = 0
        return source


class Aliasing(ThreadsBackend):
    """Folds in the input."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_reduce(request, src, dst, timeout)
        src.array[:] = dst.array


class Rewriting(ThreadsBackend):
    """Writes a broadcast's result to the root's array too, where it is already."""

    def broadcast(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().broadcast(request, src, dst, timeout)
        dst.array[:] = dst.array.copy()


class Stale(ThreadsBackend):
    """Gives the first result again when a call looks the same."""

    def reduce_scatter(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().reduce_scatter(request, src, dst, timeout)
        known = self.__dict__.setdefault("_known", {})
        dst.array[:] = known.setdefault(request.digest, dst.array.copy())


class SwappedTags(Loopback):
    """Takes messages of tag 7 for tag 1, and the other way round."""

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        return super().recv(dst, src, {1: 7, 7: 1}.get(tag, tag), timeout)


class DroppedRank(ThreadsBackend):
    """Leaves out what the last rank contributes."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if self.rank == self.size - 1 and self.size > 1:
            src = _another(src, np.zeros_like(src.array))
        super().all_reduce(request, src, dst, timeout)


class WrongDtype(ThreadsBackend):
    """Folds everything as integers."""

    def reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if src.dtype.kind == "f" and src.dtype.name != "bfloat16":
            src = _another(src, src.array.astype(np.int64).astype(src.array.dtype))
        super().reduce(request, src, dst, timeout)


class Saturating(ThreadsBackend):
    """Adds and multiplies narrow integers as vector units can: what overflows stays at the end."""

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
    """Leaves zeros and NaN to NumPy, which leaves them to the processor and their order."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        function = {"min": np.minimum, "max": np.maximum}.get(request.op.name)
        if function is not None:
            request = _altered(request, op=ReduceOp("user", function=function))
        super().all_reduce(request, src, dst, timeout)


class Bytewise(ThreadsBackend):
    """Folds booleans as the integers that their bytes are."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if src.dtype.kind == "b":
            src, dst = src.bytes(), dst.bytes()
        super().all_reduce(request, src, dst, timeout)


class RawFirst(ThreadsBackend):
    """Gives the first rank of a scan what that rank gave, byte by byte."""

    def scan(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        given = src.array.copy()
        super().scan(request, src, dst, timeout)
        if self.rank == 0 and request.op.name not in ("land", "lor"):
            dst.array[:] = given


class Tidying(ThreadsBackend):
    """Makes bytes of 0 and 1 of the booleans that it moves."""

    def all_gather(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_gather(request, src, dst, timeout)
        if dst.dtype.kind == "b":
            np.not_equal(dst.bytes().array, 0, out=dst.array)


class Hanging(ThreadsBackend):
    """Rank 1 never comes out of a barrier."""

    def barrier(self, request: Request, src: None, dst: None, timeout: float) -> None:
        super().barrier(request, src, dst, timeout)
        if self.rank == 1:
            released.wait()


class Crashing(ShmBackend):
    """Rank 1's process is killed in all_gather."""

    def plan(self, request: Request) -> Plan:
        return self._kill if request.operation == "all_gather" else super().plan(request)

    def _kill(self, src: Any, dst: Any, timeout: float) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.recv(dst, 1, 0, timeout)  # which never comes


class Raising(ThreadsBackend):
    """Lets an error of the library underneath through."""

    def scan(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if self.rank == 1:
            raise OSError("the cable is loose")
        super().scan(request, src, dst, timeout)


class Swallowing(ThreadsBackend):
    """Goes on with whatever is there when a user's operator raises."""

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
    """Averages without dividing."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        if request.op.name == "avg":
            request = _altered(request, op=as_op("sum"))
        super().all_reduce(request, src, dst, timeout)


class Disordered(Loopback):
    """Folds in whatever order is fastest when rank order was asked for."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_reduce(_altered(request, ordered=False), src, dst, timeout)


class Commuting(Loopback):
    """Takes every operator for one that commutes, and folds from the last rank down."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        function = request.op.function
        if function is not None:
            op = dataclasses.replace(request.op, function=lambda a, b: function(b, a))
            request = _altered(request, op=op)
        super().all_reduce(request, src, dst, timeout)


class Impatient(ThreadsBackend):
    """Does not wait in a barrier."""

    def barrier(self, request: Request, src: None, dst: None, timeout: float) -> None:
        pass


class Unchecked(Loopback):
    """Says that it compares calls and does not."""

    capabilities = dataclasses.replace(Loopback.capabilities, checks_calls=True)


class Early(Loopback):
    """Returns from a send before the message has left the sender's memory."""

    def send(self, src: Buffer, dst: int, tag: int, timeout: float) -> None:
        hub = self._hub
        with hub.lock:
            self._check("send")
            message = _Message(src.bytes().array, hub.sent)
            hub.sent += 1
            hub.mail.setdefault((self.rank, dst, tag), deque()).append(message)
            hub.woken[dst].notify_all()


class Deaf(ThreadsBackend):
    """Does not tell its peers that it leaves, and says that one would notice."""

    _kept: ClassVar[list[ThreadsBackend]] = []

    def close(self) -> None:
        self._kept.append(self)  # or its collection would tell


class Lending(Loopback):
    """Gives up long messages, and leaves their sender's memory where the receiver finds it."""

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
    """Does not tell its peers that a program's code has raised on it."""

    def abort(self, failure: Failure) -> None:
        if failure.kind != "failed":
            super().abort(failure)


class Alone(ThreadsBackend):
    """Goes on by itself, whoever else has been decided on."""

    def reconnect(self, world: World, timeout: float) -> ThreadsBackend:
        alone = dataclasses.replace(
            world, rank=0, size=1, local_rank=0, local_size=1, job=f"{world.job}.{world.rank}"
        )
        return super().reconnect(alone, timeout)


class Unhospitable(ThreadsBackend):
    """Has whoever joins later among the first."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> Self:
        turned = (world.rank + 1) % world.size if ".1" in world.job else world.rank
        return super().connect(dataclasses.replace(world, rank=turned), timeout)


class Slandering(ThreadsBackend):
    """Takes the last rank for lost, which lives."""

    def lost(self) -> set[int]:
        return {*super().lost(), self.size - 1} - {self.rank}


class Laconic(ThreadsBackend):
    """Does not say of a timeout that it is one."""

    def barrier(self, request: Request, src: None, dst: None, timeout: float) -> None:
        try:
            super().barrier(request, src, dst, timeout)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError("barrier: no", error.ranks) from error


class Unwaking(Loopback):
    """Does not end what waits in ``recv`` when it is aborted: that does so by its timeout."""

    def abort(self, failure: Failure) -> None:
        with self._hub.lock:
            self._hub.failure = failure


class Ignoring(Unwaking):
    """The same, and the ``recv`` of a program heeds no timeout either."""

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        with self._hub.lock:
            self._check("recv")
        if tag >= 0:
            released.wait()
        return super().recv(dst, src, tag, timeout)


class SortedGroups(ThreadsBackend):
    """Numbers the members of a group as it likes."""

    def group(self, ranks: Sequence[int], timeout: float) -> ThreadsBackend:
        return super().group(sorted(ranks), timeout)


class Overrunning(ThreadsBackend):
    """Clears the element after the result, which is somebody else's."""

    def all_reduce(self, request: Request, src: Any, dst: Any, timeout: float) -> None:
        super().all_reduce(request, src, dst, timeout)
        whole = dst.array.base
        if isinstance(whole, np.ndarray) and whole.dtype == np.uint8:
            start = dst.array.ctypes.data - whole.ctypes.data + dst.nbytes
            whole[start : start + 1] ^= 1


class MixedUp(Loopback):
    """Confuses the messages of users with its own."""

    def send(self, src: Buffer, dst: int, tag: int, timeout: float) -> None:
        super().send(src, dst, 0 if tag == -1 else tag, timeout)

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        return super().recv(dst, src, 0 if tag == -1 else tag, timeout)


class Forgiving(Loopback):
    """Hands out what waits for a receiver when the communicator is broken."""

    def abort(self, failure: Failure) -> None:
        # All that is sent in the background has to wait for its receivers: else there is nothing to
        # find, or a send fails, and its rank's communicator refuses what the transport would not.
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
            found = self._next(src, tag)
        if found is None:
            return super().recv(dst, src, tag, timeout)
        np.copyto(dst.bytes().array, found[1].data)
        return found[0]
