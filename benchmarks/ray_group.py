"""Compare `allreduce` of Ray's actors over our backend with Ray's own backend for CPUs, Gloo.

::

    .ray/bin/python benchmarks/ray_group.py     # after make test-ray, which makes this environment
    .ray/bin/python benchmarks/ray_group.py --sizes 1K 16M --turns 9

Two actors make the contestants' calls in turns: A B C D A B C D …. The contestants are our backend
with ordinary arrays, the same call of the communicator without Ray's function, our backend with an
array from `comm.empty`, and Gloo.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from collective.tools.show import add_sizes, microseconds, print_table, size_name

CONTESTANTS = ("collective", "comm.all_reduce", "comm.empty", "gloo")
_ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """Actor that is in all groups."""

    def __init__(self, rank: int) -> None:
        torch = importlib.import_module("torch")
        importlib.import_module("collective.launch.ray")
        torch.set_num_threads(1)
        self.col = importlib.import_module("ray.util.collective")
        self.rank = rank

    def connect(self) -> dict[str, float]:
        """Make the groups, and return the seconds that each one took."""
        seconds = {}
        for backend in ("collective", "gloo"):
            began = time.perf_counter()
            self.col.init_collective_group(2, self.rank, backend, backend)
            seconds[backend] = time.perf_counter() - began
        return seconds

    def measure(self, nbytes: int, turns: int) -> dict[str, list[float]]:
        """Return the seconds of a call by contestant, one figure for each turn."""
        count = max(3, min(200, (8 << 20) // nbytes))
        comm = self.col.get_group_handle("collective").comm
        arrays = {
            "collective": np.zeros(nbytes // 4, np.float32),
            "comm.all_reduce": np.zeros(nbytes // 4, np.float32),
            "comm.empty": comm.empty(nbytes // 4),
            "gloo": np.zeros(nbytes // 4, np.float32),
        }
        figures: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        for turn in range(turns + 1):
            for name, x in arrays.items():
                x[:] = 0.0
                group = "gloo" if name == "gloo" else "collective"
                self.col.barrier(group)
                began = time.perf_counter()
                for _ in range(count):
                    if name == "comm.all_reduce":
                        comm.all_reduce(x, out=x)
                    else:
                        self.col.allreduce(x, group)
                if turn:  # the first one warms up
                    figures[name].append((time.perf_counter() - began) / count)
        return figures


def measured(sizes: Sequence[int], turns: int) -> tuple[dict[str, float], list[list[str]]]:
    """Return the seconds to connect by backend, and the table's rows."""
    ray = importlib.import_module("ray")
    os.environ["PYTHONPATH"] = str(_ROOT)
    ray.init(
        address="local", num_cpus=2, object_store_memory=80 << 20, include_dashboard=False,
        log_to_driver=False, configure_logging=False, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    try:
        workers = [ray.remote(Worker).remote(rank) for rank in range(2)]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        seconds = ray.get([worker.connect.remote() for worker in workers])
        connecting = {name: max(each[name] for each in seconds) for name in seconds[0]}
        rows = []
        for nbytes in sizes:
            # A call has ended when it has on both ranks.
            both = ray.get([worker.measure.remote(nbytes, turns) for worker in workers])
            times = {
                name: [max(pair) for pair in zip(*(each[name] for each in both))]
                for name in CONTESTANTS
            }
            ratios = [
                statistics.median(g / o for g, o in zip(times["gloo"], times[name]))
                for name in CONTESTANTS[:3]
            ]
            rows.append(
                [
                    size_name(nbytes),
                    *(microseconds(statistics.median(times[name])) for name in CONTESTANTS),
                    *(f"{ratio:.1f}" for ratio in ratios),
                ]
            )
        return connecting, rows
    finally:
        ray.shutdown()


def main() -> None:
    """Measure all sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7, help="turns of each side (default: 7)")
    add_sizes(parser, "1K 64K 1M 16M")
    options = parser.parse_args()
    connecting, rows = measured(options.sizes, options.turns)
    for name, seconds in connecting.items():
        print(f"two actors connect over {name} in {seconds:.2f} s")
    print_table(
        "allreduce between two actors, µs a call; ratios are medians of the turns' ratios",
        ["size", *CONTESTANTS, *(f"Gloo / {name}" for name in CONTESTANTS[:3])],
        rows,
    )


if __name__ == "__main__":
    main()
