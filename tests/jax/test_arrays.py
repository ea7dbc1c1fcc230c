"""JAX's arrays in every call: JAX in, JAX out, on the device of the input, without copies."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

import jax
import jax.numpy as jnp

import collective
from collective.communicator import Communicator
from collective.errors import DeviceError, DtypeError, InvalidArgumentError
from collective.memory import nested
from collective.memory.arrays import adapter_like, adapter_of
from collective.memory.dtypes import BY_NAME
from collective.testing import RankPool, parametrize_with_checks, run_checks, run_ranks
from tests.support.interpreter import run_python

Check = Any
arrays: Any = importlib.import_module("collective.adapters.jax.arrays")

# Each function gets this rank's array, or a structure of arrays, and returns the call's result.
CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x, op="max"),
    "all_reduce in the background": lambda comm, x: comm.all_reduce(x, async_op=True).wait(),
    "all_reduce in rank order": lambda comm, x: comm.all_reduce(x, order="rank"),
    "reduce": lambda comm, x: comm.reduce(x, root=1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "scan": lambda comm, x: comm.scan(x),
    "broadcast": lambda comm, x: comm.broadcast(x, root=1),
    "broadcast to None": lambda comm, x: comm.broadcast(
        x if comm.rank == 1 else None, root=1, like="jax"
    ),
    "scatter": lambda comm, x: comm.scatter(x, root=1),
    "scatter to None": lambda comm, x: comm.scatter(
        x if comm.rank == 1 else None, root=1, like="jax"
    ),
    "gather": lambda comm, x: comm.gather(x, root=1),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "sendrecv": lambda comm, x: comm.sendrecv(
        x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    ),
    "broadcast_object": lambda comm, x: comm.broadcast_object(x, root=1),
    "all_gather_object": lambda comm, x: comm.all_gather_object(x),
}


@parametrize_with_checks("threads", sizes=(2,), kind="jax")
def test_jax_arrays_pass_all_checks(check: Check) -> None:
    check()


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo", "hierarchical"])
def test_jax_arrays_pass_checks_over_processes(backend: str) -> None:
    names = ["check_all_reduce", "check_structures", "check_send_recv", "check_scatter",
             "check_repeated", "check_async", "check_reductions_of_layouts"]  # fmt: skip
    results = run_checks(backend, sizes=(2,), kind="jax", checks=names)
    assert [result for result in results if result.outcome == "failed"] == []


def _kinds(comm: Communicator, name: str, dtype: str) -> list[bool]:
    x = jnp.ones((4, 3), dtype)
    many = {"w": x, "b": [x, x[:2]]}
    single = name.startswith(("reduce_scatter", "scatter", "all_to_all", "all_gather"))
    results = [CALLS[name](comm, value) for value in ([x] if single else [x, many])]
    leaves = [leaf for leaf in nested.flatten(results) if leaf is not None]
    return [isinstance(leaf, jax.Array) and leaf.dtype == dtype for leaf in leaves]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", CALLS)
def test_call_on_jax_arrays_returns_jax_arrays_of_that_dtype(name: str, dtype: str) -> None:
    for rank, kinds in enumerate(run_ranks(2, _kinds, name, dtype)):
        assert all(kinds)
        assert kinds or rank == 0  # only the root has a result, which is rank 1 here


def _mixed(comm: Communicator) -> list[Any]:
    x = jnp.arange(3.0) if comm.rank == 0 else np.arange(3, dtype=np.float32)
    results = [
        comm.all_reduce(x),
        comm.all_gather(x),
        comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank),
    ]
    assert [np.asarray(result).tolist() for result in results] == [
        [0, 2, 4], [0, 1, 2, 0, 1, 2], [0, 1, 2],
    ]  # fmt: skip
    return [type(result) is np.ndarray for result in results]


def test_ranks_of_other_frameworks_get_their_own_kind() -> None:
    jax_rank, numpy_rank = run_ranks(2, _mixed)
    assert jax_rank[:2] == [False, False]
    assert numpy_rank[:2] == [True, True]


def _received(comm: Communicator) -> list[Any]:
    if comm.rank == 0:
        for _ in range(2):
            comm.send(np.arange(3.0), 1)
        return []
    by_name, by_array = comm.recv(None, 0, like="jax"), comm.recv(None, 0, like=jnp.ones(1))
    return [(isinstance(x, jax.Array), str(x.dtype), x.tolist()) for x in (by_name, by_array)]


def _weak_types(comm: Communicator) -> list[bool]:
    with jax.enable_x64(True):
        x = jnp.asarray(1.5)
    assert x.weak_type
    assert x.dtype == np.float64
    results = [comm.broadcast(x), comm.broadcast_object(x), comm.all_reduce(x)]
    assert all(result.dtype == x.dtype for result in results)
    return [result.weak_type for result in results]


def test_weak_type_of_the_root_is_lost_on_every_rank() -> None:
    assert run_ranks(2, _weak_types) == [[False] * 3] * 2


def test_recv_like_jax_keeps_float64_without_x64() -> None:
    assert run_ranks(2, _received)[1] == [(True, "float64", [0.0, 1.0, 2.0])] * 2


def _of_scalars(comm: Communicator) -> tuple[Any, ...]:
    total = comm.all_reduce(jnp.float32(comm.rank + 1))
    return isinstance(total, jax.Array), total.shape, float(total)


def test_array_without_dimensions_stays_one() -> None:
    assert run_ranks(2, _of_scalars) == [(True, (), 3.0)] * 2


def _of_empty(comm: Communicator) -> bool:
    x = comm.empty((2, 3), "bfloat16", like="jax")
    return isinstance(x, jax.Array) and x.shape == (2, 3) and comm.all_reduce(x).dtype == x.dtype


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_empty_like_jax_returns_a_jax_array(backend: str) -> None:
    assert run_ranks(2, _of_empty, backend=backend) == [True, True]


# -- without copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "complex64", "bool"])
def test_view_shares_the_memory_of_the_array(dtype: str) -> None:
    x = jnp.ones((3, 5), dtype)
    array, element = adapter_of(x).view(x)
    assert element is BY_NAME[dtype]
    assert array.__array_interface__["data"][0] == x.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bfloat16", "bool"])
def test_result_shares_the_memory_that_the_call_wrote(dtype: str) -> None:
    adapter, element = adapter_like("jax"), BY_NAME[dtype]
    memory = adapter.empty((3, 5), element, None)
    memory[...] = 1
    x = adapter.wrap(memory, element)
    assert x.unsafe_buffer_pointer() == memory.__array_interface__["data"][0]
    assert (str(x.dtype), x.shape) == (dtype, (3, 5))


def _addresses(comm: Communicator) -> int:
    total = comm.all_reduce(jnp.ones(1 << 16))
    return int(total.unsafe_buffer_pointer()) % 64


def test_result_of_a_call_is_aligned_for_xla() -> None:
    assert run_ranks(2, _addresses) == [0, 0]


def _forget() -> None:
    """Have the adapter look for the device and the functions of JAX again."""
    for cached in (arrays._home, arrays._home_maker, arrays._maker):
        cached.cache_clear()


def test_public_functions_make_the_same_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = importlib.import_module("jax._src.lib")
    monkeypatch.setattr(lib, "xla_client", object())
    _forget()
    try:
        adapter = adapter_like("jax")
        for name in ("float32", "float64", "bfloat16", "int64", "bool"):
            memory = adapter.empty((2, 3), BY_NAME[name], None)
            memory[...] = 1
            x = adapter.wrap(memory, BY_NAME[name])
            assert isinstance(x, jax.Array)
            assert str(x.dtype) == name
            assert x.unsafe_buffer_pointer() == memory.__array_interface__["data"][0]
    finally:
        _forget()


def test_result_without_a_cpu_device_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(backend: str) -> Any:
        raise RuntimeError("unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", refuse)
    _forget()
    try:
        with pytest.raises(DeviceError, match="JAX_PLATFORMS"):
            adapter_like("jax").wrap(np.ones(2), BY_NAME["float64"])
    finally:
        _forget()


def test_donation_during_a_call_leaves_the_input_as_it_was() -> None:
    x = jnp.ones(1024)
    array, _ = adapter_of(x).view(x)
    jax.jit(lambda v: v + 1, donate_argnums=0)(x).block_until_ready()
    assert array.tolist() == [1.0] * 1024


# -- refusals ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Any:
    with collective.init() as comm:
        yield comm


def _deleted() -> Any:
    x = jnp.ones(3)
    x.delete()
    return x


@pytest.mark.parametrize("out", [True, False])
def test_jax_array_as_out_is_refused_as_immutable(alone: Any, out: bool) -> None:
    x = jnp.ones(3)
    with pytest.raises(InvalidArgumentError, match="JAX arrays are immutable"):
        alone.all_reduce(x if out else np.ones(3, np.float32), out=x)


@pytest.mark.parametrize(
    "transformed",
    [lambda f: jax.jit(f)(jnp.ones(3)), lambda f: jax.grad(lambda v: f(v).sum())(jnp.ones(3)),
     lambda f: jax.vmap(f)(jnp.ones((2, 3)))],
    ids=["jit", "grad", "vmap"],
)  # fmt: skip
def test_call_inside_a_transformed_function_names_functional(alone: Any, transformed: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"collective\.adapters\.jax\.functional"):
        transformed(alone.all_reduce)


def test_deleted_array_is_refused(alone: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="the array was deleted"):
        alone.all_reduce(_deleted())


def test_random_key_is_refused_with_the_way_to_send_it(alone: Any) -> None:
    with pytest.raises(DtypeError, match=r"jax\.random\.key_data"):
        alone.broadcast(jax.random.key(0))


# -- several devices in a process ----------------------------------------------------------------

_SEVERAL = """
import jax, jax.numpy as jnp, numpy as np, collective
from jax.sharding import NamedSharding, PartitionSpec

