"""Training of a sharded model over all processes, compared with the same training on one device.

::

    collective run -n 4 --jax tests/jax/sharded_training.py

The batch is spread along one axis of the mesh, and the weights along the other. Each step donates
the parameters. XLA adds up in another order than one device, so the results are nearly equal.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

STEPS, BATCH, INPUTS, HIDDEN = 30, 24, 6, 16
SPECS = {
    "first": PartitionSpec(None, "model"), "bias": PartitionSpec("model"),
    "second": PartitionSpec("model", None),
}  # fmt: skip


def placed(values: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def loss(parameters: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ parameters["first"] + parameters["bias"])
    return jnp.mean((hidden @ parameters["second"] - y) ** 2)


def trained(mesh: Mesh) -> tuple[dict[str, jax.Array], list[float]]:
    """Return the parameters of all processes after the last step, and the losses."""
    rng = np.random.default_rng(3)
    # Of 64 bits, which JAX makes 32 bits unless x64 is enabled.
    start = {
        "first": rng.normal(size=(INPUTS, HIDDEN)), "bias": np.zeros(HIDDEN),
        "second": rng.normal(size=(HIDDEN, 1)),
    }  # fmt: skip
    parameters = {name: placed(array, mesh, SPECS[name]) for name, array in start.items()}
    velocity = {name: placed(0 * array, mesh, SPECS[name]) for name, array in start.items()}

    @jax.jit(donate_argnums=(0, 1))
    def step(parameters: Any, velocity: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x, y)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        return jax.tree.map(lambda p, v: p - 0.01 * v, parameters, velocity), velocity, value

    losses = []
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, INPUTS))
        y = np.sin(x.sum(1, keepdims=True))
        before = parameters["first"]
        parameters, velocity, value = step(
            parameters, velocity, *(placed(a, mesh, PartitionSpec("data")) for a in (x, y))
        )
        losses.append(float(value))
        assert before.is_deleted()
    return parameters, losses


def main() -> None:
    if "x64" in sys.argv:
        jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize()
    size = jax.process_count()
    shape = (2, size // 2) if size % 2 == 0 else (size, 1)
    together, losses = trained(Mesh(np.array(jax.devices()).reshape(shape), ("data", "model")))
    local = np.array(jax.local_devices()[:1]).reshape(1, 1)
    alone, local_losses = trained(Mesh(local, ("data", "model")))
    tolerance = 1e-12 if "x64" in sys.argv else 1e-4
    np.testing.assert_allclose(losses, local_losses, rtol=tolerance)
    for name, array in together.items():
        for shard in array.addressable_shards:
            wanted = np.asarray(alone[name])[shard.index]
            np.testing.assert_allclose(shard.data, wanted, rtol=tolerance, atol=tolerance)
    assert losses[-1] < losses[0] / 2
    print(f"{together['first'].dtype}: the same after {STEPS} steps on {shape}", flush=True)


if __name__ == "__main__":
    main()
