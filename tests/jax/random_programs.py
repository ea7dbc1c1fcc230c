"""Random shard_map programs over random meshes, compared with a computation in NumPy.

::

    collective run -n 4 --jax tests/jax/random_programs.py --seed 7 --programs 10000
    COLLECTIVE_SECRET=none COLLECTIVE_INTERFACE=lo collective run -n 4 --jax \\
        --backend hierarchical tests/jax/random_programs.py --hosts 2

With ``--hosts N`` the processes claim to be on N hosts.

All processes draw the same programs. A program's mesh has some or all of the devices, in any order.
Processes without a device in the mesh go on to the next program. The numbers are small integers, so
every result is exact.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, COLUMNS = 12, 2
MOST_ROWS = 200
DTYPES = ("float32", "int32", "uint8", "int16", "bfloat16", "complex64")
Shards = dict[tuple[int, ...], np.ndarray[Any, Any]]


class Step(NamedTuple):
    """Operation along some axes of the mesh; for ppermute also who sends to whom."""

    operation: str
    axes: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...] = ()


class Program(NamedTuple):
    """Mesh as numbers of devices, names of its axes, dtype and steps."""

    devices: np.ndarray[Any, Any]
    axes: tuple[str, ...]
    dtype: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return (
            f"{self.dtype} over {self.devices.tolist()} {self.axes}: {list(map(tuple, self.steps))}"
        )


def drawn(rng: random.Random, size: int) -> Program:
    """Return a random program for ``size`` processes."""
    number = rng.randint(2, size)
    chosen = rng.sample(range(size), number)
    shapes = [(number,), (1, number), (number, 1)]
    shapes += [(a, number // a) for a in range(2, number) if number % a == 0] * 3
    shape = rng.choice(shapes)
    axes = ("a", "b")[: len(shape)]
    lengths = dict(zip(axes, shape))
    dtype = rng.choice(DTYPES)
    steps: list[Step] = []
    rows = ROWS
    for _ in range(rng.randint(1, 4)):
        along = tuple(rng.sample(axes, rng.randint(1, len(axes))))
        members = math.prod(lengths[axis] for axis in along)
        operations = ["psum", "ppermute"]
        if dtype != "complex64":
            operations += ["pmax", "pmin"]
        if rows % members == 0:
            operations += ["psum_scatter", "all_to_all"]
        if rows * members <= MOST_ROWS:
            operations += ["all_gather"]
        operation = rng.choice(operations)
        pairs: tuple[tuple[int, int], ...] = ()
        if operation == "ppermute":
            along = along[:1]
            members = lengths[along[0]]
            count = rng.randint(1, members)
            pairs = tuple(zip(rng.sample(range(members), count), rng.sample(range(members), count)))
        rows = {"psum_scatter": rows // members, "all_gather": rows * members}.get(operation, rows)
        steps.append(Step(operation, along, pairs))
    return Program(np.array(chosen).reshape(shape), axes, dtype, tuple(steps))


def in_jax(program: Program) -> Callable[[Any], Any]:
    """Return the function for shard_map."""

    def run(x: Any) -> Any:
        for operation, axes, pairs in program.steps:
            if operation == "ppermute":
                x = lax.ppermute(x, axes[0], pairs)
            elif operation == "psum_scatter":
                x = lax.psum_scatter(x, axes, tiled=True)
            elif operation == "all_gather":
                x = lax.all_gather(x, axes, tiled=True)
            elif operation == "all_to_all":
                x = lax.all_to_all(x, axes, 0, 0, tiled=True)
            else:
                x = getattr(lax, operation)(x, axes)
            # Keep the numbers small, so that they are exact.
            if program.dtype == "complex64":
                x = (x.real % 5 + 1j * (x.imag % 5)).astype(x.dtype)
            else:
                x = x % jnp.asarray(5, x.dtype)
        return x

    return run


def in_numpy(program: Program, shards: Shards) -> Shards:
    """Return each device's result, by its place in the mesh."""
    shape = dict(zip(program.axes, program.devices.shape))
    for operation, axes, pairs in program.steps:
        result: Shards = {}
        for place in shards:
            group = _group(place, program.axes, axes, shape)
            own, inputs = group.index(place), [shards[member] for member in group]
            result[place] = _one(operation, inputs, own, pairs)
        shards = {place: _small(array) for place, array in result.items()}
    return shards


