"""Faults that are injected into the ranks of any transport.

::

    from collective.testing import faults, run_ranks

    run_ranks(4, train, backend="shm", faults=[faults.kill(1, at_call=3)])

A *call* is an operation of the transport: each collective, send, recv or ``empty`` of a
communicator, counted from 1 on each rank. A call with a structure counts once for every dtype in
the structure. On transports that need a comparison before a call, the comparison does not count.
Groups made of the communicator have no faults.

A run fails if a rank returns before one of its faults has come: a test that waits for a fault must
not pass without it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from collective import InvalidArgumentError
from collective.algorithms.messages import GROUP_TAG
from collective.contract.backend import Plan
from collective.inner import Backend, Failure

if TYPE_CHECKING:
    import numpy as np

    from collective.inner import Buffer, Deadline, DeviceArray, Request, World, cuda

__all__ = ["Fault", "FaultyBackend", "RankKilled", "delay", "fail", "kill"]

T = TypeVar("T")


class RankKilled(BaseException):
    """Exception that ends a rank which is a thread, as SIGKILL ends a process.

    It is not an ``Exception``, so code that handles errors does not catch it.
    """


@dataclass(frozen=True)
class Fault:
    """Fault of one rank at one call.

    Attributes:
        kind: ``"kill"``, ``"delay"`` or ``"fail"``.
        rank: the rank that has the fault.
        at_call: ordinal of the call, from 1, before which the fault comes; None for every call
            (of a delay).
        seconds: duration of a delay; for a kill, time from the beginning of the call to the kill.
        error: exception that a failing rank raises.
        in_shrink: point in ``shrink()`` at which a kill comes, instead of at a call.

    Raises:
        InvalidArgumentError: no rank, call, time or point can be meant.
    """

    kind: str
    rank: int
    at_call: int | None = None
    seconds: float = 0.0
    error: BaseException | None = None
    in_shrink: str = ""

    def __post_init__(self) -> None:
        wrong = ""
        if not _is_ordinal(self.rank, 0):
            wrong = f"rank {self.rank!r}; expected an integer, 0 or more"
        elif self.at_call is not None and not _is_ordinal(self.at_call, 1):
            wrong = f"at_call {self.at_call!r}; expected the ordinal of a call, 1 or more"
        elif not self.seconds >= 0:
            wrong = f"{self.seconds!r} seconds; expected 0 or more"
        elif self.in_shrink not in ("", "decision", "connect"):
            wrong = f"in_shrink {self.in_shrink!r}; expected 'decision' or 'connect'"
        elif self.in_shrink and (self.at_call or self.seconds):
            wrong = "at_call or after together with in_shrink; expected one of them"
        if wrong:
            raise InvalidArgumentError(f"faults.{self.kind}: {wrong}.")

    def __str__(self) -> str:
        where = "" if self.at_call is None else f", at_call={self.at_call}"
        if self.in_shrink:
            where = f", in_shrink={self.in_shrink!r}"
        seconds = f", {'after=' * (self.kind == 'kill')}{self.seconds}" if self.seconds else ""
        return f"faults.{self.kind}({self.rank}{seconds}{where})"


def _is_ordinal(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def kill(
    rank: int, *, at_call: int | None = None, after: float = 0.0, in_shrink: str = ""
) -> Fault:
    """Kill ``rank`` at its ``at_call``-th call: by SIGKILL if the rank is a process.

    A rank that is a thread cannot be killed. It closes its communicator without a notice to its
    peers and raises :class:`RankKilled`.

    Args:
        rank: the rank to kill.
        at_call: ordinal of the call, from 1.
        after: seconds after the beginning of the call, to hit the middle of the call; 0 kills
            before the call. Processes only.
        in_shrink: point in ``shrink()`` to kill at, instead of a call: ``"decision"`` is after the
            rank has reported that it is there and before the ranks decide who goes on;
            ``"connect"`` is after the decision.
    """
    return Fault("kill", rank, at_call, after, in_shrink=in_shrink)


def delay(rank: int, seconds: float, *, at_call: int | None = None) -> Fault:
    """Let ``rank`` come ``seconds`` late to its ``at_call``-th call, or to every call."""
    return Fault("delay", rank, at_call, seconds)


def fail(rank: int, error: BaseException, *, at_call: int) -> Fault:
    """Raise ``error`` in ``rank`` at its ``at_call``-th call, as a broken library would."""
    return Fault("fail", rank, at_call, error=error)


# Attributes and methods that are those of the wrapped transport, with or without faults.
_THE_OTHERS = (
    "name", "capabilities", "rank", "size", "meeting", "why_not_shrink", "enqueues", "agree",
    "refuse_broken", "descriptors", "group", "supports", "side_stream", "synchronize_event",
    "keep_until", "batch",
)  # fmt: skip


class FaultyBackend(Backend):
    """Wrapper of another transport that injects faults.

    Args:
        inner: the transport to wrap, connected.
        plan: faults of all ranks; the wrapper uses those of its own rank.
    """

    def __init__(self, inner: Backend, plan: Sequence[Fault]) -> None:
        for name in _THE_OTHERS:
            setattr(self, name, getattr(inner, name))
        self._inner = inner
        self._plan = [fault for fault in plan if fault.rank == inner.rank]
        self._calls = 0
        self._counting = threading.Lock()
        self._killed = False
        self._due = list(self._plan)  # the faults that have not come
        self._timers: dict[int, threading.Timer] = {}  # by the index of the fault in the plan

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Refuse: a FaultyBackend wraps a transport that is already connected."""
        raise TypeError("a FaultyBackend is made of a connected transport and a plan")

    def _called(self) -> None:
        """Count a call, and inject the faults that are planned for it."""
        with self._counting:
            self._calls += 1
            number = self._calls
        for index, fault in enumerate(self._plan):
            if fault.in_shrink:
                continue
            if fault.at_call not in (None, number):
                continue
            if fault in self._due:
                self._due.remove(fault)
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            elif fault.kind == "fail":
                assert fault.error is not None
                raise fault.error
            elif fault.seconds and not self.capabilities.in_process:
                timer = self._timers[index] = threading.Timer(fault.seconds, _kill_process)
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

    def refuse_unfired(self) -> None:
        """Raise an error if a fault of this rank has not come; the rank has returned.

        Raises:
            AssertionError: the text names the fault.
        """
        late = [self._plan[index] for index, timer in self._timers.items() if timer.is_alive()]
        for timer in self._timers.values():
            timer.cancel()  # it would kill the rank in a later run
        for fault in (*late, *self._due):
            made = f"{self._calls} call{'s' * (self._calls != 1)}"
            raise AssertionError(
                f"{fault}: rank {self.rank} returned after {made}, before this fault came. Choose "
                "a call that the rank makes, or make the rank wait for the fault."
            )

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
        if not self._killed:  # a killed process could not tell its peers either
            self._inner.abort(failure)

    def close(self) -> None:
        self._inner.close()

    @property
    def ready(self) -> bool:  # type: ignore[override]  # an attribute elsewhere
        return self._inner.ready

    @property
    def device(self) -> cuda.Device | None:  # type: ignore[override]
        return self._inner.device

    def empty_device(self, nbytes: int, request: Request, deadline: Deadline) -> DeviceArray:
        return self._after(self._inner.empty_device, nbytes, request, deadline)

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> np.ndarray[Any, Any]:
        return self._after(self._inner.empty, nbytes, request, deadline)


def _kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
