"""Measurement of sums inside compiled JAX programs: two ways over our transports, and XLA's Gloo.

::

    make .jax/.done && .jax/bin/python benchmarks/jax_sums.py -n 2 --sizes 1K 64K 1M 16M
    .jax/bin/python benchmarks/jax_sums.py -n 2 --hosts 2     # between network namespaces, as root

Each program is a ``fori_loop`` of sums of float32 arrays, so that a step of the loop is one
collective call and little else. The sums are JAX's ``psum`` over our plug-in for XLA, ``psum`` over
XLA's Gloo, and ``all_reduce`` of :mod:`collective.adapters.jax.functional` in the same processes as
the latter. A process can use only one implementation of ``psum``. So these two take turns as
launches, A B A B …, and the report shows the median of the launches. The figure of a launch is the
best of five runs of the loop on the slowest process. With ``--hosts``, the processes are spread
over network namespaces, and `auto` takes ``tcp`` between them.
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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from between_hosts import hosts_of

from collective.tools.show import add_sizes, count, microseconds, print_table, size_name

_RUNS = 5
_LAUNCHES = ("plug-in", "Gloo")
_SIDES = ("plug-in", "inside jit", "Gloo")
#: Size -> µs of a call.
_Figures = dict[int, float]
# Seconds that a launch may take.
_LAUNCH_S = 600.0


def worker(launch: str, sizes: Sequence[int]) -> None:
    """Measure as one of the processes; process 0 prints microseconds by side and size as JSON."""
    import jax
    import numpy as np
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import collective
    from collective.adapters.jax import functional

    environ = os.environ
    jax.distributed.initialize(
        f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        int(environ["WORLD_SIZE"]), int(environ["RANK"]),
    )  # fmt: skip
    mesh = Mesh(np.array(jax.devices()), ("i",))
    rows = PartitionSpec("i")

    def loop(sum_of: Callable[[Any], Any], steps: int) -> Callable[[Any], Any]:
        # The factor keeps the numbers from growing, and the sums from being merged.
        return lambda x: lax.fori_loop(0, steps, lambda _, y: sum_of(y) * (1 / mesh.size), x)

    def best(program: Any, x: Any, steps: int) -> float:
        """Return the least µs of a step of a compiled loop on the slowest process."""
        assert np.allclose(program(x).addressable_shards[0].data, 1)
        runs = []
        for _ in range(_RUNS):
            began = time.perf_counter()
            program(x).block_until_ready()
            runs.append((time.perf_counter() - began) / steps * 1e6)
        return float(multihost_utils.process_allgather(np.array(min(runs))).max())

    figures: dict[str, _Figures] = {}
    comm = None if launch == "plug-in" else collective.init()
    for nbytes in sizes:
        steps = max(5, min(1000, (32 << 20) // nbytes))
        row = np.ones((1, nbytes // 4), np.float32)
        of_all = jax.make_array_from_process_local_data(NamedSharding(mesh, rows), row)
        program = jax.jit(
            jax.shard_map(
                loop(lambda y: lax.psum(y, "i"), steps),
                mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False,
            )
        )  # fmt: skip
        figures.setdefault(launch, {})[nbytes] = best(program, of_all, steps)
        if comm is not None:
            ours = jax.jit(loop(partial(functional.all_reduce, comm=comm), steps))
            found = best(ours, jax.numpy.asarray(row), steps)
            figures.setdefault("inside jit", {})[nbytes] = found
    if jax.process_index() == 0:
        print("figures " + json.dumps(figures), flush=True)


def launched(launch: str, ranks: int, sizes: Sequence[int], hosts: Any) -> dict[str, _Figures]:
    """Return the microseconds of a call by side and size, from one launch.

    Args:
        hosts: the ``Hosts`` of the processes; None for this host.
    """
    environ = {"JAX_PLATFORMS": "cpu"}
    if launch == "Gloo":
        environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
    words = ["--jax"] if launch == "plug-in" else []
    words += [__file__, "--worker", launch, "--sizes", *map(str, sizes)]
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
            return {
                side: {int(nbytes): figure for nbytes, figure in figures.items()}
                for side, figures in json.loads(text).items()
            }
    raise SystemExit(f"{launch} printed no figures:\n{output}")


def main() -> None:
    """Measure all sides in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--turns", type=int, default=3, help="launches of each side (default: 3)")
    parser.add_argument("--worker", choices=_LAUNCHES, help=argparse.SUPPRESS)
    parser.add_argument(
        "--hosts", type=count, default=1, metavar="N",
        help="number of hosts, over which the processes are spread (default: 1)",
    )  # fmt: skip
    add_sizes(parser, "1K 64K 1M 16M")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.sizes)
        return
    if options.n % options.hosts:
        parser.error("-n has to be a multiple of --hosts")
    # The sides choose these, and hosts pass the variables of this process on.
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        del os.environ[name]
    turns: dict[str, list[_Figures]] = {side: [] for side in _SIDES}
    several = hosts_of(options.hosts) if options.hosts > 1 else contextlib.nullcontext()
    with several as hosts:
        for _ in range(options.turns):
            for launch in _LAUNCHES:
                for side, figures in launched(launch, options.n, options.sizes, hosts).items():
                    turns[side].append(figures)
    rows = []
    for nbytes in options.sizes:
        medians = [statistics.median(turn[nbytes] for turn in turns[side]) for side in _SIDES]
        *ours, gloo = medians
        cells = [microseconds(each / 1e6) for each in medians]
        rows.append([size_name(nbytes), *cells, *(f"{gloo / each:.1f}" for each in ours)])
    where = f" on {options.hosts} hosts" * (options.hosts > 1)
    print_table(
        f"sums in a fori_loop, {options.n} processes{where}, µs a call",
        ["size", *_SIDES, "Gloo / plug-in", "Gloo / inside jit"],
        rows,
    )


if __name__ == "__main__":
    main()
