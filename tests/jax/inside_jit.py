"""Calls inside jit on every rank; print a line for each check that is wrong, and their number."""

import gc
import os
import weakref

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import collective
from collective.adapters.jax import functional as F

comm = collective.init()
rank, size = comm.rank, comm.size
total = size * (size + 1) / 2
base = np.arange(6, dtype=np.float32).reshape(2, 3)
x = jnp.asarray(base * (rank + 1))
rows = np.arange(size * 2 * 3, dtype=np.float32).reshape(size * 2, 3)  # two rows for each rank
mine = jnp.asarray(rows[2 * rank : 2 * rank + 2])
checks = wrong = 0


def check(name, got, wanted):
    global checks, wrong
    checks += 1
    got, wanted = np.asarray(got), np.asarray(wanted)
    if got.shape != wanted.shape or not np.allclose(got.astype(wanted.dtype), wanted, rtol=1e-2):
        wrong += 1
        print(f"[{rank}] {name}: {got.tolist()} instead of {wanted.tolist()}", flush=True)


def both(name, function, argument, wanted):
    """Check a function of one array outside and inside jit."""
    check(f"{name} eagerly", function(argument), wanted)
    check(f"{name} in jit", jax.jit(function)(argument), wanted)


# -- values
for op, wanted in (
    ("sum", base * total), ("avg", base * total / size), ("min", base), ("max", base * size),
    ("prod", np.prod([base * (r + 1) for r in range(size)], axis=0)),
):  # fmt: skip
    both(f"all_reduce {op}", lambda a, op=op: F.all_reduce(a, op=op), x, wanted)
for kind in ("int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16",
             "float32", "complex64"):  # fmt: skip
    got = jax.jit(F.all_reduce)(jnp.asarray(base).astype(kind))
    check(f"dtype of {kind}", str(got.dtype) == kind, True)
    check(f"all_reduce {kind}", got.astype("float32"), base * size)
both(
    "all_reduce bool",
    lambda a: F.all_reduce(a, op="lor"),
    jnp.asarray([rank == 0, False]),
    [True, False],
)
both("all_reduce scalar", F.all_reduce, jnp.float32(rank + 1), np.float32(total))
both("all_reduce empty", F.all_reduce, jnp.zeros((0, 3)), np.zeros((0, 3), np.float32))
check("int64 without x64", F.all_reduce(np.arange(3, dtype=np.int64)), np.arange(3) * size)
both("scan", F.scan, x, base * (rank + 1) * (rank + 2) / 2)
both("broadcast", lambda a: F.broadcast(a, root=1), x, base * 2)
both("reduce", lambda a: F.reduce(a, root=1), x, base * total if rank == 1 else np.float32(0))
both("all_gather", F.all_gather, mine, rows)
both(
    "all_gather axis 1",
    lambda a: F.all_gather(a, axis=1),
    x,
    np.hstack([base * (r + 1) for r in range(size)]),
)
both("all_gather scalar", F.all_gather, jnp.float32(rank), np.arange(size, dtype=np.float32))
counts = list(range(1, size + 1))
both(
    "all_gather counts",
    lambda a: F.all_gather(a, counts=counts),
    jnp.full(rank + 1, rank),
    np.repeat(np.arange(size), counts),
)
both("gather", lambda a: F.gather(a, root=1), mine, rows if rank == 1 else np.float32(0))
both("scatter", lambda a: F.scatter(a, root=1), jnp.asarray(rows * (rank == 1)), np.asarray(mine))
both("reduce_scatter", F.reduce_scatter, jnp.asarray(rows), np.asarray(mine) * size)
pieces = np.array_split(np.arange(2.0 * size + 1), size)
both("reduce_scatter uneven", F.reduce_scatter, jnp.arange(2.0 * size + 1), pieces[rank] * size)
both("all_to_all", F.all_to_all, jnp.arange(size) + 10 * rank, 10 * np.arange(size) + rank)
right, left = (rank + 1) % size, (rank - 1) % size
both("sendrecv", lambda a: F.sendrecv(a, right, left), x, base * (left + 1))
F.barrier()
jax.jit(lambda: F.barrier())()


