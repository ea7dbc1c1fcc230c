"""LeNet on MNIST digits, with our data-parallel wrapper, with PyTorch's, or without one.

::

    collective run -n 2 --backend shm examples/mnist_ddp.py --wrapper ours
    collective run -n 2 --backend shm examples/mnist_ddp.py --wrapper torch-ddp
    collective run -n 2 --backend shm examples/mnist_ddp.py --wrapper none
    python examples/mnist_ddp.py --wrapper none --ranks 2

All of them train on the same whole batches: each rank takes its part of every batch, and a process
without a wrapper takes the whole batch. So the final weights are equal, up to rounding; the last
line has their sum. ``torch-ddp`` is PyTorch's own wrapper over the process group ``collective``: an
ordinary program of torch.distributed, over our transport.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mnist_sgd import Digits, LeNet, load_digits
from torch.nn import functional

import collective
from collective.adapters.torch import DistributedDataParallel


def parts(
    digits: Digits, options: argparse.Namespace, epoch: int, rank: int, size: int
) -> Iterator[Digits]:
    """Yield a rank's part of each whole batch; omit digits that do not fill a batch."""
    order = np.random.default_rng((options.seed, epoch)).permutation(len(digits))
    whole = options.batch * options.ranks
    for start in range(0, len(order) - whole + 1, whole):
        yield digits[np.split(order[start : start + whole], size)[rank]]


def train(
    model: Any, digits: Digits, options: argparse.Namespace, rank: int, size: int
) -> Iterator[float]:
    """Train; yield the last loss of each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.85)
    for epoch in range(options.epochs):
        for part in parts(digits, options, epoch, rank, size):
            optimizer.zero_grad()
            loss = functional.nll_loss(model(part.images), part.labels)
            loss.backward()
            optimizer.step()
        yield loss.item()


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="LeNet on MNIST digits, with a wrapper.")
    parser.add_argument("--wrapper", choices=("ours", "torch-ddp", "none"), default="ours")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="digits per rank and step")
    parser.add_argument(
        "--ranks",
        type=int,
        help="for 'none': number of ranks whose whole batches to use (default: present ranks)",
    )
    parser.add_argument("--limit", type=int, default=5000, help="number of digits to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", help="file to write the state of the model to")
    return parser.parse_args()


def main() -> None:
    """Train, and print the accuracy and the sum of the weights."""
    options = arguments()
    # The seed selects the digits, so they are the same on every rank.
    digits, test = load_digits(options.limit, options.seed)
    comm = None
    model: Any = LeNet(options.seed)
    wrapped = model
    if options.wrapper == "torch-ddp":
        import torch.distributed as dist

        from collective.adapters.torch import plugin  # noqa: F401  # registers "collective"

        dist.init_process_group("collective")
        rank, size = dist.get_rank(), dist.get_world_size()
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    else:
        comm = collective.init()
        rank, size = comm.rank, comm.size
        if options.wrapper == "ours":
            wrapped = DistributedDataParallel(model, comm)
    part = rank, size
    if options.wrapper == "none":
        size, part = options.ranks or size, (0, 1)
    options.ranks = size
    torch.set_num_threads(1)

    ends = [time.perf_counter()]
    for epoch, loss in enumerate(train(wrapped, digits, options, *part), 1):
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}", flush=True)
        ends.append(time.perf_counter())
    seconds = ends[-1] - ends[-2]  # the first steps also pay for one-time initialisation
    if rank == 0:
        with torch.no_grad():
            accuracy = (model(test.images).argmax(1) == test.labels).double().mean().item()
        total = sum(parameter.detach().sum().item() for parameter in model.parameters())
        print(f"{options.wrapper}: batches of {size} rank(s), last epoch in {seconds:.2f} s")
        print(f"test accuracy {accuracy:.1%}")
        print(f"sum of all weights {total:.9f}")
        if options.save:
            torch.save(model.state_dict(), options.save)
    if comm is not None:
        comm.close()
    elif options.wrapper == "torch-ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
