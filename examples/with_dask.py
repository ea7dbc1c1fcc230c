"""A rank on each worker of a Dask cluster: ``python with_dask.py [tcp://SCHEDULER:8786]``."""

from __future__ import annotations

import secrets
import sys
from urllib.parse import urlsplit

import numpy as np
from dask.distributed import Client, LocalCluster

import collective
from collective.platform import held_port


def free_port() -> int:
    """Return a port that is free on the worker."""
    with held_port() as port:
        return port


def work(**place: object) -> str:
    """Run one rank."""
    with collective.init(**place) as comm:
        total = comm.all_reduce(np.array([comm.rank]))
        return f"rank {comm.rank} of {comm.size} over {comm.backend}: {total[0]}"


if __name__ == "__main__":  # place a rank on each worker, and print what the ranks return
    client = Client(sys.argv[1] if sys.argv[1:] else LocalCluster(2, threads_per_worker=1))
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    hosts = [urlsplit(worker).hostname for worker in workers]
    port = client.submit(free_port, workers=workers[:1], pure=False).result()
    common = {"store": f"tcp://{hosts[0]}:{port}", "secret": secrets.token_hex(32)}
    ranks = []
    for rank, (worker, host) in enumerate(zip(workers, hosts, strict=True)):
        place = {"rank": rank, "size": len(hosts), "local_rank": hosts[:rank].count(host)}
        place["local_size"] = hosts.count(host)
        ranks.append(client.submit(work, **common, **place, workers=[worker], pure=False))
    print(*client.gather(ranks), sep="\n")
