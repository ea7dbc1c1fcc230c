"""Bit flips in results and messages, which ``COLLECTIVE_CHECK=results`` must find.

The ranks are threads over a loopback. In each turn they make one call. One rank flips a bit: in a
message that it sends, or in its result before the checksums are computed. Afterwards the ranks'
arrays tell which ranks have a wrong result.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.contract.backend import Plan
from collective.deadline import Deadline
from collective.errors import CorruptionError
from collective.memory.buffer import Buffer
from collective.request import Request
from tests.support.loopback import Loopback, run

__all__ = ["OPERATIONS", "TWICE", "Flips", "flips"]

#: Operations that the ranks make twice. A flip may hit the first result, which no rank keeps.
TWICE = ("reduce", "reduce_scatter", "scan")
OPERATIONS = (
    "all_reduce", "broadcast", "all_gather", "all_to_all", "gather", "scatter", "send", "sendrecv",
    *TWICE,
)  # fmt: skip


def _is_data(buffer: Any) -> bool:
    """Return whether a buffer has data of a call: an odd number of int64, unlike heads."""
    return buffer is not None and buffer.nbytes % 16 == 8


class Flips:
    """Record of the effects of bit flips.

    Attributes:
        made: number of flips.
        found: number of flips for each operation and place that were found.
        folded: number of flips in the input of a reduction. All ranks have the same wrong result
            after those, so no comparison can find them.
        unused: number of flips in inputs that a rank receives in a ``scan`` and does not use, those
            of higher ranks; or in staging areas that all ranks had read.
        problems: for each forbidden effect a text.
        late: whether the time is over.
    """

    def __init__(self) -> None:
        self.made = 0
        self.found: Counter[str] = Counter()
        self.folded = 0
        self.unused = 0
        self.problems: list[str] = []
        self.late = False


class _Flipping(Loopback):
    """Loopback that flips one bit after :meth:`arm`."""

    name = "loopback-flipping"
    _left: int | None = None
    _in_result = False
    _bit = 0
    _compares = False  # whether the running call carries checksums
    flipped = False

    def arm(self, in_result: bool, nth: int, bit: int) -> None:
        """Flip a bit of the next call's result, or of this rank's ``nth`` message from now on."""
        self.flipped, self._in_result = False, in_result
        self._left, self._bit = None if in_result else nth, bit

    def disarm(self) -> None:
        """Flip nothing any more."""
        self._left, self._in_result = None, False

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        if self._left is not None and _is_data(src) and not self._compares:
            self._left -= 1
            if self._left < 0:
                src = Buffer(src.array.copy(), src.dtype)
                self._flip(src)
        super().send(src, dst, tag, deadline)

    def agree(self, request: Request, deadline: Deadline) -> None:
        self._compares = True  # digests are no data
        try:
            super().agree(request, deadline)
        finally:
            self._compares = False

    def plan(self, request: Request) -> Plan:
        plan, compares = super().plan(request), "compared" in request.options

        def run_and_flip(src: Any, dst: Any, deadline: Deadline) -> Any:
            self._compares = compares
            try:
                work = plan(src, dst, deadline)
            finally:
                self._compares = False
            if self._in_result and _is_data(dst) and not compares:
                self._flip(dst)
            return work

        return run_and_flip

    def _flip(self, buffer: Buffer) -> None:
        data = buffer.bytes().array
        at = self._bit % (8 * data.size)
        data[at // 8] ^= np.uint8(1 << at % 8)
        self.flipped = True
        self.disarm()


def flips(seed: int, wanted: int, seconds: float = float("inf"), size: int = 3) -> Flips:
    """Flip ``wanted`` bits, one in each call; return what happened."""
    record = Flips()
    outcomes: list[Any] = [None] * size
    meet = threading.Barrier(size, timeout=60.0)
    end = time.monotonic() + seconds

    def body(backend: Any) -> None:
        rank = backend.rank
        dice = random.Random(seed)
        comm = Communicator(
            backend, local_rank=rank, local_size=size, host="", timeout=30.0, check="results"
        )
        while True:
            operation, victim = dice.choice(OPERATIONS), dice.randrange(size)
            in_result, nth, bit = dice.random() < 0.4, dice.randrange(4), dice.getrandbits(30)
            share, root = 2 * dice.randrange(75, 750) + 1, dice.randrange(size)
            if rank == victim:
                backend.arm(in_result, nth, bit)
            expected, result, error = _call(comm, operation, share, root)
            right = expected is None or np.array_equal(expected, result)
            outcomes[rank] = right, None if result is None else result.copy(), error
            flipped = rank == victim and backend.flipped
            backend.disarm()
            meet.wait()
            if flipped:
                place = "result" if in_result else "message"
                _judge(record, operation, place, victim, outcomes)
            if rank == 0:
                record.late = time.monotonic() > end
            meet.wait()
            if record.made >= wanted or record.late:
                return

    run(size, body, _Flipping, timeout=min(seconds, 1e6) + 60.0)
    return record


def _call(
    comm: Communicator, operation: str, share: int, root: int
) -> tuple[Any, Any, CorruptionError | None]:
    """Make a call; return the expected result, the result and the error; None for no result."""
    rank, size = comm.rank, comm.size
    length = share * size
    rows = np.arange(size * length, dtype=np.int64).reshape(size, length) * 7919
    mine = rows[rank].copy()
    expected: Any = None
    out: Any = None
    error = None
    try:
        if operation == "all_reduce":
            expected, out = rows.sum(axis=0), np.zeros_like(mine)
            comm.all_reduce(mine, out=out)
        elif operation == "broadcast":
            expected, out = rows[root], mine
            comm.broadcast(out, root=root, out=out)
        elif operation == "all_gather":
            expected, out = rows.ravel(), np.zeros(size * length, np.int64)
            comm.all_gather(mine, out=out)
        elif operation == "all_to_all":
            expected, out = rows[:, rank * share : (rank + 1) * share].ravel(), np.zeros_like(mine)
            comm.all_to_all(mine, out=out)
        elif operation == "gather":
            if rank == root:
                expected, out = rows.ravel(), np.zeros(size * length, np.int64)
            comm.gather(mine, root=root, out=out)
        elif operation == "scatter":
            expected, out = rows[root][rank * share : (rank + 1) * share], np.zeros(share, np.int64)
            comm.scatter(mine if rank == root else None, root=root, out=out)
        elif operation == "reduce":
            if rank == root:
                expected, out = rows.sum(axis=0), np.zeros_like(mine)
            comm.reduce(mine, root=root, out=out)
        elif operation == "reduce_scatter":
            expected = rows[:, rank * share : (rank + 1) * share].sum(axis=0)
            out = np.zeros_like(expected)
            comm.reduce_scatter(mine, out=out)
        elif operation == "scan":
            expected, out = rows[: rank + 1].sum(axis=0), np.zeros_like(mine)
            comm.scan(mine, out=out)
        elif operation == "send" and rank == root:
            comm.send(mine, (root + 1) % size)
        elif operation == "send" and rank == (root + 1) % size:
            expected, out = rows[root], np.zeros_like(mine)
            comm.recv(out, src=root)
        elif operation == "sendrecv":
            expected, out = rows[rank - 1], np.zeros_like(mine)
            comm.sendrecv(mine, (rank + 1) % size, (rank - 1) % size, out=out)
    except CorruptionError as raised:
        error = raised
    return expected, out, error


def _judge(
    record: Flips, operation: str, place: str, victim: int, outcomes: list[Any]
) -> None:  # fmt: skip
    """Record whether the ranks have found the flip, and named the right ranks."""
    record.made += 1
    wrong = tuple(rank for rank, (right, _, _) in enumerate(outcomes) if not right)
    raised = {rank: error for rank, (_, _, error) in enumerate(outcomes) if error is not None}
    what = f"{operation}, flip in a {place}, ranks with a wrong result: {wrong}"
    if operation == "all_reduce" and len(wrong) == len(outcomes):
        first, *others = [result for _, result, _ in outcomes]
        if all(np.array_equal(first, other) for other in others):
            record.folded += 1
            return
    if operation == "scan" and place == "message" and not wrong and not raised:
        record.unused += 1
        return
    everybody = set(range(len(outcomes)))
    expected = set(wrong) if operation in ("send", "sendrecv") else everybody
    if set(raised) != expected:
        record.problems.append(f"{what}; raised on {sorted(raised)}")
        return
    for error in raised.values():
        # Two equal wrong results of three are a majority, so the comparison blames the third.
        blames = operation != "all_reduce" or len(wrong) == 1
        if operation == "scatter":
            # The error comes before the result is copied to `out`, on all ranks.
            named = len(error.ranks) == 1 and (place == "message" or error.ranks == (victim,))
        elif operation in TWICE and not wrong:  # the flip has hit the first result
            named = bool(error.ranks) and (place == "message" or error.ranks == (victim,))
        else:
            named = not blames or error.ranks == wrong
        if not named:
            record.problems.append(f"{what}; named {error.ranks}: {error}")
    record.found[f"{operation} ({place})"] += 1
