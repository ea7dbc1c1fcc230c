"""Python's numbers in calls: what comes out of what goes in, over each way that a call takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import DtypeError, MismatchError
from collective.testing import RankPool, run_ranks

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


@pytest.fixture(scope="module", params=["threads", "shm"])
def pair(request: Any) -> Any:
    with RankPool(2, request.param) as ranks:
        yield ranks


def _types(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _types(value) for key, value in x.items()}
    return type(x), [_types(each) for each in x] if isinstance(x, (list, tuple)) else None


def _run(comm: Communicator, what: str) -> Any:
    return CASES[what][0](comm)


@pytest.mark.parametrize("what", CASES)
def test_a_number_goes_in_and_one_of_its_type_is_returned(pair: RankPool, what: str) -> None:
    found = pair.run(_run, what)
    assert found == CASES[what][1]
    assert _types(found) == _types(CASES[what][1])


def _with_arrays(comm: Communicator) -> Any:
    found = comm.all_reduce({"loss": 1.5, "gradient": np.ones(2, np.float32), "seen": 32})
    return found["loss"], found["seen"], found["gradient"].dtype.name, found["gradient"].tolist()


def test_numbers_travel_beside_arrays(pair: RankPool) -> None:
    assert pair.run(_with_arrays) == [(3.0, 64, "float32", [2.0, 2.0])] * 2


def _one_has_an_array(comm: Communicator) -> Any:
    return comm.all_reduce(np.array(2) if comm.rank else 3)


def test_a_number_and_an_array_of_its_dtype_meet(pair: RankPool) -> None:
    number, array = pair.run(_one_has_an_array)
    assert type(number) is int
    assert (number, array.shape, array.dtype) == (5, (), np.int64)


def _of_two_types(comm: Communicator) -> str:
    with pytest.raises(MismatchError) as raised:
        comm.all_reduce(1.0 if comm.rank else 1)
    return str(raised.value)


def test_ranks_with_numbers_of_different_types_differ(pair: RankPool) -> None:
    for text in pair.run(_of_two_types):
        assert "int64" in text
        assert "float64" in text


def test_a_sum_that_might_not_fit_is_refused_and_an_array_wraps() -> None:
    def program(comm: Communicator) -> int:
        with pytest.raises(DtypeError, match=r"2 ranks have as much .* 64 bits"):
            comm.all_reduce(2**62)
        return int(comm.all_reduce(np.array(2**62)))

    assert run_ranks(2, program) == [-(2**63)] * 2


def test_what_is_no_plain_number_is_none() -> None:
    class Color(int):
        """As an enumeration's members are."""

    def program(comm: Communicator) -> None:
        for x in (Color(1), "1", None):
            with pytest.raises(Exception, match="is none"):
                comm.all_reduce(x)

    run_ranks(1, program)


@pytest.mark.parametrize("name", ["float32", "int8", "bool", "complex64"])
def test_a_scalar_of_numpys_stays_one(name: str) -> None:
    def program(comm: Communicator) -> Any:
        return comm.all_reduce(np.dtype(name).type(1), op="bor" if name == "bool" else "prod")

    (found,) = run_ranks(1, program)
    assert type(found) is np.dtype(name).type
