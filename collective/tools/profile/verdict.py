"""Whether more ranks pay: the criterion of synchronous SGD.

With R ranks, each with mini-batches of its own, an epoch takes ``N / (R B) (T_comp + T_sync)``,
on one rank ``N / B T_comp``: R ranks are faster if ``T_sync / T_comp < R - 1`` (A. Das, "Deep
Learning at scale: The torch.distributed API", 2018, equation 5).
"""

from __future__ import annotations

from dataclasses import dataclass

from .measure import StepTimes

__all__ = ["Payoff", "judge"]


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
