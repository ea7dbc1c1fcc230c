"""Connecting the ranks of the ``tcp`` transport: with each other, and with no stranger."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from collective.backends.peers.monitored import Pairing
from collective.backends.tcp.connecting import Connection, connect_all
from collective.backends.tcp.stream import TcpStream
from collective.contract.failure import Failure
from collective.contract.world import World
from collective.control.link import Challenge, KeyDiffersError, Link, ProofError, connect
from collective.control.ports import Ports
from collective.control.secret import Secret
from collective.deadline import Deadline
from collective.errors import BackendError, ConfigError
from collective.start.stores import MemoryStore
from tests.backends.peers.test_monitor import FAR, listening

SECRET = Secret(b"k" * 32)
KEY = SECRET.key("tcp")
Connections = dict[int, Connection]


class Meeting:
    """The texts that the ranks of a communicator have offered each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.texts: dict[str, dict[int, str]] = {}
        self.withdrawn = 0
        self.failures: list[Failure] = []

    def address(self, rank: int) -> str:
        """Return the address at which ``rank`` listens, once the rank has offered it."""
        while rank not in self.texts.get("addresses", {}):
            time.sleep(0.001)
        return self.texts["addresses"][rank]


class Member:
    """Channel of one rank, in place of the monitor's; also the wait of its calls."""

    secret = SECRET
    failure = None

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self.awaited: Any = None
        self._meeting = meeting

    def offer(self, name: str, text: str) -> None:
        self._meeting.texts.setdefault(name, {})[self.rank] = text

    def offered(self, name: str) -> dict[int, str]:
        return dict(self._meeting.texts[name])

    def withdraw(self, name: str) -> None:
        self._meeting.withdrawn += 1

    def abort(self, failure: Failure) -> None:
        self._meeting.failures.append(failure)

    def wait(self, where: str, deadline: Deadline, *_: Any) -> Member:
        self.deadline = deadline
        return self

    def turn(self) -> None:
        time.sleep(0.001)
        self.check()

    def check(self) -> None:
        if self.deadline.expired:
            raise BackendError("too late")


def joined(
    meeting: Meeting,
    rank: int,
    seconds: float = FAR,
    address: str = "",
    ports: Ports | None = None,
) -> Connections:
    """Connect a rank; with an address the rank takes itself for the only one of its host."""
    member: Any = Member(meeting, rank)
    size = meeting.size
    local = (0, 1) if address else (rank, size)
    address = address or "127.0.0.1"
    here = World(
        rank, size, *local, "here", "none", "job", MemoryStore(), address=address, ports=ports
    )
    return connect_all(
        Pairing(here, member, member, range(size), "connect", Deadline(seconds), lambda: None)
    )


