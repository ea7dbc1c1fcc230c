"""Strangers: programs that reach the ports of a job without knowing its key."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import socket
import subprocess
import textwrap
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collective.backends.peers.channel import Channel
from collective.backends.peers.hub import Hub
from collective.backends.peers.monitor import Monitor
from collective.control.link import Challenge, Link, ProofError, connect, listen
from collective.control.server import Server
from collective.deadline import Deadline
from collective.errors import RendezvousError
from collective.start.stores import FileStore
from tests import warm
from tests.backends.peers.test_monitor import FAR, KEY, hub_of, until, wait_for_error, world
from tests.support.interpreter import started

LOOPBACK = "127.0.0.1"


def knock(address: str) -> socket.socket:
    """Connect as a stranger does, who knows only the address."""
    host, _, port = address.partition(" ")
    if port:
        return socket.create_connection((host, int(port)), FAR)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(f"\0{host}")
    sock.settimeout(FAR)  # not before connect(), which would then fail if the queue has no room
    return sock


def say(address: str, data: bytes) -> socket.socket:
    sock = knock(address)
    with contextlib.suppress(OSError):  # the listener may have closed the connection meanwhile
        sock.sendall(data)
    return sock


def join(address: str, rank: int, size: int) -> Link:
    """Connect to the hub as a rank does, and announce the rank."""
    link = connect(address, KEY, Deadline(FAR))
    link.send({"kind": "here", "rank": rank, "size": size, "host": "here"})
    return link


def complete(address: str, size: int) -> list[Link]:
    """Join as every rank of a hub, and check that the hub reports all of them."""
    links = [join(address, rank, size) for rank in range(size)]
    for link in links:
        assert link.expect(Deadline(FAR))["hosts"] == ["here"] * size
    return links


@pytest.fixture(params=[LOOPBACK, None], ids=["tcp", "abstract"])
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    """Start the hub of two ranks that have not connected yet."""
    running_hub = hub_of(2, request.param)
    yield running_hub
    until(lambda: "collective-hub" not in {thread.name for thread in threading.enumerate()})


# -- connections without a proof --------------------------------------------------------------

FIRST_WORDS = {
    "a letter that is not ASCII": b'\x14\0\0\0{"proof":"\xc3\xa9"}',
    "brackets": b"\xa0\x0f\0\0" + b"[" * 4000,
    "nothing": b"",
    "half a proof": bytes(Challenge.length // 2),
    "a wrong proof": bytes(Challenge.length),
    "no end": bytes(1 << 20),
    "a request of HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
}


@pytest.mark.parametrize("words", FIRST_WORDS.values(), ids=FIRST_WORDS)
def test_first_words_of_stranger_end_only_its_connection(hub: Hub, words: bytes) -> None:
    with say(hub.address, words):
        for link in complete(hub.address, 2):
            link.close()


def answer_to(greeting: bytes) -> bytes:
    """Return the answer of a rank that knows the key to the greeting of a listener."""
    rank_socket, listener_socket = socket.socketpair()
    with rank_socket, listener_socket, ThreadPoolExecutor(1) as pool:
        peer = pool.submit(Link(rank_socket).prove, KEY, Deadline(FAR))
        listener_socket.sendall(greeting)
        answer = listener_socket.recv(1000)
        listener_socket.close()
        assert isinstance(peer.exception(), ProofError)
    return answer


def test_proof_is_valid_for_one_connection(hub: Hub) -> None:
    with knock(hub.address) as first, knock(hub.address) as second:
        recorded = answer_to(first.recv(1000))
        second.recv(1000)
        second.sendall(recorded)
        assert second.recv(1000) == Challenge.refusal
        assert second.recv(1000) == b""
        first.sendall(recorded)
        assert len(first.recv(1000)) == 32
    for link in complete(hub.address, 2):
        link.close()


def test_listener_cannot_relay_challenge_to_another_rank() -> None:
    """A false hub gets proofs of connecting ranks, but it needs the proof of a listening rank."""
    rank_socket, listener_socket = socket.socketpair()
    with rank_socket, listener_socket, ThreadPoolExecutor(1) as pool:
        rank = pool.submit(Link(rank_socket).prove, KEY, Deadline(FAR))
        greeting = Challenge().greeting
        listener_socket.sendall(greeting)
        nonce = listener_socket.recv(1000)[:32]
        # The answer of a second rank to the nonce of the first rank.
        listener_socket.sendall(answer_to(greeting[:-32] + nonce)[32:])
        with pytest.raises(ProofError, match="does not know this job's key"):
            rank.result(FAR)


def test_slowly_sending_hub_times_out_at_deadline() -> None:
    over = threading.Event()
    listening, address = listen(None)

    def drip() -> None:
        with listening, listening.accept()[0] as sock, contextlib.suppress(OSError):
            while not over.wait(0.05):
                sock.sendall(b"c")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(drip)
        # A complete greeting of 45 bytes would end in a different error.
        with pytest.raises(OSError, match="timed out"):
            connect(address, KEY, Deadline(0.3))
        over.set()


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(40), b"", b"[" * 4000])
def test_false_hub_is_refused(greeting: bytes) -> None:
    listening, address = listen(LOOPBACK)
    with listening, ThreadPoolExecutor(1) as pool:
        link = pool.submit(connect, address, KEY, Deadline(FAR))
        with listening.accept()[0] as sock:
            sock.sendall(greeting)
        with pytest.raises(ProofError, match=r"another program|without a greeting"):
            link.result(FAR)


@pytest.mark.parametrize(
    "published",
    [b"", b"[" * 4000, b"\xff", b'{"address": "127.0.0.1 1"}', b'{"address": "a", "key": "x"}',
     b'{"address": "127.0.0.1 1", "key": 7}', b'{"address": 1, "address": 2, "key": ""}',
     b'{"address": NaN, "key": ""}'],
)  # fmt: skip
def test_foreign_store_entry_raises_rendezvous_error(tmp_path: Path, published: bytes) -> None:
    store = FileStore(tmp_path)
    store.set("monitor", published)
    with pytest.raises(RendezvousError, match="is not what rank 0 publishes"):
        Monitor.start(world(1, 2, store), Deadline(FAR))


@pytest.mark.parametrize(
    "address", ["127.0.0.1 99999", "a..b 1", "x" * 300, "127.0.0.1 x", "\ud800"]
)
def test_invalid_address_is_retried_until_deadline(tmp_path: Path, address: str) -> None:
    store = FileStore(tmp_path)
    store.set("monitor", json.dumps({"address": address, "key": "00"}).encode())
    with pytest.raises(RendezvousError, match="rank 1 of 2 cannot reach rank 0"):
        Monitor.start(world(1, 2, store), Deadline(0.1))


# -- many strangers ---------------------------------------------------------------------------

# This program is a separate process, so that the descriptors of the hub's process can be counted.
HOLDS = """
    import resource, socket, sys
    address, count = sys.argv[1], int(sys.argv[2])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = address.partition(" ")
    held = []
    for _ in range(count):
        sock = socket.socket(socket.AF_INET if port else socket.AF_UNIX)
        sock.connect((host, int(port)) if port else chr(0) + host)
        held.append(sock)
    print("held", flush=True)
    sys.stdin.read()
    """

# A hub whose process is limited to a few more descriptors.
POOR = """
    import os, resource, sys, threading
    from tests.backends.peers.test_monitor import hub_of
    hub = hub_of(2, "127.0.0.1", 60.0)
    limit = len(os.listdir("/proc/self/fd")) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    print(hub.address, flush=True)
    before = os.times()
    thread, = [each for each in threading.enumerate() if each.name == "collective-hub"]
    thread.join()
    used = os.times()
    print(used.user + used.system - before.user - before.system)
    """


def program(
    body: str, *arguments: object
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run a program until the end of the ``with`` block."""
    return started("-c", textwrap.dedent(body), *arguments)


