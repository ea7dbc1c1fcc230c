"""Calls in C over the control segment: plans of collectives, and messages through its rings.

All ranks make a call in C or all in Python: they find out when they connect whether they can, and
the rest depends on the request alone. The C is in ``collective/native``: ``shared.c``,
``staging.c`` and ``messages.c``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import native
from collective.algorithms import arithmetic
from collective.deadline import Deadline
from collective.memory.buffer import Buffer

from .control import Control
from .layout import LINE
from .memory import Heap, PeerMemory
from .messages import describe, wait_for_message
from .ring import refuse

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.request import Request

__all__ = ["Compiled", "exchange_bytes", "make_exchange"]

# Looks of C at a word, of 10 to 40 ns each, before it yields the processor. They take some
# microseconds if the rank has a core of its own, and a moment if the peer needs the core.
_LOOKS, _LOOKS_CROWDED = 200, 4
# Looks of C at a ring before it yields the processor: a microsecond or two, which a message takes
# to a peer that runs. If both ranks share a core, the looks add to the time of each message, and
# ranks may share a core also where there are others. 4 B, both on one core: 15 µs with 1000 looks,
# 3 with 100.
_RING_LOOKS = 100
# Longer calls on ordinary memory are not staged where the kernel reads a peer's memory, if ranks
# wait for a core, or if each rank has a part of its own to copy meanwhile. The kernel copies once
# and not twice, and its copies are slower (docs/decisions.md).
_MOVED_BYTES, _FOLDED_BYTES = 4 << 20, 8 << 20
# Bytes, on the rank that has most, from which on a call is a long one. Below that a copy through an
# area costs less than a second wait (benchmarks/native.py).
_LEAST_LONG = 24 << 10
# As in collective/native/shared.h.
_OPERATIONS = {
    name: number
    for number, name in enumerate(
        ("barrier", "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter",
         "all_to_all", "gather", "scatter", "scan")
    )
}  # fmt: skip
# Bytes of an element where the request does not say of what it has some.
_WIDEST = 16
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter", "scan"})
_PIECES = frozenset({"all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"})


class Compiled:
    """A control segment and symmetric memory as C sees them, and plans over them.

    Args:
        control, heap: of the ranks.
        crowded: whether any rank says that there are more ranks than cores.
        single_copy: whether all ranks can have the kernel read each other's memory.
        cached: bytes that the last cache holds of the arrays of a call.
    """

    def __init__(
        self, control: Control, heap: Heap, crowded: bool, single_copy: bool, cached: int
    ) -> None:
        looks = _LOOKS_CROWDED if control.crowded else _LOOKS
        made = native.shared(
            control.segment.map, control.rank, control.size, 8 * LINE, control.layout.areas,
            control.layout.area_bytes, _LEAST_LONG, looks, _ControlCallbacks(control),
        )  # fmt: skip
        assert made is not None  # or nobody would make this
        # Kept, as one rank may switch it off later.
        self._core: Any = native.chosen.extension
        self._rank, self._size = control.rank, control.size
        self._shared = made
        self._crowded, self._single_copy, self._cached = crowded, single_copy, cached
        heap.tell(made.know)

    def plan(self, request: Request) -> Plan | None:
        """Return what makes the call in C, or None if that is Python's; alike on all ranks."""
        operation, dtype = request.operation, request.dtype
        number = _OPERATIONS.get(operation)
        if number is None or (operation == "all_to_all" and not request.alike):
            return None
        elements = request.elements if operation in _PIECES else None
        nbytes = request.nbytes
        if elements is not None:
            nbytes = max(nbytes, sum(elements) * (_WIDEST if dtype is None else dtype.itemsize))
        if not self._stages(operation, nbytes):
            return None
        fold, mean, scale, code = None, False, None, 0
        if operation in _REDUCTIONS:
            assert dtype is not None
            op, code = request.op, dtype.code
            scale = arithmetic.pre(op, dtype, self._size)
            mean = op.name == "avg" and scale is None
            # Sums to a fold, with something done before or after.
            fold = "sum" if op.name in ("avg", "premul_sum") else str(op.name)
            if op.function is not None or not self._core.make_fold(fold, code, None):
                return None
        plan = self._shared.plan(
            number, request.digest, request.root or 0, elements, fold, code, mean, request, _apart
        )
        if scale is not None:
            return partial(_scaled, scale, plan)
        if dtype is not None and operation == "scan" and self._rank == 0:
            # A fold of several values does this to its result. Rank 0 has one value and no fold.
            finish = arithmetic.post(request.op, dtype, 1)
            return plan if finish is None else partial(_finished, finish, plan)
        return plan

    def _stages(self, operation: str, nbytes: int) -> bool:
        if not self._single_copy:
            return True
        if self._crowded:
            return nbytes <= (_FOLDED_BYTES if operation in _REDUCTIONS else _MOVED_BYTES)
        # Of the longest array, how many all ranks have together.
        arrays = {"scatter": 2, "all_gather": 1 + self._size, "all_to_all": 2 * self._size}
        if operation not in arrays or nbytes <= _MOVED_BYTES:
            return True
        # One copy leaves more room in the caches, as long as they hold anything of it.
        return nbytes * arrays[operation] >= self._cached


