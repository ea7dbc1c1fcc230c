"""Measurement of ranks as threads without a GIL: ``python benchmarks/free_threads.py``.

Two ranks train LeNet in NumPy, data-parallel, on digits of noise: as threads of one process
(``threads``), and as processes (``shm``). Both take turns. In each step every rank computes the
gradient of its mini-batch, one all-reduce averages the gradients, and all replicas take the same
step. The network is written in NumPy alone, since PyTorch has no wheel for every free-threaded
Python. NumPy's linear algebra must run in one thread per rank: set ``OMP_NUM_THREADS=1`` and
``OPENBLAS_NUM_THREADS=1``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np

import collective
from collective.communicator import Communicator
from collective.testing import RankPool

Array = np.ndarray[Any, np.dtype[np.float32]]
#: Shapes of the weights: two convolutions as matrices, and three linear layers.
SHAPES = ((25, 6), (150, 16), (400, 120), (120, 84), (84, 10))


def patches(x: Array) -> Array:
    """Return the 5 × 5 patches of pictures (N, H, W, C) as rows (N, H - 4, W - 4, 25 C)."""
    seen = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(1, 2))
    return np.ascontiguousarray(seen).reshape(*seen.shape[:3], -1)


def pooled(x: Array) -> Array:
    """Return the means of blocks of 2 × 2 of pictures (N, H, W, C)."""
    n, height, width, channels = x.shape
    mean: Array = x.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4))
    return mean


def spread(x: Array) -> Array:
    """Return the gradient of :func:`pooled`."""
    return x.repeat(2, 1).repeat(2, 2) / np.float32(4)


def unpatched(x: Array, channels: int) -> Array:
    """Return the gradient of :func:`patches`."""
    n, height, width, _ = x.shape
    parts = x.reshape(n, height, width, channels, 5, 5)
    whole = np.zeros((n, height + 4, width + 4, channels), np.float32)
    for row in range(5):
        for column in range(5):
            whole[:, row : row + height, column : column + width] += parts[..., row, column]
    return whole


def gradients(weights: list[Array], x: Array, labels: Array) -> list[Array]:
    """Return the gradients of the mean cross-entropy of a batch (N, 28, 28, 1)."""
    first = patches(np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0))))
    a1 = np.tanh(first @ weights[0])
    second = patches(pooled(a1))
    a2 = np.tanh(second @ weights[1])
    values = [pooled(a2).reshape(len(x), -1)]
    for weight in weights[2:4]:
        values.append(np.tanh(values[-1] @ weight))
    scores = values[-1] @ weights[4]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(len(x)), labels] -= 1
    gradient, found = chances / np.float32(len(x)), []
    for layer in (4, 3, 2):
        found.append(values[layer - 2].T @ gradient)
        gradient = gradient @ weights[layer].T
        if layer > 2:
            gradient *= 1 - values[layer - 2] ** 2
    gradient = spread(gradient.reshape(len(x), 5, 5, 16)) * (1 - a2**2)
    found.append(second.reshape(-1, 150).T @ gradient.reshape(-1, 16))
    gradient = spread(unpatched(gradient @ weights[1].T, 6)) * (1 - a1**2)
    found.append(first.reshape(-1, 25).T @ gradient.reshape(-1, 6))
    return found[::-1]


def train(comm: Communicator, steps: int, batch: int) -> float:
    """Return the seconds of a step; all ranks end with equal weights."""
    random = np.random.default_rng(0)
    weights = [random.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for shape in SHAPES]
    digits = np.random.default_rng(1 + comm.rank)
    x = digits.normal(size=(batch, 28, 28, 1)).astype(np.float32)
    labels = digits.integers(0, 10, batch)
    comm.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        means = comm.all_reduce(gradients(weights, x, labels), op="avg")
        for weight, mean in zip(weights, means):
            weight -= np.float32(0.01) * mean
    seconds = time.perf_counter() - start
    for weight in weights:
        if not np.array_equal(comm.broadcast(weight.copy(), root=0), weight):
            raise AssertionError("the ranks' weights differ")
    return seconds / steps


def main() -> int:
    """Measure both kinds of ranks in turns, and print their times of a step."""
    parser = argparse.ArgumentParser(description="LeNet over threads and over processes.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"Python {sys.version.split()[0]}, GIL {'on' if locked else 'off'}, core "
          f"{collective.native.status()}")  # fmt: skip
    kinds = {"threads": options.ranks, "shm": options.ranks, "one rank": 1}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    pools = {
        name: RankPool(ranks, "threads" if name == "one rank" else name, timeout=300)
        for name, ranks in kinds.items()
    }
    for turn in range(options.turns + 1):
        for name, pool in pools.items():
            seconds = max(pool.run(train, options.steps, options.batch))
            if turn:  # the first turn imports modules and fills caches
                times[name].append(1e3 * seconds)
    for pool in pools.values():
        pool.close()
    for name, milliseconds in times.items():
        least, median = min(milliseconds), statistics.median(milliseconds)
        print(f"{name:9} {least:7.1f} ms a step at least, median {median:7.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
