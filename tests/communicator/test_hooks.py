"""Listeners and hooks: functions of the program that a communicator runs around its calls."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import collective
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


def events_of(comm: Communicator, call: Any) -> list[tuple[CallEvent, BaseException | None]]:
    """Make a call; return the event and the error of each run of the hook after it."""
    events: list[tuple[CallEvent, BaseException | None]] = []
    begun: list[CallEvent] = []
    end = comm.hook(before=begun.append, after=lambda event, error: events.append((event, error)))
    try:
        call(comm)
    finally:
        end()
    assert [event for event, _ in events] == begun
    return events


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
        " with a user operator",
    ),
    once("sendrecv", 32, lambda comm: comm.sendrecv(np.ones(4), 1 - comm.rank, 1 - comm.rank)),
    once(
        "sendrecv", 32,
        lambda comm: comm.sendrecv(np.ones(4), 1 - comm.rank, 1 - comm.rank, async_op=True).wait(),
        " in the background",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "nbytes", "call"), CALLS)
@on_ranks("pair")
def test_hook_runs_once_for_each_kind_of_call(
    comm: Communicator, operation: str, nbytes: int, call: Any
) -> None:
    ((event, error),) = events_of(comm, call)
    assert (event.operation, event.nbytes, error) == (operation, nbytes, None)


@on_ranks("pair")
def test_hook_runs_for_each_repetition_of_call(comm: Communicator) -> None:
    x = np.ones(4)
    assert len(events_of(comm, lambda comm: [comm.all_reduce(x, out=x) for _ in range(3)])) == 3


def test_hook_added_during_call_keeps_order_of_calls() -> None:
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
def test_hook_event_of_message_has_peer_and_tag(comm: Communicator) -> None:
    if comm.rank == 0:
        ((sent, _),) = events_of(comm, lambda comm: comm.send(np.ones(2), 1, tag=5))
        ends = (sent.operation, sent.nbytes, sent.dst, sent.src, sent.tag)
        assert ends == ("send", 16, 1, None, 5)
    else:
        ((received, _),) = events_of(comm, lambda comm: comm.recv(None, 0, tag=5))
        assert (received.operation, received.src, received.tag) == ("recv", 0, 5)
        assert received.nbytes == -1


@on_ranks("pair")
def test_hook_event_of_half_a_sendrecv_names_the_method(comm: Communicator) -> None:
    dst, src = (1, collective.NULL) if comm.rank == 0 else (collective.NULL, 0)
    ((event, _),) = events_of(comm, lambda comm: comm.sendrecv(np.ones(2), dst, src))
    ends = (event.operation, event.nbytes, event.dst, event.src)
    assert ends == (("sendrecv", 16, 1, None) if comm.rank == 0 else ("sendrecv", -1, None, 0))


@on_ranks("pair")
def test_hook_after_call_receives_its_error(comm: Communicator) -> None:
    errors: list[BaseException | None] = []
    comm.hook(after=lambda _, error: errors.append(error))
    with pytest.raises(MismatchError):
        comm.all_reduce(np.ones(4 + comm.rank))
    assert type(errors[0]) is MismatchError


def test_hook_sees_comparison_inside_call() -> None:
    def program(comm: Communicator) -> list[tuple[str, bool]]:
        begun: list[CallEvent] = []
        comm.hook(before=begun.append)
        comm.all_reduce(np.ones(2))
        return [(event.operation, event.compares) for event in begun]

    events = run_ranks(2, program, backend="tests.support.loopback:Loopback", check="always")
    assert events == [[("all_reduce", False), ("all_reduce", True)]] * 2


@on_ranks("pair")
def test_hook_does_not_run_after_removal(comm: Communicator) -> None:
    events: list[CallEvent] = []
    end = comm.hook(before=events.append)
    comm.barrier()
    end()
    comm.barrier()
    assert len(events) == 1


# -- hooks that raise --------------------------------------------------------------------------


class _Vain(Exception):
    """Error that the hooks of these tests raise."""


def _raising(error: BaseException) -> Any:
    def hook(*event: Any) -> None:
        raise error

    return hook


def test_hook_error_ends_call_on_all_ranks() -> None:
    def program(comm: Communicator) -> str:
        end = comm.hook(before=_raising(_Vain("not now")) if comm.rank == 0 else None)
        try:
            comm.all_reduce(np.ones(1))
        except (_Vain, PeerFailedError) as error:
            end()
            outcome = f"{type(error).__name__}: {'not now' in str(error)}"
            with pytest.raises(PeerFailedError, match=r"(?s)rank 0 failed.*not now"):
                comm.barrier()
            return outcome
        return "returned"

    outcome = run_ranks(2, program, backend="threads")
    assert outcome == ["_Vain: True", "PeerFailedError: True"]


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
def test_hook_error_of_any_class_reaches_all_ranks(error: BaseException) -> None:
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
def test_hook_error_after_failed_call_keeps_call_error_as_context(comm: Communicator) -> None:
    group = comm.dup()
    group.hook(after=_raising(_Vain("the log is full")))
    with pytest.raises(_Vain) as caught:
        group.all_reduce(np.ones(4 + comm.rank))
    assert isinstance(caught.value.__context__, MismatchError)


@on_ranks("pair")
def test_hook_errors_are_chained_as_context(comm: Communicator) -> None:
    group = comm.dup()
    for text in ("first", "second"):
        group.hook(after=_raising(_Vain(text)))
    with pytest.raises(_Vain, match="first") as caught:  # the last to begin is the first to end
        group.barrier()
    assert str(caught.value.__context__) == "second"


@on_ranks("pair")
def test_hook_error_ends_hooks_that_began(comm: Communicator) -> None:
    group, events = comm.dup(), []
    group.hook(before=events.append, after=lambda event, error: events.append(error))
    group.hook(before=_raising(error := _Vain("not now")), after=_raising(_Vain("not begun")))
    with pytest.raises(_Vain, match="not now"):
        group.barrier()
    assert events[1:] == [error]


def test_listener_error_in_group_ends_calls_of_members() -> None:
    class Listening(Listener):
        def group(self, child: Any, ranks: Any) -> None:
            raise _Vain("no groups")

    def program(comm: Communicator) -> bool:
        if comm.rank == 0:
            comm.inner.listen(Listening())
            with pytest.raises(_Vain):
                comm.dup()
        else:
            with pytest.raises(PeerFailedError, match="no groups"):
                comm.dup().barrier()
        return True

    assert run_ranks(2, program, backend="threads") == [True, True]


def test_listener_error_in_close_leaves_communicator_closed() -> None:
    class Listening(Listener):
        def close(self) -> None:
            raise _Vain("not yet")

    def program(comm: Communicator) -> bool:
        group = comm.dup()
        if comm.rank == 0:
            group.inner.listen(Listening())
            with pytest.raises(_Vain):
                group.close()
        else:
            with pytest.raises(PeerLostError, match="rank 0 has closed"):
                group.barrier()
        return True

    assert run_ranks(2, program, backend="threads") == [True, True]