def relay(a):
    """Pass an array from rank 0 to rank 1, which returns twice of it."""
    if rank == 0:
        sent = F.send(a, 1, tag=5)
        return F.recv(src=1, like=a, after=sent) + sent
    if rank == 1:
        got = F.recv(src=0, tag=5, like=a)
        return F.send(got * 2, 0) + 0 * a.sum()
    return jnp.float32(0) * a.sum()


both("send, recv", relay, x, base * 2 if rank == 0 else np.float32(0))

# -- transformations
both("vmap", jax.vmap(F.all_reduce), x, base * total)
both("vmap all_gather", jax.vmap(F.all_gather, in_axes=1, out_axes=1), mine, rows)
both(
    "vmap reduce_scatter",
    jax.vmap(F.reduce_scatter, in_axes=1, out_axes=1),
    jnp.asarray(rows),
    np.asarray(mine) * size,
)
both("vmap reduce", jax.vmap(F.reduce), x, base * total if rank == 0 else np.zeros(2, np.float32))
both(
    "scan of calls",
    lambda a: jax.lax.scan(lambda c, _: (F.all_reduce(c) / size, None), a, None, length=5)[0],
    jnp.ones(3),
    np.ones(3, np.float32),
)
both(
    "fori_loop",
    lambda a: jax.lax.fori_loop(0, 4, lambda k, c: F.all_reduce(c, op="avg"), a),
    jnp.ones(3),
    np.ones(3, np.float32),
)
both(
    "while_loop",
    lambda a: jax.lax.while_loop(lambda c: c < 100, lambda c: F.all_reduce(c), a),
    jnp.float32(1),
    np.float32(size ** np.ceil(np.log(100) / np.log(size))),
)
both("cond", lambda a: jax.lax.cond(a.sum() >= 0, F.all_reduce, lambda v: v, a), x, base * total)
donated = jax.jit(F.all_reduce, donate_argnums=0)
check("donated", donated(jnp.asarray(base)), base * size)


def unlike(a):
    """Make 60 calls of unlike lengths and ops, which fail if XLA reorders them."""
    return sum(
        F.all_reduce(jnp.full(k % 7 + 1, a), op=("sum", "min", "max")[k % 3]).sum()
        for k in range(60)
    )


check(
    "order",
    jax.jit(unlike)(jnp.float32(rank + 1)),
    np.float32(sum((k % 7 + 1) * (total, 1, size)[k % 3] for k in range(60))),
)

# -- gradients
weight = jnp.asarray(rank + 1.0, jnp.float32)  # rank r weighs its result with r + 1: G = total


def gradient(name, function, argument, wanted):
    loss = lambda a: (weight * function(a)).sum()  # noqa: E731
    check(f"grad {name}", jax.grad(loss)(argument), wanted)
    check(f"grad {name} in jit", jax.jit(jax.grad(loss))(argument), wanted)
    check(f"grad of jit {name}", jax.grad(jax.jit(loss))(argument), wanted)


ones, zeros = np.ones_like(base), np.zeros_like(base)
gradient("all_reduce", F.all_reduce, x, ones * total)
gradient("avg", lambda a: F.all_reduce(a, op="avg"), x, ones * total / size)
y = x + 1  # so that no extreme is held by two ranks, but for the first element
held = np.where(base == 0, total / size, total if rank == size - 1 else 0)
gradient("max", lambda a: F.all_reduce(a, op="max"), y, held)
others = np.prod([base * (r + 1) + 1 for r in range(size) if r != rank], axis=0)
gradient("prod", lambda a: F.all_reduce(a, op="prod"), y, others * total)
gradient("reduce", lambda a: F.reduce(a, root=1), x, ones * 2)
gradient("broadcast", lambda a: F.broadcast(a, root=1), x, ones * total if rank == 1 else zeros)
gradient("all_gather", F.all_gather, x, ones * total)
gradient("gather", lambda a: F.gather(a, root=1), x, ones * 2)
each = np.repeat(np.arange(size) + 1.0, 2)[:, None] * np.ones((1, 3))
gradient(
    "scatter", lambda a: F.scatter(a, root=1), jnp.asarray(rows), each if rank == 1 else 0 * each
)
gradient("reduce_scatter", F.reduce_scatter, jnp.asarray(rows), each)
gradient("all_to_all", F.all_to_all, jnp.ones(size), np.arange(size) + 1.0)
gradient("sendrecv", lambda a: F.sendrecv(a, right, left), x, ones * (right + 1))
gradient("send, recv", relay, x, 2 * ones if rank == 0 else zeros)
check(
    "second derivative",
    jax.grad(lambda a: jax.grad(lambda b: (F.all_reduce(b) ** 2).sum())(a).sum())(x),
    2 * ones * size * size,
)
check(
    "grad of scan",
    jax.grad(
        lambda a: jax.lax.scan(lambda c, _: (F.all_reduce(c), None), a, None, length=3)[0].sum()
    )(x),
    ones * size**3,
)
check("grad of vmap", jax.grad(lambda a: jax.vmap(F.reduce)(a).sum())(x), ones)
check(
    "grad of cond",
    jax.jit(jax.grad(lambda a: jax.lax.cond(a.sum() >= 0, F.all_reduce, lambda v: v, a).sum()))(x),
    ones * size,
)