def heard(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def test_thousand_stranger_connections_do_not_block_ranks(hub: Hub) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with program(HOLDS, hub.address, 1000) as strangers:
        assert heard(strangers) == "held"
        most = len(os.listdir("/proc/self/fd")) - before
        links = complete(hub.address, 2)
        for link in links:
            link.close()
    assert most <= 128 + 5


def test_hub_without_descriptors_refuses_strangers() -> None:
    with program(POOR) as poor:
        address = heard(poor)
        with program(HOLDS, address, 40) as strangers:
            assert heard(strangers) == "held"
            for link in complete(address, 2):
                link.close()
        # The hub has slept while waiting for its ranks instead of spinning.
        assert float(heard(poor)) < 1.0


def test_hub_does_not_store_data_of_strangers() -> None:
    """While 100 strangers send 1 MiB each, the hub allocates less than 1 MiB in total."""
    hub = hub_of(1, LOOPBACK)
    words = bytes(1 << 20)
    strangers = [knock(hub.address) for _ in range(100)]
    until(lambda: all(sock.recv(100) for sock in strangers))
    tracemalloc.start()
    try:
        for stranger in strangers:
            with contextlib.suppress(OSError):
                stranger.sendall(words)
        for link in complete(hub.address, 1):
            link.close()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for stranger in strangers:
            stranger.close()
    assert most < 1 << 20


def test_random_strings_do_not_stop_hub(hub: Hub) -> None:
    """No exception ends the thread of the hub, and the ranks connect meanwhile."""
    rank = join(hub.address, 0, 2)
    chance = random.Random(8)
    for _ in range(5000):
        say(hub.address, chance.randbytes(chance.randrange(2 * Challenge.length))).close()
    other = join(hub.address, 1, 2)
    for link in (rank, other):
        assert link.expect(Deadline(FAR))["kind"] == "complete"
        link.close()


def test_altered_proof_is_refused() -> None:
    """A proof that is lengthened, or changed in one byte, is refused."""
    hub = hub_of(1, None)

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.integers(0, 63), st.integers(1, 255), st.binary(max_size=4))
    def stranger(at: int, flip: int, more: bytes) -> None:
        with knock(hub.address) as sock:
            proof = bytearray(answer_to(sock.recv(1000)))
            if more:
                proof += more
            else:
                proof[at] ^= flip
            sock.sendall(proof)
            assert sock.recv(1000) == (b"" if more else Challenge.refusal)

    stranger()
    complete(hub.address, 1)[0].close()


