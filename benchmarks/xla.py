"""Measurement of sums inside compiled JAX programs: our plug-in for XLA against XLA's own Gloo.

::

    make .jax/.done && .jax/bin/python benchmarks/xla.py -n 2 --sizes 1K 64K 1M 16M
    .jax/bin/python benchmarks/xla.py -n 2 --hosts 2     # between network namespaces, as root

Each program is a ``fori_loop`` of sums (``psum``) of float32 arrays, so that a step of the loop is
one collective call and little else. A process can use only one implementation. So the sides take
turns as launches, A B A B …, and the report shows the median of the launches. The figure of a
launch is the best of five runs of the loop on the slowest process. With ``--hosts``, the processes
are spread over network namespaces, and `auto` takes ``tcp`` between them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from between_hosts import hosts_of

from collective.tools.show import add_sizes, count, microseconds, print_table, size_name

_RUNS = 5
_SIDES = ("collective", "gloo")
# Seconds that a launch may take.
_LAUNCH_S = 600.0


def worker(sizes: Sequence[int]) -> None:
    """Measure as one of the processes; process 0 prints microseconds by size as JSON."""
    import jax
    import numpy as np
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    environ = os.environ
    jax.distributed.initialize(
        f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        int(environ["WORLD_SIZE"]), int(environ["RANK"]),
    )  # fmt: skip
    mesh = Mesh(np.array(jax.devices()), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    figures = {}
    for nbytes in sizes:
        steps = max(5, min(1000, (32 << 20) // nbytes))
        rows = jax.make_array_from_callback(
            (mesh.size, nbytes // 4), sharding,
            lambda index, n=nbytes: np.ones((1, n // 4), np.float32),
        )  # fmt: skip

        def loop(x, steps=steps):  # type: ignore[no-untyped-def]
            # The factor keeps the numbers from growing, and the sums from being merged.
            return lax.fori_loop(0, steps, lambda _, y: lax.psum(y, "i") * (1 / mesh.size), x)

        program = jax.jit(
            jax.shard_map(
                loop, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"),
                check_vma=False,
            )
        )  # fmt: skip
        program(rows).block_until_ready()
        runs = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            program(rows).block_until_ready()
            runs.append((time.perf_counter() - began) / steps * 1e6)
        figures[nbytes] = float(multihost_utils.process_allgather(np.array(min(runs))).max())
    if jax.process_index() == 0:
        print("figures " + json.dumps(figures), flush=True)


def launched(side: str, ranks: int, sizes: Sequence[int], hosts: Any) -> dict[int, float]:
    """Return the microseconds of a call by size, from one launch of one side.

    Args:
        hosts: the ``Hosts`` of the processes; None for this host.
    """
    environ = {"JAX_PLATFORMS": "cpu"}
    if side == "gloo":
        environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    words = ["--jax"] if side == "collective" else []
    words += [__file__, "--worker", "--sizes", *map(str, sizes)]
    if hosts is None:
        command = [sys.executable, "-m", "collective", "run", "-n", str(ranks), *words]
        done = subprocess.run(
            command, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False, timeout=_LAUNCH_S,
        )  # fmt: skip
        output = done.stdout
    else:
        each = ranks // len(hosts.hosts)
        places = ",".join(f"{host.name}:{each}" for host in hosts.hosts)
        job = hosts.run(["--hosts", places, *words], **environ)
        job.wait(_LAUNCH_S)
        output = str(job)
    for line in output.splitlines():
        _, found, text = line.partition("figures ")
        if found:
            return {int(nbytes): figure for nbytes, figure in json.loads(text).items()}
    raise SystemExit(f"{side} printed no figures:\n{output}")


def main() -> None:
    """Measure both sides in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--turns", type=int, default=3, help="launches of each side (default: 3)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--hosts", type=count, default=1, metavar="N",
        help="number of hosts, over which the processes are spread (default: 1)",
    )  # fmt: skip
    add_sizes(parser, "1K 64K 1M 16M")
    options = parser.parse_args()
    if options.worker:
        worker(options.sizes)
        return
    if options.n % options.hosts:
        parser.error("-n has to be a multiple of --hosts")
    # The sides choose these, and hosts pass the variables of this process on.
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        del os.environ[name]
    turns: dict[str, list[dict[int, float]]] = {side: [] for side in _SIDES}
    several = hosts_of(options.hosts) if options.hosts > 1 else contextlib.nullcontext()
    with several as hosts:
        for _ in range(options.turns):
            for side in _SIDES:
                turns[side].append(launched(side, options.n, options.sizes, hosts))
    rows = []
    for nbytes in options.sizes:
        ours, gloo = (statistics.median(turn[nbytes] for turn in turns[side]) for side in _SIDES)
        rows.append(
            [
                size_name(nbytes),
                microseconds(ours / 1e6),
                microseconds(gloo / 1e6),
                f"{gloo / ours:.1f}",
            ]
        )
    where = f" on {options.hosts} hosts" * (options.hosts > 1)
    print_table(
        f"psum in a fori_loop, {options.n} processes{where}, µs a call",
        ["size", "collective", "Gloo", "Gloo / collective"],
        rows,
    )


if __name__ == "__main__":
    main()