def _scaled(
    scale: Callable[..., Any], plan: Plan, src: Buffer, dst: Buffer | None, deadline: Deadline
) -> None:
    """Make a reduction whose inputs are multiplied before they are folded."""
    scaled = Buffer(np.empty_like(src.array), src.dtype)
    with np.errstate(all="ignore"):
        scale(src.array, scaled.array)
    plan(scaled, dst, deadline)


def _finished(
    finish: Callable[..., Any], plan: Plan, src: Buffer, dst: Buffer, deadline: Deadline
) -> None:
    """Make a reduction of one value."""
    plan(src, dst, deadline)
    finish(dst.array, dst.array)


def _apart(plan: Plan, src: Buffer | None, dst: Buffer | None, deadline: Deadline) -> None:
    """Make a call on copies of arrays that C does not take, such as arrays that overlap."""
    source = None if src is None else Buffer(np.array(src.array, order="C"), src.dtype)
    result = None if dst is None else Buffer(np.empty(dst.array.size, dst.array.dtype), dst.dtype)
    plan(source, result, deadline)
    # The root of a broadcast passes its input as its output, and that array may be read-only.
    if dst is not None and result is not None and dst.array.flags.writeable:
        dst.array[...] = result.array


class _ControlCallbacks:
    """Methods that C calls when it has waited in vain for a moment, or when a call has failed."""

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
        """Return when a counter that a rank writes has come to ``value``.

        Args:
            offset: the counter's, in bytes of the control segment.
            most: the highest value that the protocol allows by now.
        """
        control = self._control
        words, at, line = control.words, offset // 8, (1 + rank) * LINE
        # All have to arrive. Of a block, others may have no need any more.
        ranks = range(control.size) if at == line else (rank,)
        control.request = request
        control.wait(
            lambda: control.reached(at, value, most),
            lambda: [r for r in ranks if words[(1 + r) * LINE + at - line] < value],
            request,
            deadline,
        )

    def differ(self, request: Request, deadline: Deadline) -> None:
        """Raise that the ranks' calls differ."""
        self._control.request = request
        raise self._control.disagreement(request, deadline)

    def fail(self, request: Request) -> None:
        """Raise why the communicator is broken."""
        raise self._control.failure(request)

    def refuse(self, request: Request, rank: int, what: str) -> None:
        """Raise that a rank has written what no rank writes."""
        self._control.request = request
        self._control.refuse(rank, what)

    def note(self, request: Request) -> int:
        """Describe a call for peers that wonder; return its number."""
        return self._control.note(request)


# -- messages -------------------------------------------------------------------------------


def make_exchange(
    control: Control, peers: PeerMemory, crowded: bool, single_copy: bool
) -> native.Exchange:
    """Return what sends and receives over the rings of ``control``'s segment.

    A message goes through a ring, whose two copies run at the same time where both ends have a
    core: 4 MiB take 0.16 ms and not 0.26. Where ranks are more than cores, what a ring does not
    hold is fetched: 4 MiB take 0.8 ms and not 1.4.
    """
    layout = control.layout
    streamed = layout.ring_bytes if crowded else sys.maxsize
    made = native.messages(
        control.segment.map, control.rank, control.size, layout.rings, layout.ring_bytes, streamed,
        _RING_LOOKS, single_copy, _MessageCallbacks(control, peers), 8 * LINE,
    )  # fmt: skip
    assert made is not None  # or nobody would make this
    return made


def exchange_bytes(
    exchange: native.Exchange, control: Control, src: Buffer | None, to: int, dst: Buffer | None,
    source: int, tag: int, deadline: Deadline,
) -> int:  # fmt: skip
    """Send, receive, or both, of lengths that the receivers know; return who sent.

    Raises:
        CollectiveError: some rank has failed.
    """
    x, out = (None if each is None else each.array for each in (src, dst))
    done = exchange(x, to, out, source, tag, deadline, False)
    if done is NotImplemented:
        control.refuse_broken(describe(to, source, tag))
        # Of a class that C does not know, such as np.memmap.
        x, out = (None if each is None else each.view(np.uint8, np.ndarray) for each in (x, out))
        done = exchange(x, to, out, source, tag, deadline, False)
        if done is NotImplemented:
            control.refuse_broken(describe(to, source, tag))
            raise TypeError(f"{type(src)}, {type(dst)}: not in memory that C can see")
    return int(done)


class _MessageCallbacks:
    """Methods that a message in C calls when it cannot go on by itself."""

    def __init__(self, control: Control, peers: PeerMemory) -> None:
        self._control = control
        self._peers = peers

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

    def fetch(self, rank: int, address: int, out: Any, tag: int) -> None:
        """Copy the rest of a message from the sender's memory."""
        self._peers.fetch(rank, address, np.frombuffer(out, np.uint8))
        # The sender leaves its memory alone until it gives up. Before it changes anything then, it
        # breaks the communicator.
        self._control.refuse_broken(f"recv(tag={tag})")

    def refuse(self, rank: int, what: str) -> None:
        """Break the communicator."""
        refuse(self._control, rank, what)
