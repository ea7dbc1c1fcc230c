"""PyTorch's fully sharded data parallelism (FSDP2), over any backend.

Run: collective run -n 2 examples/fsdp2.py
 or: torchrun --nproc-per-node 2 examples/fsdp2.py [--backend gloo]

A small Transformer learns to sort digits. Each rank keeps its share of the parameters, gradients
and optimizer state. FSDP2 gathers the parameters of a block when the block computes, and sums and
scatters its gradients.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LENGTH = 8


class Sorter(nn.Module):
    """Network that reads digits and returns the log-probabilities of the digits at each place."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.digits = nn.Embedding(10, width)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        x = self.digits(digits) + self.positions
        for block in self.blocks:
            x = block(x)
        return nn.functional.log_softmax(self.head(x), dim=-1)


def train(steps: int) -> None:
    """Train, and print the loss of every tenth step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Sorter()
    whole = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    if rank == 0:
        print(f"{whole} parameters, of which rank 0 keeps {local}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        digits = torch.randint(10, (32, LENGTH), generator=generator)
        optimizer.zero_grad()
        answer = model(digits).flatten(0, 1)
        loss = nn.functional.nll_loss(answer, digits.sort().values.flatten())
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item() / size:.4f}")


def main() -> None:
    """Read the command line, join the other ranks and train."""
    parser = argparse.ArgumentParser(description="Fully sharded data parallelism.")
    parser.add_argument("--backend", default="collective")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    train(options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
