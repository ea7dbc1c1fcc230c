"""Bit flips in the staging areas of ``shm``, which ``COLLECTIVE_CHECK=results`` must find.

Two processes make long calls in C. Meanwhile a thread of one of them flips random bits of the areas
through which both ranks pass their data. Most flips hit a place that no rank reads any more. So
afterwards the ranks' arrays tell whether a call was hit.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from typing import Any

import numpy as np

from collective import native
from collective.communicator import Communicator
from collective.errors import CorruptionError
from collective.testing import RankPool

from .flips import TWICE, Flips

__all__ = ["STAGED", "staging_flips"]

STAGED = ("all_reduce", "broadcast", "all_gather", "all_to_all", "gather", "scatter", *TWICE)
_SIZE = 2
# Calls per job; after each job the effects are judged.
_CALLS = 25
# Number of elements of a rank's array: 1 MiB, as much as one area.
_COUNT = 1 << 17

#: Flips made during a call, whether the result was right, its digest, and whether an error came.
Outcome = tuple[int, bool, str, bool]


def staging_flips(seed: int, wanted: int, seconds: float = float("inf")) -> Flips:
    """Flip at least ``wanted`` bits of the areas; return what happened.

    ``found`` counts the calls that were hit, and not the flips.
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
    flipping = _Flipping(comm, seed) if comm.rank == seed % comm.size else None
    outcomes = []
    for operation in operations:
        mine, out, expected = _arrays(operation, comm.rank)
        comm.barrier()
        if flipping is not None:
            flipping.go_on()
        raised = False
        try:
            _call(comm, operation, mine, out)
        except CorruptionError:
            raised = True
        flips = 0 if flipping is None else flipping.pause()
        right = expected is None or np.array_equal(expected, out)
        digest = hashlib.sha256(out.data).hexdigest()
        outcomes.append((flips, right, digest, raised))
    if flipping is not None:
        flipping.end()
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


class _Flipping:
    """Thread that flips bits of the areas during calls."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        control: Any = comm.transport._control  # type: ignore[attr-defined]
        layout = control.layout
        length = 2 * comm.size * layout.area_bytes
        self._areas = np.frombuffer(control.segment.map, np.uint8, length, layout.areas)
        self._places = np.random.default_rng(seed)
        self._flips, self._over = 0, False
        self._going, self._paused = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._going.wait()
            if self._over:
                return
            for at in self._places.integers(self._areas.size, size=64).tolist():
                if not self._going.is_set():
                    break
                self._areas[at] ^= 1 << at % 8
                self._flips += 1
                time.sleep(2e-5)
            if not self._going.is_set():
                self._paused.set()

    def go_on(self) -> None:
        """Flip bits from now on."""
        self._flips = 0
        self._paused.clear()
        self._going.set()

    def pause(self) -> int:
        """Flip no more bits; return the number of flips since :meth:`go_on`."""
        self._going.clear()
        self._paused.wait()
        return self._flips

    def end(self) -> None:
        """End the thread, and let go of the areas."""
        self._over = True
        self._going.set()
        self._thread.join()
        del self._areas


def _judge(record: Flips, operation: str, outcomes: tuple[Outcome, ...]) -> None:
    record.made += sum(flips for flips, _, _, _ in outcomes)
    wrong = [rank for rank, (_, right, _, _) in enumerate(outcomes) if not right]
    raised = [rank for rank, (*_, error) in enumerate(outcomes) if error]
    if not wrong:
        # A flip may also hit the first of two results, or the checksums on their way, which only
        # their receiver notices.
        if operation in TWICE and len(raised) == len(outcomes):
            record.found[f"{operation} (staging)"] += 1
        elif raised:
            record.found["checksums"] += 1
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
