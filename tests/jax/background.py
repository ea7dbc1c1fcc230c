"""Calls inside jit, which XLA makes in the background, beside other calls and events.

The argument selects the turn. Each rank prints its results. A product of large matrices delays the
calls inside jit, and makes XLA run the program in a thread of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import collective
from collective.adapters.jax import functional
from collective.communicator import Communicator

BIG = jnp.eye(1200, dtype=jnp.float32)


def slow_sum(comm: Communicator, products: int = 3) -> Callable[[float], jax.Array]:
    """Return a compiled function that sums a number over the ranks after some products."""

    @jax.jit
    def total(x: float) -> jax.Array:
        product = jax.lax.fori_loop(0, products, lambda _, y: y @ BIG, BIG)
        return functional.all_reduce(jnp.full(3, x) * product[0, 0], comm)

    return total


def order(comm: Communicator) -> str:
    """Make a sum inside jit, which is late on rank 0, and then one outside, early on rank 0."""
    total = slow_sum(comm, products=40 if comm.rank == 0 else 1)
    total(0.0).block_until_ready()
    comm.barrier()
    inside = total(comm.rank + 1.0)
    if comm.rank == 1:
        time.sleep(0.5)
    outside = comm.all_reduce(np.full(3, 10.0 * (comm.rank + 1), np.float32))
    return f"{np.asarray(inside)} {outside}"


def messages(comm: Communicator) -> str:
    """Send inside jit and then outside, to one peer with one tag."""
    if comm.rank == 0:
        send = jax.jit(lambda x: functional.send(x * (BIG @ BIG)[0, 0], 1, comm))
        send(jnp.ones(2))
        comm.send(np.full(2, 2, np.float32), 1)
        return "sent"
    first, second = (comm.recv(None, 0) for _ in range(2))
    return f"{first} {second}"


def loop(comm: Communicator) -> str:
    """Train with one sum inside jit and one broadcast outside in each step."""

    @jax.jit
    def step(weights: jax.Array, batch: jax.Array) -> jax.Array:
        return weights + functional.all_reduce((batch @ batch).mean(0), comm, "avg")

    weights = jnp.zeros(800)
    for number in range(10):
        batch = np.full((800, 800), number, np.float32) if comm.rank == 0 else None
        weights = step(weights, jnp.asarray(comm.broadcast(batch)))
    return str(float(weights[0]))  # 800 times the sum of the squares


def late(comm: Communicator) -> str:
    """Wait in a barrier, behind a call inside jit, for a rank that is late."""
    total = slow_sum(comm)
    total(0.0).block_until_ready()
    if comm.rank == 1:
        time.sleep(1)
        functional.all_reduce(jnp.zeros(()), comm).block_until_ready()
        functional.barrier(comm)
        return "late"
    began = time.monotonic()
    functional.all_reduce(jnp.zeros(()) * (BIG @ BIG)[0, 0], comm)
    functional.barrier(comm)
    return f"waited: {time.monotonic() - began > 0.5}"


def error(comm: Communicator) -> str:
    """Make different calls behind a product."""
    op = ("sum", "max")[comm.rank]
    different = jax.jit(lambda x: functional.all_reduce(x * (BIG @ BIG)[0, 0], comm, op))
    try:
        return str(different(jnp.ones(3)))
    except jax.errors.JaxRuntimeError as raised:
        return str(raised).split(" [")[0]


def interrupt(comm: Communicator) -> str:
    """Interrupt rank 0, which waits inside jit."""
    functional.all_reduce(jnp.ones(3), comm).block_until_ready()
    if comm.rank == 1:
        time.sleep(2)
        return "slept"
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        try:
            return str(jax.jit(functional.all_reduce, static_argnums=1)(jnp.ones(5), comm))
        except Exception as raised:
            time.sleep(1)
            return f"an ordinary error: {raised}"
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def main() -> None:
    turn = sys.argv[1]
    if turn == "block":
        with collective.init() as comm:
            result = slow_sum(comm)(1.0)
        print(result)
    elif turn == "exit":
        comm = collective.init()
        slow_sum(comm)(1.0)
    else:
        comm = collective.init()
        print(globals()[turn](comm), flush=True)
        if turn in ("error", "interrupt"):
            os._exit(0)  # JAX would raise the error again


if __name__ == "__main__":
    main()
