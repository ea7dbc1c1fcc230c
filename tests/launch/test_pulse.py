"""Signs of life of a host: beats of its agent, and answers of its kernel to knocks."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from collective.launch.agent_line import BEAT_S
from collective.launch.hosts import reachability
from collective.launch.hosts.reachability import Pulse
from collective.launch.supervisor import Place, Supervisor
from collective.launch.variables import Run
from collective.platform import held_port

Address = tuple[str, int]


class Clock:
    """Clock that only moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reachability, "time", made)
    return made


@pytest.fixture
def listening() -> Iterator[Address]:
    """Yield the place of a socket that listens, of a process that never accepts."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()


@pytest.fixture
def unanswered() -> Iterator[Address]:
    """Yield a place whose kernel answers no knock: it drops them, since the queue is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = server.getsockname()
        for _ in range(2):
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(place)
        time.sleep(0.05)
        yield place


def cut_off_after(subject: Pulse, clock: Clock, beats: int) -> int | None:
    """Return after how many beats without a sign of life the host counts as cut off."""
    for beat in range(1, beats + 1):
        clock.now += BEAT_S
        time.sleep(0.002)  # the kernel has this much time to answer
        if subject.is_cut_off():
            return beat
    return None


def test_host_without_any_sign_of_life_is_cut_off_within_two_seconds(
    clock: Clock, unanswered: Address
) -> None:
    subject = Pulse()
    subject.place = unanswered
    beats = cut_off_after(subject, clock, 40)
    subject.forget()
    assert beats is not None
    assert 1.0 < beats * BEAT_S <= 1.75  # three knocks have to be lost; the ranks need some time


def test_host_whose_kernel_answers_is_not_cut_off(clock: Clock, listening: Address) -> None:
    subject = Pulse()
    subject.place = listening
    assert cut_off_after(subject, clock, 39) is None
    assert not subject.is_silent()
    clock.now += 2 * BEAT_S
    assert subject.is_silent()  # but its agent does not work


def test_refused_connection_is_an_answer(clock: Clock) -> None:
    subject = Pulse()
    with held_port() as port:
        subject.place = "127.0.0.1", port
        assert cut_off_after(subject, clock, 20) is None


def test_beat_ends_the_doubt(clock: Clock, unanswered: Address) -> None:
    subject = Pulse()
    subject.place = unanswered
    for _ in range(5):
        assert cut_off_after(subject, clock, 4) is None
        subject.hear()
    assert not subject._knocks


def test_host_without_route_is_cut_off(clock: Clock) -> None:
    # The kernel of this host reports the error: no packet leaves.
    subject = Pulse()
    subject.place = "255.255.255.255", 9
    assert cut_off_after(subject, clock, 8) is not None
    subject.forget()


def test_host_of_this_process_is_never_cut_off(clock: Clock) -> None:
    assert cut_off_after(Pulse(), clock, 39) is None


# -- which hosts the supervisor gives up early --------------------------------------------------


def machine(*, local: bool = False, cut_off: bool = False) -> Any:
    pulse = SimpleNamespace(is_cut_off=lambda: cut_off)
    return SimpleNamespace(local=local, lost="", line=None, pulse=pulse)


def given_up(*hosts: Any, spare: int) -> list[Any]:
    """Return which of ``hosts``, with a rank each, are given up early if ``spare`` may be lost."""
    places = [Place(host, 0, 1) for host in hosts]
    run = Run([], len(hosts), {}, len(hosts) - spare)
    meeting: Any = SimpleNamespace()
    supervisor = Supervisor(0, run, [{}] * len(hosts), meeting, hosts, places)
    for number, place in enumerate(places):
        supervisor._attend(number, place)
    try:
        return supervisor._cut_off()
    finally:
        supervisor._loop.open.close()


def test_cut_off_host_is_given_up_if_enough_ranks_are_left() -> None:
    host = machine(cut_off=True)
    assert given_up(host, machine(), machine(), spare=1) == [host]
    assert given_up(machine(local=True), host, spare=1) == [host]


def test_cut_off_host_is_kept_if_the_run_would_end_without_it() -> None:
    assert given_up(machine(cut_off=True), machine(), machine(), spare=0) == []
    both = machine(cut_off=True), machine(cut_off=True)
    assert given_up(*both, machine(), machine(), spare=1) == []
    assert given_up(*both, machine(), machine(), spare=2) == [*both]


def test_no_host_is_given_up_while_all_others_are_silent() -> None:
    silent = machine(cut_off=True), machine(cut_off=True)
    assert given_up(machine(local=True), *silent, spare=2) == []
