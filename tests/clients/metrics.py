"""torchmetrics: states that are summed or concatenated, also of different lengths per rank."""

from __future__ import annotations

import outcome
import torch
import torch.distributed as dist
from torchmetrics import MeanMetric, MetricCollection, PearsonCorrCoef
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)


def main() -> None:
    """Compute metrics over the backend named on the command line."""
    options = outcome.options(__doc__)
    dist.init_process_group(options.backend)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    count = 20 + 7 * rank
    score = torch.rand(count, 3, generator=generator)
    label = torch.randint(3, (count,), generator=generator)
    classes = MetricCollection([
        MulticlassAccuracy(3), MulticlassF1Score(3), MulticlassConfusionMatrix(3),
    ])  # fmt: skip
    classes.update(score, label)
    area, joined, mean, correlation = BinaryAUROC(), CatMetric(), MeanMetric(), PearsonCorrCoef()
    area.update(score[:, 0], label.clamp(max=1))
    joined.update(score[:, 1])
    mean.update(score[:, 2])
    correlation.update(score[:, 0], score[:, 1])
    per_step = MulticlassAccuracy(3, dist_sync_on_step=True)(score, label)
    outcome.save(
        options.out,
        **classes.compute(),
        area=area.compute(),
        joined=joined.compute(),
        mean=mean.compute(),
        correlation=correlation.compute(),
        per_step=per_step,
        mine=[score, label],
        processes=dist.get_world_size(),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
