"""Training with Ray Train over the backend ``collective`` of torch.distributed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    import collective.adapters.torch.process_group as process_group

    assert isinstance(dist.group.WORLD, process_group.ProcessGroup)
    torch.manual_seed(dist.get_rank())  # DDP gives all ranks the parameters of rank 0
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), dist.get_rank() + 1.0)).pow(2).mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().ravel() for p in model.parameters()])
    least, most = weights.clone(), weights.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        facts = {
            "backend": dist.get_backend(),
            "transport": dist.group.WORLD.comm.backend,
            "model": type(model).__name__,
            "equal": bool((least == most).all()),
        }
        Path(config["file"]).write_text(json.dumps(facts))


if __name__ == "__main__":
    ray.init(
        address="local", num_cpus=3, object_store_memory=80 << 20, include_dashboard=False,
        log_to_driver=False, configure_logging=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"file": f"{folder}/facts.json"},
            torch_config=TorchConfig(backend="collective"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
        print(type(trainer).__module__, Path(folder, "facts.json").read_text(), flush=True)
    ray.shutdown()
