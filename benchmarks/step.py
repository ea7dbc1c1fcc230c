"""Breakdown of the time that data-parallel training adds to a step: ``python benchmarks/step.py``.

Two ranks of one thread each train an MLP of six layers of 1024, with 25 MB of gradients, in
PyTorch and in Chainer. The same processes run several kinds of step, which differ by one thing
each. The kinds take turns, A B C A B C …. A turn is some steps from a common start; its figure is
the mean of the slowest rank. A share is the median of the differences between neighbouring turns:

===================  ===========================================================================
skew                 a step with a barrier after the backward pass, minus one without: the ranks
                     wait for the slower one in every step
hooks and copies     a step under ``no_sync()``, minus one without a wrapper: gradients are copied
                     into their buckets, and no rank waits
the reduction        an all-reduce of the same size, of memory without gradients, back to back
cold caches          the same all-reduce within a step, after the barrier, minus the step with the
                     barrier, minus its time back to back: the time to fetch data into the caches,
                     for the all-reduce and for the optimizer after it
the rest             the time that the wrapper adds, minus all of these: several buckets, the
                     background thread, and as a negative share the time that overlap hides
===================  ===========================================================================

For comparison there are PyTorch's own wrapper over our process group and over Gloo. In Chainer, if
mpi4py is installed, there is ChainerMN's ``naive`` (``--mpi-envs``).

``--clock processor`` measures the processor time of the ranks' threads instead. Other programs on
the machine have little influence on this time. A rank that polls while it waits counts as busy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peers

import collective
from collective.launch.ranks import Participant
from collective.tools.bench.alternate import alternate, median_excess, repeated
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, print_table

_FRAMEWORKS = ("torch", "chainer")
_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
_BARE, _BARRIER, _KEPT = "bare", "with a barrier", "no_sync"
_COLD, _WARM, _OURS = "with a reduction", "a reduction", "ours"

Step = Callable[[], None]


# -- in the ranks -----------------------------------------------------------------------


def torch_sides(comm: Any, options: argparse.Namespace) -> dict[str, Step]:
    """Return the kinds of step in PyTorch."""
    import torch.distributed as dist
    from training import wrapped_by_torch

    import collective.adapters.torch.plugin  # noqa: F401  # registers it
    from collective.adapters.torch import DistributedDataParallel
    from collective.tools.models.torch import model_of, step_of

    plain, x = model_of("mlp", options.width)
    first, second, third = (model_of("mlp", options.width)[0] for _ in range(3))
    flat = comm.empty(sum(p.numel() for p in plain.parameters()), "float32", like=x)
    flat[:] = 0
    ours = DistributedDataParallel(first, comm, bucket_mib=options.bucket_mib)
    plugin = wrapped_by_torch(second, dist.new_group(backend="collective"))
    synced = step_of(ours, x)

    def unsynced() -> None:
        with ours.no_sync():
            synced()

    return {
        **_sides(comm, flat, lambda after: step_of(plain, x, after)),
        _KEPT: unsynced,
        _OURS: synced,
        "torch's, over ours": step_of(plugin, x),
        "torch's, over Gloo": step_of(wrapped_by_torch(third), x),
    }


def chainer_sides(comm: Any, options: argparse.Namespace) -> dict[str, Step]:
    """Return the kinds of step in Chainer."""
    import numpy as np
    from chainer_training import mlp_step

    # This import comes first: without it, `import chainer` fails with a current NumPy.
    from collective.adapters.chainer.optimizer import create_multi_node_optimizer

    import chainer  # isort: skip

    def sgd() -> Any:
        return chainer.optimizers.SGD(1e-4)

    plain = mlp_step(sgd(), options.width)
    flat = comm.empty(plain.model.count_params(), np.float32)
    flat[...] = 0
    ours = create_multi_node_optimizer(sgd(), comm, bucket_mib=options.bucket_mib)
    step = mlp_step(ours, options.width)

    def with_after(after: Step) -> Step:
        def call() -> None:
            plain.backward()
            after()
            plain.optimizer.update()

        return call

    def unsynced() -> None:
        loss = step.loss()
        step.model.cleargrads()
        with ours.no_sync():
            ours.backward(loss)
        ours.actual_optimizer.update()

    sides = _sides(comm, flat, with_after)
    sides |= {_KEPT: unsynced, _OURS: step}
    try:
        import chainermn

        naive = chainermn.create_communicator("naive")
        optimizer = chainermn.create_multi_node_optimizer(sgd(), naive)
        sides["naive"] = mlp_step(optimizer, options.width)
    except ImportError:  # mpi4py is not installed
        pass
    return sides


def _sides(comm: Any, flat: Any, step: Callable[[Step], Step]) -> dict[str, Step]:
    """Return the steps without a wrapper.

    Args:
        step: function that makes a step which calls its argument after the backward pass.
    """

    def reduction() -> None:
        comm.all_reduce(flat, op="avg", out=flat)

    def both() -> None:
        comm.barrier()
        reduction()

    return {
        _BARE: step(lambda: None),
        _BARRIER: step(comm.barrier),
        _COLD: step(both),
        _WARM: reduction,
    }


def torch_steps(comm: Any, folder: Path, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Measure as one of the ranks, in PyTorch."""
    from training import gloo

    with gloo(comm, folder):
        return _turns(comm, torch_sides(comm, asked), asked)


