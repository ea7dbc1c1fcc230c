"""Calls in C over the control segment: plans of collectives, and messages through its rings.

Either all ranks make a call in C, or all make it in Python. When they connect, the ranks find out
whether all of them have the core. Beyond that the choice depends only on the request. The C is in
``collective/native``: ``shared.c``, ``staging.c`` and ``messages.c``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import native
from collective.algorithms import arithmetic
from collective.backends.mail import CompiledMail
from collective.backends.matching import exchange_in_c
from collective.deadline import Deadline
from collective.memory.buffer import Buffer

from .control import Control, description
from .layout import LINE
from .memory import Heap
from .messages import describe, wait_for_message
from .ring import refuse

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.request import Request

# Number of C's polls of a ring before it yields the processor. They take a microsecond or two,
# which is the time of a message to a running peer. If both ranks share a core, the polls add to the
# time of each message. Ranks may share a core even if other cores are free. 4 B with both ranks on
# one core take 15 µs with 1000 polls, and 3 µs with 100.
_RING_LOOKS = 100
# If ranks share cores, a message through a ring of at least this many bytes needs few turns of the
# scheduler. It is quicker than the kernel's copy then (docs/measurements/native.md).
_LONG_RING = 512 << 10
# A call is long if the longest input of any rank has at least this many bytes. For shorter calls a
# copy through an area costs less than a second wait (benchmarks/native.py).
_LEAST_LONG = 24 << 10
# The same numbers as in collective/native/shared.h.
_OPERATIONS = {
    name: number
    for number, name in enumerate(
        ("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter",
         "all_to_all", "gather", "scatter", "scan")
    )
}  # fmt: skip
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter", "scan"})
_PIECES = frozenset({"all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"})


class Compiled:
    """Control segment and symmetric memory as C sees them, and plans over them.

    Args:
        control, heap: those of this rank.
        crowded: whether some rank sees more ranks than cores.
        single_copy: whether all ranks can read each other's memory through the kernel.
    """

    def __init__(self, control: Control, heap: Heap, crowded: bool, single_copy: bool) -> None:
        shared = native.shared(
            control.segment.map, control.rank, control.size, 8 * LINE,
            control.layout.calls[control.rank], control.layout.areas, control.layout.area_bytes,
            _LEAST_LONG, crowded, _ControlCallbacks(control), _pids(control, single_copy),
        )  # fmt: skip
        assert shared is not None  # the transport creates this object only if all have the core
        # Keep the core: this rank may switch it off later, but all ranks must go on alike.
        self._core: Any = native.chosen.extension
        self._rank, self._size = control.rank, control.size
        self._shared = shared
        heap.tell(shared.know)

    def plan(self, request: Request) -> Plan | None:
        """Return a plan of the call in C, or None if Python makes the call.

        Ranks with equal digests choose alike. Ranks with different ones may not, but every plan,
        in C or in Python, compares the digests before it moves data.
        """
        operation, dtype = request.operation, request.dtype
        number = _OPERATIONS.get(operation)
        if number is None or (operation == "all_to_all" and not request.alike):
            return None
        elements = request.elements if operation in _PIECES else None
        fold, mean, scale, code = None, False, None, 0
        if operation in _REDUCTIONS:
            assert dtype is not None
            op, code = request.op, dtype.code
            scale = arithmetic.pre(op, dtype, self._size)
            mean = op.name == "avg" and scale is None
            # To a fold these two operators are sums. The scaling comes before or after the fold.
            fold = "sum" if op.name in ("avg", "premul_sum") else str(op.name)
            if op.function is not None or not self._core.make_fold(fold, code, None):
                return None
        plan = self._shared.plan(
            number, request.digest, request.root or 0, elements, fold, code, mean, request,
            description(request), _apart,
        )  # fmt: skip
        finish = None
        if dtype is not None and operation == "scan" and self._rank == 0:
            # C does this to the result of a fold. Rank 0 has a single value and no fold.
            finish = arithmetic.post(request.op, dtype, 1)
        return arithmetic.around(plan, scale, finish)


def _pids(control: Control, single_copy: bool) -> list[int] | None:
    """Return the ranks' processes, if all ranks can read each other's memory."""
    return [control.pid(rank) for rank in range(control.size)] if single_copy else None


def _apart(
    plan: Callable[..., Any], src: Buffer | None, dst: Buffer | None, deadline: Deadline
) -> Any:
    """Make a call on copies of arrays that C cannot take, such as arrays that overlap.

    Args:
        plan: the plan, or its method ``summed``.
    """
    source = None if src is None else Buffer(np.array(src.array, order="C"), src.dtype)
    result = None if dst is None else Buffer(np.empty(dst.array.size, dst.array.dtype), dst.dtype)
    value = plan(source, result, deadline)
    # The root of a broadcast passes its input as its output, and that array may be read-only.
    if dst is not None and result is not None and dst.array.flags.writeable:
        dst.array[...] = result.array
    return value


class _ControlCallbacks:
    """Methods that C calls after it has polled in vain for a moment, or after a call has failed."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def wait(
        self,
        request: Request,
        deadline: Deadline,
        rank: int,
        offset: int,
        value: int,
        most: int,
    ) -> None:
        """Wait until a counter that ``rank`` writes has reached ``value``.

        Args:
            request: the call that waits.
            deadline: for the wait.
            rank: the rank that writes the counter.
            offset: bytes from the segment's beginning to the counter.
            value: the value to wait for.
            most: the highest value that the protocol allows at this moment.
        """
        control = self._control
        words, at, line = control.words, offset // 8, (1 + rank) * LINE
        # A step needs the arrival of all ranks. For a block only ``rank`` counts: no other rank may
        # be needed any more.
        ranks = range(control.size) if at == line else (rank,)
        control.request = request
        control.wait(
            lambda: control.reached(at, value, most),
            lambda: [r for r in ranks if words[(1 + r) * LINE + at - line] < value],
            request,
            deadline,
        )

    def differ(self, request: Request, deadline: Deadline) -> None:
        """Raise an error that says how the ranks' calls differ."""
        self._control.request = request
        raise self._control.disagreement(request, deadline)

    def fail(self, request: Request) -> None:
        """Raise the error that explains why the communicator is broken."""
        raise self._control.failure(request)

    def refuse(self, request: Request, rank: int, what: str) -> None:
        """Raise an error, since ``rank`` has written an impossible value to shared memory."""
        self._control.request = request
        self._control.refuse(rank, what)

    def unreadable(self, request: Request, rank: int) -> None:
        """Raise an error, since the kernel does not read the memory of ``rank``."""
        self._control.request = request
        self._control.refuse_unreadable(rank)

    def moved(self, request: Request) -> None:
        """Raise an error, since an array of the running call has got other memory."""
        self._control.refuse_moved(request)


