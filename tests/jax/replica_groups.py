"""Compile programs of JAX for meshes of several devices, and read the groups in each of them.

Run by test_programs.py: replica_groups.py DEVICES. The program needs one process, because XLA
writes the same text for its own virtual devices. Prints the number of different texts, and fails at
a text that cannot be read, or whose groups do not have each device of the mesh once.
"""

import os
import random
import re
import sys

devices = int(sys.argv[1])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from collective.adapters.jax.xla.replica_groups import device_groups  # noqa: E402

FUNCTIONS = [
    lambda x: x.sum(),
    lambda x: x.sum(0),
    lambda x: x.max(1),
    lambda x: x.T * 2,
    lambda x: x @ x.T,
    lambda x: x * 2,
    lambda x: jnp.sort(x, 1),
    lambda x: jnp.roll(x, 3, 0),
]
MESHES = {4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}[devices]
choose = random.Random(devices)


def shardings(mesh: Mesh) -> list[NamedSharding]:
    """Return the ways of splitting a matrix over the axes of a mesh."""
    names = mesh.axis_names
    axes = [None, *names, names, names[::-1]]
    pairs = [(a, b) for a in names for b in names if a != b]
    specs = [(a,) for a in axes] + [(None, a) for a in axes] + pairs
    return [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]


texts = set()
x = jax.ShapeDtypeStruct((16, 16), np.float32)
for shape in MESHES:
    numbers = np.arange(devices)
    orders = [
        numbers,
        numbers.reshape(shape).T.ravel(),
        np.random.RandomState(0).permutation(devices),
    ]
    for order in orders:
        mesh = Mesh(np.array(jax.devices())[order].reshape(shape), tuple("abc"[: len(shape)]))
        for function in FUNCTIONS:
            source, target = choose.choices(shardings(mesh), k=2)
            for out in (target, None) if function(np.ones((16, 16))).ndim == 2 else (None,):
                jitted = jax.jit(function, in_shardings=source, out_shardings=out)
                text = jitted.lower(x).compile().as_text()
                found = re.findall(r"replica_groups=.*?(?=, [a-z_]+=[^(]|$)", text, re.MULTILINE)
                for groups in set(found) - texts:
                    read = device_groups(
                        f"%x = f32[2] all-reduce(%p), channel_id=1, {groups}, "
                        "use_global_device_ids=true, to_apply=%r",
                        numbers[None],
                    )
                    members = sorted(device for group in read for device in group)
                    assert members == [*numbers], (groups, read)
                    texts.add(groups)
print(len(texts), *sorted(texts), sep="\n")
