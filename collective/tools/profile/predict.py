"""Whether more ranks pay: the criterion of synchronous SGD, and what the model of costs says.

With R ranks, each with mini-batches of its own, an epoch takes ``N / (R B) (T_comp + T_sync)``,
on one rank ``N / B T_comp``: R ranks are faster if ``T_sync / T_comp < R - 1`` (A. Das, "Deep
Learning at scale: The torch.distributed API", 2018, equation 5). How long a step would take on
other numbers of ranks is the model's to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from collective.algorithms.model import (
    ALGORITHMS,
    Fit,
    LinkSpeed,
    Measured,
    Vector,
    coefficients,
    fit,
    operations,
)

from .measure import StepTimes

__all__ = ["Outlook", "Payoff", "Prediction", "judge", "predict", "to_link"]

_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_RATE = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
         "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
         "bit": 0.125, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Payoff:
    """What the criterion says of the ranks that there were.

    Attributes:
        ranks: R.
        ratio: T_sync / T_comp; infinite if nothing is computed.
        pays: whether that is below R - 1. With one rank there is nothing to judge: False.
        speedup: R T_comp / (T_comp + T_sync): over one rank that computes a step as fast.
        efficiency: speedup / R.
        doubled_limit: seconds below which T_sync has to stay with 2 R ranks for these to be
            faster than R.
    """

    ranks: int
    ratio: float
    pays: bool
    speedup: float
    efficiency: float
    doubled_limit: float


def judge(steps: StepTimes, ranks: int) -> Payoff:
    """Apply the criterion to what was measured."""
    comp, sync = steps.comp, steps.sync
    ratio = sync / comp if comp > 0 else float("inf")
    efficiency = comp / (comp + sync) if comp + sync > 0 else 1.0
    # (T_comp + T_sync(2R)) / 2R < (T_comp + T_sync(R)) / R
    limit = comp + 2 * sync
    return Payoff(ranks, ratio, ratio < ranks - 1, ranks * efficiency, efficiency, limit)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step on some number of ranks, in seconds.

    Attributes:
        ranks: how many.
        algorithm: by which they all-reduce.
        moving: all calls of the step, once all ranks are there.
        low, high: between what that lies with 90 %, if the model holds.
        sync: T_sync: of ``moving`` what computing does not hide, waiting as measured, and what
            was measured beyond the model.
        speedup: over one rank that takes as long to compute a step: R T_comp / step.
    """

    ranks: int
    algorithm: str
    moving: float
    low: float
    high: float
    sync: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predictions and what they stand on.

    Attributes:
        fits: the model fitted for each algorithm, the one with the least error first.
        measured: how many measurements that was, and the numbers of ranks in them.
        rank_counts: those numbers.
        far: what connects hosts; None: all ranks as those of this host are.
        per_host: ranks a host.
        left_out: calls of a step that the model does not know.
        here: the model's ``moving`` for the ranks that were profiled, by the first fit.
        moved_here: what was measured of that.
        excess: by how much the latter is more: what the model does not know of, such as ranks
            that wait for a core. Each algorithm has its own; this is the first fit's.
        predictions: for each number of ranks the algorithms, the fastest first.
    """

    fits: list[Fit]
    measured: int
    rank_counts: list[int]
    far: LinkSpeed | None
    per_host: int | None
    left_out: list[str]
    here: float
    moved_here: float
    excess: float
    predictions: list[list[Prediction]]


def to_link(text: str) -> LinkSpeed:
    """Return what ``"10us,12GB/s"`` says: the time of an empty message, and bytes a second.

    Raises:
        ValueError: it says something else.
    """
    number = r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*"
    match = re.fullmatch(rf"{number}({'|'.join(_TIME)})\s*,{number}({'|'.join(_RATE)})/s\s*", text)
    if match is None:
        raise ValueError(
            f"{text!r}; a time and a rate, such as 10us,12GB/s or 1.5ms,10Gbit/s (units "
            f"{', '.join(_TIME)}; {', '.join(_RATE)})"
        )
    seconds, rate = float(match[1]) * _TIME[match[2]], float(match[3]) * _RATE[match[4]]
    if rate <= 0:
        raise ValueError(f"{text!r}; a rate above 0")
    return LinkSpeed(seconds, 1 / rate)


def predict(
    steps: StepTimes,
    ranks: int,
    measured: Sequence[Measured],
    wanted: Sequence[int],
    far: LinkSpeed | None = None,
    per_host: int | None = None,
) -> Outlook:
    """Extrapolate a step to other numbers of ranks.

    Each rank computes as long as now, and hides of its calls in the background the share that
    it hides now, but no more than it has time for; ranks wait for late ones as long as now.

    Args:
        steps: what was profiled, on ``ranks`` ranks.
        measured: the transport's figures, on one host.
        wanted: numbers of ranks.
        far: what connects hosts; None takes all ranks to be connected as those of one host.
        per_host: how many ranks a host has, with ``far``.

    Raises:
        ValueError: as :func:`collective.algorithms.model.fit`.
    """
    fits = sorted((fit(measured, name) for name in ALGORITHMS), key=lambda one: one.typical)
    known = [call for call in steps.calls if call[0] in operations()]

    def counts(p: int, algorithm: str) -> Vector:
        near = p if far is None or per_host is None else min(p, per_host)
        total: Vector = sum(
            times * coefficients(op, nbytes, p, near, algorithm) for op, nbytes, times in known
        ) + coefficients("barrier", 0, 1, 1, algorithm)
        return total

    moved = steps.sync - steps.waiting + steps.hidden
    here = [one.seconds(counts(ranks, one.algorithm), far) for one in fits]
    excess = [max(0.0, moved - model) if ranks > 1 else 0.0 for model in here]
    predictions = []
    for p in wanted:
        found = []
        for one, beyond in zip(fits, excess):
            counted = counts(p, one.algorithm)
            moving = one.seconds(counted, far)
            low, high = one.interval(counted, far)
            share = min(1.0, steps.hidden / moved) if moved > 0 else 0.0
            hidden = min(share * (moving + beyond), max(steps.window, steps.hidden))
            sync = steps.waiting + beyond + moving - hidden if p > 1 else 0.0
            speedup = p * steps.comp / (steps.comp + sync) if steps.comp + sync > 0 else 1.0
            found.append(Prediction(p, one.algorithm, moving, low, high, sync, speedup))
        predictions.append(sorted(found, key=lambda one: one.moving))
    return Outlook(
        fits,
        len(measured),
        sorted({one.ranks for one in measured}),
        far,
        per_host if far is not None else None,
        sorted({op for op, _, _ in steps.calls if op not in operations() and op != "empty"}),
        here[0],
        moved,
        excess[0],
        predictions,
    )
