"""Shared code of ``elastic.py`` and ``elastic_chainer.py``: options, killing and reporting."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import numpy as np

import collective

#: The numbers (``comm.membership.origin``) of the ranks that are lost, and of those that have
#: joined.
Marked = tuple[Sequence[int], Sequence[int]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that both programs have."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # A replacement for a lost rank needs some seconds until it joins.
    steps = 1000 if collective.config().grow == "on" else 80
    options.add_argument(
        "--steps",
        type=int,
        default=steps,
        help="(default: 80; 1000 with `collective run --replace`)",
    )
    options.add_argument(
        "--batch", type=int, default=32, help="digits per rank and step (default: 32)"
    )
    options.add_argument(
        "--kill",
        type=rank_at_step,
        action="append",
        default=[],
        metavar="RANK@STEP",
        help="kill the rank with this original number in the middle of this step",
    )
    options.add_argument("--picture", metavar="FILE.png", help="draw the loss over the steps")
    return options


def rank_at_step(text: str) -> tuple[int, int]:
    """Return the numbers of a text such as ``3@20``."""
    rank, _, step = text.partition("@")
    if not (rank.isdecimal() and step.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank and a step, such as 3@20")
    return int(rank), int(step)


def die(comm: collective.Communicator) -> None:
    """End this rank; a process ends without informing the other ranks."""
    if comm.capabilities.in_process:
        sys.exit("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def marked(
    marks: Mapping[int, Marked], step: int, comm: collective.Communicator, size: int
) -> dict[int, Marked]:
    """Return the marks, with a new one at ``step`` if ranks have been lost or have joined.

    Args:
        marks: the marks so far.
        step: the present step.
        comm: communicator of the present ranks.
        size: number of ranks at the start.
    """
    lost = {number for mark in marks.values() for number in mark[0]}
    joined = {number for mark in marks.values() for number in mark[1]}
    ever = set(range(size)) | joined
    found = (
        sorted(ever - set(comm.membership.origin) - lost),
        sorted(set(comm.membership.origin) - ever),
    )
    return {**marks, step: found} if any(found) else dict(marks)


def described(mark: Marked) -> str:
    """Return a text that names the lost ranks and those that have joined."""
    lost, joined = (", ".join(map(str, numbers)) for numbers in mark)
    return " and ".join(
        [f"lost rank {lost}"] * bool(lost) + [f"number {joined} joined"] * bool(joined)
    )


def report(
    comm: collective.Communicator,
    losses: Sequence[float],
    marks: Mapping[int, Marked],
    right: float,
    weights: Sequence[np.ndarray],
    picture: str | None,
) -> None:
    """Print and draw how training went, on rank 0.

    Collective: every rank calls it.

    Args:
        comm: communicator of the remaining ranks.
        losses: loss of each step, over the digits of all ranks that took part.
        marks: the steps before which the ranks changed, and the changes.
        right: share of the test digits that are recognised.
        weights: this rank's final weights.
        picture: path of the picture, or None.

    Raises:
        SystemExit: the ranks' weights differ.
    """
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()[:16]
    digests = comm.all_gather_object(digest)
    if set(digests) != {digest}:
        sys.exit(f"the ranks' final weights differ; their digests are {digests}")
    if comm.rank:
        return
    for step, mark in marks.items():
        print(f"step {step}: {described(mark)}; {losses[step]:.3f} is the loss then")
    print(
        f"{len(losses)} steps, the last with {comm.size} ranks: loss {losses[0]:.3f} -> "
        f"{losses[-1]:.3f}, test accuracy {right:.1%}"
    )
    print(f"the weights are the same on all of them: {digest}")
    if picture is not None:
        plot(picture, losses, marks)
        print(f"the loss over the steps is in {picture}")


def plot(path: str, losses: Sequence[float], marks: Mapping[int, Marked]) -> None:
    """Write a PNG: the loss over the steps, with a line at each step where the ranks changed."""
    # Avoid pyplot, which keeps global state and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(len(losses)), losses, color="steelblue", linewidth=1.8)
    for step, mark in marks.items():
        axes.axvline(step, color="firebrick", linestyle="--", linewidth=1)
        axes.text(
            step,
            max(losses),
            f" {described(mark)}",
            color="firebrick",
            verticalalignment="top",
            fontsize=9,
        )
    axes.set(xlabel="step", ylabel="training loss", ylim=(0, None), xlim=(0, len(losses) - 1))
    figure.savefig(path, dpi=120)
