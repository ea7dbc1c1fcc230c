"""Things that go wrong on purpose, over any transport.

::

    from collective.testing import faults, run_ranks

    run_ranks(4, train, backend="shm", faults=[faults.kill(1, at_call=3)])

A *call* is an operation of the transport: each collective, send, recv or ``empty`` of a
communicator, counted from 1 on each rank; a structure makes one for every dtype in it. The
comparison that goes before a call on transports that need one is not counted, and groups
made of the communicator go without faults.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from collective.algorithms.messages import GROUP_TAG
from collective.contract.backend import Backend, Plan
from collective.contract.failure import Failure

if TYPE_CHECKING:
    import numpy as np
    from typing_extensions import Self

    from collective.contract.world import World
    from collective.cuda import Device
    from collective.deadline import Deadline
    from collective.memory.buffer import Buffer
    from collective.memory.device_array import DeviceArray
    from collective.request import Request

__all__ = ["Fault", "FaultyBackend", "RankKilled", "delay", "fail", "kill"]

T = TypeVar("T")


class RankKilled(BaseException):
    """Ends a rank that is a thread, where a process would have been killed.

    No ``Exception``: code that handles errors must not survive it.
    """


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank at one call.

    Attributes:
        kind: ``"kill"``, ``"delay"`` or ``"fail"``.
        rank: on which rank.
        at_call: before its how-manieth call, from 1; None for every call (of a delay).
        seconds: how long a delay is; how long after the beginning of the call a kill comes.
        error: what a failing rank raises.
        in_shrink: where in ``shrink()`` a kill comes, instead of at a call.
    """

    kind: str
    rank: int
    at_call: int | None = None
    seconds: float = 0.0
    error: BaseException | None = None
    in_shrink: str = ""


def kill(
    rank: int, *, at_call: int | None = None, after: float = 0.0, in_shrink: str = ""
) -> Fault:
    """Kill ``rank`` at its ``at_call``-th call: SIGKILL for a process, which cannot object.

    A rank that is a thread cannot be killed; it leaves its communicator without a word and
    raises :class:`RankKilled`.

    Args:
        rank: who.
        at_call: at which call, counted from 1.
        after: seconds after the beginning of the call, to hit the middle of it; 0 is before
            it. Processes only.
        in_shrink: in ``shrink()`` instead: ``"decision"``, when the rank has said that it is there
            and before it is decided who goes on, or ``"connect"``, when it is decided.
    """
    return Fault("kill", rank, at_call, after, in_shrink=in_shrink)


def delay(rank: int, seconds: float, *, at_call: int | None = None) -> Fault:
    """Let ``rank`` come ``seconds`` late to its ``at_call``-th call, or to every call."""
    return Fault("delay", rank, at_call, seconds)


def fail(rank: int, error: BaseException, *, at_call: int) -> Fault:
    """Raise ``error`` in ``rank`` at its ``at_call``-th call, as a broken library would."""
    return Fault("fail", rank, at_call, error=error)


# What is the other transport's, whatever goes wrong.
_THE_OTHERS = (
    "name", "capabilities", "rank", "size", "meeting", "why_not_shrink", "enqueues", "agree",
    "refuse_broken", "descriptors", "group", "supports", "side_stream", "synchronize_event",
    "keep_until", "batch",
)  # fmt: skip


class FaultyBackend(Backend):
    """Another transport, with faults.

    Args:
        inner: the transport, connected.
        plan: the faults of all ranks; this one takes its own.
    """

    def __init__(self, inner: Backend, plan: Sequence[Fault]) -> None:
        for name in _THE_OTHERS:
            setattr(self, name, getattr(inner, name))
        self._inner = inner
        self._plan = [fault for fault in plan if fault.rank == inner.rank]
        self._calls = 0
        self._counting = threading.Lock()
        self._killed = False

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Refuse: this wraps a transport that is connected."""
        raise TypeError("a FaultyBackend is made of a connected transport and a plan")

    def _called(self) -> None:
        """Count a call and let happen what is planned for it."""
        with self._counting:
            self._calls += 1
            number = self._calls
        for fault in self._plan:
            if fault.in_shrink:
                continue
            if fault.at_call not in (None, number):
                continue
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            elif fault.kind == "fail":
                assert fault.error is not None
                raise fault.error
            elif fault.seconds and not self.capabilities.in_process:
                timer = threading.Timer(fault.seconds, _kill_process)
                timer.daemon = True
                timer.start()
            else:
                self._die(f"at call {number}")

    def _die(self, where: str) -> None:
        if not self.capabilities.in_process:
            _kill_process()
        self._inner.close()
        self._killed = True
        raise RankKilled(f"rank {self.rank} was killed {where}, as planned")

    def _shrinks(self, where: str) -> None:
        if any(fault.in_shrink == where for fault in self._plan) and not self._killed:
            self._die(f"in shrink(), at its {where}")

    def _after(self, operation: Callable[..., T], *args: Any) -> T:
        self._called()
        return operation(*args)

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        if tag == GROUP_TAG:
            self._inner.send(src, dst, tag, deadline)
        else:
            self._after(self._inner.send, src, dst, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        if tag == GROUP_TAG:
            return self._inner.recv(dst, src, tag, deadline)
        return self._after(self._inner.recv, dst, src, tag, deadline)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        self._after(self._inner.sendrecv, src, to, dst, source, tag, deadline)

    def plan(self, request: Request) -> Plan:
        return partial(self._after, self._inner.plan(request))

    def lost(self) -> Set[int]:
        self._shrinks("decision")
        return self._inner.lost()

    def reconnect(self, world: World, deadline: Deadline) -> Backend:
        self._shrinks("connect")
        return self._inner.reconnect(world, deadline)

    def abort(self, failure: Failure) -> None:
        if not self._killed:  # the dead tell nothing
            self._inner.abort(failure)

    def close(self) -> None:
        self._inner.close()

    @property
    def ready(self) -> bool:  # type: ignore[override]  # an attribute elsewhere
        return self._inner.ready

    @property
    def device(self) -> Device | None:  # type: ignore[override]
        return self._inner.device

    def empty_device(self, nbytes: int, request: Request, deadline: Deadline) -> DeviceArray:
        return self._after(self._inner.empty_device, nbytes, request, deadline)

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> np.ndarray[Any, Any]:
        return self._after(self._inner.empty, nbytes, request, deadline)


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
