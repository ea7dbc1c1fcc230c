"""Lightning: DDP with synchronised logs, uneven data, a checkpoint and a test run."""

from __future__ import annotations

from typing import Any

import lightning
import outcome
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Small network that logs means over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        answer = self.network(batch[0])
        self.accuracy.update(answer, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(answer, batch[1]), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        gathered = self.all_gather(self.network(batch[0]))
        self.log("spread", gathered.std(), sync_dist=True, reduce_fx="mean")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Train over the backend named on the command line."""
    options = outcome.options(__doc__)
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(70, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    strategy = DDPStrategy(process_group_backend=options.backend)  # the argument to add
    best = ModelCheckpoint(options.out / "best", monitor="val_loss")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=3, logger=False,
        callbacks=[best], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=options.out, gradient_clip_val=1.0, accumulate_grad_batches=2,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 8))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= trainer.test(model, DataLoader(data, 8), ckpt_path="best", verbose=False)[0]
    outcome.save(
        options.out,
        weights=model.state_dict(),
        metrics=metrics,
        best=trainer.strategy.broadcast(best.best_model_path).rpartition("/")[2],
        processes=trainer.world_size,
    )


if __name__ == "__main__":
    main()
