"""Failures of calls inside jit: argument 1 names which; every rank prints its error."""

import gc
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
if sys.argv[1] in ("devices", "shard_map"):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable

import collective
from collective.adapters.jax import functional as F

comm = collective.init()


def one(a):
    return F.all_reduce(a)


def two(a):
    return F.all_gather(a)


def devices():
    mesh = jax.make_mesh((2,), ("i",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    return jax.jit(one)(jax.device_put(jnp.ones(4), place))


def shard_map():
    mesh = jax.make_mesh((2,), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    a = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))(a)


def collected():
    executable = jax.jit(one).lower(jnp.ones(3)).compile().runtime_executable()
    jax.clear_caches()
    gc.collect()  # the compiled function, which keeps its calls
    comm.barrier()  # waits for programs in the background, and forgets the calls of those gone
    token = jnp.zeros(0, bool)
    executable.execute_sharded([token, jnp.ones(3)]).block_until_ready()


def structure():
    """Check that each function refuses a structure by its name, and raise the error of one."""
    a = {"a": jnp.ones(2)}
    calls = {name: lambda a, name=name: getattr(F, name)(a) for name in F.__all__}
    calls |= {"send": lambda a: F.send(a, 0), "sendrecv": lambda a: F.sendrecv(a, 0, 0)}
    calls |= {"recv": lambda a: F.recv(src=0, like=a)}
    del calls["barrier"]
    for name, call in calls.items():
        with pytest.raises(collective.InvalidArgumentError, match=f"^{name}: got a dict"):
            jax.jit(call)(a)
    F.all_reduce([1.0, 2.0])


turns = {
    "structure": structure,
    "differ": lambda: jax.jit(one if comm.rank == 0 else two)(jnp.ones(3)),
    "shapes": lambda: jax.jit(one)(jnp.ones(3 + comm.rank)),
    "devices": devices,
    "shard_map": shard_map,
    "scan": lambda: jax.grad(lambda a: F.scan(a).sum())(jnp.ones(3)),
    "scan forward": lambda: jax.jvp(F.scan, (jnp.ones(3),), (jnp.ones(3),)),
    "and": lambda: jax.grad(lambda a: F.all_reduce(a, op="band").sum())(jnp.ones(3)),
    "stored": lambda: serialize_executable.serialize(jax.jit(one).lower(jnp.ones(3)).compile()),
    "collected": collected,
    "op": lambda: F.all_reduce(jnp.ones(3), op="median"),
    "rank": lambda: F.recv(like=jnp.ones(3)),
    "none": lambda: F.broadcast(None),
    "array as rank": lambda: jax.jit(lambda root: F.broadcast(jnp.ones(3), root=root))(0),
    "checkpoint": lambda: jax.grad(jax.checkpoint(lambda a: one(a).sum()))(jnp.ones(3)),
    "platform": lambda: jax.jit(one).trace(jnp.ones(3)).lower(lowering_platforms=("cuda",)),
    "counts": lambda: F.reduce_scatter(jnp.ones(3), counts=[1, 1]),
}
try:
    jax.block_until_ready(turns[sys.argv[1]]())
    print(f"[{comm.rank}] no error", flush=True)
except Exception as error:
    print(f"[{comm.rank}] {type(error).__name__}: {error}".replace("\n", " "), flush=True)
os._exit(0)
