"""Calls inside jit on every rank; print a line for each check that is wrong, and their number.

A traced call has two ways: Python makes its first call, and over shm the native core makes the
later ones. So each function is called several times, with other numbers each time. The numbers
differ between ranks, or a call that does nothing would pass as an average.
"""

import gc
import itertools
import os
import weakref

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import collective
from collective.adapters.jax import functional as F
from collective.communicator.repeated import RepeatedCall

TURNS = 3
comm = collective.init()
rank, size = comm.rank, comm.size
total = size * (size + 1) / 2
base = np.arange(6, dtype=np.float32).reshape(2, 3)
x = jnp.asarray(base * (rank + 1))
rows = np.arange(size * 2 * 3, dtype=np.float32).reshape(size * 2, 3)  # two rows for each rank
mine = jnp.asarray(rows[2 * rank : 2 * rank + 2])
checks = wrong = in_python = 0
make = RepeatedCall.make


def counted(*arguments):
    """Count a call that Python makes, and make it."""
    global in_python
    in_python += 1
    make(*arguments)


RepeatedCall.make = counted


def check(name, got, wanted, dtype="float32", rtol=1e-5):
    global checks, wrong
    checks += 1
    got = np.asarray(got)
    kind = np.complex128 if got.dtype.kind == "c" else np.float64
    found, wanted = got.astype(kind), np.asarray(wanted).astype(kind)
    alike = str(got.dtype) == dtype and found.shape == wanted.shape
    if not alike or not np.allclose(found, wanted, rtol=rtol):
        wrong += 1
        print(
            f"[{rank}] {name}: {got.dtype} {found.tolist()} instead of {dtype} {wanted.tolist()}",
            flush=True,
        )


def arrays(turn, shape, dtype):
    """Return an array of small numbers for each rank, unlike those of other ranks and turns."""
    numbers = [np.random.default_rng([turn, r]).integers(0, 4, shape) for r in range(size)]
    return [number % 2 == 0 if dtype == "bool" else number for number in numbers]


def jitted(name, function, wanted, shape=(2, 3), dtype="float32", rtol=1e-5):
    """Check several calls of a compiled function.

    Args:
        function: function of an array.
        wanted: function that returns this rank's result, from the list of all ranks' arrays.
    """
    compiled = jax.jit(function)
    for turn in range(TURNS):
        numbers = arrays(turn, shape, dtype)
        got = compiled(jnp.asarray(numbers[rank]).astype(dtype))
        # A computation in double precision, beside which integers and 16 bits can be checked.
        result = wanted([number.astype(complex if "c" in dtype else float) for number in numbers])
        check(f"{name} of {dtype} in jit, call {turn}", got, result, dtype, rtol)


def both(name, function, wanted, shape=(2, 3), dtype="float32"):
    """Check several calls of a function outside and inside jit, with the arguments of jitted."""
    for turn in range(TURNS):
        numbers = arrays(turn, shape, dtype)
        got = function(jnp.asarray(numbers[rank]).astype(dtype))
        check(f"{name} eagerly, call {turn}", got, wanted(numbers), dtype)
    jitted(name, function, wanted, shape, dtype)


def at_root(value):
    """Return a result that only rank 1 has; the other ranks have a zero."""
    return value if rank == 1 else 0.0


# -- values
right, left = (rank + 1) % size, (rank - 1) % size
PIECES = (size * 2, 3)  # shape of an array with a piece for each rank


def piece(array, r=rank):
    return np.array_split(array, size)[r]


REDUCTIONS = {
    "sum": sum,
    "avg": lambda a: sum(a) / size,
    "min": lambda a: np.min(a, axis=0),
    "max": lambda a: np.max(a, axis=0),
    "prod": lambda a: np.prod(a, axis=0),
}
for op, wanted in REDUCTIONS.items():
    both(f"all_reduce {op}", lambda a, op=op: F.all_reduce(a, op=op), wanted)
    for dtype in ("int8", "bfloat16"):
        if (op, dtype) != ("avg", "int8"):
            jitted(
                f"all_reduce {op}", lambda a, op=op: F.all_reduce(a, op=op), wanted, dtype=dtype,
                rtol=1e-2 if op == "avg" else 1e-5,
            )  # fmt: skip
