"""The program of jax#40830: reduce-scatters in groups of two, each result compared with NumPy.

::

    collective run -n 2 --jax tests/jax/reduce_scatters.py --turns 1500
    collective run -n 2 tests/jax/reduce_scatters.py --gloo

Over the Gloo of some versions of XLA, a part of the first process's results is wrong, depending on
the time. ``--gloo`` runs the same program over the installed XLA's Gloo. In the issue the groups
are devices of one process. Here each process has one device, and the number of processes is even.
"""

from __future__ import annotations

import argparse
import os
import sys

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=30, help="number of calls (default: 30)")
    parser.add_argument(
        "--chunk-kib", type=int, default=4096, help="length of a result (default: 4096)"
    )
    parser.add_argument("--gloo", action="store_true", help="use the Gloo of XLA")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if options.gloo:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address, size, rank = (os.environ[k] for k in ("MASTER_PORT", "WORLD_SIZE", "RANK"))
        jax.distributed.initialize(f"127.0.0.1:{address}", int(size), int(rank))
    else:
        jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("group", "member"))
    spec = PartitionSpec(("group", "member"))
    number = options.chunk_kib * 1024 // 8
    steps = np.arange(2 * number, dtype=np.float64) % 1009  # sums of such numbers are exact
    group, member = divmod(jax.process_index(), 2)
    function = jax.jit(
        jax.shard_map(
            lambda x: lax.psum_scatter(x, "member", tiled=True), mesh=mesh, in_specs=spec,
            out_specs=spec, check_vma=False,
        )
    )  # fmt: skip
    wrong = 0
    for turn in range(options.turns):
        start = 10_000 * group + turn  # the members of the group add this, and this + 1
        x = jax.make_array_from_process_local_data(
            NamedSharding(mesh, spec), steps + (start + member), (mesh.size * 2 * number,)
        )
        result = np.asarray(function(x).addressable_shards[0].data)
        wanted = 2 * steps[member * number : (member + 1) * number] + (2 * start + 1)
        places = np.flatnonzero(result != wanted)
        if places.size:
            wrong += 1
            print(
                f"turn {turn}: {places.size} of {number} elements are wrong, {places[0]} to "
                f"{places[-1]}", flush=True,
            )  # fmt: skip
    print(f"{options.turns} reduce-scatters, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