def _group(
    place: tuple[int, ...], names: Sequence[str], axes: Sequence[str], shape: dict[str, int]
) -> list[tuple[int, ...]]:
    """Return the places that exchange data with ``place``; the first of ``axes`` is the slowest."""
    members = []
    for values in itertools.product(*(range(shape[axis]) for axis in axes)):
        changed = dict(zip(names, place)) | dict(zip(axes, values))
        members.append(tuple(changed[name] for name in names))
    return members


def _one(
    operation: str, inputs: list[Any], own: int, pairs: Sequence[tuple[int, int]]
) -> np.ndarray[Any, Any]:
    number = len(inputs)
    if operation == "psum":
        return np.asarray(sum(inputs))
    if operation in ("pmax", "pmin"):
        return np.asarray(getattr(np, operation[1:])(inputs, axis=0))
    if operation == "psum_scatter":
        return np.split(np.asarray(sum(inputs)), number)[own]
    if operation == "all_gather":
        return np.concatenate(inputs)
    if operation == "all_to_all":
        return np.concatenate([np.split(array, number)[own] for array in inputs])
    senders = [src for src, dst in pairs if dst == own]
    return inputs[senders[0]] if senders else np.zeros_like(inputs[own])


def _small(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.real % 5 + 1j * (array.imag % 5) if np.iscomplexobj(array) else array % 5


def is_right(program: Program, seed: int) -> bool:
    """Run a program here, and return whether this process's part of the result is right."""
    devices = np.array(jax.devices())[program.devices]
    if jax.local_devices()[0] not in devices:
        return True
    number = devices.size
    whole = np.random.default_rng(seed).integers(0, 5, (number * ROWS, COLUMNS))
    wide = np.complex64 if program.dtype == "complex64" else np.int64
    pieces = np.split(whole.astype(wide), number)
    places = [tuple(map(int, place)) for place in np.ndindex(devices.shape)]
    wanted = in_numpy(program, dict(zip(places, pieces)))
    mesh = Mesh(devices, program.axes)
    sharding = NamedSharding(mesh, PartitionSpec(program.axes))
    given = whole.astype(jnp.dtype(program.dtype))
    array = jax.make_array_from_callback(given.shape, sharding, lambda index: given[index])
    function = jax.shard_map(
        in_jax(program), mesh=mesh, in_specs=PartitionSpec(program.axes),
        out_specs=PartitionSpec(program.axes), check_vma=False,
    )  # fmt: skip
    result = np.asarray(jax.jit(function)(array).addressable_shards[0].data).astype(wide)
    own = places[int(np.flatnonzero(devices.ravel() == jax.local_devices()[0])[0])]
    return result.shape == wanted[own].shape and bool(np.array_equal(result, wanted[own]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=1)
    options = parser.parse_args()
    if options.hosts > 1:
        place, size = int(os.environ["COLLECTIVE_RANK"]), int(os.environ["COLLECTIVE_SIZE"])
        socket.gethostname = lambda: f"host-{place * options.hosts // size}"
    jax.distributed.initialize()
    rng = random.Random(options.seed)
    wrong = 0
    for number in range(options.programs):
        program = drawn(rng, jax.process_count())
        if not is_right(program, options.seed + number):
            wrong += 1
            print(f"wrong: program {number}: {program}", flush=True)
        if number % 50 == 49:
            jax.clear_caches()
    print(f"{options.programs} programs, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
