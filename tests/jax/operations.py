"""Every collective operation of JAX in every dtype, compared with NumPy; prints what is wrong.

Nothing here imports collective. With ``--hosts N`` the processes claim to be on N hosts.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 bfloat16 float32 float64 complex64 "
    "complex128"
).split()
WRONG: list[str] = []
CHECKED: list[str] = []


def check(name: str, result: Any, wanted: Any) -> None:
    CHECKED.append(name)
    wanted = np.asarray(wanted)
    result = np.asarray(result).astype(wanted.dtype)
    if result.shape != wanted.shape or not np.array_equal(result, wanted):
        WRONG.append(name)
        print(f"wrong: {name}: {result.ravel()[:4]}, expected {wanted.ravel()[:4]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=1)
    hosts = parser.parse_args().hosts
    jax.config.update("jax_enable_x64", True)
    if hosts > 1:
        rank, size = int(os.environ["COLLECTIVE_RANK"]), int(os.environ["COLLECTIVE_SIZE"])
        socket.gethostname = lambda: f"host-{rank * hosts // size}"
    jax.distributed.initialize()
    rank, size = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))

    def run(function: Callable[[Any], Any], whole: Any) -> Any:
        array = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
        mapped = partial(
            jax.shard_map, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")
        )
        return np.asarray(jax.jit(mapped(function))(array).addressable_shards[0].data)

    for dtype in DTYPES:
        rng = np.random.default_rng(1)
        whole = rng.integers(0, 7, (size * size * 2, 3)).astype(jnp.dtype(dtype))
        known = whole.astype(np.float32) if dtype == "bfloat16" else whole
        parts = np.split(known, size)
        total = sum(parts[1:], parts[0])
        if dtype != "bool":
            check(f"psum {dtype}", run(lambda x: lax.psum(x, "i"), whole), total)
            check(
                f"psum_scatter {dtype}",
                run(lambda x: lax.psum_scatter(x, "i", tiled=True), whole),
                np.split(total, size)[rank],
            )
        if not dtype.startswith("complex"):
            check(f"pmax {dtype}", run(lambda x: lax.pmax(x, "i"), whole), np.max(parts, 0))
            check(f"pmin {dtype}", run(lambda x: lax.pmin(x, "i"), whole), np.min(parts, 0))
        check(
            f"all_gather {dtype}", run(lambda x: lax.all_gather(x, "i"), whole)[rank], parts[rank]
        )
        check(
            f"all_to_all {dtype}",
            run(lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True), whole),
            np.concatenate([np.split(part, size)[rank] for part in parts]),
        )
        around = [(k, (k + 1) % size) for k in range(size)]
        check(
            f"ppermute {dtype}",
            run(lambda x, p=around: lax.ppermute(x, "i", p), whole), parts[(rank - 1) % size],
        )  # fmt: skip
        check(
            f"one message {dtype}",
            run(lambda x: lax.ppermute(x, "i", [(0, size - 1)]), whole),
            parts[0] if rank == size - 1 else np.zeros_like(parts[0]),
        )
    gathered = multihost_utils.process_allgather(np.array([rank, 5]))
    check("process_allgather", gathered, [[other, 5] for other in range(size)])
    told = multihost_utils.broadcast_one_to_all(np.array([rank, 7]))
    check("broadcast_one_to_all", told, [0, 7])
    multihost_utils.sync_global_devices("end")
    left = jax.make_array_from_callback((4 * size, 8), sharding, lambda i: np.ones((4, 8)))
    product = jax.jit(lambda a, b: a @ b, out_shardings=NamedSharding(mesh, PartitionSpec()))
    check("pjit", product(left, np.ones((8, 2))), np.full((4 * size, 2), 8))
    donated = jax.make_array_from_callback((size, 3), sharding, lambda i: np.full((1, 3), 2.0))
    summed = jax.shard_map(lambda x: lax.psum(x, "i") + 0 * x, mesh=mesh,
                           in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))  # fmt: skip
    result = jax.jit(summed, donate_argnums=0)(donated)
    check("donated", result.addressable_shards[0].data, np.full((1, 3), 2.0 * size))
    check("donated is deleted", donated.is_deleted(), True)
    check("x64", run(lambda x: lax.psum(x, "i"), np.full((size, 1), 2.0**40 + 1)),
          [[size * (2.0**40 + 1)]])  # fmt: skip
    try:
        run(lambda x: lax.psum(x, "i"), np.ones((size, 2), np.float16))
        print("float16 was accepted", flush=True)
    except Exception as error:
        print(f"float16: {error}", flush=True)
    world = next(
        thing for thing in gc.get_objects()
        if type(thing).__name__ == "Communicator" and thing.size == size
    )  # fmt: skip
    over = f"{world.backend}, {world.local_size} on this host"
    print(f"{len(CHECKED)} checks, {len(WRONG)} wrong, over {over}", flush=True)


if __name__ == "__main__":
    main()
