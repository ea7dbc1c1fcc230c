"""Schedules of a pipeline: what each stage computes when, and how much of the time it waits.

A model is cut into stages, one a rank, and a batch into micro-batches. A micro-batch goes forward
through the stages from the first to the last, and its gradient back. Two orders are known here:

- ``gpipe``: all forward passes, then all backward passes; a stage keeps all micro-batches.
  (Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
  Parallelism", 2019.)
- ``1f1b``: so many forward passes as there are stages after its own, then one forward and one
  backward pass in turn, then the backward passes that are left; a stage keeps ``stages - rank``
  micro-batches at most. (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
  Clusters Using Megatron-LM", 2021, section 2.2.1.)

Both end a step with all micro-batches through ("flush"), so that its gradients are those of the
whole batch; both take the same time. There is no framework and no transport here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, MismatchError

__all__ = [
    "REDUCTIONS",
    "SCHEDULES",
    "Action",
    "Span",
    "check_options",
    "check_same",
    "idle_share",
    "least_idle",
    "most_kept",
    "order",
    "replay",
]

Direction = Literal["forward", "backward"]

#: The orders that are known.
SCHEDULES = "1f1b", "gpipe"
#: What the loss of a micro-batch may be over its samples.
REDUCTIONS = "mean", "sum"


class Action(NamedTuple):
    """One pass of one micro-batch through a stage."""

    kind: Direction
    microbatch: int


class Span(NamedTuple):
    """When a pass ran.

    Attributes:
        kind, microbatch: as of the :class:`Action`.
        start, end: seconds on a clock that all ranks of the pipeline share.
        cpu: seconds that the thread which ran it was on a processor.
    """

    kind: Direction
    microbatch: int
    start: float
    end: float
    cpu: float


def check_options(microbatches: int, schedule: str, reduction: str) -> None:
    """Refuse what a pipeline cannot be asked for.

    Raises:
        InvalidArgumentError: ``microbatches`` is no positive integer, or an option is none of its
            values.
    """
    whole = isinstance(microbatches, int) and not isinstance(microbatches, bool)
    if not whole or microbatches < 1:
        raise InvalidArgumentError(
            f"Pipeline: microbatches={microbatches!r}; a positive integer. Ranks wait for "
            "(stages - 1) / (microbatches + stages - 1) of the time: take several times as many "
            "as stages."
        )
    chosen = (("schedule", schedule, SCHEDULES), ("reduction", reduction, REDUCTIONS))
    for name, value, known in chosen:
        if value not in known:
            raise InvalidArgumentError(f"Pipeline: {name}={value!r}; one of {', '.join(known)}.")


def check_same(comm: Communicator, microbatches: int, schedule: str, reduction: str) -> None:
    """Compare the ranks' options.

    Collective: every rank of ``comm``.

    Raises:
        MismatchError: they differ; on every rank.
    """
    every = comm.all_gather_object([microbatches, schedule, reduction])
    other = next((rank for rank, theirs in enumerate(every) if theirs != every[0]), None)
    if other is not None:
        given = [
            f"microbatches={every[rank][0]}, schedule={every[rank][1]!r}, "
            f"reduction={every[rank][2]!r} on rank {rank}"
            for rank in (0, other)
        ]
        raise MismatchError(
            f"Pipeline: {'; '.join(given)} [rank {comm.rank} of {comm.size}]. Pass the same on "
            "every rank."
        )


def order(schedule: str, rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return what the stage of ``rank`` does in a step, in this order.

    Args:
        schedule: one of :data:`SCHEDULES`.
        rank: the stage's number, from 0.
        stages: how many there are.
        microbatches: how many go through.
    """
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - rank - 1)
    actions = [Action("forward", each) for each in range(ahead)]
    for each in range(ahead, microbatches):
        actions += [Action("forward", each), Action("backward", each - ahead)]
    return actions + [
        Action("backward", each) for each in range(microbatches - ahead, microbatches)
    ]


def most_kept(actions: Sequence[Action]) -> int:
    """Return of how many micro-batches at once a stage keeps what its backward passes need."""
    kept = most = 0
    for action in actions:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most


def least_idle(stages: int, microbatches: int) -> float:
    """Return the share of the time that ranks wait where all stages take equally long.

    ``(stages - 1) / (microbatches + stages - 1)``, in both schedules (Narayanan et al., 2021,
    section 2.2, where the bubble is given relative to the time of the computation alone).
    """
    return (stages - 1) / (microbatches + stages - 1)


def replay(
    actions: Sequence[Sequence[Action]], seconds: Sequence[Mapping[Direction, float]]
) -> list[list[Span]]:
    """Return when everything would run on ranks that wait for nothing but each other.

    Messages take no time, and no rank is held up by what else a machine does.

    Args:
        actions: what each rank does, from the first stage to the last.
        seconds: how long a forward and a backward pass take on each rank.

    Raises:
        InvalidArgumentError: the ranks wait for each other for ever.
    """
    last = len(actions) - 1
    ends: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in actions]
    progress = True
    while progress:
        progress = False
        for rank, todo in enumerate(actions):
            while len(spans[rank]) < len(todo):
                action = todo[len(spans[rank])]
                needed = _before(rank, last, action)
                if needed is not None and needed not in ends:
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                start = free if needed is None else max(free, ends[needed])
                taken = seconds[rank][action.kind]
                ends[rank, action] = start + taken
                spans[rank].append(Span(*action, start, start + taken, taken))
                progress = True
    if any(len(done) < len(todo) for done, todo in zip(spans, actions)):
        raise InvalidArgumentError("replay: these ranks wait for each other for ever.")
    return spans


def _before(rank: int, last: int, action: Action) -> tuple[int, Action] | None:
    """Return whose pass an action of a rank needs, or None."""
    if action.kind == "forward":
        return (rank - 1, action) if rank else None
    if rank == last:
        return rank, Action("forward", action.microbatch)
    return rank + 1, action


def idle_share(timelines: Sequence[Sequence[Span]]) -> float:
    """Return the share of a step that its ranks were in no pass: 0 for always, 1 for never busy.

    The step lasts from the first pass to the end of the last one, of any rank. What is no pass is
    waiting, for other ranks or for messages.

    Args:
        timelines: each rank's passes of one step.
    """
    spans = [span for timeline in timelines for span in timeline]
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (len(timelines) * seconds)
