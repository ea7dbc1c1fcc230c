"""Measurement of data-parallel training in Chainer: ``python benchmarks/chainer_training.py``.

The figure is the time that syncing adds to a step of an MLP with 25 MB of gradients, on two ranks
of one thread each. Under the ``mpiexec`` of each MPI, the same processes have one model for each of
these sides: no syncing; our optimizer over ``shm``; ChainerMN's optimizer over our communicator,
over its own ``naive`` communicator, and over ``flat`` on mpi4py. As a lower bound there is a step
without syncing, followed by a reduction of the same size, of memory without gradients. The sides
take turns, A B C A B C …. The time that a side adds is the median difference between its turns and
the neighbouring turns without syncing. ChainerMN's ``flat`` keeps its buffers on a GPU. Here the
same algorithm runs on the host, with one array and one ``MPI_Allreduce``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers
from turns import alternate, median_excess, repeated

from collective.launch.ranks import Participant
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, microseconds, print_table

# Promised bounds: added time of ours over ChainerMN's, and of the drop-in over ChainerMN's.
_ADDED, _DROP_IN = 1 / 5, 1.0
_BARE = "no syncing"
_FLOOR = "a reduction alone"
_SIDES = ("ours", "drop-in", "naive", "flat (host)")

# -- in the ranks -----------------------------------------------------------------------


class _Step:
    """Training step of an MLP of six layers, as a function without arguments."""

    def __init__(self, optimizer: Any, width: int) -> None:
        import chainer

        np.random.seed(0)  # Chainer draws the weights from NumPy's global generator
        links, relu = chainer.links, chainer.functions.relu
        layers = [layer for _ in range(6) for layer in (links.Linear(width, width), relu)]
        self.model = chainer.Sequential(*layers[:-1])
        self.optimizer = optimizer
        self._x = np.random.default_rng(0).standard_normal((64, width), np.float32)
        optimizer.setup(self.model)

    def _loss(self) -> Any:
        import chainer

        return chainer.functions.mean(self.model(self._x) ** 2)

    def __call__(self) -> None:
        self.optimizer.update(self._loss)


def _flat() -> Any:
    """Return ChainerMN's ``flat`` with its buffers on the host."""
    import chainermn
    from chainermn.communicators.naive_communicator import NaiveCommunicator

    class Flat(NaiveCommunicator):  # type: ignore[misc]
        def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
            grads = [p.grad for _, p in sorted(model.namedparams())]
            packed = np.concatenate([grad.ravel() for grad in grads])
            mean = np.empty_like(packed)
            self._multi_node_mean(packed, mean)
            start = 0
            for grad in grads:
                grad[...] = mean[start : start + grad.size].reshape(grad.shape)
                start += grad.size

    return Flat(chainermn.create_communicator("naive").mpi_comm)


def rank(_: Participant, width: int, quick: bool) -> dict[str, list[float]]:
    """Measure as one of the ranks; return the figures."""
    import collective
    from collective.adapters.chainer.chainermn import CollectiveCommunicator
    from collective.adapters.chainer.optimizer import create_multi_node_optimizer

    import chainer  # isort: skip
    import chainermn  # isort: skip

    comm = collective.init("shm")
    communicators: dict[str, Any] = {
        "drop-in": CollectiveCommunicator(comm.dup()),
        "naive": chainermn.create_communicator("naive"),
        "flat (host)": _flat(),
    }
    optimizers = {_BARE: chainer.optimizers.SGD(0.0)}
    optimizers["ours"] = create_multi_node_optimizer(chainer.optimizers.SGD(0.0), comm)
    for name, communicator in communicators.items():
        sgd = chainer.optimizers.SGD(0.0)
        optimizers[name] = chainermn.create_multi_node_optimizer(sgd, communicator)
    steps = {name: _Step(optimizer, width) for name, optimizer in optimizers.items()}
    _agree(steps)
    bare = steps[_BARE]
    memory = comm.empty(bare.model.count_params(), np.float32)
    memory[...] = 0

    def reduction_alone() -> None:
        bare()
        comm.all_reduce(memory, op="avg", out=memory)

    calls: dict[str, Callable[[], None]] = {**steps, _FLOOR: reduction_alone}
    sides = {side: repeated(call) for side, call in calls.items()}
    found = alternate(comm, sides, *((3, 0.03) if quick else (15, 0.4)), warm=2)
    comm.close()
    return found


def _agree(steps: Mapping[str, _Step]) -> None:
    """Check that all sides have the same gradients after a call."""
    gradients = {}
    for name, step in steps.items():
        step()  # the first call of ChainerMN's optimizer only broadcasts parameters
        step()
        grads = [p.grad for _, p in sorted(step.model.namedparams())]
        gradients[name] = np.concatenate([grad.ravel() for grad in grads])
    for name, averaged in gradients.items():
        # Both ranks have the same batch, so the average equals the gradients of a rank.
        np.testing.assert_array_equal(averaged, gradients[_BARE], err_msg=name)
    for step in steps.values():
        step.optimizer.lr = 1e-4


# -- outside ------------------------------------------------------------------------------


def measure(vendor: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure under an MPI; return the figures."""
    found: dict[str, list[float]]
    found = peers.run_under_mpi(vendor, 2, rank, options.width, options.quick)
    return found


def added(times: dict[str, list[float]], side: str) -> float:
    """Return the seconds that a side adds to a step: the median over turns."""
    return median_excess(times[side], times[_BARE])


def show(run: dict[str, Any]) -> None:
    """Print the tables of a run, and whether the promises are kept."""
    print(f"{headline(run['machine'])}; 2 ranks\n")
    kept = []
    for vendor, times in run["syncing"].items():
        ours = added(times, "ours")
        rows = []
        for side in (_BARE, _FLOOR, *_SIDES):
            step = statistics.median(times[side])
            extra = max(0.0, added(times, side))
            share = ours / extra if side in _SIDES[1:] and extra else None
            last = "" if share is None else f"{share:.2f}"
            rows.append([side, microseconds(step), microseconds(extra), last])
        header = ["side", "step µs", "sync adds µs", "ours, of that"]
        print_table(f"a step under {vendor}", header, rows)
        drop_in = added(times, "drop-in")
        for side in _SIDES[2:]:
            theirs = added(times, side)
            kept.append((f"ours ≤ 1/5 of {side}, {vendor}", ours / theirs, _ADDED))
            kept.append((f"drop-in not slower than {side}, {vendor}", drop_in / theirs, _DROP_IN))
    for what, value, bound in kept:
        verdict = "kept" if value <= bound else "not kept"
        print(f"{what}: {value:.2f} (promised {bound:g}): {verdict}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure steps of training in Chainer.")
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    add_outputs(parser)
    parser.add_argument("--width", type=int, default=1024, help="width of the MLP's layers")
    peers.add_options(parser)
    options = parser.parse_args(arguments)

    def measure_all() -> dict[str, Any]:
        found = peers.find(options)
        if not found:
            raise SystemExit(
                "chainer_training: no MPI library is installed; run `make .mpi/mpich/.done`."
            )
        return {"syncing": {vendor: measure(path, options) for vendor, path in found.items()}}

    show(measured(options, measure_all))
    return 0


if __name__ == "__main__":
    import chainer_training  # ranks that mpiexec starts import their functions by this name

    sys.exit(chainer_training.main())
