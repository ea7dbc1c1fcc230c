"""Calls as Ray makes them, over ranks of our own."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collective
from collective.launch.actor_calls import ActorCalls
from collective.launch.outcome import RanksFailedError
from collective.testing import run_ranks
from tests.support.selection import in_whole

SUM = SimpleNamespace(reduceOp=SimpleNamespace(name="SUM"), root_rank=1)


class Calls(ActorCalls):
    def __init__(self, comm: collective.Communicator) -> None:
        self.comm = comm


def _results(comm: collective.Communicator) -> dict[str, Any]:
    calls, rank = Calls(comm), comm.rank
    x = np.array([rank + 1.0, 2.0])
    arrays = {name: x.copy() for name in ("allreduce", "reduce", "broadcast")}
    for name, array in arrays.items():
        getattr(calls, name)([array], SUM)
    places = [np.zeros(2) for _ in range(comm.size)]
    calls.allgather([places], [x])
    out = np.zeros(())
    calls.reducescatter([out], [[np.array(rank + 10.0 * n) for n in range(comm.size)]], SUM)
    if rank == 0:
        calls.send([x], SimpleNamespace(dst_rank=1, n_elements=0))
    else:
        calls.recv([x], SimpleNamespace(src_rank=0))
    calls.barrier()
    return {
        **{name: array.tolist() for name, array in arrays.items()},
        "allgather": [place.tolist() for place in places],
        "reducescatter": out.tolist(),
        "recv": x.tolist(),
    }


def test_calls_put_results_in_place() -> None:
    first, second = run_ranks(2, _results, backend="threads")
    assert first == {
        "allreduce": [3.0, 4.0], "reduce": [1.0, 2.0], "broadcast": [2.0, 2.0],
        "allgather": [[1.0, 2.0], [2.0, 2.0]], "reducescatter": 1.0, "recv": [1.0, 2.0],
    }  # fmt: skip
    assert second == {**first, "reduce": [3.0, 4.0], "reducescatter": 21.0}


def _refused(comm: collective.Communicator, case: Callable[[Calls], None]) -> str:
    with pytest.raises(collective.CollectiveError) as caught:
        case(Calls(comm))
    return f"{type(caught.value).__name__} {caught.value}"


X = np.zeros(2)

# Each waits for rank 1, which has died.
LOST: dict[str, Callable[[Calls], None]] = {
    "allreduce": lambda calls: calls.allreduce([np.zeros(2)], SUM),
    "barrier": lambda calls: calls.barrier(),
    "reduce": lambda calls: calls.reduce([np.zeros(2)], SimpleNamespace(root_rank=0)),
    "broadcast": lambda calls: calls.broadcast([np.zeros(2)], SimpleNamespace(root_rank=1)),
    "allgather": lambda calls: calls.allgather([[np.zeros(2), np.zeros(2)]], [np.zeros(2)]),
    "reducescatter": lambda calls: calls.reducescatter([np.zeros(2)], [[X, X]], SUM),
    "send": lambda calls: calls.send([np.zeros(1 << 20)], SimpleNamespace(dst_rank=1)),
    "recv": lambda calls: calls.recv([np.zeros(2)], SimpleNamespace(src_rank=1)),
}


def _lost(comm: collective.Communicator, name: str) -> tuple[int, ...]:
    if comm.rank == 1:
        os._exit(3)
    with pytest.raises(collective.PeerLostError) as caught:
        LOST[name](Calls(comm))
    return caught.value.ranks


@pytest.mark.parametrize("backend", ["shm", in_whole("gloo")])
@pytest.mark.parametrize("name", LOST)
def test_death_of_a_peer_raises_in_every_call(name: str, backend: str) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, _lost, name, backend=backend)
    assert list(caught.value.errors) == [1]
    assert caught.value.results == {0: (1,)}


@pytest.mark.parametrize(
    ("case", "text"),
    [(lambda calls: calls.allreduce([X, X], SUM), "UnsupportedError allreduce: got arrays for 2"),
     (lambda calls: calls.allgather([[X, X]], [X]), "InvalidArgumentError allgather: the list"),
     (lambda calls: calls.allgather([[np.zeros((2, 2))]], [X]), "ShapeError allgather: array 0"),
     (lambda calls: calls.reducescatter([X], [[np.zeros(2, int)]]), "DtypeError reducescatter: "),
     (lambda calls: calls.send([X], SimpleNamespace(dst_rank=0, n_elements=1)), "UnsupportedError"),
    ],
)  # fmt: skip
def test_calls_refuse_arguments_by_name(case: Callable[[Calls], None], text: str) -> None:
    (refusal,) = run_ranks(1, lambda comm: _refused(comm, case), backend="threads")
    assert refusal.startswith(text)


def test_calls_refuse_read_only_arrays_of_the_program() -> None:
    x = np.zeros(2)
    x.flags.writeable = False
    (refusal,) = run_ranks(
        1, lambda comm: _refused(comm, lambda calls: calls.allreduce([x], SUM)), backend="threads"
    )
    assert refusal.startswith("InvalidArgumentError out: the array is read-only")
