"""DeepSpeed on the CPU: its engine with ZeRO stages 1, 2 and 3, and a checkpoint."""

from __future__ import annotations

import deepspeed
import outcome
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train over the backend named on the command line."""
    options = outcome.options(__doc__)
    deepspeed.init_distributed(options.backend)  # the argument to add
    weights, losses = {}, {}
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        losses[stage] = []
        for _ in range(8):
            x = torch.randn(4, 8, generator=generator)
            loss = nn.functional.cross_entropy(engine(x), x[:, :3].argmax(1))
            engine.backward(loss)
            engine.step()
            losses[stage].append(loss.detach())
        engine.save_checkpoint(str(options.out / f"stage-{stage}"))
        engine.load_checkpoint(str(options.out / f"stage-{stage}"))
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            weights[stage] = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.destroy()
    outcome.save(options.out, weights=weights, losses=losses, processes=dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
