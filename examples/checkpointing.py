"""PyTorch's distributed checkpoints: saved in one layout, loaded into another one.

Run: collective run -n 2 examples/checkpointing.py
 or: torchrun --nproc-per-node 2 examples/checkpointing.py [--backend gloo]

The program trains and saves a network whose parameters are cut by rows; each rank writes its
share. It loads the checkpoint into a network that is cut by columns, and into one that every rank
has as a whole. All three networks continue training in the same way.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

LAYOUTS = {"rows": lambda parameter: Shard(0), "columns": lambda p: Shard(p.ndim - 1)}


class Training:
    """Network and its optimizer, cut by rows or by columns, or whole.

    Args:
        layout: "rows", "columns" or "whole".
        seed: seed of the initial weights.
    """

    def __init__(self, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        if layout in LAYOUTS:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(self.model, mesh=mesh, shard_placement_fn=LAYOUTS[layout])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def steps(self, first: int, count: int) -> float:
        """Do ``count`` steps, starting with number ``first``; return the last loss."""
        loss = torch.tensor(0.0)
        for step in range(first, first + count):
            generator = torch.Generator().manual_seed(step % 4)
            x = torch.randn(32, 16, generator=generator)  # four batches, the same on all ranks
            self.optimizer.zero_grad()
            loss = (self.model(x) - x[:, :8].sin()).square().mean()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def save(self, folder: str) -> None:
        """Write the state; each rank writes the parts that it has."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        """Read the state; each rank reads the parts that it needs."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )


def train(folder: str) -> None:
    """Train, save, load into other layouts, train further, and print the losses."""
    rank = dist.get_rank()
    saved = Training("rows", seed=0)
    before = saved.steps(0, 20)
    saved.save(folder)
    if rank == 0:
        print(f"step 20, cut by rows, saved: loss {before:.5f}")
    for layout in ("rows", "columns", "whole"):
        going = saved
        if layout != "rows":
            going = Training(layout, seed=1)
            going.load(folder)
        after = going.steps(20, 20)
        if rank == 0:
            print(f"step 40, {layout}: loss {after:.5f}")


def main() -> None:
    """Read the command line, join the other ranks and train."""
    parser = argparse.ArgumentParser(description="Distributed checkpoints.")
    parser.add_argument("--backend", default="collective")
    parser.add_argument("--folder", help="folder to write to (default: a temporary one)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    with tempfile.TemporaryDirectory() as temporary:
        # All ranks use rank 0's folder.
        folder = [options.folder or temporary]
        dist.broadcast_object_list(folder)
        train(folder[0])
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