# -- malformed messages of ranks that know the key ----------------------------------------------

ENTRY = [
    1,
    7,
    False,
    {"operation": "scan", "dtype": None, "shape": None, "options": {}, "site": ""},
]
LEFT = {
    "kind": "left",
    "channel": "world",
    "members": [0],
    "finished": 0,
    "dropped": False,
    "last": "barrier()",
}
REPORT = {
    "kind": "report",
    "channel": "world",
    "entries": [ENTRY],
    "finished": 0,
    "started": 1,
    "waits": [["recv(tag=0)", "x.py:4 in main", False, [1], ["recv", 0, None, 1]]],
}
STALL = {"kind": "stall", "channel": "world", "members": [0], "asks": None, "within": None}
WRONG: dict[str, object] = {
    "no kind": {},
    "an unknown kind": {"kind": "hello"},
    "kind is a list": {"kind": []},
    "no fields": {"kind": "failure"},
    "a list": [],
    "members are no ranks": {**LEFT, "members": "01"},
    "a negative member": {**LEFT, "members": [-1]},
    "a huge number": {**LEFT, "finished": 1 << 64},
    "number is a bool": {**LEFT, "finished": True},
    "flag is an integer": {**LEFT, "dropped": 1},
    "channel is a list": {**STALL, "channel": []},
    "a negative time": {**STALL, "within": -1},
    "an unfinished failure": {"kind": "failure", "channel": "world", "members": [0],
                              "failure": {"kind": "lost", "rank": 0}, "finished": None},
    "a short entry": {**REPORT, "entries": [ENTRY[:3]]},
    "a last call that is a number": {**LEFT, "last": 7},
    "a wait that is a number": {**REPORT, "waits": [7]},
    "a wait for a negative rank": {**REPORT, "waits": [["recv", "", False, [-1], None]]},
    "a call without options": {**REPORT, "entries": [[1, 7, False, {"operation": "scan"}]]},
}  # fmt: skip
NO_MESSAGES = [
    b"", b"{", b"[" * 4000, b'{"kind": "bye", "kind": "bye"}', b'{"kind": "bye", "n": NaN}',
    b'{"kind": "bye", "n": ' + b"9" * 5000 + b"}", b"\xff", b"null",
]  # fmt: skip


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    ("said", "why"),
    [
        *(
            pytest.param(framed(json.dumps(message).encode()), "ValueError: a message", id=what)
            for what, message in WRONG.items()
        ),
        *((framed(text), "Error") for text in NO_MESSAGES),
        pytest.param(b"\xff" * 4, "a message of 4294967295 bytes", id="no end"),
    ],
)
def test_malformed_message_ends_connection_of_its_sender(said: bytes, why: str) -> None:
    """The hub keeps serving, and tells rank 0 what was wrong with the message of rank 1."""
    hub = hub_of(2, None)
    links = complete(hub.address, 2)
    links[1].write(said)
    notice = links[0].expect(Deadline(FAR))
    assert (notice["kind"], notice["rank"]) == ("lost", 1)
    assert why in notice["why"]
    for link in links:
        link.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["channel", "members", "failure", "finished", "asks", "entries", "started", "waits", "last"]
    ),
    JSON | st.just("world") | st.just([0]) | st.just(0) | st.just([ENTRY]),
)


