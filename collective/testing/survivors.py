"""Helpers of the checks of shrinking and growing: ranks that lose others, and the survivors.

In each check, a rank adds two to the power of its first number, so that a sum tells exactly which
ranks took part.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collective import Communicator, UnsupportedError
from collective.inner import Deadline, RanksFailedError

from .checks import RankFactory
from .faults import Fault

#: Seconds that a rank waits at most for the file of another rank.
FAR_S = 20.0


class Survivor(NamedTuple):
    """State of a rank's communicator as the rank sees it, and the sum over the ranks in it."""

    rank: int
    size: int
    generation: int
    origin: tuple[int, ...]
    lost: frozenset[int]
    total: float


def gather(comm: Communicator, marks: str, point: str = "here") -> None:
    """Return when all ranks are here. An abort may overtake a message, so ranks use files.

    Args:
        marks: directory in which each rank creates a file.
        point: name of the point in the function.
    """
    Path(marks, f"{point}-{comm.rank}").touch()
    await_files(*(Path(marks, f"{point}-{rank}") for rank in range(comm.size)))


def run_fresh(
    factory: RankFactory, size: int, function: Any, *args: Any, **options: Any
) -> list[Any]:
    """Run ``function(comm, marks, *args)`` on new ranks; ``marks`` is a new directory."""
    with tempfile.TemporaryDirectory() as marks:
        results: list[Any] = factory.run(size, function, marks, *args, fresh=True, **options)
    return results


def sum_of(comm: Communicator, first: int) -> float:
    """Return the sum of two to the power of each rank's first number."""
    return float(comm.all_reduce(np.full(3, 2.0**first))[0])


def seen_of(comm: Communicator, first: int) -> Survivor:
    """Return what the rank sees whose first number is ``first``."""
    total = sum_of(comm, first)
    ranks = comm.membership
    return Survivor(comm.rank, comm.size, ranks.generation, ranks.origin, ranks.lost, total)


def survivors(
    factory: RankFactory, size: int, victims: Sequence[int], function: Any, *args: Any,
    plan: Sequence[Fault] = (),
) -> dict[int, Any]:  # fmt: skip
    """Run ``function``, which ``victims`` do not survive, and return the others' results."""
    try:
        results = run_fresh(factory, size, function, *args, faults=plan)
    except RanksFailedError as failure:
        if set(failure.errors) - set(victims):
            raise
        return {rank: result for rank, result in failure.results.items() if rank not in victims}
    return {rank: result for rank, result in enumerate(results) if rank not in victims}


def hold_generation(
    outcomes: dict[int, Any], members: Sequence[int], lost: Sequence[int], numbers: Sequence[int]
) -> None:
    """Check that exactly ``members``, in this order, form one generation.

    Args:
        outcomes: what each rank sees, by its first number.
        members: first numbers of the expected ranks.
        lost: ranks of the last generation that are not in this one.
        numbers: possible numbers of the generation; all ranks must have the same number.
    """
    assert sorted(outcomes) == list(members), f"{sorted(outcomes)} went on instead of {members}"
    generations = {outcome.generation for outcome in outcomes.values()}
    assert len(generations) == 1, f"the ranks are in generations {generations}"
    assert generations <= set(numbers), (
        f"the ranks are in generation {generations}, not in one of {numbers}"
    )
    total = sum(2.0**member for member in members)
    for number, outcome in outcomes.items():
        expected = Survivor(
            members.index(number), len(members), outcome.generation, tuple(members),
            frozenset(lost), total,
        )  # fmt: skip
        assert outcome == expected, f"number {number} says {outcome} instead of {expected}"


def hold_refused(comm: Communicator, call: str) -> None:
    """Check that ``comm`` or its membership refuses a call, names a remedy, and goes on."""
    text = "it was not refused"
    try:
        getattr(comm if call in ("shrink", "grow") else comm.membership, call)()
    except UnsupportedError as error:
        text = str(error)
    comm.barrier()
    assert "COLLECTIVE_BACKEND=" in text, f"rank {comm.rank}: no remedy: {text}"


def await_files(*paths: Path) -> None:
    """Return when all files exist, or after :data:`FAR_S`."""
    deadline = Deadline(FAR_S)
    while not all(path.exists() for path in paths) and not deadline.expired:
        time.sleep(0.001)
