"""Meshes of some of the processes, while other processes are in other meshes.

XLA tells an MPI library the first device of a mesh, and not how many devices there are. So all
meshes here begin with device 0, and some processes come to a mesh that the others have left out.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def prepared(numbers: Sequence[int]):
    """Return a function that sums over a mesh of devices, and its input: ones."""
    mesh = Mesh(np.array(jax.devices())[list(numbers)], ("i",))
    sharding = NamedSharding(mesh, PartitionSpec("i"))
    ones = jax.make_array_from_callback(
        (len(numbers), 2), sharding, lambda index: np.ones((1, 2), np.float32)
    )
    function = jax.shard_map(
        lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=PartitionSpec("i"),
        out_specs=PartitionSpec("i"),
    )  # fmt: skip
    return jax.jit(function), ones


def total(numbers: Sequence[int]) -> str:
    """Return the sum over some devices, "-" on other processes, or the error."""
    if jax.process_index() not in numbers:
        return "-"
    try:
        function, ones = prepared(numbers)
        return str(float(np.asarray(function(ones).addressable_shards[0].data)[0, 0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def permuted() -> bool:
    """Return whether sums of a matrix's columns are right over meshes of permuted devices."""
    matrix, right = np.arange(64, dtype=np.float32).reshape(8, 8), []
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0], [1, 3, 0, 2]):
        mesh = Mesh(np.array(jax.devices())[order].reshape(2, 2), ("a", "b"))
        sharding = NamedSharding(mesh, PartitionSpec("a", "b"))
        x = jax.make_array_from_callback(matrix.shape, sharding, matrix.__getitem__)
        for spec in (PartitionSpec(), PartitionSpec("b"), PartitionSpec(("b", "a"))):
            sharding = NamedSharding(mesh, spec)
            sums = jax.jit(lambda x: x.sum(0), out_shardings=sharding)(x)
            right += [
                np.array_equal(s.data, matrix.sum(0)[s.index]) for s in sums.addressable_shards
            ]
    return all(right)


def stored(path: str) -> None:
    """Write the executable of a sum over all devices to a file."""
    function, ones = prepared(range(jax.process_count()))
    parts = serialize(function.lower(ones).compile())
    with open(f"{path}-{jax.process_index()}", "wb") as file:
        pickle.dump(parts, file)


def run_stored(path: str) -> str:
    """Return the sum by the executable in the file, which this process has not compiled."""
    _, ones = prepared(range(jax.process_count()))
    with open(f"{path}-{jax.process_index()}", "rb") as file:
        parts = pickle.load(file)
    try:
        result = deserialize_and_load(*parts)(ones)
        return str(float(np.asarray(result.addressable_shards[0].data)[0, 0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    jax.distributed.initialize()
    size = jax.process_count()
    if sys.argv[1:2] == ["store"]:
        stored(sys.argv[2])
        return
    if sys.argv[1:2] == ["load"]:
        print(run_stored(sys.argv[2]), flush=True)
        time.sleep(1)
        return
    if sys.argv[1:2] == ["permuted"]:
        print(permuted(), flush=True)
        return
    # The last process is not in the first two meshes, so it comes to the third mesh first.
    meshes = [[0, 1], [1, 0], list(range(size)), list(range(size))[::-1], [0, size - 1], [0, 1]]
    print(" ".join(total(numbers) for numbers in meshes), flush=True)


if __name__ == "__main__":
    main()
