"""What the checks of shrinking and growing share: ranks that lose others, and who goes on.

In each of them a rank adds two to the power of its first number, so that a sum tells exactly who
was in it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collective.communicator import Communicator
from collective.deadline import Deadline
from collective.errors import UnsupportedError
from collective.launch.outcome import RanksFailedError

from .checks import RankFactory
from .faults import Fault

__all__ = [
    "FAR_S", "Survivor", "await_files", "gather", "hold_generation", "hold_refused", "run_fresh",
    "seen_of", "sum_of", "survivors",
]  # fmt: skip

#: How long a rank waits for a file of another's, at most.
FAR_S = 20.0


class Survivor(NamedTuple):
    """A rank's communicator, as it says itself, and the sum of those who are in it."""

    rank: int
    size: int
    generation: int
    origin: tuple[int, ...]
    lost: frozenset[int]
    total: float


def gather(comm: Communicator, marks: str, point: str = "here") -> None:
    """Return when all ranks are here, without a message that an abort could still overtake.

    Args:
        marks: a directory in which each leaves a file.
        point: where in the function that is.
    """
    Path(marks, f"{point}-{comm.rank}").touch()
    await_files(*(Path(marks, f"{point}-{rank}") for rank in range(comm.size)))


def run_fresh(
    factory: RankFactory, size: int, function: Any, *args: Any, **options: Any
) -> list[Any]:
    """Run ``function(comm, marks, *args)`` on new ranks."""
    with tempfile.TemporaryDirectory() as marks:
        results: list[Any] = factory.run(size, function, marks, *args, fresh=True, **options)
    return results


def sum_of(comm: Communicator, first: int) -> float:
    """Return the sum of two to the power of each rank's first number."""
    return float(comm.all_reduce(np.full(3, 2.0**first))[0])


def seen_of(comm: Communicator, first: int) -> Survivor:
    """Return what a rank sees that had this number at first."""
    total = sum_of(comm, first)
    return Survivor(comm.rank, comm.size, comm.generation, comm.origin, comm.lost, total)


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
        return {rank: each for rank, each in failure.results.items() if rank not in victims}
    return {rank: each for rank, each in enumerate(results) if rank not in victims}


def hold_generation(
    outcomes: dict[int, Any], members: Sequence[int], lost: Sequence[int], numbers: Sequence[int]
) -> None:
    """Hold that all are one generation, of ``members``, in that order, and nobody else is.

    Args:
        outcomes: what each says, by its first number.
        members: by their first numbers.
        lost: the ranks of the last generation that are in it no more.
        numbers: what the generation's may be; they have to agree on it.
    """
    assert sorted(outcomes) == list(members), f"{sorted(outcomes)} went on instead of {members}"
    generations = {outcome.generation for outcome in outcomes.values()}
    assert len(generations) == 1, f"the ranks are in generations {generations}"
    assert generations <= set(numbers), (
        f"the ranks are in generation {generations}, not in one of {numbers}"
    )
    total = sum(2.0**each for each in members)
    for number, outcome in outcomes.items():
        expected = Survivor(
            members.index(number), len(members), outcome.generation, tuple(members),
            frozenset(lost), total,
        )  # fmt: skip
        assert outcome == expected, f"number {number} says {outcome} instead of {expected}"


def hold_refused(comm: Communicator, call: str) -> None:
    """Hold that a call is refused, with a remedy, and that the ranks can go on."""
    text = "it was not refused"
    try:
        getattr(comm, call)()
    except UnsupportedError as error:
        text = str(error)
    comm.barrier()
    assert "COLLECTIVE_BACKEND=" in text, f"rank {comm.rank}: no remedy: {text}"


def await_files(*paths: Path) -> None:
    """Return when they are there."""
    deadline = Deadline(FAR_S)
    while not all(path.exists() for path in paths) and not deadline.expired:
        time.sleep(0.001)