# -- messages -------------------------------------------------------------------------------


def make_exchange(control: Control, single_copy: bool, crowded: bool) -> native.Exchange:
    """Return a function that sends and receives over the rings of ``control``'s segment.

    A long message goes through a ring. The receiver fetches it at once if it lies in huge pages,
    and its rest if the sender is slow.
    """
    layout = control.layout
    claims = single_copy and not (crowded and layout.ring_bytes >= _LONG_RING)
    exchange = native.messages(
        control.segment.map, control.rank, control.size, layout.rings, layout.ring_bytes,
        _RING_LOOKS, claims, _MessageCallbacks(control), 8 * LINE, _pids(control, single_copy),
    )  # fmt: skip
    assert exchange is not None  # the transport calls this only if all ranks have the core
    return exchange


def make_mail(exchange: native.Exchange, control: Control) -> CompiledMail:
    """Return the posted messages beside those of :func:`make_exchange`."""
    return CompiledMail(exchange, _MessageCallbacks(control), control.refuse_broken)


def exchange_bytes(
    exchange: native.Exchange, control: Control, src: Buffer | None, to: int, dst: Buffer | None,
    source: int, tag: int, deadline: Deadline,
) -> int:  # fmt: skip
    """Send, receive, or both; the receivers must know the lengths. Return the sender's rank.

    Raises:
        CollectiveError: some rank has failed.
    """
    x, out = (None if each is None else each.array for each in (src, dst))
    return exchange_in_c(
        exchange, x, to, out, source, tag, deadline,
        lambda: control.refuse_broken(describe(to, source, tag)),
    )  # fmt: skip


class _MessageCallbacks:
    """Methods that a message in C calls when it cannot go on by itself."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def wait(
        self,
        advance: Callable[[], int],
        to: int,
        source: int,
        tag: int,
        deadline: Deadline,
    ) -> None:
        """Wait for the rest of a message."""
        wait_for_message(self._control, advance, to, source, tag, deadline)

    def moved(self, to: int, source: int, tag: int) -> None:
        """Raise an error, since an array of the running message has got other memory."""
        self._control.refuse_moved(describe(to, source, tag))

    def refuse(self, rank: int, what: str, to: int, source: int, tag: int) -> None:
        """Break the communicator."""
        refuse(self._control, rank, what)