first, second = jax.devices()
with collective.init() as comm:
    x = jax.device_put(jnp.ones(5, jnp.bfloat16), second)
    like = comm.broadcast(x, like=x)
    results = [comm.all_reduce(x), comm.all_gather(x), comm.all_reduce([x, x])[1], like]
    print([result.devices() == {second} for result in results])
    out = np.empty(5, x.dtype)
    print(comm.all_reduce(x, out=out) is out, out.tolist() == [1] * 5)
    print(comm.all_gather_object(x)[0].tolist() == [1] * 5)
    x.delete()
    halves = NamedSharding(jax.make_mesh((2,), ("a",)), PartitionSpec("a"))
    for value in (x, jax.device_put(jnp.ones(4), halves)):
        try:
            comm.all_reduce(value)
        except collective.InvalidArgumentError as error:
            print(error)
"""


def test_array_on_another_device_comes_back_to_it_and_spread_arrays_are_refused() -> None:
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = run_python("-c", _SEVERAL, timeout=120.0, **variables)
    assert done.returncode == 0, done.stderr
    devices, out, objects, deleted, spread = done.stdout.splitlines()
    assert devices == "[True, True, True, True]"
    assert (out, objects) == ("True True", "True")
    assert "the array was deleted" in deleted
    assert "is spread over 2 devices by NamedSharding" in spread


def test_program_without_jax_arrays_does_not_import_jax() -> None:
    program = (
        "import sys, numpy as np, collective, collective.adapters.jax\n"
        "with collective.init() as comm: comm.all_reduce(np.ones(2))\n"
        "print('jax' in sys.modules)"
    )
    assert run_python("-c", program).stdout.split() == ["False"]


def test_pool_of_processes_returns_jax_results_of_two_calls() -> None:
    with RankPool(2, "shm") as pool:
        assert pool.run(_of_scalars) == pool.run(_of_scalars) == [(True, (), 3.0)] * 2
