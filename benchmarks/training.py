"""Measurement of data-parallel training in PyTorch: ``python benchmarks/training.py``.

It compares our steps with PyTorch's. There are two parts, each with two ranks of one thread.
``--parts`` selects parts.

- ``wrappers``: the same model is wrapped by our ``DistributedDataParallel`` over ``shm`` and by
  PyTorch's over Gloo, with its ``gradient_as_bucket_view``. They take turns, A B A B …. A turn is
  some steps (forward, backward, SGD) from a common start; its figure is the mean of the slowest
  rank. Each wrapper also does turns under its ``no_sync()``. The difference is the time that
  syncing adds to a step.
- ``plugin``: PyTorch's wrapper over our process group, on ``shm``, against the same over Gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from torch import nn
from turns import alternate, median_excess, median_ratio, repeated

from collective.adapters.torch import DistributedDataParallel
from collective.tools.bench.libraries import TorchDistributed
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, microseconds, print_table

# Promised bounds for the MLP: our added time over torch's, and torch's step over ours.
_ADDED, _STEP = 1 / 5, 1.3
# Promised bound for PyTorch's wrapper over our process group.
_PLUGIN = 1.3
_MODELS = "mlp lenet"
# Shapes of the batches.
_BATCHES = {"mlp": (64, 1024), "lenet": (32, 1, 28, 28)}
_PARTS = "wrappers plugin"
_TITLES = {
    "wrappers": ("a training step", "ours", "torch's"),
    "plugin": ("a step of torch's wrapper", "over our shm", "over Gloo"),
}


def _model(name: str) -> nn.Module:
    """Return ``"mlp"``, whose six layers have 25 MB of gradients, or ``"lenet"``; seeded."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers[:-1])
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


def _step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a step of training on a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _wrapped_by_torch(model: nn.Module, group: Any = None) -> Any:
    """Return a model in PyTorch's wrapper, over Gloo or the process group."""
    return nn.parallel.DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True
    )


def _rank(comm: Any, folder: Path, part: str, names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Measure as one of the ranks; return the figures of each model."""
    torch.set_num_threads(1)
    library = TorchDistributed(folder, comm.rank, comm.size)
    found = {name: _turns(comm, part, name, quick) for name in names}
    gc.collect()  # a wrapper that is freed after its process group may hang
    library.close()
    return found


def _turns(comm: Any, part: str, name: str, quick: bool) -> dict[str, list[float]]:
    """Check that all sides have the same gradients, and return the times of their turns."""
    wrapped = _wrapped(part, comm, name)
    x = torch.randn(_BATCHES[name], generator=torch.Generator().manual_seed(0))
    for module in wrapped.values():
        module(x * (comm.rank + 1)).square().mean().backward()
    first, *others = ([p.grad for p in module.parameters()] for module in wrapped.values())
    for gradients in others:
        for a, b in zip(first, gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    rounds, turn = (3, 0.03) if quick else (15, 0.4)
    # Warm up, since the wrappers change the layout of their buckets in the first steps.
    return alternate(comm, _sides(wrapped, x), rounds, turn, warm=3)


def _wrapped(part: str, comm: Any, name: str) -> dict[str, Any]:
    """Return the sides of a part, each with its own model."""
    first, second = (_model(name) for _ in range(2))
    if part == "plugin":
        import collective.adapters.torch.plugin  # noqa: F401  # registers it

        group = dist.new_group(backend="collective")
        return {"ours": _wrapped_by_torch(first, group), "torch": _wrapped_by_torch(second)}
    return {"ours": DistributedDataParallel(first, comm), "torch": _wrapped_by_torch(second)}


def _sides(wrapped: dict[str, Any], x: torch.Tensor) -> dict[str, Callable[[int], None]]:
    """Return the steps of each side with syncing and without."""
    sides = {}
    for side, module in wrapped.items():
        step = _step_of(module, x)
        sides[side], sides[f"{side}, no_sync"] = repeated(step), _within(module.no_sync, step)
    return sides


def _within(
    context: Callable[[], contextlib.AbstractContextManager[Any]], step: Callable[[], None]
) -> Callable[[int], None]:
    def several(count: int) -> None:
        with context():
            repeated(step)(count)

    return several


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Return medians in seconds, and medians of differences and ratios of neighbouring turns."""
    ours, other = (side for side in times if not side.endswith("no_sync"))
    added = {side: median_excess(times[side], times[f"{side}, no_sync"]) for side in (ours, other)}
    return {
        "ours": statistics.median(times[ours]),
        "other": statistics.median(times[other]),
        "ours_added": added[ours],
        "other_added": added[other],
        "faster": median_ratio(times[other], times[ours]),
    }


def two_ranks(part: str, names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Run two ranks of a part and return the figures of each model."""
    found: dict[str, Any] = peers.run_here(2, "shm", _rank, part, names, quick)
    return found


def show(run: dict[str, Any]) -> None:
    """Print the tables of a run."""
    print(f"{headline(run['machine'])}; 2 ranks\n")
    for part, models in run["parts"].items():
        rows = []
        for name, times in models.items():
            got = summary(times)
            share = got["ours_added"] / got["other_added"]
            figures = [got["ours"], got["other"], got["ours_added"], got["other_added"]]
            shown = [microseconds(max(0.0, seconds)) for seconds in figures]
            kept = "kept" if _is_kept(part, name, got) else "missed"
            rows.append(
                [name, *shown[:2], f"{got['faster']:.2f}", *shown[2:], f"{share:.2f}", kept]
            )
        title, ours, other = _TITLES[part]
        header = ["model", f"{ours} µs", f"{other} µs", "times as fast", f"sync adds: {ours} µs"]
        header += [f"{other} µs", "of that", "verdict"]
        print_table(title, header, rows)


def _is_kept(part: str, name: str, got: dict[str, float]) -> bool:
    share = got["ours_added"] / got["other_added"]
    if part == "plugin":
        return got["faster"] >= (_PLUGIN if name == "mlp" else 1.0)
    return got["faster"] >= (_STEP if name == "mlp" else 1.0) and (name != "mlp" or share <= _ADDED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure steps of data-parallel training.")
    parser.add_argument("--parts", nargs="+", default=_PARTS.split(), choices=_PARTS.split(),
                        metavar="PART", help=f"of {_PARTS} (default: all)")  # fmt: skip
    parser.add_argument("--models", nargs="+", default=_MODELS.split(), choices=_MODELS.split())
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    add_outputs(parser)
    options = parser.parse_args(arguments)

    def all_parts() -> dict[str, Any]:
        asked = options.models, options.quick
        return {"parts": {part: two_ranks(part, *asked) for part in options.parts}}

    show(measured(options, all_parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
