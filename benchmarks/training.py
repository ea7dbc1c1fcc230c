"""Measurement of data-parallel training in PyTorch: ``python benchmarks/training.py``.

It compares our steps with PyTorch's. There are four parts, each with two ranks of one thread.
``--parts`` selects parts.

- ``wrappers``: the same model is wrapped by our ``DistributedDataParallel`` over ``shm`` and by
  PyTorch's over Gloo, with its ``gradient_as_bucket_view``. They take turns, A B A B …. A turn is
  some steps (forward, backward, SGD) from a common start; its figure is the mean of the slowest
  rank. Each wrapper also does turns under its ``no_sync()``. The difference is the time that
  syncing adds to a step.
- ``plugin``: PyTorch's wrapper over our process group, on ``shm``, against the same over Gloo.
- ``buckets``: our wrapper over ``gloo`` against the loop of the tutorials. The loop calls PyTorch's
  ``all_reduce`` over Gloo for one parameter after the other, after the backward pass.
- ``memory``: the peak memory of all ranks together. Each wrapper runs in its own processes. A page
  that ranks share counts once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from torch import nn

from collective.adapters.torch import DistributedDataParallel
from collective.tools.bench.alternate import alternate, median_excess, median_ratio, repeated
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.rivals import Gloo
from collective.tools.models.torch import model_of, step_of
from collective.tools.show import add_outputs, microseconds, print_table

# Promised bounds for the MLP: our added time over torch's, and torch's step over ours.
_ADDED, _STEP = 1 / 5, 1.3
# Promised bounds for PyTorch's wrapper over our process group, for an all-reduce for each
# parameter, and for memory.
_PLUGIN, _BUCKETS, _MEMORY = 1.3, 2.0, 1.05
_MODELS = "mlp lenet resnet"
_PARTS = "wrappers plugin buckets memory"
_MEMORY_OF = ("ours", "torch", "no wrapper")
_TITLES = {
    "wrappers": ("a training step", "ours", "torch's"),
    "plugin": ("a step of torch's wrapper", "over our shm", "over Gloo"),
    "buckets": ("a training step over gloo", "ours", "by parameter"),
}


@contextlib.contextmanager
def gloo(comm: Any, folder: Path) -> Iterator[None]:
    """Make the ranks those of torch.distributed over Gloo; they meet in ``folder``.

    At the end of the block, the caller must not hold a wrapper of PyTorch any more.
    """
    torch.set_num_threads(1)
    library = Gloo(folder, comm.rank, comm.size)
    yield
    gc.collect()  # a wrapper that is freed after its process group may hang
    library.close()


def wrapped_by_torch(model: nn.Module, group: Any = None) -> Any:
    """Return a model in PyTorch's wrapper, over Gloo or the process group."""
    return nn.parallel.DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=True
    )