def chainer_steps(comm: Any, _: Any, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Measure as one of the ranks, in Chainer."""
    return _turns(comm, chainer_sides(comm, asked), asked)


def chainer_steps_under_mpi(_: Participant, asked: argparse.Namespace) -> dict[str, list[float]]:
    """Measure as one of the ranks that mpiexec has started, in Chainer."""
    with collective.init("shm") as comm:
        return chainer_steps(comm, None, asked)


def _turns(comm: Any, sides: dict[str, Step], asked: argparse.Namespace) -> dict[str, list[float]]:
    calls = {side: repeated(step) for side, step in sides.items()}
    rounds, turn = (3, 0.03) if asked.quick else (15, 0.3)
    return alternate(comm, calls, rounds, turn, warm=3, clock=_CLOCKS[asked.clock])


# -- outside ----------------------------------------------------------------------------


def measure(framework: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Run the ranks of one framework; return the seconds per step of each side, by turn."""
    asked = argparse.Namespace(
        width=options.width, bucket_mib=options.bucket_mib, clock=options.clock, quick=options.quick
    )
    found: dict[str, list[float]]
    venv = next(iter(peers.find(options).values()), None)
    if framework == "torch":
        found = peers.run_here(2, "shm", torch_steps, asked)
    elif venv is None:
        found = peers.run_here(2, "shm", chainer_steps, asked)
    else:
        found = peers.run_under_mpi(venv, 2, chainer_steps_under_mpi, asked)
    return found


def shares(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the seconds that each share adds to a step, and the total of the wrapper."""

    def more(side: str, than: str) -> float:
        return median_excess(times[side], times[than])

    warm = statistics.median(times[_WARM])
    parts = {
        "skew": more(_BARRIER, _BARE),
        "hooks and copies": more(_KEPT, _BARE),
        "the reduction": warm,
        "cold caches": more(_COLD, _BARRIER) - warm,
    }
    return {
        **parts,
        "the rest": more(_OURS, _BARE) - sum(parts.values()),
        "all": more(_OURS, _BARE),
    }


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print the tables of a run."""
    print(f"{headline(run['machine'])}; 2 ranks, by the clock: {run['clock']}\n")
    for framework, times in run["steps"].items():
        found = shares(times)
        rows = [
            [what, f"{1e3 * seconds:.2f}", f"{seconds / found['all']:.0%}"]
            for what, seconds in found.items()
        ]
        title = f"{framework}: what our wrapper adds to a step"
        print_table(title, ["share", "ms", "of all"], rows, markdown)
        rows = []
        for side, each in times.items():
            if side != _WARM:
                added = median_excess(each, times[_BARE])
                rows.append([side, f"{1e3 * statistics.median(each):.1f}", f"{1e3 * added:.2f}"])
        print_table(f"{framework}: steps", ["step", "ms", "more than bare"], rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Break down the time that syncing adds to a step.")
    parser.add_argument("--frameworks", nargs="+", choices=_FRAMEWORKS, default=_FRAMEWORKS)
    parser.add_argument(
        "--bucket-mib", type=float, default=25.0, help="bucket size of our wrappers"
    )
    parser.add_argument("--width", type=int, default=1024, help="width of the MLP's layers")
    parser.add_argument("--clock", choices=list(_CLOCKS), default="wall")
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    add_outputs(parser, earlier=True)
    peers.add_options(parser)
    options = parser.parse_args(arguments)

    def steps() -> dict[str, Any]:
        found = {framework: measure(framework, options) for framework in options.frameworks}
        return {"clock": options.clock, "steps": found}

    show(measured(options, steps), options.markdown)
    return 0


if __name__ == "__main__":
    import step  # ranks that mpiexec starts import their functions by this name

    sys.exit(step.main())
