"""PyTorch's DistributedDataParallel, in an ordinary program that only names our backend.

Run: collective run -n 2 examples/ddp.py
 or: torchrun --nproc-per-node 2 examples/ddp.py [--backend gloo]

A network learns which of two interleaved spirals a point belongs to. Each rank sees its share of
the points. The program prints the same figures over every backend.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(count: int) -> TensorDataset:
    """Return noisy points of two spirals, and for each point the number of its spiral."""
    generator = torch.Generator().manual_seed(1)
    label = torch.arange(count) % 2
    along = torch.rand(count, generator=generator)
    angle = 1.5 * torch.pi * along + torch.pi * label
    points = torch.stack([angle.cos(), angle.sin()], 1) * (0.2 + along)[:, None]
    return TensorDataset(points + 0.05 * torch.randn(count, 2, generator=generator), label)


def train(epochs: int) -> None:
    """Train, and print the loss of each epoch and the accuracy at the end."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = spirals(2048)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)  # loss and right answers
        for points, label in loader:
            optimizer.zero_grad()
            answer = model(points)
            loss = nn.functional.cross_entropy(answer, label)
            loss.backward()
            optimizer.step()
            right = (answer.argmax(1) == label).sum()
            total += torch.stack([loss.detach() * len(label), right])
        dist.reduce(total, dst=0)
        if rank == 0:
            mean, accuracy = (total / len(data)).tolist()
            print(f"epoch {epoch}: loss {mean:.4f}, accuracy {accuracy:.3f}")


def main() -> None:
    """Read the command line, join the other ranks and train."""
    parser = argparse.ArgumentParser(description="DistributedDataParallel over any backend.")
    parser.add_argument("--backend", default="collective")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    train(options.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
