"""What splits save and cost: ``python benchmarks/splitting.py --memory --time --ranks``.

``--memory``: the bytes that a training step keeps for its backward pass, counted and not sampled,
of a chain of six layers like a U-Net's on one image, whole, in eight stripes, and with the
channels between two convolutions in eight parts. ``--time``: the time of such a step, whole and in
stripes, in turns. ``--ranks``: the time of a step on two ranks, each with half of the rows, and of
one process's, in turns. Medians; PyTorch has one thread everywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import collective
from collective.adapters.torch import Split
from collective.bench.report import Observer, print_table, write
from collective.testing import run_ranks

_STRIPES = 8
_CHANNELS = 32


def chain(channels: int = _CHANNELS) -> nn.Module:
    """Return six layers: two convolutions, down, one, up, one."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()),
            *(nn.ConvTranspose2d(channels, channels, 2, 2), nn.Conv2d(channels, 1, 3, padding=1)),
        )


def image(size: int) -> torch.Tensor:
    """Return one image, the same everywhere."""
    return torch.linspace(-1, 1, size * size).reshape(1, 1, size, size)


def step(module: nn.Module, x: torch.Tensor) -> None:
    """Do a forward and a backward pass."""
    module.zero_grad()
    module(x).square().mean().backward()


def memory(size: int) -> list[dict[str, Any]]:
    """Count what is kept, and judge it."""
    x, rows = image(size), []
    found = Split(chain(), data=(_STRIPES,)).memory_report(x)
    rows.append({"what": f"bytes kept, data=({_STRIPES},)", "ratio": found.ratio, "must": 1 / 6})
    pair = nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 1, 3))
    found = Split(pair, channels=_STRIPES).memory_report(x)
    rows.append({"what": f"bytes kept, channels={_STRIPES}", "ratio": found.ratio, "must": 1 / 7})
    return rows


def _turns(sides: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """Return the median seconds of each side, measured in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(count + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            side()
            if turn:  # the first is for warming up
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}


def times(size: int, count: int) -> list[dict[str, Any]]:
    """Time a step in stripes beside the whole one."""
    x, whole = image(size), chain()
    kept = Split(chain(), data=(_STRIPES,), recompute=False)
    again = Split(chain(), data=(_STRIPES,))
    found = _turns(
        {
            "whole": lambda: step(whole, x),
            "kept": lambda: step(kept, x),
            "again": lambda: step(again, x),
        },
        count,
    )
    return [
        {"what": "time, recompute=False", "ratio": found["kept"] / found["whole"], "must": 1.15},
        {"what": "time, recompute=True", "ratio": found["again"] / found["whole"], "must": 1.6},
    ]


def _on_a_rank(comm: collective.Communicator, size: int, count: int) -> float:
    torch.set_num_threads(1)
    x, whole = image(size), chain()
    split = Split(chain(), data=(comm.size,), comm=comm)

    def together() -> None:
        comm.barrier()
        step(split, x)

    def alone() -> None:
        comm.barrier()
        if comm.rank == 0:
            step(whole, x)

    found = _turns({"together": together, "alone": alone}, count)
    return found["alone"] / found["together"]


def ranks(size: int, count: int) -> list[dict[str, Any]]:
    """Time a step on two ranks beside one rank's."""
    faster = run_ranks(2, _on_a_rank, size, count, backend="shm", timeout=540)[0]
    return [{"what": "2 ranks, times as fast as 1", "ratio": faster, "least": 1.6}]


def _verdict(row: dict[str, Any]) -> str:
    kept = row["ratio"] <= row["must"] if "must" in row else row["ratio"] >= row["least"]
    return "kept" if kept else "missed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="What splits save and cost.")
    parser.add_argument("--memory", action="store_true", help="count what is kept")
    parser.add_argument("--time", action="store_true", help="time a step in stripes")
    parser.add_argument("--ranks", action="store_true", help="time a step on two ranks")
    parser.add_argument("--size", type=int, default=1024, help="rows of the image (default: 1024)")
    parser.add_argument("--turns", type=int, default=5, help="steps a side (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    observer, rows = Observer(), []
    everything = not (options.memory or options.time or options.ranks)
    if options.memory or everything:
        rows += memory(options.size)
    if options.time or everything:
        rows += times(options.size, options.turns)
    if options.ranks or everything:
        rows += ranks(options.size, options.turns)
    run = {"rows": rows, "machine": observer.machine()}
    write(options.json, run)
    print_table(
        f"{run['machine']['date']}, {run['machine']['cpu']}, {options.size} rows",
        ["what", "bound", "measured", "verdict"],
        [
            [
                row["what"],
                f"≤ {row['must']:.2f}" if "must" in row else f"≥ {row['least']:.2f}",
                f"{row['ratio']:.3f}",
                _verdict(row),
            ]
            for row in rows
        ],
        options.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