# Functions of one array, and their results from all ranks' arrays: calls that reduce, and others.
REDUCING = {
    "scan": (F.scan, lambda a: sum(a[: rank + 1])),
    "reduce": (lambda a: F.reduce(a, root=1), lambda a: at_root(sum(a))),
    "reduce_scatter": (F.reduce_scatter, lambda a: piece(sum(a))),
    "vmap reduce": (
        jax.vmap(lambda a: F.reduce(a, root=1)),
        lambda a: sum(a) if rank == 1 else np.zeros(2 * size),
    ),
}
MOVING = {
    "broadcast": (lambda a: F.broadcast(a, root=1), lambda a: a[1]),
    "all_gather": (F.all_gather, np.concatenate),
    "all_gather axis 1": (lambda a: F.all_gather(a, axis=1), np.hstack),
    "gather": (lambda a: F.gather(a, root=1), lambda a: at_root(np.concatenate(a))),
    "scatter": (lambda a: F.scatter(a, root=1), lambda a: piece(a[1])),
    "all_to_all": (F.all_to_all, lambda a: np.concatenate([piece(each) for each in a])),
    "sendrecv": (lambda a: F.sendrecv(a, right, left), lambda a: a[left]),
    "vmap broadcast": (jax.vmap(lambda a: F.broadcast(a, root=1)), lambda a: a[1]),
}
for name, (function, wanted) in {**REDUCING, **MOVING}.items():
    both(name, function, wanted, PIECES)
    for dtype in ("int8", "bfloat16", "bool"):
        if name in MOVING or dtype != "bool":
            jitted(name, function, wanted, PIECES, dtype)
for dtype in ("int16", "int32", "uint8", "uint16", "uint32", "float16", "complex64"):
    jitted("all_reduce", F.all_reduce, sum, dtype=dtype)
both("all_reduce lor", lambda a: F.all_reduce(a, op="lor"), lambda a: np.any(a, axis=0),
     dtype="bool")  # fmt: skip
both("all_reduce scalar", F.all_reduce, sum, ())
both("all_reduce empty", F.all_reduce, sum, (0, 3))
check("int64 without x64", F.all_reduce(np.arange(3, dtype=np.int64)), np.arange(3) * size, "int32")
both("all_gather scalar", F.all_gather, np.array, ())
counts = list(range(1, size + 1))
both(
    "all_gather counts",
    lambda a: F.all_gather(a[: rank + 1], counts=counts),
    lambda a: np.concatenate([each[: r + 1] for r, each in enumerate(a)]),
    (size,),
)
both("reduce_scatter uneven", F.reduce_scatter, lambda a: piece(sum(a)), (2 * size + 1,))
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


both("send, recv", relay, lambda a: a[0] * 2 if rank == 0 else 0.0)


# -- the native core makes the later calls of these functions over shm, and Python makes all others
def later_calls(function):
    """Return how many calls Python makes after the first one, of a compiled function."""
    compiled = jax.jit(function)
    for turn in range(TURNS):
        got = compiled(jnp.asarray(arrays(turn, PIECES, "float32")[rank], jnp.float32))
        got.block_until_ready()
        if turn == 0:
            before = in_python
    return in_python - before


THROUGH_PYTHON = {"all_gather axis 1", "scatter", "sendrecv"}
for name, (function, _) in {"all_reduce": (F.all_reduce, sum), **REDUCING, **MOVING}.items():
    through_python = comm.backend != "shm" or name in THROUGH_PYTHON
    check(f"later calls of {name} by Python", later_calls(function), through_python * (TURNS - 1),
          "int64")  # fmt: skip

# -- transformations
both("vmap", jax.vmap(F.all_reduce), sum)
both("vmap all_gather", jax.vmap(F.all_gather, in_axes=1, out_axes=1), np.concatenate)
both(
    "vmap reduce_scatter",
    jax.vmap(F.reduce_scatter, in_axes=1, out_axes=1),
    lambda a: piece(sum(a)),
    PIECES,
)


def weighted_averages(a):
    """Return the result of a loop of averages, in which each rank multiplies with its weight."""
    for _ in range(4):
        a = [sum(each * (r + 1) for r, each in enumerate(a)) / size] * size
    return a[rank]


