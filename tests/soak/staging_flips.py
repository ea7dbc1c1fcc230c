"""Bit flips in the staging areas of ``shm``, which ``COLLECTIVE_CHECK=results`` must find.

Two processes make long calls in C. During each call a thread of one of them flips a bit of the
areas through which both ranks pass their data. Most flips hit a block that one rank has announced,
and that the other rank has not read to its end. Some come too late. So afterwards the ranks' arrays
tell whether a call was hit.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from typing import Any

import numpy as np

from collective import native
from collective.backends.shm.layout import LINE
from collective.communicator import Communicator
from collective.errors import CorruptionError
from collective.testing import RankPool

from .flips import TWICE, Flips

__all__ = ["STAGED", "staging_flips"]

STAGED = ("all_reduce", "broadcast", "all_gather", "all_to_all", "gather", "scatter", *TWICE)
_SIZE = 2
# Calls per job; after each job the effects are judged.
_CALLS = 100
# Number of elements of a rank's array: 1 MiB, as much as one area.
_COUNT = 1 << 17
# Bytes of a block of such arrays with two ranks, as in collective/native/staging.c. And the words
# of a rank's line that count the blocks which it has posted, folded and read, as in shared.h.
_BLOCK_BYTES, _POSTED, _FOLDED_AT, _READ = 64 << 10, 40, 48, 56
_FOLDED = ("all_reduce", *TWICE)

#: Flips made during a call, whether the result was right, its digest, and whether an error came.
Outcome = tuple[int, bool, str, bool]


def staging_flips(seed: int, wanted: int, seconds: float = float("inf")) -> Flips:
    """Flip at least ``wanted`` bits of the areas; return what happened.

    ``unused`` counts the flips of bits that no rank read any more.
    """
    record, end = Flips(), time.monotonic() + seconds
    if native.chosen.extension is None:
        return record
    with RankPool(_SIZE, "shm", timeout=120.0) as pool:
        while record.made < wanted and time.monotonic() < end:
            dice = random.Random(seed)
            operations = [dice.choice(STAGED) for _ in range(_CALLS)]
            ranks = pool.run(_calls, seed, operations, check="results")
            for operation, outcomes in zip(operations, zip(*ranks)):
                _judge(record, operation, outcomes)
            seed += 1
    return record


def _calls(comm: Communicator, seed: int, operations: list[str]) -> list[Outcome]:
    flipper = _Flipper(comm, seed) if comm.rank == seed % comm.size else None
    outcomes = []
    for operation in operations:
        mine, out, expected = _arrays(operation, comm.rank)
        comm.barrier()
        if flipper is not None:
            flipper.begin(operation)
        raised = False
        try:
            _call(comm, operation, mine, out)
        except CorruptionError:
            raised = True
        flips = 0 if flipper is None else flipper.end(operation)
        right = expected is None or np.array_equal(expected, out)
        digest = hashlib.sha256(out.data).hexdigest()
        outcomes.append((flips, right, digest, raised))
    if flipper is not None:
        flipper.close()
    return outcomes


def _arrays(operation: str, rank: int) -> tuple[Any, Any, Any]:
    """Return the input, the array for the result, and the right result; None for no result."""
    rows = np.arange(_SIZE * _COUNT, dtype=np.int64).reshape(_SIZE, _COUNT) * 7919
    half = _COUNT // _SIZE
    part = slice(rank * half, (rank + 1) * half)
    expected: Any = {
        "all_reduce": rows.sum(axis=0), "broadcast": rows[0], "all_gather": rows.ravel(),
        "all_to_all": rows[:, part].ravel(), "gather": None if rank else rows.ravel(),
        "scatter": rows[0][part], "reduce": None if rank else rows.sum(axis=0),
        "reduce_scatter": rows.sum(axis=0)[part], "scan": rows[: rank + 1].sum(axis=0),
    }[operation]  # fmt: skip
    out = np.zeros(0 if expected is None else expected.size, np.int64)
    if operation == "broadcast" and rank == 0:
        out = rows[0].copy()
    return rows[rank].copy(), out, expected


def _call(comm: Communicator, operation: str, mine: Any, out: Any) -> None:
    if operation == "broadcast":
        comm.broadcast(out, out=out)
    elif operation in ("gather", "reduce"):
        getattr(comm, operation)(mine, out=None if comm.rank else out)
    elif operation == "scatter":
        comm.scatter(None if comm.rank else mine, out=out)
    else:
        getattr(comm, operation)(mine, out=out)


class _Flipper:
    """One flip of a bit in the areas in each call, from a random moment on."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        control: Any = comm.inner.transport._control  # type: ignore[attr-defined]
        layout = control.layout
        self._words = control.words
        self._area: int = layout.area_bytes
        length = 2 * comm.size * layout.area_bytes
        self._areas = np.frombuffer(control.segment.map, np.uint8, length, layout.areas)
        self._dice = random.Random(seed)
        self._seconds: dict[str, float] = {}
        self._began, self._flips, self._over = 0.0, 0, False
        self._timer = threading.Timer(0.0, int)

    def begin(self, operation: str) -> None:
        """Flip a bit during the call that comes now."""
        self._flips, self._over = 0, False
        delay = self._dice.random() * self._seconds.get(operation, 1e-3)
        self._timer = threading.Timer(delay, self._flip, (operation in _FOLDED,))
        self._began = time.perf_counter()
        self._timer.start()

    def end(self, operation: str) -> int:
        """Return the number of bits that were flipped since :meth:`begin`."""
        self._seconds[operation] = min(0.05, time.perf_counter() - self._began)
        self._over = True
        self._timer.cancel()
        self._timer.join()
        return self._flips

    def close(self) -> None:
        """Let go of the areas."""
        del self._areas

    def _flip(self, folds: bool) -> None:
        dice, place = self._dice, None
        if dice.random() < 0.1:
            place = dice.randrange(self._areas.size)
        while place is None and not self._over:
            time.sleep(2e-5)
            place = self._place(folds)
        if place is not None:
            self._areas[place] ^= 1 << dice.randrange(8)
            self._flips += 1

    def _place(self, folds: bool) -> int | None:
        """Return a place in a block that a rank has announced, and its peer has not read yet."""
        dice, rank = self._dice, self._dice.randrange(_SIZE)
        counter = dice.choice([_POSTED, _FOLDED_AT]) if folds else _POSTED
        announced = int(self._words[(1 + rank) * LINE + counter])
        if announced <= self._words[(2 - rank) * LINE + _READ]:
            return None
        # A call that folds nothing uses both areas of a rank as one.
        blocks = self._area // _BLOCK_BYTES * (1 if folds else 2)
        area = 2 * rank * self._area + (self._area if counter == _FOLDED_AT else 0)
        return area + (announced - 1) % blocks * _BLOCK_BYTES + dice.randrange(_BLOCK_BYTES)


def _judge(record: Flips, operation: str, outcomes: tuple[Outcome, ...]) -> None:
    made = sum(flips for flips, _, _, _ in outcomes)
    record.made += made
    wrong = [rank for rank, (_, right, _, _) in enumerate(outcomes) if not right]
    raised = [rank for rank, (*_, error) in enumerate(outcomes) if error]
    if not wrong:
        # A flip may also hit the first of two results, or the checksums on their way, which only
        # their receiver notices.
        if operation in TWICE and len(raised) == len(outcomes):
            record.found[f"{operation} (staging)"] += 1
        elif raised:
            record.found["checksums"] += 1
        else:
            record.unused += made
        return
    equal = len({digest for _, _, digest, _ in outcomes}) == 1
    if operation == "all_reduce" and len(wrong) == len(outcomes) and equal:
        record.folded += 1
    elif len(raised) == len(outcomes):
        record.found[f"{operation} (staging)"] += 1
    elif operation == "scatter" and wrong == raised:
        record.found["checksums"] += 1  # the error comes before the result is copied to `out`
    else:
        record.problems.append(f"{operation}, ranks with a wrong result: {wrong}; raised: {raised}")