class Ranks:
    """Rank 0 of two, which is listening already, and rank 1, which :meth:`join` starts."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.meeting = Meeting(2)
        self._pool = pool
        self._first: Future[Connections] = pool.submit(joined, self.meeting, 0)
        self.address = self.meeting.address(0)

    def knock(self) -> socket.socket:
        """Connect as a stranger does, who knows only the address."""
        host, _, port = self.address.partition(" ")
        return socket.create_connection((host, int(port)), FAR)

    def join(self) -> None:
        """Connect rank 1, and check that the connection is one between the two ranks."""
        second = self._pool.submit(joined, self.meeting, 1)
        ends = self._first.result(FAR)[1].sock, second.result(FAR)[0].sock
        with ends[0], ends[1]:
            assert ends[0].getpeername() == ends[1].getsockname()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ThreadPoolExecutor(2) as pool:
        yield Ranks(pool)


def sockets() -> int:
    links = (f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket") for link in links)


def test_each_pair_of_ranks_has_one_connection() -> None:
    meeting = Meeting(4)
    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(lambda rank: joined(meeting, rank), range(4)))
    for rank, connections in enumerate(ranks):
        assert sorted(connections) == [peer for peer in range(4) if peer != rank]
        for peer, connection in connections.items():
            other = ranks[peer][rank].sock
            assert connection.sock.getpeername() == other.getsockname()
    for connections in ranks:
        for connection in connections.values():
            connection.sock.close()


def test_ranks_connect_over_ipv6() -> None:
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("the system has no IPv6")
    meeting = Meeting(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: joined(meeting, rank, address="::1"), range(2)))
    for connection in (ranks[0][1], ranks[1][0]):
        assert connection.sock.getpeername()[0] == "::1"
        connection.sock.close()


def test_only_the_ranks_that_others_connect_to_need_a_port() -> None:
    meeting = Meeting(2)
    with socket.create_server(("127.0.0.1", 0)) as taken, ThreadPoolExecutor(2) as pool:
        port = taken.getsockname()[1]
        first = pool.submit(joined, meeting, 0)
        second = pool.submit(joined, meeting, 1, ports=Ports(port, port))
        ends = first.result(FAR)[1].sock, second.result(FAR)[0].sock
    for end in ends:
        end.close()


def test_connected_ranks_listen_at_no_port(ranks: Ranks) -> None:
    assert listening(), "rank 0 should listen until rank 1 has come"
    ranks.join()
    assert listening() == set()


def test_connecting_leaves_no_thread(ranks: Ranks) -> None:
    ranks.join()
    assert "collective-tcp-listen" not in {thread.name for thread in threading.enumerate()}


def test_late_rank_is_awaited_until_deadline_and_leaves_nothing() -> None:
    before = sockets(), listening()
    with pytest.raises(BackendError, match="too late"):
        joined(Meeting(2), 0, seconds=0.1)
    assert (sockets(), listening()) == before


def test_address_of_another_host_is_refused() -> None:
    meeting = Meeting(2)
    member: Any = Member(meeting, 0)
    # RFC 5737: reserved for documentation.
    far = World(0, 2, 0, 1, "here", "none", "job", MemoryStore(), address="192.0.2.1")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*COLLECTIVE_INTERFACE"):
        connect_all(Pairing(far, member, member, range(2), "connect", Deadline(FAR), lambda: None))


# -- strangers ------------------------------------------------------------------------------------

WORDS = {
    "nothing": b"",
    "half a proof": bytes(Challenge.length // 2),
    "a wrong proof": bytes(Challenge.length),
    "a message": bytes(8) + b"\0" * 16 + b"payload",
    "no end": bytes(1 << 20),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_words_of_stranger_end_only_its_connection(ranks: Ranks, words: bytes) -> None:
    with ranks.knock() as stranger, contextlib.suppress(OSError):
        stranger.sendall(words)
    ranks.join()


def test_stranger_with_another_key_is_refused(ranks: Ranks) -> None:
    with pytest.raises(KeyDiffersError):
        connect(ranks.address, b"x" * 32, Deadline(FAR))
    ranks.join()


def test_recorded_handshake_is_worth_nothing(ranks: Ranks) -> None:
    """A stranger sends the proof that a rank has made for another connection."""
    ours, theirs = socket.socketpair()
    with (
        ranks.knock() as first,
        ranks.knock() as second,
        ours,
        theirs,
        ThreadPoolExecutor(1) as pool,
    ):
        proving = pool.submit(Link(ours).prove, KEY, Deadline(FAR))
        theirs.sendall(first.recv(1000))
        recorded = theirs.recv(1000)
        theirs.close()
        assert isinstance(proving.exception(), ProofError)
        second.recv(1000)
        second.sendall(recorded)
        assert second.recv(1000) == Challenge.refusal
        assert second.recv(1000) == b""
        first.sendall(recorded)
        assert len(first.recv(1000)) == 32, "the proof was not even valid where it was made"
    ranks.join()


def test_strangers_that_hold_connections_keep_nobody_out(ranks: Ranks) -> None:
    held = [ranks.knock() for _ in range(300)]
    ranks.join()
    for stranger in held:
        stranger.close()


def test_strangers_cost_no_descriptor_afterwards(ranks: Ranks) -> None:
    before = sockets()
    held = [ranks.knock() for _ in range(100)]
    ranks.join()
    for stranger in held:
        stranger.close()
    assert sockets() == before - 1, "rank 0's listening socket should be the only difference"


@pytest.mark.parametrize("claim", [0, 2, -1, True, "1", None, 1.0])
def test_wrong_number_of_rank_is_turned_away(ranks: Ranks, claim: Any) -> None:
    link = connect(ranks.address, KEY, Deadline(FAR))
    link.send({"rank": claim})
    with pytest.raises((EOFError, OSError)):
        link.exactly(1, Deadline(FAR))
    link.close()
    ranks.join()


def test_second_connection_of_a_rank_is_turned_away() -> None:
    meeting = Meeting(3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(joined, meeting, 0, seconds=1.0)
        link, again = (connect(meeting.address(0), KEY, Deadline(FAR)) for _ in range(2))
        link.send({"rank": 2})
        assert link.exactly(8, Deadline(FAR)) == b"welcome\n"
        again.send({"rank": 2})
        with pytest.raises((EOFError, OSError)):
            again.exactly(1, Deadline(FAR))
        with pytest.raises(BackendError, match="too late"):
            first.result(FAR)
    link.close()
    again.close()


# -- bytes behind the handshake -------------------------------------------------------------------


def test_bytes_behind_the_welcome_belong_to_the_first_message() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)

    def refuse(what: str) -> Any:
        raise AssertionError(what)

    sender = TcpStream(far, b"", refuse)
    content = np.arange(100, dtype=np.uint8)
    assert list(sender.write(content, 7)) == []
    wire = near.recv(1000)
    with near, far:
        for cut in (0, 1, 23, 24, 25, 124):
            receiver = TcpStream(near, wire[:cut], refuse)
            far.sendall(wire[cut:])
            prefix = receiver.prefix()
            assert prefix is not None
            assert prefix[:2] == (100, 7)
            out = np.empty(100, np.uint8)
            assert list(receiver.read(prefix, out)) == []
            np.testing.assert_array_equal(out, content)