# -- forward mode: the tangents go through the same call, so they are those of all ranks


def tangent(name, function, argument, direction, wanted):
    forward = lambda a, t: jax.jvp(function, (a,), (t,))[1]  # noqa: E731
    check(f"jvp {name}", forward(argument, direction), wanted)
    check(f"jvp {name} in jit", jax.jit(forward)(argument, direction), wanted)
    got = jax.jvp(jax.jit(function), (argument,), (direction,))[1]
    check(f"jvp of jit {name}", got, wanted)


tangent("all_reduce", F.all_reduce, y, x, base * total)
tangent("avg", lambda a: F.all_reduce(a, op="avg"), y, x, base * total / size)
tangent("max", lambda a: F.all_reduce(a, op="max"), y, x,
        np.where(base == 0, base, base * size))  # fmt: skip
factors = [base * (r + 1) + 1 for r in range(size)]
product = np.prod(factors, axis=0)
tangent("prod", lambda a: F.all_reduce(a, op="prod"), y, x,
        sum(base * (r + 1) * product / factors[r] for r in range(size)))  # fmt: skip
tangent("broadcast", lambda a: F.broadcast(a, root=1), y, x, base * 2)
tangent("all_gather", F.all_gather, rows[:2] * 0, mine, rows)
tangent("reduce_scatter", F.reduce_scatter, jnp.zeros_like(rows), jnp.asarray(rows),
        np.asarray(mine) * size)  # fmt: skip
tangent("sendrecv", lambda a: F.sendrecv(a, right, left), y, x, base * (left + 1))
tangent("relay", relay, y, x, base * 2 if rank == 0 else np.float32(0))
tangent("vmap", jax.vmap(F.all_reduce), y, x, base * total)
tangent(
    "scan of calls",
    lambda a: jax.lax.scan(lambda c, _: (F.all_reduce(c), None), a, None, length=3)[0],
    y, x, base * total * size**2,
)  # fmt: skip
tangent(
    "while_loop",
    lambda a: jax.lax.while_loop(lambda c: c.sum() < 1e4, F.all_reduce, a),
    jnp.ones(3), jnp.ones(3), np.full(3, size ** np.ceil(np.log(1e4 / 3) / np.log(size))),
)  # fmt: skip
tangent("gradient", jax.grad(lambda a: (F.all_reduce(a) ** 2).sum()), y, x,
        2 * size * base * total)  # fmt: skip
transposed = jax.linear_transpose(F.all_gather, mine)
check("linear_transpose", transposed(jnp.asarray(rows))[0], np.asarray(mine) * size)
again = jax.linear_transpose(lambda g: transposed(g)[0], jnp.asarray(rows))
check("linear_transpose twice", jax.jit(again)(mine)[0], rows)


# -- a program that is gone keeps no communicator
def released():
    other = comm.dup()
    jax.jit(lambda a: F.all_reduce(a, other))(x).block_until_ready()
    F.all_reduce(x, other).block_until_ready()
    return weakref.ref(other)


reference = released()
jax.clear_caches()
gc.collect()
comm.barrier()  # waits for programs in the background
check("communicator of a program that is gone", reference() is None, True)
print(f"[{rank}] {checks} checks, {wrong} wrong", flush=True)
