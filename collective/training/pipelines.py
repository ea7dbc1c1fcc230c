"""Schedules of a pipeline: the order of the passes in each stage, and the share of time it waits.

A model is cut into stages, one on each rank, and a batch is cut into micro-batches. A micro-batch
goes forward through the stages from the first to the last, and its gradient goes back. The module
offers two schedules:

- ``gpipe``: all forward passes, then all backward passes; a stage keeps all micro-batches.
  (Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
  Parallelism", 2019.)
- ``1f1b``: first as many forward passes as there are later stages, then one forward and one
  backward pass in turn, then the remaining backward passes. A stage keeps at most ``stages - rank``
  micro-batches. (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
  Clusters Using Megatron-LM", 2021, section 2.2.1.)

Both schedules end a step only when all micro-batches have gone through ("flush"). So the gradients
are those of the whole batch. Both schedules take the same time. The module uses no framework and
no transport. Ranks send in the background, so any order works. If a send waited for its receive,
``1f1b`` would have to pair each send with the next receive, and ``gpipe`` in another way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from collective.errors import InvalidArgumentError

__all__ = [
    "REDUCTIONS",
    "SCHEDULES",
    "Action",
    "Span",
    "check_options",
    "idle_share",
    "least_idle",
    "most_kept",
    "order",
    "replay",
]

Direction = Literal["forward", "backward"]

#: Names of the schedules.
SCHEDULES = "1f1b", "gpipe"
#: Ways in which a micro-batch's loss may combine its samples.
REDUCTIONS = "mean", "sum"


class Action(NamedTuple):
    """One pass, forward or backward, of one micro-batch through a stage."""

    kind: Direction
    microbatch: int


class Span(NamedTuple):
    """Time during which a pass ran.

    Attributes:
        kind, microbatch: those of the :class:`Action`.
        start, end: seconds on a clock that all ranks of the pipeline share.
        cpu: CPU seconds of the thread that ran the pass.
    """

    kind: Direction
    microbatch: int
    start: float
    end: float
    cpu: float


def check_options(microbatches: int, schedule: str, reduction: str) -> None:
    """Check the options of a pipeline.

    Raises:
        InvalidArgumentError: ``microbatches`` is no positive integer, or another option has an
            unknown value.
    """
    whole = isinstance(microbatches, int) and not isinstance(microbatches, bool)
    if not whole or microbatches < 1:
        raise InvalidArgumentError(
            f"Pipeline: microbatches={microbatches!r} (expected a positive integer). Ranks wait "
            "for (stages - 1) / (microbatches + stages - 1) of the time: use several times as many "
            "micro-batches as stages."
        )
    chosen = (("schedule", schedule, SCHEDULES), ("reduction", reduction, REDUCTIONS))
    for name, value, known in chosen:
        if value not in known:
            raise InvalidArgumentError(
                f"Pipeline: {name}={value!r} (expected one of {', '.join(known)})."
            )


def order(schedule: str, rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return the passes of a step through the stage of ``rank``, in their order.

    Args:
        schedule: one of :data:`SCHEDULES`.
        rank: number of the stage, from 0.
        stages: number of stages.
        microbatches: number of micro-batches in a step.
    """
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - rank - 1)
    actions = [Action("forward", batch) for batch in range(ahead)]
    for batch in range(ahead, microbatches):
        actions += [Action("forward", batch), Action("backward", batch - ahead)]
    return actions + [
        Action("backward", batch) for batch in range(microbatches - ahead, microbatches)
    ]


def most_kept(actions: Sequence[Action]) -> int:
    """Return the largest number of micro-batches that a stage keeps for backward at one time."""
    kept = most = 0
    for action in actions:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most


def least_idle(stages: int, microbatches: int) -> float:
    """Return the share of the time that ranks wait if all stages take equally long.

    The share is ``(stages - 1) / (microbatches + stages - 1)`` in both schedules (Narayanan et al.,
    2021, section 2.2, which gives the bubble relative to the time of the computation alone).
    """
    return (stages - 1) / (microbatches + stages - 1)


def replay(
    actions: Sequence[Sequence[Action]], seconds: Sequence[Mapping[Direction, float]]
) -> list[list[Span]]:
    """Return the time of each pass on ranks that wait only for each other.

    Messages take no time, and nothing else on a machine delays a rank.

    Args:
        actions: passes of each rank, from the first stage to the last.
        seconds: duration of a forward and a backward pass on each rank.

    Raises:
        InvalidArgumentError: the ranks wait for each other, so that none can continue.
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
        raise InvalidArgumentError(
            "replay: deadlock: these ranks wait for each other. Check the order of their passes."
        )
    return spans


def _before(rank: int, last: int, action: Action) -> tuple[int, Action] | None:
    """Return the rank and the pass that an action of ``rank`` depends on, or None."""
    if action.kind == "forward":
        return (rank - 1, action) if rank else None
    if rank == last:
        return rank, Action("forward", action.microbatch)
    return rank + 1, action


def idle_share(timelines: Sequence[Sequence[Span]]) -> float:
    """Return the share of a step in which its ranks ran no pass: from 0 (always busy) to 1.

    The step lasts from the start of the first pass to the end of the last one, over all ranks.
    Time outside a pass is waiting, for other ranks or for messages.

    Args:
        timelines: passes of one step, for each rank.
    """
    spans = [span for timeline in timelines for span in timeline]
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (len(timelines) * seconds)