def test_random_messages_of_peers_do_not_stop_hub() -> None:
    """Rank 0 is still served, whatever the fields of the other ranks' messages are."""
    size = 60
    hub = hub_of(size, None)
    links = complete(hub.address, size)
    ranks = iter(range(1, size))

    @settings(
        max_examples=size - 1, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(st.sampled_from(["bye", "failure", "left", "stall", "report"]), FIELDS)
    def peer(kind: str, fields: dict[str, object]) -> None:
        link = links[next(ranks)]
        link.send({**fields, "kind": kind})
        link.close()

    peer()
    ask = {"kind": "stall", "channel": "last", "members": [0], "asks": [0], "within": 9}
    links[0].send(ask)
    while links[0].expect(Deadline(FAR)).get("channel") != "last":
        pass
    for link in links:
        link.close()


class FakeHub:
    """Hub that admits a rank, and then answers with a given message."""

    def __init__(self, message: object) -> None:
        self.listening, self.address = listen(None)
        self.message = message
        self.server = Server(self.listening, KEY, self)
        self.over = False

    def turn(self) -> bool:
        return not self.over

    def pause(self) -> float | None:
        return None

    def heard(self, link: Link, message: dict[str, object]) -> None:
        known = {"kind": "complete", "hosts": ["here"] * 2, "session": ""}
        link.send(known if message["kind"] == "here" else self.message)  # type: ignore[arg-type]

    def gone(self, link: Link, why: str) -> None:
        self.over = True


@pytest.mark.parametrize(
    "message",
    [{}, [], {"kind": "lost", "rank": 0}, {"kind": "lost", "rank": 7, "why": ""},
     {"kind": "left", "channel": "world", "rank": 7, "finished": 0, "dropped": False,
      "last": ""},
     {"kind": "late", "channel": "world", "late": {"x": None}}],
    ids=str,
)  # fmt: skip
def test_malformed_message_of_hub_counts_as_lost_rank_0(tmp_path: Path, message: object) -> None:
    hub = FakeHub(message)
    store = FileStore(tmp_path)
    store.set("monitor", json.dumps({"address": hub.address, "key": KEY.hex()}).encode())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(hub.server.run)
        monitor = Monitor.start(world(1, 2, store), Deadline(FAR))
        monitor.channel.compare()
        error = wait_for_error(monitor.channel)
        assert "rank 0 (on here) is gone: it sent a malformed message: " in str(error)
        monitor.channel.close()


def test_event_of_dropped_link_is_ignored() -> None:
    """A stranger sends data at the moment at which the last rank completes the roll call."""
    entered, free = threading.Event(), threading.Event()

    class Waits(FakeHub):
        def heard(self, link: Link, message: dict[str, object]) -> None:
            if message["kind"] == "wait":
                entered.set()
                free.wait(FAR)
            else:
                self.server.stop_listening()
                link.send({"kind": "stopped"})

    hub = Waits({})
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(hub.server.run)
        waiting, last = (
            connect(hub.address, KEY, Deadline(FAR)),
            connect(hub.address, KEY, Deadline(FAR)),
        )
        stranger = knock(hub.address)
        stranger.recv(100)
        waiting.send({"kind": "wait"})
        entered.wait(FAR)
        # Both messages are ready when the selector is polled next.
        last.send({"kind": "stop"})
        stranger.sendall(bytes(Challenge.length))
        free.set()
        assert last.expect(Deadline(FAR)) == {"kind": "stopped"}
        last.close()
        served.result(FAR)
    stranger.close()
    waiting.close()


# -- at a port of Gloo, in place of a peer ------------------------------------------------------


class PortScanner:
    """Stranger that finds the ports of Gloo, and connects to them before the peers do."""

    def __init__(self, then: Callable[[socket.socket], None]) -> None:
        self.ports: list[int] = []
        self.held: list[socket.socket] = []
        self._then = then

    def see(self, address: bytes) -> None:
        """Read the port from an address of Gloo: a sockaddr_in after a name and two lengths."""
        at = 8 + int.from_bytes(address[:8], "little") + 8 + 2
        port = int.from_bytes(address[at : at + 2], "big")
        if port not in self.ports:
            self.ports.append(port)
            self._take_all_numbers(port)

    def _take_all_numbers(self, port: int) -> None:
        for number in range(4):  # ranks of two groups with two ranks each
            sock = socket.create_connection((LOOPBACK, port))
            sock.sendall(number.to_bytes(8, "little"))
            self._then(sock)
            self.held.append(sock)


def over_gloo(
    directory: Path, stranger: PortScanner, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> list[Any]:
    """Connect two ranks over Gloo; return each rank's sum or the text of its error."""
    from collective.start.connecting import connect as connect_ranks

    store, offer = FileStore(directory), Channel.offer

    def offer_late(channel: Channel, name: str, text: str) -> None:
        if name.startswith("addresses"):
            stranger.see(bytes.fromhex(text))
        offer(channel, name, text)

    monkeypatch.setattr(Channel, "offer", offer_late)

    def rank(number: int) -> Any:
        try:
            with connect_ranks(world(number, 2, store), "gloo", start_timeout=timeout) as comm:
                return float(comm.all_reduce(np.array([number + 1.0]))[0])
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(rank, range(2)))
    for sock in stranger.held:
        sock.close()
    return outcomes


THEN: dict[str, Callable[[socket.socket], None]] = {
    "is silent": lambda sock: None,
    "hangs up": socket.socket.close,
    "says anything": lambda sock: sock.sendall(bytes(range(256))),
}


@pytest.mark.parametrize("then", THEN.values(), ids=THEN)
def test_stranger_at_gloo_port_is_an_error_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[socket.socket], None]
) -> None:
    pytest.importorskip("torch", reason="the gloo transport needs PyTorch")
    stranger = PortScanner(then)
    for text in over_gloo(tmp_path, stranger, monkeypatch, FAR):
        # Gloo itself notices a stranger that hangs up.
        assert re.search("has not proved that it knows this job's secret|closed by peer", text)
    assert os.listdir(tmp_path) == []
    gc.collect()  # the tracebacks of the errors hold Gloo's sockets


