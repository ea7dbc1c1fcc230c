"""Tensor parallelism by PyTorch's DTensor and DeviceMesh, over any backend.

Run: collective run -n 2 examples/dtensor.py
 or: torchrun --nproc-per-node 2 examples/dtensor.py [--backend gloo]

The first layer of a network is cut by columns and the second one by rows. So each rank computes
with its share of the hidden units, and one all-reduce per forward pass assembles the output.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def network() -> nn.Sequential:
    """Return the network, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def train(steps: int) -> None:
    """Train the cut network and a whole one side by side, and print their losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    whole = network()
    cut = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (cut, whole)]
    # All ranks use the same batches: the network is divided, not the data.
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(64, 16, generator=generator)
        target = x.square().mean(1, keepdim=True)
        losses = []
        for model, optimizer in zip((cut, whole), optimizers):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {losses[0]:.4f} cut, {losses[1]:.4f} whole")
    same = all(
        torch.allclose(
            actual.full_tensor() if isinstance(actual, DTensor) else actual, expected, atol=1e-5
        )
        for actual, expected in zip(cut.parameters(), whole.parameters())
    )
    table = distribute_tensor(torch.arange(24.0).reshape(6, 4), mesh, [Shard(0)])
    turned = table.redistribute(mesh, [Shard(1)])
    back = turned.redistribute(mesh, [Replicate()]).to_local()
    if rank == 0:
        print(f"equal to the whole network: {same}")
        print(f"rank 0's columns: {tuple(turned.to_local().shape)}, sum {back.sum().item():.0f}")


def main() -> None:
    """Read the command line, join the other ranks and train."""
    parser = argparse.ArgumentParser(description="Tensor parallelism.")
    parser.add_argument("--backend", default="collective")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    train(options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
