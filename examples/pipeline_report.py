"""Figures and pictures of ``pipeline.py`` and ``pipeline_chainer.py``: idle shares and timelines.

The idle share of a step is the part of the ranks' time in which no forward and no backward pass
ran. The time counts from the start of the first pass of any rank to the end of the last one. Idle
time has three causes. A figure that mixes the causes does not explain any of them:

1. The order of the passes. With p stages and m micro-batches it costs at least
   ``(p - 1) / (m + p - 1)``.
2. Stages that do not take equally long.
3. The machine: messages take time, and ranks share cores with each other and with other programs.

So the report has three figures:

- *measured*: the share by the clock, with all three causes. It is a median over the steps, because
  single steps are disturbed.
- *replayed*: the share without the third cause. The same passes are scheduled again on ranks that
  wait only for each other, and each pass takes the median of its measured processor times.
- *at the least*: the formula, without the second and third causes.

At the end :func:`compare` checks that the pipeline has the gradients of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collective.training.pipelines import Action, Span, idle_share, least_idle, replay

#: Share of a rank's time that may be idle beyond the formula.
MARGIN = 0.1
#: Largest difference between gradients or weights, relative to the largest value of their array.
TOLERANCE = 1e-12

Timelines = Sequence[Sequence[Span]]


def replayed(steps: Sequence[Timelines]) -> list[list[Span]]:
    """Return a step's timelines without the time that the machine adds.

    Args:
        steps: for each step, the passes of each rank.
    """
    seconds = []
    for rank in range(len(steps[0])):
        spans = [span for step in steps for span in step[rank]]
        seconds.append(
            {
                kind: float(np.median([span.cpu for span in spans if span.kind == kind]))
                for kind in ("forward", "backward")
            }
        )
    return replay([[Action(*span[:2]) for span in passes] for passes in steps[0]], seconds)


def time_line(together: Sequence[float], alone: Sequence[float]) -> str:
    """Return a line with the median times of a step: of the pipeline and of one process."""
    pipeline, single = float(np.median(together)), float(np.median(alone))
    return (
        f"time           {1e3 * pipeline:.0f} ms a step, {1e3 * single:.0f} ms by one process: "
        f"{single / pipeline:.2f} x"
    )


def idle_lines(steps: Sequence[Timelines], microbatches: int) -> str:
    """Return lines with the three figures, and whether they are near enough to the least one."""
    shares = [idle_share(step) for step in steps]
    low, measured, high = np.percentile(shares, [25, 50, 75])
    stages = len(steps[0])
    least = least_idle(stages, microbatches)
    again = idle_share(replayed(steps))
    measured_enough = "yes" if measured <= least + MARGIN else "no; is the machine busy?"
    replayed_enough = "yes" if again <= least + MARGIN else "no; are the stages equal?"
    return (
        f"idle share     {measured:.1%} measured, by the clock (median of {len(steps)} steps, half "
        f"of them in {low:.1%} to {high:.1%})\n"
        f"               {again:.1%} replayed, by the processor's time that "
        "the passes took\n"
        f"               {least:.1%} at the least, (p - 1) / (m + p - 1) with p = {stages}, m = "
        f"{microbatches}\n"
        f"               up to {least + MARGIN:.1%} is good enough: measured {measured_enough}, "
        f"replayed {replayed_enough}"
    )


def compare(
    states: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]], steps: int
) -> int:
    """Print whether gradients and weights equal those of one process; return the exit code.

    Args:
        states: each stage's arrays by their names, from the pipeline.
        alone: the same arrays, from one process.
        steps: number of training steps, for the text.
    """
    differences = [
        furthest(actual, expected) for actual, expected in zip(states, alone, strict=True)
    ]
    difference = float(np.max(differences))
    equal = difference <= TOLERANCE
    print(
        f"gradients      {'equal' if equal else 'NOT equal'} to one process on whole batches, and "
        f"weights, after {steps} steps (to {difference:.1e}; {TOLERANCE:.0e} allowed)"
    )
    return int(not equal)


def furthest(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest difference between arrays, relative to the largest value of each array.

    The result is NaN if any value is NaN.
    """
    pairs = [(np.asarray(found[name]), np.asarray(array)) for name, array in expected.items()]
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))


def plot(
    path: str, losses: Sequence[float], alone: Sequence[float], steps: list[Timelines]
) -> None:
    """Write a PNG: the loss over the steps, a measured step, and the replayed step."""
    # Avoid pyplot, which keeps global state and looks for a display.
    from matplotlib.figure import Figure

    ranks = len(steps[0])
    heights = (3, 0.6 + 0.4 * ranks, 0.6 + 0.4 * ranks)
    figure = Figure(figsize=(9, 1.2 + sum(heights)), layout="constrained")
    upper, *lower = figure.subplots(3, 1, height_ratios=heights)
    numbers = range(1, len(losses) + 1)
    upper.semilogy(numbers, losses, linewidth=3, color="lightsteelblue", label="pipeline")
    upper.semilogy(numbers, alone, "--", color="black", label="one process")
    upper.set(xlabel="step", ylabel="training loss", title=f"{ranks} stages, one on each rank")
    upper.legend()
    # The step whose idle share is the median.
    typical = sorted(steps, key=idle_share)[len(steps) // 2]
    for axes, spans, title in zip(
        lower, (typical, replayed(steps)), ("a step, measured", "replayed by processor's time")
    ):
        draw(axes, spans)
        axes.set_title(f"{title}: {idle_share(spans):.1%} idle")
    lower[-1].set_xlabel("ms; forward passes are light, backward passes dark")
    figure.savefig(path, dpi=120)


def draw(axes: object, timelines: Timelines) -> None:
    """Draw each rank's passes as bars, with the numbers of their micro-batches."""
    began = min(span.start for timeline in timelines for span in timeline)
    for rank, timeline in enumerate(timelines):
        for span in timeline:
            left, width = 1e3 * (span.start - began), 1e3 * (span.end - span.start)
            colour = "lightsteelblue" if span.kind == "forward" else "steelblue"
            axes.barh(rank, width, 0.8, left, color=colour, edgecolor="white", linewidth=0.5)
            text = str(span.microbatch)
            axes.text(left + width / 2, rank, text, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(timelines)), [f"rank {rank}" for rank in range(len(timelines))])
    axes.invert_yaxis()
    axes.margins(x=0.01)
