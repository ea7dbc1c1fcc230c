"""Chainer variables as arguments and results of a communicator's calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.arrays")

import chainer
import chainer.links as L
from chainer import Parameter, Variable

from collective.errors import DeviceError, InvalidArgumentError, MismatchError
from collective.memory.arrays import adapter_like, adapter_of
from collective.testing import run_ranks
from tests.support.interpreter import run_python
from tests.support.on_ranks import ranks_of

ranks = ranks_of(("threads", 2), ("shm", 2))


# -- views and wrapping ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "bool"])
def test_variable_view_is_its_array(dtype: str) -> None:
    x = Variable(np.zeros((3, 4), dtype).T)
    array, seen_dtype = adapter_of(x).view(x)
    assert array is x.array
    assert seen_dtype.name == dtype
    wrapped = adapter_of(x).wrap(array, seen_dtype)
    assert type(wrapped) is Variable
    assert wrapped.array is array
    assert not wrapped.requires_grad


def test_parameters_and_subclasses_use_chainer_adapter() -> None:
    class Mine(Variable):  # type: ignore[misc]
        pass

    for x in (Variable(np.ones(2)), Parameter(np.ones(2)), Mine(np.ones(2))):
        assert adapter_of(x) is adapter_like("chainer")


@pytest.mark.parametrize("x", [Parameter(name="W"), Variable()])
def test_uninitialised_variable_raises_with_its_name(x: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not initialized.*initialize\(shape\)"):
        adapter_of(x).view(x)
    with pytest.raises(InvalidArgumentError, match=repr(x.name or "")):
        adapter_of(x).output(x)


def test_variable_of_unknown_array_type_raises_device_error() -> None:
    class Other(Variable):  # type: ignore[misc]
        array = memoryview(b"12")

    x = Other(np.ones(2))
    with pytest.raises(DeviceError, match=r"builtins.memoryview \(expected an array of NumPy"):
        adapter_of(x).view(x)


def test_link_as_array_raises_invalid_argument_error() -> None:
    with pytest.raises(InvalidArgumentError, match="Linear is not an array"):
        adapter_of(L.Linear(2, 2))


def test_numpy_array_does_not_import_chainer() -> None:
    """Check NumPy arrays and a class ``Variable`` of another module."""
    program = """
import sys, numpy as np
from collective.memory.arrays import adapter_of, is_array
class Variable: array = np.ones(2)
print(adapter_of(np.ones(2)).name, is_array(Variable()), "chainer" in sys.modules)
"""
    done = run_python("-c", program)
    assert done.stdout == "numpy False False\n", done.stderr


# -- through the communicator ----------------------------------------------------------------


def in_place(comm: Any) -> None:
    parameter = Parameter(np.full((2, 3), comm.rank + 1.0), name="W")
    array = parameter.array
    assert comm.all_reduce(parameter, op="avg", out=parameter) is parameter
    assert parameter.array is array
    np.testing.assert_array_equal(array, np.full((2, 3), 1.5))
    assert parameter.requires_grad
    # The output may be another kind of array, also in an asynchronous call.
    plain = np.zeros((2, 3))
    comm.all_reduce(Variable(np.ones((2, 3))), out=plain, async_op=True).wait()
    np.testing.assert_array_equal(plain, np.full((2, 3), 2))


def structures(comm: Any) -> None:
    model = L.Linear(3, 2, initialW=comm.rank + 1, initial_bias=comm.rank)
    reduced = comm.all_reduce({"W": model.W, "rest": [model.b, np.ones(2)]})
    assert [type(leaf) for leaf in (reduced["W"], *reduced["rest"])] == [
        Variable,
        Variable,
        np.ndarray,
    ]
    parameters = dict(model.namedparams())
    comm.broadcast(parameters, root=1, out=parameters)
    np.testing.assert_array_equal(model.W.array, np.full((2, 3), 2))
    np.testing.assert_array_equal(model.b.array, [1, 1])


def mixed(comm: Any) -> None:
    """Check that a rank with variables and a rank with NumPy arrays each get their own kind."""
    x = np.arange(3.0)
    total = comm.all_reduce(Variable(x) if comm.rank else x)
    assert type(total) is (Variable if comm.rank else np.ndarray)
    np.testing.assert_array_equal(total.array if comm.rank else total, 2 * x)
    copy = comm.broadcast(x if comm.rank == 0 else None, like="chainer")
    assert isinstance(copy, np.ndarray if comm.rank == 0 else Variable)


def objects(comm: Any) -> None:
    received = comm.broadcast_object(
        {"x": Variable(np.arange(2)), "n": 1} if comm.rank == 0 else None
    )
    assert type(received["x"]) is Variable
    np.testing.assert_array_equal(received["x"].array, [0, 1])


def symmetric(comm: Any) -> None:
    x = comm.empty((2, 3), "float32", like="chainer")
    assert type(x) is Variable
    x.array[...] = comm.rank
    comm.all_reduce(x, out=x)
    np.testing.assert_array_equal(x.array, np.ones((2, 3)))
    parameter = Parameter(x.array)
    assert parameter.array is x.array


def disagreeing(comm: Any) -> None:
    differ = r"(?s)rank 0: all_reduce\(float64\[2\].*rank 1: all_reduce\(float64\[3\]"
    with pytest.raises(MismatchError, match=differ):
        comm.all_reduce(Variable(np.ones(2 + comm.rank)))


def one_is_not_initialized(comm: Any) -> None:
    if comm.rank == 1:
        with pytest.raises(InvalidArgumentError, match="Parameter 'W' is not initialized"):
            comm.all_reduce(Parameter(name="W"))
    total = comm.all_reduce(Parameter(np.ones(1)))
    assert total.array[0] == 2


# testing/test_kinds.py checks that every call accepts and returns variables.
PROGRAMS = [
    in_place, structures, mixed, objects, symmetric, disagreeing, one_is_not_initialized
]  # fmt: skip


@pytest.mark.parametrize("call", PROGRAMS, ids=lambda call: call.__name__)
def test_communicator_calls_accept_variables(call: Any, ranks: Any) -> None:
    ranks.run(call)


def test_all_reduce_result_has_no_creator() -> None:
    def program(comm: Any) -> Any:
        x = Variable(np.ones(2))
        return comm.all_reduce(x * 2).creator

    assert run_ranks(2, program) == [None, None]


def test_chainer_config_is_separate_for_each_thread() -> None:
    """Check that one thread may train while another evaluates."""

    def program(comm: Any) -> tuple[bool, bool]:
        with chainer.using_config("train", comm.rank == 0), chainer.using_config("debug", True):
            comm.barrier()
            return chainer.config.train, (Variable(np.ones(2)) * 2).creator is not None

    assert run_ranks(2, program) == [(True, True), (False, True)]
