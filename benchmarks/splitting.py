"""Measurement of the savings and costs of splits: ``python benchmarks/splitting.py``.

``--memory``
    The bytes that a training step keeps for its backward pass, counted and not sampled. The model
    is a chain of six layers like a U-Net's on one image: whole, in eight stripes, and with the
    channels between two convolutions in eight parts. There are also whole networks with their
    channels in four parts, in PyTorch and, if it is installed, in Chainer
    (``split_networks.py``).

``--time``
    The time of such a step, whole and in stripes, in turns.

``--ranks``
    The time of a step on two ranks, each with half of the rows, and in one process, in turns.

``--channels``
    The difference of the losses from those of one process, in ten steps of training a block of
    VGG. The channels are split over two ranks, with all filters on each rank, or with only its own
    filters on each rank. In the second case the bytes of the filters are counted. For comparison
    there is the computation of ChainerMN's ``ParallelConvolution2D`` on two ranks. There each rank
    convolves its half of the input channels into its half of the output channels, which is
    ``groups=2``.

The figures are medians. PyTorch has one thread everywhere.

The allocator is set to keep free memory, as the allocators of GPUs do. By default, glibc returns
large arrays to the system after each use and gets them again page by page. This more than doubles
the processor time of a whole step here, and affects small stripes less. ``--as-is`` keeps the
default.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import util
from typing import Any

import split_networks
import torch
from torch import nn

import collective
from collective.adapters.torch import Split
from collective.launch import restart_with
from collective.testing import preload, run_ranks
from collective.tools.bench.alternate import alternate, repeated
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, print_table

_STRIPES = 8
_PARTS = 4
# mallopt(3): map no block separately, and return no memory to the system.
_KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def image(size: int) -> torch.Tensor:
    """Return one image, the same everywhere."""
    return torch.linspace(-1, 1, size * size).reshape(1, 1, size, size)


def step(module: nn.Module, x: torch.Tensor) -> None:
    """Do a forward and a backward pass."""
    module.zero_grad()
    module(x).square().mean().backward()


def memory(size: int) -> list[dict[str, Any]]:
    """Count the bytes that steps keep, and return rows with their bounds."""
    x, rows = image(size), []
    found = Split(split_networks.chain(), data=(_STRIPES,)).memory_report(x)
    rows.append({"what": f"bytes kept, data=({_STRIPES},)", "ratio": found.ratio, "must": 1 / 6})
    pair = nn.Sequential(nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 1, 3))
    found = Split(pair, channels=_STRIPES).memory_report(x)
    rows.append({"what": f"bytes kept, channels={_STRIPES}", "ratio": found.ratio, "must": 1 / 7})
    ways: list[dict[str, Any]] = [{"data": (_STRIPES,)}, {"channels": _PARTS}]
    for how in ways:
        found = Split(split_networks.chain(), recompute=False, **how).memory_report(x)
        named = ", ".join(f"{name}={value}" for name, value in how.items())
        rows.append({"what": f"bytes kept, {named}, recompute=False", "ratio": found.ratio})
    return rows + networks(min(size, 256))


def networks(size: int) -> list[dict[str, Any]]:
    """Count the bytes that networks keep with their channels in parts, in both frameworks."""
    x = image(size)
    found = [
        ("PyTorch", name, Split(make(), channels=_PARTS).memory_report(x))
        for name, make in split_networks.torch_networks().items()
    ]
    if util.find_spec("chainer") is not None:
        from collective.adapters.chainer.splits import Split as LinkSplit

        found += [
            ("Chainer", name, LinkSplit(make(), channels=_PARTS).memory_report(x.numpy()))
            for name, make in split_networks.chainer_networks().items()
        ]
    return [
        {"what": f"{framework}, channels={_PARTS}, {name}", "ratio": report.ratio}
        for framework, name, report in found
    ]


def _turns(
    comm: collective.Communicator | None, sides: dict[str, Callable[[], None]], count: int
) -> dict[str, float]:
    """Return the median seconds of each side, measured in turns of one step."""
    steps = {name: repeated(side) for name, side in sides.items()}
    seconds = alternate(comm, steps, count, 0.0, warm=1)
    return {name: statistics.median(turns) for name, turns in seconds.items()}


def times(size: int, count: int) -> list[dict[str, Any]]:
    """Compare the time of a step in stripes with that of a whole step."""
    x, whole = image(size), split_networks.chain()
    kept = Split(split_networks.chain(), data=(_STRIPES,), recompute=False)
    again = Split(split_networks.chain(), data=(_STRIPES,))
    modules = {"whole": whole, "kept": kept, "again": again}
    found = _turns(None, {name: partial(step, each, x) for name, each in modules.items()}, count)
    return [
        {"what": "time, recompute=False", "ratio": found["kept"] / found["whole"], "must": 1.15},
        {"what": "time, recompute=True", "ratio": found["again"] / found["whole"], "must": 1.6},
    ]


def _on_a_rank(comm: collective.Communicator, size: int, count: int) -> float:
    torch.set_num_threads(1)
    x, whole = image(size), split_networks.chain()
    split = Split(split_networks.chain(), data=(comm.size,), comm=comm)

    def alone() -> None:
        if comm.rank == 0:
            step(whole, x)

    found = _turns(comm, {"together": partial(step, split, x), "alone": alone}, count)
    return found["alone"] / found["together"]


def ranks(size: int, count: int) -> list[dict[str, Any]]:
    """Compare the time of a step on two ranks with that on one rank."""
    faster = run_ranks(2, _on_a_rank, size, count, backend="shm", timeout=540)[0]
    return [{"what": "2 ranks, times as fast as 1", "ratio": faster, "least": 1.6}]


def vgg(groups: int = 1) -> nn.Module:
    """Return two convolutions as in VGG, and a classifier; two groups have fewer weights."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(8, 16, 3, padding=1, groups=groups), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1, groups=groups), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 8 * 8, 10)),
        ).double()


