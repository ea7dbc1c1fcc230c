"""Checks of the calls that carry Python objects."""

from __future__ import annotations

import fractions
from typing import Any

import numpy as np

from collective import Communicator, InvalidArgumentError

from .checks import on_each_rank, roots
from .samples import assert_same, values


def _thing(rank: int) -> dict[str, Any]:
    return {
        "none": None,
        "numbers": [True, rank, 2**70 + rank, 0.5 * rank, 1 + 2j, float("inf")],
        "text": "rank " + "é" * rank,
        "bytes": bytes(range(rank)),
        "pair": (rank, {"set": {1, rank}}),
        "array": values("float32", (2, rank), rank, 80),
    }


def _hold(found: Any, rank: int, what: str) -> None:
    wanted = _thing(rank)
    assert isinstance(found, dict), f"{what}: got {found!r}"
    found = dict(found)
    assert_same(found.pop("array"), wanted.pop("array"), f"the array in {what}")
    if found != wanted:
        raise AssertionError(f"{what}: got {found!r}; expected {wanted!r}")


@on_each_rank(roots)
def check_objects(comm: Communicator, root: int) -> None:
    """Check that plain data and arrays go through every object call unchanged."""
    mine = _thing(comm.rank)
    found = comm.broadcast_object(mine if comm.rank == root else None, root=root)
    _hold(found, root, f"broadcast_object(root={root})")
    gathered = comm.gather_object(mine, root=root)
    if comm.rank == root:
        assert gathered is not None
        assert len(gathered) == comm.size, f"gather_object: {len(gathered)} objects"
        for rank, item in enumerate(gathered):
            _hold(item, rank, f"item {rank} of gather_object(root={root})")
    else:
        assert gathered is None, f"gather_object: rank {comm.rank} got {gathered!r}"
    for rank, item in enumerate(comm.all_gather_object(mine)):
        _hold(item, rank, f"item {rank} of all_gather_object")
    things = [_thing(rank) for rank in range(comm.size)] if comm.rank == root else None
    _hold(comm.scatter_object(things, root=root), comm.rank, f"scatter_object(root={root})")


@on_each_rank(at_least=2)
def check_send_object(comm: Communicator) -> None:
    """Check that send_object and recv_object carry plain data, between arrays and by tag."""
    if comm.rank == 0:
        for dst in range(1, comm.size):
            comm.send_object(_thing(dst), dst, tag=4)
            comm.send(np.arange(dst), dst, tag=4)
            comm.send_object([None], dst, tag=4)
    else:
        _hold(comm.recv_object(0, tag=4), comm.rank, "recv_object")
        assert_same(comm.recv(None, 0, tag=4), np.arange(comm.rank), "an array after an object")
        assert comm.recv_object(0, tag=4) == [None]


@on_each_rank()
def check_pickle_is_refused(comm: Communicator) -> None:
    """Check that both ends refuse objects that need pickles, unless they pass pickle=True."""
    thing = fractions.Fraction(comm.rank, 7)
    for call in (comm.all_gather_object, comm.gather_object):
        try:
            call(thing)
        except InvalidArgumentError:
            continue
        raise AssertionError(f"{call.__name__} took a Fraction without pickle=True")
    found = comm.all_gather_object(thing, pickle=True)
    wanted = [fractions.Fraction(rank, 7) for rank in range(comm.size)]
    assert found == wanted, f"all_gather_object(pickle=True): {found}; expected {wanted}"
    if comm.size == 1:
        return
    if comm.rank == 0:
        comm.send_object(thing, 1, pickle=True)
        comm.send_object("plain", 1)
    elif comm.rank == 1:
        try:
            got = comm.recv_object(0)
        except InvalidArgumentError:
            pass
        else:
            raise AssertionError(f"recv_object read a pickle without pickle=True: {got!r}")
        assert comm.recv_object(0) == "plain", "the message after a refused pickle"
