"""Test of whether each host reaches all others, as one agent makes it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from collective.launch.hosts.reachability import ReachableSocket, reached
from collective.platform import held_port

# The check waits for all addresses at once, two seconds. One after the other, 150 addresses would
# take 300 s. The rest is for a busy machine.
TOGETHER_S = 60.0
NO_ANSWER = "no answer within 2 s"


@pytest.fixture
def dead() -> Iterator[int]:
    """Yield a port of this host that answers to no connection, since its queue is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(server.getsockname())
        time.sleep(0.05)
        yield server.getsockname()[1]


@pytest.fixture
def mute() -> Iterator[int]:
    """Yield a port of this host that accepts connections, and sends nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server.getsockname()[1]


@pytest.fixture
def listener() -> Iterator[ReachableSocket]:
    with held_port() as port:
        made = ReachableSocket("lo", ("127.0.0.1", port), "a token")
        yield made
        made.rest()
        made._socket.close()


def test_dead_addresses_are_named_after_one_wait(dead: int, mute: int) -> None:
    peers = [[f"dead{number}", "127.0.0.1", dead, "token"] for number in range(150)]
    peers.append(["mute", "127.0.0.1", mute, "token"])
    began = time.monotonic()
    assert reached(peers) == [[str(peer[0]), NO_ANSWER] for peer in peers]
    assert time.monotonic() - began < TOGETHER_S


def test_host_with_right_token_is_reached(listener: ReachableSocket) -> None:
    address, port = listener.address, listener.port
    assert reached([["a", address, port, "a token"], ["store", address, port, ""]]) == []
    other = "another host or program answers there"
    assert reached([["a", address, port, "a t0ken"]]) == [["a", other]]


def test_refused_connection_is_named_at_once() -> None:
    with held_port() as port:
        assert reached([["a", "127.0.0.1", port, "token"]]) == [["a", "Connection refused"]]


def test_resting_listener_answers_without_a_token(listener: ReachableSocket) -> None:
    listener.rest()
    with socket.create_connection((listener.address, listener.port), 5.0) as connection:
        listener.dismiss()
        assert connection.recv(16) == b""
