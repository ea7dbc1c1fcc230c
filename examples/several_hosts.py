"""Training on several hosts, with NumPy alone. It continues if a rank or a host is lost.

::

    collective run --hosts first:1,second:1 --min-ranks 1 examples/several_hosts.py
    collective run --hosts first:2,second:2 --min-ranks 2 examples/several_hosts.py
    collective run -n 2 --backend tcp --min-ranks 1 examples/several_hosts.py      # on one host

The network learns which of three arms of a spiral a point lies on. Every step takes the same batch,
whatever the number of ranks. Each rank computes the gradient of its part of the batch, and one
all-reduce sums the parts. So the result depends on the number of ranks only by rounding. If ranks
are lost, the others return to the last step that all of them have finished, and share out its batch
anew.
"""

from __future__ import annotations

import argparse

import numpy as np

import collective
from collective import elastic

ARMS, HIDDEN = 3, 32
BATCH, TEST = 256, 3000
RATE, MOMENTUM = 0.5, 0.9


def spiral(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points, float64 ``[count, 2]``, and the arm of each, int64 ``[count]``."""
    random = np.random.default_rng(seed)
    arms = random.integers(ARMS, size=count)
    radius = random.uniform(0.05, 1.0, count)
    angle = 2 * np.pi * arms / ARMS + 4 * radius + random.normal(0.0, 0.1, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), arms


def network() -> list[np.ndarray]:
    """Return the initial weights and offsets of two layers."""
    random = np.random.default_rng(0)
    return [
        random.normal(0.0, 1.0, (2, HIDDEN)), np.zeros(HIDDEN),
        random.normal(0.0, 0.2, (HIDDEN, ARMS)), np.zeros(ARMS),
    ]  # fmt: skip


def forward(weights: list[np.ndarray], points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of the hidden layer, and the probabilities of the arms."""
    hidden = np.tanh(points @ weights[0] + weights[1])
    scores = hidden @ weights[2] + weights[3]
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def gradients(
    weights: list[np.ndarray], points: np.ndarray, arms: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """Return the summed loss of some points, and its gradients."""
    hidden, share = forward(weights, points)
    rows = np.arange(len(arms))
    loss = -float(np.log(share[rows, arms]).sum())
    share[rows, arms] -= 1.0
    below = (share @ weights[2].T) * (1.0 - hidden**2)
    return loss, [points.T @ below, below.sum(axis=0), hidden.T @ share, share.sum(axis=0)]


def train(comm: collective.Communicator, steps: int) -> None:
    """Train for ``steps`` steps with the ranks that are left, and report."""
    weights = network()
    state = elastic.State(
        comm, weights=weights, speeds=[np.zeros_like(w) for w in weights], step=0, loss=0.0
    )
    for generation in elastic.generations(comm, state):
        with generation as comm:
            if comm.rank == 0:
                print(f"step {state.step}, size {comm.size}, over {comm.backend}", flush=True)
            while state.step < steps:
                points, arms = spiral(BATCH, seed=1 + state.step)
                mine = slice(comm.rank, None, comm.size)
                loss, parts = gradients(state.weights, points[mine], arms[mine])
                loss, *sums = comm.all_reduce([np.array(loss), *parts])
                for weight, speed, total in zip(state.weights, state.speeds, sums, strict=True):
                    speed *= MOMENTUM
                    speed -= RATE / BATCH * total
                    weight += speed
                state.loss = float(loss) / BATCH
                state.step += 1
                state.commit()
    points, arms = spiral(TEST, seed=0)
    right = float((forward(state.weights, points)[1].argmax(axis=1) == arms).mean())
    if comm.rank == 0:
        print(
            f"{state.step} steps, size {comm.size} at the end: loss {state.loss:.3f}, "
            f"test accuracy {right:.1%}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="(default: 400)")
    options = parser.parse_args()
    with collective.init() as world:
        train(world, options.steps)
