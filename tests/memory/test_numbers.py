"""Python numbers as arguments of calls: the class and value of results, for each kind of call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import DtypeError, MismatchError
from collective.testing import run_ranks
from tests.support.on_ranks import on_ranks, ranks_of

pair = ranks_of(("threads", 2), ("shm", 2))

CASES: dict[str, tuple[Any, list[Any]]] = {
    "a sum of floats": (lambda c: c.all_reduce(3.5), [7.0, 7.0]),
    "a sum of integers": (lambda c: c.all_reduce(c.rank + 1), [3, 3]),
    "a sum of complex numbers": (lambda c: c.all_reduce(1j * c.rank), [1j, 1j]),
    "an average": (lambda c: c.all_reduce(float(c.rank), op="avg"), [0.5, 0.5]),
    "a maximum": (lambda c: c.all_reduce(-c.rank, op="max"), [0, 0]),
    "a product in rank order": (lambda c: c.all_reduce(3, op="prod", order="rank"), [9, 9]),
    "whether all": (lambda c: c.all_reduce(c.rank == 0, op="land"), [False, False]),
    "whether some": (lambda c: c.all_reduce(c.rank == 0, op="lor"), [True, True]),
    "the longest that fits": (lambda c: c.all_reduce(2**62 - 1), [2**63 - 2, 2**63 - 2]),
    "a list": (lambda c: c.all_reduce([1, 2.5]), [[2, 5.0], [2, 5.0]]),
    "a structure": (lambda c: c.all_reduce({"a": (1, [True])}, op="min"), [{"a": (1, [True])}] * 2),
    "at the root": (lambda c: c.reduce(2, root=1), [None, 4]),
    "a scan": (lambda c: c.scan(5), [5, 10]),
    "a broadcast": (lambda c: c.broadcast(c.rank + 0.5, root=1), [1.5, 1.5]),
    "a broadcast of a list": (lambda c: c.broadcast([c.rank, 0.5], root=1), [[1, 0.5]] * 2),
    "all ranks' numbers": (lambda c: c.all_gather(c.rank), [[0, 1], [0, 1]]),
    "all numbers at the root": (lambda c: c.gather(c.rank + 0.5), [[0.5, 1.5], None]),
    "in the background": (lambda c: c.all_reduce(2, async_op=True).wait(), [4, 4]),
}


def _types(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _types(value) for key, value in x.items()}
    return type(x), [_types(item) for item in x] if isinstance(x, (list, tuple)) else None


@pytest.mark.parametrize("what", CASES)
@on_ranks("pair")
def test_calls_return_number_of_same_class(comm: Communicator, what: str) -> None:
    call, wanted = CASES[what]
    result = call(comm)
    assert result == wanted[comm.rank]
    assert _types(result) == _types(wanted[comm.rank])


@on_ranks("pair")
def test_all_reduce_of_structure_mixes_numbers_and_arrays(comm: Communicator) -> None:
    result = comm.all_reduce({"loss": 1.5, "gradient": np.ones(2, np.float32), "seen": 32})
    assert (result["loss"], result["seen"]) == (3.0, 64)
    assert (result["gradient"].dtype.name, result["gradient"].tolist()) == ("float32", [2.0, 2.0])


@on_ranks("pair")
def test_all_reduce_of_number_matches_array_of_same_dtype(comm: Communicator) -> None:
    result: Any = comm.all_reduce(np.array(2) if comm.rank else 3)
    assert result == 5
    if comm.rank:
        assert (result.shape, result.dtype) == ((), np.int64)
    else:
        assert type(result) is int


@on_ranks("pair")
def test_all_reduce_of_int_and_float_raises_mismatch_error(comm: Communicator) -> None:
    with pytest.raises(MismatchError) as raised:
        comm.all_reduce(1.0 if comm.rank else 1)
    assert "int64" in str(raised.value)
    assert "float64" in str(raised.value)


@on_ranks("pair")
def test_all_reduce_of_large_int_raises_but_array_wraps(comm: Communicator) -> None:
    with pytest.raises(DtypeError, match=r"2 ranks have as large a .* 64 bits"):
        comm.all_reduce(2**62)
    assert comm.all_reduce(np.array(2**62)) == -(2**63)


def test_all_reduce_of_int_subclass_or_text_raises() -> None:
    class Color(int):
        """Subclass of ``int``, like a member of an ``IntEnum``."""

    def program(comm: Communicator) -> None:
        for x in (Color(1), "1", None):
            with pytest.raises(Exception, match="is not an array"):
                comm.all_reduce(x)

    run_ranks(1, program)


@pytest.mark.parametrize("name", ["float32", "int8", "bool", "complex64"])
def test_all_reduce_of_numpy_scalar_returns_same_class(name: str) -> None:
    def program(comm: Communicator) -> Any:
        return comm.all_reduce(np.dtype(name).type(1), op="bor" if name == "bool" else "prod")

    (result,) = run_ranks(1, program)
    assert type(result) is np.dtype(name).type