def weighted_average(c):
    return F.all_reduce(c * (rank + 1), op="avg")


both(
    "scan of calls",
    lambda a: jax.lax.scan(lambda c, _: (weighted_average(c), None), a, None, length=4)[0],
    weighted_averages,
)
both(
    "fori_loop",
    lambda a: jax.lax.fori_loop(0, 4, lambda k, c: weighted_average(c), a),
    weighted_averages,
)


def step(_, c):
    """Add the results of calls of which a rank has an own result, or none."""
    return (
        F.reduce(c * (rank + 1), root=1)
        + F.broadcast(c + rank, root=1)
        + F.gather(c * rank, root=1).sum()
        + F.scan(c)
        + F.scatter(jnp.concatenate([c * (r + 1 + rank) for r in range(size)]), root=1)
        + F.sendrecv(c, right, left)
    ) / 16


def steps(a):
    """Return this rank's result of 4 times :func:`step`."""
    for _ in range(4):
        reduced = sum(each * (r + 1) for r, each in enumerate(a))
        gathered = sum((each * r).sum() for r, each in enumerate(a))
        a = [
            (
                (reduced + gathered if r == 1 else 0)
                + a[1] + 1 + sum(a[: r + 1]) + a[1] * (r + 2) + a[(r - 1) % size]
            ) / 16
            for r in range(size)
        ]  # fmt: skip
    return a[rank]


both("fori_loop of rooted calls", lambda a: jax.lax.fori_loop(0, 4, step, a), steps)


def grown(a):
    """Return the sum of all ranks' numbers, multiplied with the size until it is at least 100."""
    value = sum(a) + 1
    while value < 100:
        value = value * size
    return value


both(
    "while_loop",
    lambda a: jax.lax.while_loop(lambda c: c < 100, F.all_reduce, F.all_reduce(a) + 1),
    grown,
    (),
)
both("cond", lambda a: jax.lax.cond(a.sum() >= 0, F.all_reduce, lambda v: v, a), sum)
donated = jax.jit(F.all_reduce, donate_argnums=0)
for turn in range(TURNS):
    check("donated", donated(jnp.asarray(base * (rank + turn))), base * (total + size * (turn - 1)))


def unlike(a):
    """Make 60 calls of unlike lengths and ops, which fail if XLA reorders them."""
    return sum(
        F.all_reduce(jnp.full(k % 7 + 1, a), op=("sum", "min", "max")[k % 3]).sum()
        for k in range(60)
    )


check(
    "order",
    jax.jit(unlike)(jnp.float32(rank + 1)),
    sum((k % 7 + 1) * (total, 1, size)[k % 3] for k in range(60)),
)

# -- gradients


def gradient(name, function, argument, wanted):
    """Check the gradient of a loss in which rank r weighs its result with r + 1."""
    loss = lambda a, weight: (weight * function(a)).sum()  # noqa: E731
    ways = {
        "grad": jax.grad(loss),
        "grad in jit": jax.jit(jax.grad(loss)),
        "grad of jit": jax.grad(jax.jit(loss)),
    }
    for (way, differentiate), turn in itertools.product(ways.items(), range(1, TURNS + 1)):
        weight = jnp.float32(turn * (rank + 1))
        check(f"{way} {name}, call {turn}", differentiate(argument, weight), wanted * turn)


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
    """Check the tangent of a function, which is linear in the direction."""
    forward = lambda a, t: jax.jvp(function, (a,), (t,))[1]  # noqa: E731
    compiled = jax.jit(function)
    ways = {
        "jvp": forward,
        "jvp in jit": jax.jit(forward),
        "jvp of jit": lambda a, t: jax.jvp(compiled, (a,), (t,))[1],
    }
    for (way, differentiate), turn in itertools.product(ways.items(), range(1, TURNS + 1)):
        got = differentiate(argument, direction * turn)
        check(f"{way} {name}, call {turn}", got, wanted * turn)


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
check("communicator of a program that is gone", reference() is None, True, "bool")
print(f"[{rank}] {checks} checks, {wrong} wrong", flush=True)
