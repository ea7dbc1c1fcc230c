"""Listeners: what programs hook into a communicator's calls."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.communicator.listener import CallEvent
from collective.errors import MismatchError
from collective.ops import user_op
from collective.testing import run_ranks
from tests.on_ranks import on_ranks, ranks_of

pair = ranks_of(("threads", 2))


def heard(comm: Communicator, call: Any) -> list[tuple[CallEvent, BaseException | None]]:
    """Make a call; return what was heard of it, after it."""
    found: list[tuple[CallEvent, BaseException | None]] = []
    begun: list[CallEvent] = []
    end = comm.hook(before=begun.append, after=lambda event, error: found.append((event, error)))
    try:
        call(comm)
    finally:
        end()
    assert [event for event, _ in found] == begun
    return found


def once(operation: str, nbytes: int, call: Any, how: str = "") -> Any:
    return pytest.param(operation, nbytes, call, id=operation + how)


CALLS = [
    once("all_reduce", 32, lambda comm: comm.all_reduce(np.ones(4))),
    once("reduce", 32, lambda comm: comm.reduce(np.ones(4))),
    once("scan", 32, lambda comm: comm.scan(np.ones(4))),
    once("reduce_scatter", 32, lambda comm: comm.reduce_scatter(np.ones(4))),
    once("all_gather", 64, lambda comm: comm.all_gather(np.ones(4))),
    once("all_to_all", 32, lambda comm: comm.all_to_all(np.ones(4))),
    once("broadcast", 32, lambda comm: comm.broadcast(np.ones(4))),
    once("barrier", 0, lambda comm: comm.barrier()),
    once("empty", 16, lambda comm: comm.empty(4)),
    once(
        "all_reduce", 32, lambda comm: comm.all_reduce(np.ones(4), async_op=True).wait(),
        " in the background",
    ),
    once(
        "all_reduce", 32, lambda comm: comm.all_reduce(np.ones(4), op=user_op(np.add)),
        " with an operator of the program's",
    ),
    once("sendrecv", 32, lambda comm: comm.sendrecv(np.ones(4), 1 - comm.rank, 1 - comm.rank)),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "nbytes", "call"), CALLS)
@on_ranks("pair")
def test_a_call_is_heard_of_once(
    comm: Communicator, operation: str, nbytes: int, call: Any
) -> None:
    ((event, error),) = heard(comm, call)
    assert (event.operation, event.nbytes, error) == (operation, nbytes, None)


@on_ranks("pair")
def test_a_call_that_is_made_again_is_heard_of_again(comm: Communicator) -> None:
    x = np.ones(4)
    assert len(heard(comm, lambda comm: [comm.all_reduce(x, out=x) for _ in range(3)])) == 3


def test_a_hook_that_comes_while_a_call_is_under_way_keeps_their_order() -> None:
    hooked = threading.Event()

    def program(comm: Communicator) -> list[float]:
        if comm.rank:
            assert hooked.wait(30)
        first = comm.all_reduce(np.ones(2), async_op=True)
        comm.hook()
        second = comm.all_reduce(np.full(3, 2.0), async_op=True)
        hooked.set()
        return [float(first.wait().sum()), float(second.wait().sum())]

    assert run_ranks(2, program, backend="threads") == [[4.0, 12.0]] * 2


@on_ranks("pair")
def test_messages_tell_their_ends(comm: Communicator) -> None:
    if comm.rank == 0:
        ((sent, _),) = heard(comm, lambda comm: comm.send(np.ones(2), 1, tag=5))
        ends = (sent.operation, sent.nbytes, sent.dst, sent.src, sent.tag)
        assert ends == ("send", 16, 1, None, 5)
    else:
        ((received, _),) = heard(comm, lambda comm: comm.recv(None, 0, tag=5))
        assert (received.operation, received.src, received.tag) == ("recv", 0, 5)
        assert received.nbytes == -1


@on_ranks("pair")
def test_what_a_call_raised_is_heard_of(comm: Communicator) -> None:
    found: list[BaseException | None] = []
    comm.hook(after=lambda _, error: found.append(error))
    with pytest.raises(MismatchError):
        comm.all_reduce(np.ones(4 + comm.rank))
    assert type(found[0]) is MismatchError


def test_what_is_compared_first_is_heard_of_within() -> None:
    def program(comm: Communicator) -> list[tuple[str, bool]]:
        begun: list[CallEvent] = []
        comm.hook(before=begun.append)
        comm.all_reduce(np.ones(2))
        return [(event.operation, event.compares) for event in begun]

    found = run_ranks(2, program, backend="tests.loopback:Loopback", check="always")
    assert found == [[("all_reduce", False), ("all_reduce", True)]] * 2


@on_ranks("pair")
def test_nothing_is_heard_of_after_the_end(comm: Communicator) -> None:
    found: list[CallEvent] = []
    end = comm.hook(before=found.append)
    comm.barrier()
    end()
    comm.barrier()
    assert len(found) == 1


@on_ranks("pair")
def test_a_hook_that_raises_is_the_calls_error(comm: Communicator) -> None:
    def before(event: CallEvent) -> None:
        raise ValueError("not now")

    end = comm.hook(before=before)
    with pytest.raises(ValueError, match="not now"):
        comm.all_reduce(np.ones(1))
    end()
    assert comm.all_reduce(np.ones(1)) == 2.0
