"""Ranks as tasks of submitit: on Slurm, or on this host if there is no Slurm.

python examples/with_submitit.py --tasks 2
"""

from __future__ import annotations

import argparse

import numpy as np
import submitit

import collective


def task(count: int) -> tuple[int, int, float]:
    """Sum ``count`` numbers of each rank; return rank, size and the sum."""
    # The variables of torchrun, which collective.init() reads.
    submitit.helpers.TorchDistributedEnvironment().export()
    with collective.init() as comm:
        total = comm.all_reduce(np.full(count, comm.rank + 1.0))
        return comm.rank, comm.size, float(total.sum())


def main() -> None:
    """Submit the tasks and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=2, help="number of tasks on each node")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (with Slurm)")
    parser.add_argument("--folder", default="jobs", help="folder of the jobs' logs")
    options = parser.parse_args()
    executor = submitit.AutoExecutor(folder=options.folder)
    executor.update_parameters(
        nodes=options.nodes, tasks_per_node=options.tasks, timeout_min=10, name="collective"
    )
    for rank, size, total in executor.submit(task, 10).results():
        print(f"rank {rank} of {size}: {total}")


if __name__ == "__main__":
    main()