def rank(comm: Any, folder: Path, part: str, names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Measure as one of the ranks; return the figures of each model."""
    with gloo(comm, folder):
        return {name: _turns(comm, part, name, quick) for name in names}


def _turns(comm: Any, part: str, name: str, quick: bool) -> dict[str, list[float]]:
    """Check that all sides have the same gradients, and return the times of their turns."""
    wrapped = _wrapped(part, comm, name)
    x = model_of(name)[1]
    for module in wrapped.values():
        module(x * (comm.rank + 1)).square().mean().backward()
    if part == "buckets":
        _by_parameter(wrapped["by parameter"])
    first, *others = ([p.grad for p in module.parameters()] for module in wrapped.values())
    for gradients in others:
        for a, b in zip(first, gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    rounds, turn = (3, 0.03) if quick else (15, 0.4)
    # Warm up, since the wrappers change the layout of their buckets in the first steps.
    return alternate(comm, _sides(wrapped, x), rounds, turn, warm=3)


def _wrapped(part: str, comm: Any, name: str) -> dict[str, Any]:
    """Return the sides of a part, each with its own model."""
    first, second = (model_of(name)[0] for _ in range(2))
    if part == "plugin":
        import collective.adapters.torch.plugin  # noqa: F401  # registers it

        group = dist.new_group(backend="collective")
        return {"ours": wrapped_by_torch(first, group), "torch": wrapped_by_torch(second)}
    ours = DistributedDataParallel(first, comm)
    if part == "buckets":
        return {"ours": ours, "by parameter": second}
    return {"ours": ours, "torch": wrapped_by_torch(second)}


def _sides(wrapped: dict[str, Any], x: torch.Tensor) -> dict[str, Callable[[int], None]]:
    """Return the steps of each side with syncing and without."""
    sides = {}
    for side, module in wrapped.items():
        bare = step_of(module, x)
        if side == "by parameter":
            synced = step_of(module, x, partial(_by_parameter, module))
            sides[side], sides[f"{side}, no_sync"] = repeated(synced), repeated(bare)
        else:
            sides[side], sides[f"{side}, no_sync"] = repeated(bare), _within(module.no_sync, bare)
    return sides


def _within(
    context: Callable[[], contextlib.AbstractContextManager[Any]], step: Callable[[], None]
) -> Callable[[int], None]:
    def several(count: int) -> None:
        with context():
            repeated(step)(count)

    return several


def _by_parameter(model: nn.Module) -> None:
    """Average the gradients as in "Writing distributed applications with PyTorch"."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def memory(comm: Any, folder: Path, side: str, names: Sequence[str], quick: bool) -> int:
    """Train as one of the ranks of one side; return the peak of all ranks' memory in bytes."""
    torch.set_num_threads(1)
    with gloo(comm, folder) if side == "torch" else contextlib.nullcontext():
        return _peak_of(comm, side, names[0], 3 if quick else 10)


def _peak_of(comm: Any, side: str, name: str, steps: int) -> int:
    model, x = model_of(name)
    wrapped: Any = model
    if side == "ours":
        wrapped = DistributedDataParallel(model, comm)
    elif side == "torch":
        wrapped = wrapped_by_torch(model)
    step = step_of(wrapped, x)
    for _ in range(steps):
        step()
    comm.barrier()
    return sum(comm.all_gather_object(_peak_bytes()))


def _peak_bytes() -> int:
    """Return the peak memory of this process, with its current share of shared pages."""
    texts = [Path("/proc/self", name).read_text() for name in ("status", "smaps_rollup")]
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for text in texts
        for line in text.splitlines()
        if line.endswith(" kB")
    }
    return (kib["VmHWM"] - (kib["Rss"] - kib["Pss"])) << 10


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


def two_ranks(work: Callable[..., Any], part: str, names: Sequence[str], quick: bool) -> Any:
    """Run two ranks of a part and return their figures."""
    backend = "gloo" if part == "buckets" else "shm"
    return peers.run_here(2, backend, work, part, names, quick)


def measure(parts: Sequence[str], names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Return the figures of each part."""
    figures: dict[str, Any] = {}
    for part in parts:
        if part != "memory":
            figures[part] = two_ranks(rank, part, names, quick)
            continue
        figures[part] = {
            name: {side: two_ranks(memory, side, [name], quick) for side in _MEMORY_OF}
            for name in names
        }
    return figures


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print the tables of a run."""
    print(f"{headline(run['machine'])}; 2 ranks\n")
    for part, models in run["parts"].items():
        if part == "memory":
            _show_memory(models, markdown)
            continue
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
        print_table(title, header, rows, markdown)


def _is_kept(part: str, name: str, got: dict[str, float]) -> bool:
    share = got["ours_added"] / got["other_added"]
    if part == "plugin":
        return got["faster"] >= (_PLUGIN if name == "mlp" else 1.0)
    if part == "buckets":
        return share <= 1 / _BUCKETS
    return got["faster"] >= (_STEP if name == "mlp" else 1.0) and (name != "mlp" or share <= _ADDED)


def _show_memory(models: dict[str, dict[str, int]], markdown: bool) -> None:
    rows = []
    for name, peaks in models.items():
        ratio = peaks["ours"] / peaks["torch"]
        shown = [f"{nbytes / 2**20:.0f}" for nbytes in peaks.values()]
        rows.append([name, *shown, f"{ratio:.3f}", "kept" if ratio <= _MEMORY else "missed"])
    header = ["model", *(f"{side} MiB" for side in _MEMORY_OF), "of torch's", "verdict"]
    print_table("peak memory of both ranks", header, rows, markdown)


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
        return {"parts": measure(options.parts, options.models, options.quick)}

    show(measured(options, all_parts), options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