# -- at torchrun's store, with a separate program -------------------------------------------------

RANK = """
    import numpy as np
    import collective
    with collective.init("gloo") as comm:
        assert comm.all_reduce(np.ones(1)) == 2.0
    """
TEXT = "5ca1ab1e" * 8


def rank_of_two(number: int, port: int) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run a rank as torchrun would, alone on its host, with the agent's store at ``port``."""
    return started(
        "-c", textwrap.dedent(RANK), python=warm.python(),
        RANK=str(number), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(number), MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="none", TORCHELASTIC_USE_AGENT_STORE="True",
        COLLECTIVE_SECRET=TEXT, COLLECTIVE_INTERFACE="lo",
    )  # fmt: skip


def test_stranger_at_torchrun_store_cannot_join_and_job_continues() -> None:
    """The stranger reads all that rank 0 has published before rank 1 starts, and tries the hub."""
    dist = pytest.importorskip("torch.distributed")
    served = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with rank_of_two(0, served.port) as rank_0:
        stranger = dist.TCPStore(LOOPBACK, served.port, is_master=False)
        until(stranger.list_keys, seconds=90.0)
        (name,) = stranger.list_keys()
        assert "monitor" not in name
        sealed = stranger.get(name)
        nonce, value, tag = sealed[:16], json.loads(sealed[16:-32]), sealed[-32:]
        assert list(value) == ["address"]
        for key in (nonce, tag, bytes.fromhex(name.rpartition("/")[2]), name.encode(), b""):
            with pytest.raises(ProofError):
                connect(value["address"], key, Deadline(FAR))
        with rank_of_two(1, served.port) as rank_1:
            ended = [rank.communicate(timeout=90)[1] for rank in (rank_0, rank_1)]
    assert [rank_0.returncode, rank_1.returncode] == [0, 0], ended
