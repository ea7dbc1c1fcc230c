"""What ``elastic.py`` and ``elastic_chainer.py`` share: who dies when, what is said and drawn."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence

import numpy as np

import collective

#: The numbers (``comm.origin``) of those who are not there any more, and of those who are new.
Marked = tuple[Sequence[int], Sequence[int]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that both have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Who stands in for a lost rank needs some seconds until it is there.
    steps = 1000 if collective.config().grow == "on" else 80
    made.add_argument(
        "--steps",
        type=int,
        default=steps,
        help="(default: 80; 1000 with `collective run --replace`)",
    )
    made.add_argument("--batch", type=int, default=32, help="digits a rank and step (default: 32)")
    made.add_argument(
        "--kill",
        type=_kill,
        action="append",
        default=[],
        metavar="RANK@STEP",
        help="kill the rank that was this one at first in the middle of that step",
    )
    made.add_argument("--picture", metavar="FILE.png", help="draw the loss over the steps")
    return made


def _kill(text: str) -> tuple[int, int]:
    rank, _, step = text.partition("@")
    if not (rank.isdecimal() and step.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}; a rank and a step, such as 3@20")
    return int(rank), int(step)


def die(comm: collective.Communicator) -> None:
    """End this rank, without a word to the others if it is a process."""
    if comm.capabilities.in_process:
        sys.exit("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def marked(
    marks: Mapping[int, Marked], step: int, comm: collective.Communicator, size: int
) -> dict[int, Marked]:
    """Return the marks, and at this step who is not here any more, or new, of ``size`` at first."""
    lost = {number for mark in marks.values() for number in mark[0]}
    joined = {number for mark in marks.values() for number in mark[1]}
    ever = set(range(size)) | joined
    found = sorted(ever - set(comm.origin) - lost), sorted(set(comm.origin) - ever)
    return {**marks, step: found} if any(found) else dict(marks)


def described(mark: Marked) -> str:
    """Say who was lost, and who has joined."""
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
        comm: the ranks that are left.
        losses: of each step, over the digits of all ranks that took part.
        marks: the steps before which the ranks changed, and how.
        right: the share of the digits for the test that are recognized.
        weights: that this rank has ended with.
        picture: where to draw, or None.

    Raises:
        SystemExit: the ranks have not the same weights.
    """
    found = hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()[:16]
    every = comm.all_gather_object(found)
    if set(every) != {found}:
        sys.exit(f"the ranks have ended with other weights than each other: {every}")
    if comm.rank:
        return
    for step, mark in marks.items():
        print(f"step {step}: {described(mark)}; {losses[step]:.3f} is the loss then")
    print(
        f"{len(losses)} steps, the last with {comm.size} ranks: loss {losses[0]:.3f} -> "
        f"{losses[-1]:.3f}, test accuracy {right:.1%}"
    )
    print(f"the weights are the same on all of them: {found}")
    if picture is not None:
        plot(picture, losses, marks)
        print(f"the loss over the steps is in {picture}")


def plot(path: str, losses: Sequence[float], marks: Mapping[int, Marked]) -> None:
    """Write a PNG: the loss over the steps, and a line where ranks were lost."""
    # Not pyplot: it keeps global state, and would look for a display.
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
