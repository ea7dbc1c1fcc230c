"""accelerate: a training loop with accumulated, clipped gradients and gathered metrics."""

from __future__ import annotations

import outcome
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train over the backend named on the command line."""
    options = outcome.options(__doc__)
    dist.init_process_group(options.backend)  # the line to add
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(60, 8)  # not a whole number of batches a rank
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, 8, shuffle=True), schedule
    )
    losses = []
    for _ in range(3):
        for features, label in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), label)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
    model.eval()
    answers, labels = [], []
    for features, label in accelerator.prepare(DataLoader(data, 8)):
        with torch.no_grad():
            pair = accelerator.gather_for_metrics((model(features).argmax(1), label))
        answers.append(pair[0])
        labels.append(pair[1])
    accelerator.save_state(str(options.out / "state"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(options.out / "state"))
    word = ["from rank 0" if accelerator.is_main_process else None]
    broadcast_object_list(word)
    outcome.save(
        options.out,
        weights=accelerator.get_state_dict(model),
        losses=torch.stack(losses),
        answers=torch.cat(answers),
        labels=torch.cat(labels),
        padded=accelerator.pad_across_processes(torch.ones(2 + accelerator.process_index)),
        objects=[word, gather_object([accelerator.process_index])],
        wrapper=type(model).__name__,
        processes=accelerator.num_processes,
    )
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
