"""Listeners: what programs hook into a communicator's calls."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.communicator.listener import CallEvent, Listener
from collective.errors import (
    CommunicatorAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    ShapeError,
)
from collective.ops import user_op
from collective.testing import run_ranks
from tests.support.on_ranks import on_ranks, ranks_of

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

    found = run_ranks(2, program, backend="tests.support.loopback:Loopback", check="always")
    assert found == [[("all_reduce", False), ("all_reduce", True)]] * 2


@on_ranks("pair")
def test_nothing_is_heard_of_after_the_end(comm: Communicator) -> None:
    found: list[CallEvent] = []
    end = comm.hook(before=found.append)
    comm.barrier()
    end()
    comm.barrier()
    assert len(found) == 1


# -- hooks that raise --------------------------------------------------------------------------


class _Vain(Exception):
    """What a hook raises."""


def _raising(error: BaseException) -> Any:
    def hook(*event: Any) -> None:
        raise error

    return hook


def test_hook_that_raises_ends_the_call_of_all_ranks() -> None:
    def program(comm: Communicator) -> str:
        end = comm.hook(before=_raising(_Vain("not now")) if comm.rank == 0 else None)
        try:
            comm.all_reduce(np.ones(1))
        except (_Vain, PeerFailedError) as error:
            end()
            found = f"{type(error).__name__}: {'not now' in str(error)}"
            with pytest.raises(PeerFailedError, match=r"(?s)rank 0 failed.*not now"):
                comm.barrier()
            return found
        return "returned"

    found = run_ranks(2, program, backend="threads")
    assert found == ["_Vain: True", "PeerFailedError: True"]


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(error, id=type(error).__name__)
        for error in (
            ShapeError("of a hook"),
            CommunicatorAbortedError("of a hook"),
            PeerLostError("of a hook", (7,)),
            KeyboardInterrupt("of a hook"),
        )
    ],
)
def test_hook_may_raise_any_error(error: BaseException) -> None:
    def program(comm: Communicator) -> bool:
        if comm.rank == 0:
            comm.hook(before=_raising(error))
            with pytest.raises(type(error), match="of a hook") as caught:
                comm.all_reduce(np.ones(1))
            return caught.value is error
        with pytest.raises(CommunicatorAbortedError, match=r"(?s)rank 0.*of a hook"):
            comm.all_reduce(np.ones(1))
        return True

    assert run_ranks(2, program, backend="threads") == [True, True]


@on_ranks("pair")
def test_hook_that_raises_after_a_failed_call_keeps_its_error(comm: Communicator) -> None:
    group = comm.dup()
    group.hook(after=_raising(_Vain("the log is full")))
    with pytest.raises(_Vain) as caught:
        group.all_reduce(np.ones(4 + comm.rank))
    assert isinstance(caught.value.__context__, MismatchError)


@on_ranks("pair")
def test_hooks_that_raise_keep_each_others_errors(comm: Communicator) -> None:
    group = comm.dup()
    for text in ("first", "second"):
        group.hook(after=_raising(_Vain(text)))
    with pytest.raises(_Vain, match="first") as caught:  # the last to begin is the first to end
        group.barrier()
    assert str(caught.value.__context__) == "second"


@on_ranks("pair")
def test_hook_that_raises_ends_those_that_began(comm: Communicator) -> None:
    group, found = comm.dup(), []
    group.hook(before=found.append, after=lambda event, error: found.append(error))
    group.hook(before=_raising(error := _Vain("not now")), after=_raising(_Vain("not begun")))
    with pytest.raises(_Vain, match="not now"):
        group.barrier()
    assert found[1:] == [error]


def test_listener_that_raises_of_a_group_ends_the_calls_of_its_members() -> None:
    class Listening(Listener):
        def group(self, child: Any, ranks: Any) -> None:
            raise _Vain("no groups")

    def program(comm: Communicator) -> bool:
        if comm.rank == 0:
            comm.listen(Listening())
            with pytest.raises(_Vain):
                comm.dup()
        else:
            with pytest.raises(PeerFailedError, match="no groups"):
                comm.dup().barrier()
        return True

    assert run_ranks(2, program, backend="threads") == [True, True]


def test_listener_that_raises_at_the_end_leaves_the_communicator_closed() -> None:
    class Listening(Listener):
        def close(self) -> None:
            raise _Vain("not yet")

    def program(comm: Communicator) -> bool:
        group = comm.dup()
        if comm.rank == 0:
            group.listen(Listening())
            with pytest.raises(_Vain):
                group.close()
        else:
            with pytest.raises(PeerLostError, match="rank 0 has closed"):
                group.barrier()
        return True

    assert run_ranks(2, program, backend="threads") == [True, True]
