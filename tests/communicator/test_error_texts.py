"""Texts of errors about the arguments of messages: they name the method that the program called."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collective import ANY_SOURCE, NULL
from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.testing import RankPool
from tests.support.on_ranks import ranks_of

pair = ranks_of(("shm", 2), ("threads", 2))


def _error(make: Callable[[], Any]) -> str:
    try:
        make()
    except InvalidArgumentError as error:
        return str(error)
    return "no error"


_UNFIT: dict[str, tuple[Any, Any, str]] = {
    "another shape": (np.ones(100), np.empty(50), "out has shape (50,); the result has (100,)"),
    "a structure": (np.ones(100), [np.empty(100)], "the message is a single array"),
    "another nesting": ([np.ones(9)], {"a": np.empty(9)}, "out is nested differently"),
    "a leaf of another shape": ([np.ones(9)], [np.empty(8)], "out has shape (8,)"),
}


def _unfit(comm: Communicator, case: str, async_op: bool) -> str:
    x, out, _ = _UNFIT[case]
    peer = 1 - comm.rank

    def call() -> None:
        work = comm.sendrecv(x, peer, peer, out=out, async_op=async_op)
        if async_op:
            work.wait()

    return _error(call)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("case", list(_UNFIT))
def test_out_that_does_not_fit_in_sendrecv_names_call_and_ranks(
    pair: RankPool, case: str, async_op: bool
) -> None:
    for rank, text in enumerate(pair.run(_unfit, case, async_op)):
        begin = f"sendrecv from rank {1 - rank} to rank {rank}: {_UNFIT[case][2]}"
        assert text.startswith(begin)


def _one_way(comm: Communicator) -> str:
    if comm.rank == 0:
        comm.send(np.ones(3), 1)
        return _error(lambda: comm.sendrecv("x", 1, NULL))  # type: ignore[call-overload]
    return _error(lambda: comm.sendrecv(np.ones(3), NULL, 0, out=np.empty(4)))


def test_sendrecv_with_one_neighbour_names_sendrecv(pair: RankPool) -> None:
    for text in pair.run(_one_way):
        assert text.startswith(("sendrecv: ", "sendrecv from rank 0 to rank 1: "))


_RANKS: dict[str, Callable[[Any], Any]] = {
    "send to None": lambda comm: comm.send(np.ones(1), None),
    "send to -1": lambda comm: comm.send(np.ones(1), -1),
    "recv from None": lambda comm: comm.recv(None, None),
    "sendrecv to None": lambda comm: comm.sendrecv(np.ones(1), None, 0),
    "sendrecv from -1": lambda comm: comm.sendrecv(np.ones(1), 0, ANY_SOURCE),
    "send_object to None": lambda comm: comm.send_object("x", None),
}


def _texts_of(comm: Communicator, calls: dict[str, Callable[[Any], Any]]) -> dict[str, str]:
    return {name: _error(lambda call=call: call(comm)) for name, call in calls.items()}


def _peers(comm: Communicator) -> dict[str, str]:
    return _texts_of(comm, _RANKS)


def test_missing_neighbour_in_a_message_is_told_of_null(pair: RankPool) -> None:
    for texts in pair.run(_peers):
        for name, text in texts.items():
            assert text.endswith('For "no neighbour" pass collective.NULL.'), name


def _roots(comm: Communicator) -> str:
    return _error(lambda: comm.broadcast(np.ones(1), root=-1))


def test_root_outside_the_communicator_is_not_told_of_null(pair: RankPool) -> None:
    for text in pair.run(_roots):
        assert text.startswith("broadcast: root -1; this communicator has ranks 0 to 1")
        assert "NULL" not in text


_NO_ARRAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "all_reduce": (lambda comm: comm.all_reduce("x"), "all_gather_object"),
    "reduce": (lambda comm: comm.reduce("x"), "gather_object"),
    "broadcast": (lambda comm: comm.broadcast("x", root=comm.rank), "broadcast_object"),
    "gather": (lambda comm: comm.gather("x"), "gather_object"),
    "all_gather": (lambda comm: comm.all_gather(["x"]), "all_gather_object"),
    "scatter": (lambda comm: comm.scatter("x", root=comm.rank), "scatter_object"),
    "send": (lambda comm: comm.send("x", 1 - comm.rank), "send_object"),
    "sendrecv": (
        lambda comm: comm.sendrecv("x", 1 - comm.rank, 1 - comm.rank),
        "send_object and recv_object",
    ),
    "all_to_all": (lambda comm: comm.all_to_all("x"), "the *_object calls"),
}


def _no_arrays(comm: Communicator) -> dict[str, str]:
    return _texts_of(comm, {name: call for name, (call, _) in _NO_ARRAYS.items()})


def test_text_in_place_of_an_array_names_the_operation_and_its_object_call(pair: RankPool) -> None:
    for texts in pair.run(_no_arrays):
        for name, text in texts.items():
            assert text.startswith(f"{name}: a str is not an array. Pass "), text
            assert text.endswith(f" (for objects: {_NO_ARRAYS[name][1]})."), text


def _odd_arguments(comm: Communicator) -> dict[str, str]:
    peer = 1 - comm.rank
    return _texts_of(
        comm,
        {
            "number": lambda comm: comm.send(3, peer),
            "buffer": lambda comm: comm.send(array("d", [1.0]), peer),
            "other": lambda comm: comm.send(object(), peer),
            "out": lambda comm: comm.recv("x", peer),
            "out of all_reduce": lambda comm: comm.all_reduce(np.ones(1), out="x"),
        },
    )


def test_number_in_place_of_an_array_is_told_of_asarray(pair: RankPool) -> None:
    for texts in pair.run(_odd_arguments):
        assert "send: an int is not an array" in texts["number"]
        assert "(for a number: numpy.asarray(x); for objects: send_object)" in texts["number"]


def test_buffer_in_place_of_an_array_is_told_of_asarray(pair: RankPool) -> None:
    for texts in pair.run(_odd_arguments):
        assert "send: an array.array is not an array" in texts["buffer"]
        assert "(for its elements: numpy.asarray(x))" in texts["buffer"]


def test_other_object_in_place_of_an_array_is_told_of_pickle(pair: RankPool) -> None:
    for texts in pair.run(_odd_arguments):
        assert texts["other"].endswith("(for objects: send_object with pickle=True).")


def test_out_that_is_no_array_is_named_out(pair: RankPool) -> None:
    for texts in pair.run(_odd_arguments):
        assert texts["out"].startswith("recv: out is a str, not an array. Pass ")
        assert texts["out of all_reduce"].startswith("all_reduce: out is a str, not an array. ")
