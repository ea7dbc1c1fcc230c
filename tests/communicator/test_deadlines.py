"""All steps of a call share one deadline."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from collective import Communicator, InvalidArgumentError
from collective.backends.threads import ThreadsBackend
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.request import Request
from collective.testing import run_ranks
from tests.support.loopback import Loopback

STEP_S = 0.02


class Slow:
    """Mixin that delays each step, and records the time that the deadline leaves for it."""

    def _slowly(self, step: Callable[..., Any], *args: Any) -> Any:
        self.__dict__.setdefault("given", []).append(args[-1].left())
        time.sleep(STEP_S)
        return step(*args)

    def plan(self, request: Request) -> Any:
        return functools.partial(self._slowly, super().plan(request))  # type: ignore[misc]

    def agree(self, request: Request, deadline: Deadline) -> None:
        self._slowly(super().agree, request, deadline)  # type: ignore[misc]

    def group(self, ranks: Sequence[int], deadline: Deadline) -> Any:
        return self._slowly(super().group, ranks, deadline)  # type: ignore[misc]


class Comparing(Slow, ThreadsBackend):
    """Slow transport that compares calls by itself while it makes them."""


class NotComparing(Slow, Loopback):
    """Slow transport that does not compare calls by itself."""


def lengths(comm: Communicator) -> np.ndarray[Any, Any]:
    return np.ones(1000 + comm.rank)


CALLS: dict[str, Callable[[Communicator], Any]] = {
    "gather of uneven arrays": lambda comm: comm.gather(lengths(comm)),
    "all_gather of uneven arrays": lambda comm: comm.all_gather(lengths(comm)),
    "all_to_all of uneven arrays": lambda comm: comm.all_to_all(lengths(comm)),
    "gather of uneven structures": lambda comm: comm.gather([lengths(comm), np.ones(2)]),
    "broadcast to None": lambda comm: comm.broadcast(None if comm.rank else np.ones(1000)),
    "split": lambda comm: comm.split(0),
    "split_by_host": lambda comm: comm.split("host"),
    "scatter": lambda comm: comm.scatter(None if comm.rank else np.ones(1000)),
}


def seconds_left(comm: Communicator, name: str) -> list[float]:
    CALLS[name](comm)
    return list(comm.inner.transport.__dict__["given"])


@pytest.mark.parametrize("kind", [Comparing, NotComparing])
@pytest.mark.parametrize("name", CALLS)
def test_later_steps_have_remaining_time_of_deadline(kind: type[Any], name: str) -> None:
    for rank in run_ranks(2, seconds_left, name, backend=kind):
        assert rank[0] > rank[1] + STEP_S / 2, rank
        assert rank == sorted(rank, reverse=True)


def test_comparison_before_call_shares_its_deadline() -> None:
    def program(comm: Communicator) -> list[float]:
        comm.all_reduce(np.ones(2))
        return list(comm.inner.transport.__dict__["given"])

    for rank in run_ranks(2, program, backend=NotComparing, check="always"):
        assert rank[0] > rank[1] + STEP_S / 2, rank


class Leaving(ThreadsBackend):
    """Transport whose function for plain messages waits, and then leaves the message to Python."""

    def exchange(
        self, x: Any, to: int, out: Any, source: int, tag: int, deadline: Deadline, heads: bool
    ) -> Any:
        self.__dict__["waited"] = deadline
        return NotImplemented if out is None else deadline

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        assert deadline is self.__dict__["waited"]
        return super().recv(dst, src, tag, deadline)


@pytest.mark.parametrize("options", [{}, {"timeout": 9.0}], ids=["plain", "timeout"])
def test_message_left_to_python_keeps_deadline_of_call(options: dict[str, float]) -> None:
    def program(comm: Communicator) -> None:
        if comm.rank:
            comm.send(np.ones(3), 0)
        else:
            comm.recv(np.zeros(3), 1, **options)

    run_ranks(2, program, backend=Leaving)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "5", None, True])
def test_timeout_that_is_no_positive_number_is_refused(seconds: Any) -> None:
    def set_timeout(comm: Communicator) -> None:
        usual = comm.timeout
        with pytest.raises(InvalidArgumentError, match="expected a positive number of seconds"):
            comm.timeout = seconds
        assert comm.timeout == usual

    run_ranks(1, set_timeout)


def test_timeout_too_long_for_a_float_never_expires() -> None:
    run_ranks(1, lambda comm: comm.all_reduce(np.ones(2), timeout=10**400))
