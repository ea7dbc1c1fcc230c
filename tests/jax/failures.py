"""A call that the last process does not make as the others do; prints each process's errors.

The argument is what the last process does: ``kill``, ``late``, ``differ``, or ``lengths`` for a
gather of more elements than the others have. With ``forced`` every process has two devices. With
``elsewhere`` XLA makes the communicators over its Gloo, although the plug-in announces them.
"""

from __future__ import annotations

import os
import sys
import time

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def announce_in_vain() -> None:
    """Announce the cliques of all programs to a plug-in that XLA does not call."""
    from collective.adapters.jax.xla.calls import Calls
    from collective.adapters.jax.xla.cliques import install
    from collective.adapters.jax.xla.world import connect_processes

    install(Calls(connect_processes(), None))


def main() -> None:
    fault = sys.argv[1]
    if fault == "forced":
        jax.config.update("jax_num_cpu_devices", 2)
    if fault == "elsewhere":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize()
    if fault == "elsewhere":
        announce_in_vain()
    rank, size = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    length = 5 if fault == "lengths" and rank == size - 1 else 4
    ones = jax.make_array_from_callback(
        (mesh.size, length), sharding, lambda i: np.ones((1, length), np.float32)
    )

    def mapped(operation):
        return jax.jit(
            jax.shard_map(
                lambda x: operation(x, "i"), mesh=mesh, in_specs=PartitionSpec("i"),
                out_specs=PartitionSpec("i"),
            )
        )  # fmt: skip

    call = mapped(lax.psum)
    if fault == "lengths":
        call = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    if fault not in ("forced", "elsewhere", "lengths"):
        for _ in range(5):
            call(ones).block_until_ready()
        if rank == size - 1:
            if fault == "kill":
                os.kill(os.getpid(), 9)
            if fault == "late":
                time.sleep(5)
            if fault == "differ":
                call = mapped(lax.pmax)
    for turn in ("first", "second"):
        began = time.monotonic()
        try:
            call(ones).block_until_ready()
            print(f"{turn}: no error", flush=True)
        except Exception as error:
            text = str(error).replace("\n", " ")
            print(f"{turn}: {time.monotonic() - began:.2f} s: {text}", flush=True)
    print("lives", flush=True)
    if fault == "late":
        time.sleep(5)  # rank 0 serves JAX's coordinator, without which the late process is aborted
    # JAX's own end would wait for the process that died.
    os._exit(0)


if __name__ == "__main__":
    main()
