"""Sums in a loop, inside jit and by psum: prints how many calls Python made, and their results."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collective.communicator.repeated import RepeatedCall

STEPS = 200
in_python = 0
make = RepeatedCall.make


def counted(*arguments: Any) -> None:
    global in_python
    in_python += 1
    make(*arguments)


RepeatedCall.make = counted  # type: ignore[method-assign]


def inside_jit() -> Any:
    import collective
    from collective.adapters.jax import functional

    comm = collective.init()

    def step(_: int, x: Any) -> Any:
        parts = functional.reduce_scatter(functional.all_reduce(x), op="max")
        return functional.all_gather(parts) * (1 / comm.size)

    return jax.jit(lambda x: lax.fori_loop(0, STEPS, step, x))(jnp.ones(64))


def psum() -> Any:
    jax.distributed.initialize()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    spec = PartitionSpec("i")
    ones = jax.make_array_from_callback(
        (mesh.size, 64), NamedSharding(mesh, spec), lambda index: np.ones((1, 64), np.float32)
    )

    def loop(x: Any) -> Any:
        return lax.fori_loop(0, STEPS, lambda _, y: lax.psum(y, "i") * (1 / mesh.size), x)

    program = jax.jit(
        jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    return program(ones).addressable_shards[0].data


result = {"jit": inside_jit, "psum": psum}[sys.argv[1]]()
print(f"{in_python} calls by Python, result {set(np.asarray(result).ravel().tolist())}", flush=True)