def losses(module: nn.Module) -> list[float]:
    """Train on one batch for ten steps, and return the losses."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, 16, 16, generator=random, dtype=torch.float64)
    classes = torch.randint(10, (16,), generator=random)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, momentum=0.9)
    found = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(module(x), classes)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


def held(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and their gradients."""
    return sum(
        tensor.nbytes
        for parameter in module.parameters()
        for tensor in (parameter, parameter.grad)
        if tensor is not None
    )


def _losses_on_a_rank(comm: collective.Communicator, filters: str) -> tuple[list[float], int]:
    torch.set_num_threads(1)
    split = Split(vgg(), channels=comm.size, comm=comm, filters=filters)
    return losses(split), held(split)


def channels() -> list[dict[str, Any]]:
    """Compare the losses with channels split over ranks with the losses of one process."""
    whole = vgg()
    one = losses(whole)

    def apart(others: Sequence[float]) -> float:
        return max(abs(a - b) / abs(a) for a, b in zip(one, others))

    def over_ranks(filters: str) -> tuple[float, int]:
        found = run_ranks(2, _losses_on_a_rank, filters, backend="shm", timeout=300)
        return apart(found[0][0]), max(each for _, each in found)

    (ours, _), (own, most) = over_ranks("all"), over_ranks("own")
    theirs = apart(losses(vgg(groups=2)))
    return [
        {"what": "loss, channels over 2 ranks", "ratio": ours, "must": 1e-12},
        {"what": "loss, filters='own'", "ratio": own, "must": 1e-12},
        {"what": "weights, filters='own'", "ratio": most / held(whole), "must": 0.51},
        {"what": "loss, groups=2, as ParallelConvolution2D", "ratio": theirs},
    ]


def _bound(row: dict[str, Any]) -> str:
    if "must" in row:
        return f"≤ {row['must']:.3g}"
    return f"≥ {row['least']:.3g}" if "least" in row else ""


def _verdict(row: dict[str, Any]) -> str:
    if not _bound(row):
        return ""
    kept = row["ratio"] <= row["must"] if "must" in row else row["ratio"] >= row["least"]
    return "kept" if kept else "missed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the savings and costs of splits.")
    parser.add_argument("--memory", action="store_true", help="count the bytes that a step keeps")
    parser.add_argument("--time", action="store_true", help="time a step in stripes")
    parser.add_argument("--ranks", action="store_true", help="time a step on two ranks")
    parser.add_argument("--channels", action="store_true", help="train with channels over ranks")
    parser.add_argument("--size", type=int, default=1024, help="rows of the image (default: 1024)")
    parser.add_argument("--turns", type=int, default=5, help="steps of each side (default: 5)")
    parser.add_argument("--as-is", action="store_true", help="do not change the allocator")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    if arguments is None and not options.as_is:
        restart_with(**_KEEPING)
    # Import PyTorch once for all ranks that are started below. The first optimizer imports the
    # second module.
    preload(["torch", "torch._dynamo"])
    torch.set_num_threads(1)

    def measure() -> dict[str, Any]:
        parts = {
            "memory": lambda: memory(options.size),
            "time": lambda: times(options.size, options.turns),
            "ranks": lambda: ranks(options.size, options.turns),
            "channels": channels,
        }
        chosen = [name for name in parts if getattr(options, name)] or parts
        return {"rows": [row for name in chosen for row in parts[name]()]}

    run = measured(options, measure)
    print_table(
        f"{headline(run['machine'])}; {options.size} rows",
        ["what", "bound", "measured", "verdict"],
        [[row["what"], _bound(row), f"{row['ratio']:.3g}", _verdict(row)] for row in run["rows"]],
        options.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
