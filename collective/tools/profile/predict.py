"""Whether more ranks pay: the criterion of synchronous SGD, and predictions of the cost model.

With R ranks, each with its own mini-batches, an epoch takes ``N / (R B) (T_comp + T_sync)``. On one
rank it takes ``N / B T_comp``. So R ranks are faster if ``T_sync / T_comp < R - 1`` (A. Das, "Deep
Learning at scale: The torch.distributed API", 2018, equation 5). The model predicts how long a step
would take on other numbers of ranks.
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
    """Result of the criterion for the profiled ranks.

    Attributes:
        ranks: R.
        ratio: T_sync / T_comp; infinite if nothing is computed.
        pays: whether the ratio is below R - 1; False for one rank.
        speedup: R T_comp / (T_comp + T_sync), compared with one rank that computes a step in
            the same time.
        efficiency: speedup / R.
        doubled_limit: limit in seconds; 2 R ranks are faster than R if their T_sync is below it.
    """

    ranks: int
    ratio: float
    pays: bool
    speedup: float
    efficiency: float
    doubled_limit: float


def judge(steps: StepTimes, ranks: int) -> Payoff:
    """Return the criterion's result for a measured step."""
    comp, sync = steps.comp, steps.sync
    ratio = sync / comp if comp > 0 else float("inf")
    efficiency = comp / (comp + sync) if comp + sync > 0 else 1.0
    # 2R ranks are faster if (T_comp + T_sync(2R)) / 2R < (T_comp + T_sync(R)) / R.
    limit = comp + 2 * sync
    return Payoff(ranks, ratio, ratio < ranks - 1, ranks * efficiency, efficiency, limit)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of a step on a number of ranks, in seconds.

    Attributes:
        ranks: number of ranks.
        algorithm: algorithm of the all-reduces.
        moving: time of all calls of the step, once all ranks have come.
        low, high: interval that contains ``moving`` with 90 % probability, if the model holds.
        sync: T_sync: the part of ``moving`` that computing does not hide, the measured waiting,
            and the measured excess over the model.
        speedup: compared with one rank that computes a step in the same time: R T_comp / step.
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
    """Predictions and their basis.

    Attributes:
        fits: fitted model of each algorithm, the one with the least error first.
        measured: number of measurements.
        rank_counts: numbers of ranks in the measurements.
        far: connection between hosts; None if all ranks are connected like those of this host.
        per_host: number of ranks on each host.
        left_out: calls of a step that the model does not include.
        here: the first fit's ``moving`` for the profiled ranks.
        moved_here: measured time for ``here``.
        excess: time by which ``moved_here`` exceeds ``here``. It is due to causes that the model
            does not include, such as ranks that wait for a core. Each algorithm has its own; this
            is the first fit's.
        predictions: for each number of ranks, a prediction for each algorithm, the fastest first.
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
    """Return the time of an empty message and the rate that ``"10us,12GB/s"`` states.

    Raises:
        ValueError: the text has another form.
    """
    number = r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*"
    match = re.fullmatch(rf"{number}({'|'.join(_TIME)})\s*,{number}({'|'.join(_RATE)})/s\s*", text)
    if match is None:
        raise ValueError(
            f"{text!r}; expected a time and a rate, such as 10us,12GB/s or 1.5ms,10Gbit/s (units "
            f"{', '.join(_TIME)}; {', '.join(_RATE)})"
        )
    seconds, rate = float(match[1]) * _TIME[match[2]], float(match[3]) * _RATE[match[4]]
    if rate <= 0:
        raise ValueError(f"{text!r}; expected a rate above 0")
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

    In the prediction, each rank computes as long as in the profile. It hides the same share of its
    calls in the background, but no more than fits into its computing time. Ranks wait for late
    ranks as long as in the profile.

    Args:
        steps: the profiled step, on ``ranks`` ranks.
        measured: measurements of the transport on one host.
        wanted: numbers of ranks.
        far: connection between hosts; None if all ranks are connected like those of one host.
        per_host: number of ranks on each host, with ``far``.

    Raises:
        ValueError: as for :func:`collective.algorithms.model.fit`.
    """
    fits = sorted((fit(measured, name) for name in ALGORITHMS), key=lambda fitted: fitted.typical)
    known = [call for call in steps.calls if call[0] in operations()]

    def counts(p: int, algorithm: str) -> Vector:
        near = p if far is None or per_host is None else min(p, per_host)
        total: Vector = sum(
            times * coefficients(op, nbytes, p, near, algorithm) for op, nbytes, times in known
        ) + coefficients("barrier", 0, 1, 1, algorithm)
        return total

    moved = steps.sync - steps.waiting + steps.hidden
    here = [fitted.seconds(counts(ranks, fitted.algorithm), far) for fitted in fits]
    excess = [max(0.0, moved - model) if ranks > 1 else 0.0 for model in here]
    predictions = []
    for p in wanted:
        found = []
        for fitted, beyond in zip(fits, excess):
            counted = counts(p, fitted.algorithm)
            moving = fitted.seconds(counted, far)
            low, high = fitted.interval(counted, far)
            share = min(1.0, steps.hidden / moved) if moved > 0 else 0.0
            hidden = min(share * (moving + beyond), max(steps.window, steps.hidden))
            sync = steps.waiting + beyond + moving - hidden if p > 1 else 0.0
            speedup = p * steps.comp / (steps.comp + sync) if steps.comp + sync > 0 else 1.0
            found.append(Prediction(p, fitted.algorithm, moving, low, high, sync, speedup))
        predictions.append(sorted(found, key=lambda prediction: prediction.moving))
    return Outlook(
        fits,
        len(measured),
        sorted({row.ranks for row in measured}),
        far,
        per_host if far is not None else None,
        sorted({op for op, _, _ in steps.calls if op not in operations() and op != "empty"}),
        here[0],
        moved,
        excess[0],
        predictions,
    )
