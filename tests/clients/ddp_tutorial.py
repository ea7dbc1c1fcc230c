"""The steps of PyTorch's DDP tutorial: ``spawn``, an explicit process group, a checkpoint."""

from __future__ import annotations

import argparse
import os

import outcome
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, size: int, options: argparse.Namespace) -> None:
    """Train on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group(options.backend, rank=rank, world_size=size)  # the name to change
    torch.manual_seed(rank)  # DDP copies rank 0's weights to all ranks
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        x = torch.randn(20, 10, generator=generator)
        loss = (model(x) - x[:, :5]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    path = options.out / "model.checkpoint"
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    mean = torch.stack(losses)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    outcome.save(options.out, weights=model.module.state_dict(), losses=mean, processes=size)
    dist.destroy_process_group()


def main() -> None:
    """Start two processes over the backend named on the command line."""
    options = outcome.options(__doc__)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29501")
    mp.spawn(work, args=(2, options), nprocs=2)


if __name__ == "__main__":
    main()
