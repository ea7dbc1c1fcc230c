"""Steps of data-parallel training, ours against PyTorch's: ``python benchmarks/training.py``.

In each of two ranks (one thread each) the same model is wrapped by our
``DistributedDataParallel`` over ``shm`` and by PyTorch's over Gloo, with its
``gradient_as_bucket_view``. They take turns, A B A B …; a turn is some steps (forward, backward,
SGD) from a common start, and its figure the slowest rank's mean. Each wrapper also does turns
under its ``no_sync()``: the difference is what syncing adds to a step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from report import Observer, duration, print_table, write
from torch import nn

# What was promised of the MLP: of torch's added time, and of its step.
_ADDED, _STEP = 1 / 5, 1.3
_MODELS = "mlp lenet resnet"


class _Residual(nn.Module):
    """Two convolutions and a way around; He et al., "Deep residual learning" (2016)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.relu(self.body(x) + self.around(x))
        return out


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and a batch for it."""
    torch.manual_seed(0)
    if name == "mlp":  # 25 MB of gradients
        layers = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers), torch.randn(64, 1024)
    if name == "lenet":
        made = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
        )
        return made, torch.randn(32, 1, 28, 28)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [_Residual(a, b) for a, b in itertools.pairwise(widths)]
    head = [nn.Conv2d(3, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*head, *blocks, *tail), torch.randn(4, 3, 32, 32)


def _step(model: Any, x: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def rank(folder: Path, names: Sequence[str], quick: bool) -> None:
    """Measure as one of the ranks; rank 0 writes the figures to ``folder``."""
    import torch.distributed as dist

    import collective
    from collective.adapters.torch import DistributedDataParallel

    torch.set_num_threads(1)
    comm = collective.init("shm")
    store = dist.FileStore(str(folder / "store"), comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    rounds, turn = (3, 0.1) if quick else (15, 0.4)
    found = {}
    for name in names:
        sides: dict[str, tuple[Any, Callable[[], None]]] = {}
        ours = DistributedDataParallel(model_of(name)[0], comm)
        theirs = nn.parallel.DistributedDataParallel(
            model_of(name)[0], gradient_as_bucket_view=True
        )
        x = model_of(name)[1]
        for side, wrapped in (("ours", ours), ("torch", theirs)):
            step = _step(wrapped, x)
            sides[side] = contextlib.nullcontext, step
            sides[f"{side}, no_sync"] = wrapped.no_sync, step
            wrapped(x * (comm.rank + 1)).square().mean().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5)
        found[name] = _turns(comm, sides, rounds, turn)
    if comm.rank == 0:
        (folder / "figures.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    comm.close()


def _turns(
    comm: Any, sides: dict[str, tuple[Any, Callable[[], None]]], rounds: int, turn: float
) -> dict[str, list[float]]:
    """Return each side's seconds a step, a figure a turn."""

    def block(side: str, count: int) -> float:
        context, step = sides[side]
        comm.barrier()
        start = time.perf_counter()
        with context():
            for _ in range(count):
                step()
        mine = torch.tensor([(time.perf_counter() - start) / count], dtype=torch.float64)
        slowest: float = comm.all_reduce(mine, op="max").item()
        return slowest

    counts = {}
    for side in sides:
        block(side, 3)  # buckets are laid out anew in the first of them
        counts[side] = max(1, round(turn / block(side, 3)))
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side in sides:
            times[side].append(block(side, counts[side]))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Return medians, and medians of what neighbouring turns differ by, in seconds."""
    added = {
        side: statistics.median(a - b for a, b in zip(times[side], times[f"{side}, no_sync"]))
        for side in ("ours", "torch")
    }
    return {
        "ours": statistics.median(times["ours"]),
        "torch": statistics.median(times["torch"]),
        "ours_added": added["ours"],
        "torch_added": added["torch"],
        "faster": statistics.median(b / a for a, b in zip(times["ours"], times["torch"])),
    }


def measure(names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Run two ranks and return their figures."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "collective", "run", "-n", "2", __file__, "--rank", folder]
        command += ["--models", *names] + ["--quick"] * quick
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    return found


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print the table of a run."""
    about = run["machine"]
    print(f"{about['date']}, {about['cpu']}, {about['cores']} cores, 2 ranks\n")
    rows = []
    for name, times in run["models"].items():
        got = summary(times)
        share = got["ours_added"] / got["torch_added"]
        rows.append(
            [
                name, duration(got["ours"]), duration(got["torch"]), f"{got['faster']:.2f}",
                duration(max(0.0, got["ours_added"])), duration(max(0.0, got["torch_added"])),
                f"{share:.2f}",
            ]
        )  # fmt: skip
    header = ["model", "our step µs", "torch's µs", "times as fast", "our sync adds µs"]
    print_table("a training step", [*header, "torch's adds µs", "of torch's"], rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Steps of data-parallel training.")
    parser.add_argument("--models", nargs="+", default=_MODELS.split(), choices=_MODELS.split())
    parser.add_argument("--quick", action="store_true", help="three short turns each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank(options.rank, options.models, options.quick)
        return 0
    observer = Observer()
    run = {"models": measure(options.models, options.quick), "machine": observer.machine()}
    write(options.json, run)
    show(run, options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
