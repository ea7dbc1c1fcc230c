"""Behaviour common to all stores, and the store that rank 0 serves to ranks with the job's secret.

See also start/test_sealed_store.py, and start/test_tcp_store.py.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.backends.peers.monitored import HandedStore
from collective.backends.peers.standby import LastingStore, Standby
from collective.control import link as link_module
from collective.control import server as server_module
from collective.control.link import Link, Tls, connect, encoded
from collective.control.secret import Secret
from collective.control.store import PrefixedStore, Store, WatchedStore, WrappedStore
from collective.deadline import Deadline
from collective.errors import RendezvousError, UnsupportedError
from collective.memory.buffer import Buffer
from collective.start import tcp_store
from collective.start.rendezvous import Endpoint
from collective.start.stores import FileStore, LateStore, MemoryStore, SealedStore
from collective.start.tcp_store import TcpStore
from tests.backends.peers.test_monitor import FAR
from tests.support.interpreter import run_together, started
from tests.support.network_hosts import free_port

RANKS, KEYS = 6, 25
FAR_S = 60.0

SECRET = Secret(bytes(range(32)))
#: Returns the store of one rank.
Opener = Callable[[], Store]


def free_address() -> Endpoint:
    return Endpoint("127.0.0.1", free_port(), "a test")


def store(
    where: Endpoint,
    *,
    serve: bool = False,
    secret: Secret = SECRET,
    timeout: float = FAR,
    tls: Tls | None = None,
):
    deadline = Deadline(timeout)
    return TcpStore(where, secret, serve=serve, spans_hosts=False, deadline=deadline, tls=tls)


# -- openers for each kind of store ---------------------------------------------------------


def _file(directory: Path, opened: contextlib.ExitStack) -> Opener:
    return lambda: FileStore(directory)


def _memory(directory: Path, opened: contextlib.ExitStack) -> Opener:
    shared = MemoryStore()
    return lambda: shared


def _tcp(directory: Path, opened: contextlib.ExitStack) -> Opener:
    where = free_address()

    def connected(serve: bool = False) -> Store:
        return opened.enter_context(contextlib.closing(store(where, serve=serve)))

    connected(serve=True)
    return connected


def _agent(directory: Path, opened: contextlib.ExitStack) -> Opener:
    dist = pytest.importorskip("torch.distributed")
    from collective.start.torch_store import AgentStore

    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = Endpoint("127.0.0.1", served.port, "a test", served=True)
    opened.callback(lambda: served)
    return lambda: AgentStore(where, Deadline(FAR_S))


def _torch(directory: Path, opened: contextlib.ExitStack) -> Opener:
    dist = pytest.importorskip("torch.distributed")
    from collective.start.torch_store import TorchStore

    files = str(directory)
    return lambda: TorchStore(dist.PrefixStore("a", dist.FileStore(files, RANKS)))


def _lasting(directory: Path, opened: contextlib.ExitStack) -> Opener:
    def lasting() -> Store:
        lasting_store = LastingStore(FileStore(directory), Standby(0, None, None))
        return opened.enter_context(contextlib.closing(lasting_store))

    return lasting


KINDS: dict[str, Callable[[Path, contextlib.ExitStack], Opener]] = {
    "file": _file,
    "memory": _memory,
    "tcp": _tcp,
    "torchrun's agent": _agent,
    "torch's": _torch,
    "lasting": _lasting,
    "sealed": lambda directory, _: lambda: SealedStore(FileStore(directory), SECRET),
    "prefixed": lambda directory, _: lambda: PrefixedStore(FileStore(directory), "job."),
    "generation": lambda directory, _: (
        lambda: WatchedStore(FileStore(directory), "job.1.", lambda: None, lasts=True)
    ),
    "late": lambda directory, _: lambda: LateStore(lambda: FileStore(directory)),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    with contextlib.ExitStack() as opened:
        yield request.param(tmp_path / "store", opened)


def test_store_set_value_is_read_and_deleted_by_other_ranks(opener: Opener) -> None:
    writer, reader = opener(), opener()
    assert reader.try_get("key") is None
    for value in (b"value", b"", b"\0\xff" * 100_000, b"again"):
        writer.set("key", value)
        assert reader.get("key", Deadline(0.0)) == value
        assert reader.try_get("key") == value
    writer.set("another", b"")
    reader.delete("key")
    reader.delete("key")
    assert writer.try_get("key") is None
    assert writer.try_get("another") == b""


def test_store_get_waits_for_value_set_by_another_thread(opener: Opener) -> None:
    writer, reader = opener(), opener()
    received: list[bytes] = []
    waiting = threading.Thread(target=lambda: received.append(reader.get("key", Deadline(FAR_S))))
    waiting.start()
    # While a thread waits in get, the store serves other threads.
    reader.set("other", b"1")
    assert writer.get("other", Deadline(FAR_S)) == b"1"
    writer.set("key", b"late")
    waiting.join(FAR_S)
    assert received == [b"late"]


def test_store_get_of_absent_key_raises_and_names_key(opener: Opener) -> None:
    with pytest.raises(RendezvousError, match="'key'"):
        opener().get("key", Deadline(0.0))


def test_put_if_absent_race_has_one_winner_for_all(opener: Opener) -> None:
    stores = [opener() for _ in range(RANKS)]
    won: list[list[bytes]] = [[] for _ in stores]
    together = threading.Barrier(RANKS)

    def race(rank: int) -> None:
        for key in range(KEYS):
            together.wait(FAR_S)
            won[rank].append(stores[rank].put_if_absent(f"key-{key}", b"of rank %d" % rank))

    threads = [threading.Thread(target=race, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(FAR_S)
    read = [stores[0].try_get(f"key-{key}") for key in range(KEYS)]
    assert won == [read] * RANKS


def test_put_if_absent_returns_first_value_when_repeated(opener: Opener) -> None:
    store = opener()
    values = [store.put_if_absent("key", value) for value in (b"first", b"second", b"first")]
    assert values == [b"first"] * 3


def test_put_if_absent_accepts_any_bytes(opener: Opener) -> None:
    store, value = opener(), bytes(range(256))
    assert store.put_if_absent("key", value) == value
    assert store.try_get("key") == value


def test_put_if_absent_keeps_value_of_set(opener: Opener) -> None:
    store = opener()
    store.set("key", b"set before")
    assert store.put_if_absent("key", b"put") == b"set before"


def test_put_if_absent_after_delete_succeeds(opener: Opener) -> None:
    store = opener()
    store.put_if_absent("key", b"first")
    store.delete("key")
    assert store.put_if_absent("key", b"second") == b"second"


def test_put_if_absent_race_between_processes_has_one_winner(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import sys
        from collective.deadline import Deadline
        from collective.start.stores import FileStore
        store = FileStore({str(tmp_path / "store")!r})
        store.set("here-" + sys.argv[1], b"")
        for rank in range(4):
            store.get(f"here-{{rank}}", Deadline({FAR_S}))
        for key in range(100):
            print(store.put_if_absent(f"key-{{key}}", sys.argv[1].encode()).decode())
    """)
    done = run_together(*(["-c", program, rank] for rank in range(4)), timeout=FAR_S)
    outputs = [process.stdout.split() for process in done]
    assert len(outputs[0]) == 100, done[0].stderr
    assert outputs == [outputs[0]] * 4


def test_put_if_absent_leaves_only_the_key_in_directory(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    for value in (b"first", b"second"):
        store.put_if_absent("key", value)
    assert [path.name for path in store.directory.iterdir()] == ["key"]


def test_put_if_absent_in_removed_directory_raises_rendezvous_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.directory.rmdir()
    with pytest.raises(RendezvousError, match="COLLECTIVE_STORE"):
        store.put_if_absent("key", b"value")


def test_put_if_absent_of_unsupporting_store_names_remedy() -> None:
    class Simple(MemoryStore):
        put_if_absent = Store.put_if_absent

    with pytest.raises(
        UnsupportedError, match=r"Simple without an atomic put.* COLLECTIVE_STORE=DIR"
    ):
        Simple().put_if_absent("key", b"value")


# -- stores that forward requests -----------------------------------------------------------


class Recording(Store):
    """A store that records each request and gives a fixed answer."""

    served_by_rank = True

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def __str__(self) -> str:
        return "here"

    def set(self, key: str, value: bytes) -> None:
        self.asked.append(("set", key, value))

    def get(self, key: str, deadline: Deadline) -> bytes:
        self.asked.append(("get", key, deadline))
        return b"value"

    def try_get(self, key: str) -> bytes | None:
        self.asked.append(("try_get", key))
        return None

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        self.asked.append(("put_if_absent", key, value))
        return b"won"

    def delete(self, key: str) -> None:
        self.asked.append(("delete", key))

    def close(self) -> None:
        self.asked.append(("close",))

    def has_ended(self) -> bool:
        self.asked.append(("has_ended",))
        return True

    def refusals(self) -> tuple[dict[str, int], dict[str, int]]:
        self.asked.append(("refusals",))
        return {"10.0.0.2": 3}, {}

    def announced(self) -> Set[tuple[str, int]]:
        self.asked.append(("announced",))
        return {("host", 7)}

    def without(self, ranks: Set[int]) -> None:
        self.asked.append(("without", ranks))

    def check(self) -> None:
        self.asked.append(("check",))


# The methods of a store, each with arguments and the answer of Recording.
ASKED: dict[str, tuple[tuple[object, ...], object]] = {
    "set": (("key", b"value"), None),
    "get": (("key", Deadline(1.0)), b"value"),
    "try_get": (("key",), None),
    "put_if_absent": (("key", b"value"), b"won"),
    "delete": (("key",), None),
    "close": ((), None),
    "has_ended": ((), True),
    "refusals": ((), ({"10.0.0.2": 3}, {})),
    "announced": ((), {("host", 7)}),
    "without": (({1},), None),
    "check": ((), None),
}


def test_wrapped_store_forwards_every_method_of_a_store() -> None:
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public == {*ASKED, "served_by_rank"}
    below = Recording()
    wrapped = WrappedStore(below)
    for name, (arguments, answer) in ASKED.items():
        assert getattr(wrapped, name)(*arguments) == answer
    assert below.asked == [(name, *arguments) for name, (arguments, _) in ASKED.items()]
    assert wrapped.served_by_rank
    assert str(wrapped) == "here"


def test_prefixed_stores_do_not_share_keys(tmp_path: Path) -> None:
    below = FileStore(tmp_path / "store")
    one, other = PrefixedStore(below, "one."), PrefixedStore(below, "other.")
    one.set("key", b"value")
    assert other.try_get("key") is None
    assert below.try_get("one.key") == b"value"


def test_prefixed_store_error_names_key_of_caller(tmp_path: Path) -> None:
    prefixed = PrefixedStore(FileStore(tmp_path / "store"), "job.")
    with pytest.raises(RendezvousError, match="nobody published 'key' at"):
        prefixed.get("key", Deadline(0.0))


def test_late_store_opens_at_first_request_only(tmp_path: Path) -> None:
    opened: list[FileStore] = []

    def open_store() -> Store:
        opened.append(FileStore(tmp_path / "store"))
        return opened[-1]

    late = LateStore(open_store)
    assert "not open" in str(late)
    late.check()
    late.close()
    assert not opened
    late.set("key", b"value")
    assert late.try_get("key") == b"value"
    assert len(opened) == 1
    assert str(late) == str(tmp_path / "store")


def test_handed_store_passes_on_and_keeps_one_value() -> None:
    notes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    handed: list[bool] = []

    def hand(note: Buffer, publishes: bool) -> None:
        handed.append(publishes)
        if publishes:
            notes.put(note.array.tobytes())
        else:
            note.array[:] = np.frombuffer(notes.get_nowait(), np.uint8)

    def fail() -> None:
        raise RendezvousError("rank 2 is gone")

    one, other = HandedStore(hand, fail), HandedStore(hand, fail)
    assert other.try_get("key") is None
    one.set("key", b"/dev/shm/segment")
    assert [other.get("key", Deadline(0.0)) for _ in range(2)] == [b"/dev/shm/segment"] * 2
    assert other.try_get("key") == b"/dev/shm/segment"
    assert handed == [True, False]
    with pytest.raises(RendezvousError, match="rank 2 is gone"):
        one.check()


def test_put_if_absent_refuses_value_of_stranger(tmp_path: Path) -> None:
    plain = FileStore(tmp_path / "store")
    sealed = SealedStore(plain, SECRET)
    sealed.put_if_absent("key", b"value")
    (name,) = (path.name for path in plain.directory.iterdir())
    plain.set(name, b"a stranger's, of no use whatever it says, since it has no tag at all")
    with pytest.raises(RendezvousError, match="does not know the job's secret"):
        sealed.put_if_absent("key", b"value")


# -- the store of rank 0, for ranks with the secret ---------------------------------------


@pytest.fixture
def where() -> Iterator[Endpoint]:
    """Yield an address at which this process serves a store."""
    address = free_address()
    with contextlib.closing(store(address, serve=True)) as first:
        first.set("key", b"value")
        yield address


def asks(where: Endpoint) -> Link:
    """Return a raw link to the server, for requests that no store sends."""
    return connect(f"{where.host} {where.port}", SECRET.key("store"), Deadline(FAR))


def holds_its_value(where: Endpoint) -> bool:
    with contextlib.closing(store(where)) as another:
        return another.get("key", Deadline(FAR)) == b"value"


def test_second_store_of_rank_0_reuses_its_server(where: Endpoint) -> None:
    with contextlib.closing(store(where, serve=True)) as again:
        assert again.try_get("key") == b"value"


def test_second_server_with_another_secret_raises_rendezvous_error(where: Endpoint) -> None:
    with pytest.raises(RendezvousError, match=r"another secret.*Set another port"):
        store(where, serve=True, secret=Secret(bytes(32)))


def test_rank_with_another_secret_is_refused_with_remedy(where: Endpoint) -> None:
    wanted = (
        rf"rank 0 \({where}, a test\) did not let this rank join within 0\.3 s: .*"
        r"Most likely its secret differs\. Compare `sha256sum` of the file in COLLECTIVE_SEC"
    )
    with pytest.raises(RendezvousError, match=wanted):
        store(where, secret=Secret(bytes(32)), timeout=0.3)


def test_server_counts_refused_secrets() -> None:
    here = free_address()
    with contextlib.closing(store(here, serve=True)) as served:
        assert served.refusals() == ({}, {})
        with pytest.raises(RendezvousError):
            store(here, secret=Secret(bytes(32)), timeout=0.3)
        # The other rank's last attempt may still be under way.
        assert served.refusals()[0]["127.0.0.1"] >= 1
        with contextlib.closing(store(here)) as other:
            assert other.refusals() is None
        with contextlib.closing(store(here, serve=True)) as again:
            assert again.refusals()[0] == {}, "those that came before it"


def test_server_bounds_addresses_of_refused_secrets() -> None:
    here = free_address()
    with contextlib.closing(store(here, serve=True)) as served:
        for number in range(20):
            with (
                socket.create_connection(
                    (here.host, here.port), source_address=(f"127.0.0.{number + 2}", 0)
                ) as wrong,
                contextlib.suppress(ConnectionResetError),
            ):
                wrong.sendall(bytes(64))
                while wrong.recv(100):
                    pass
        counts, _ = served.refusals()
    assert len(counts) == 9
    assert counts["127.0.0.2"] == 1
    assert counts["other addresses"] == 12


def test_silent_connection_is_no_refused_secret() -> None:
    here = free_address()
    with contextlib.closing(store(here, serve=True)) as served:
        socket.create_connection((here.host, here.port)).close()
        assert served.try_get("key") is None  # the server has seen the connection
        assert served.refusals() == ({}, {})


def test_server_at_port_in_use_raises_with_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = Endpoint("127.0.0.1", other.getsockname()[1], "a test")
        with pytest.raises(RendezvousError, match=r"in use.*COLLECTIVE_STORE=tcp://HOST:PORT"):
            store(address, serve=True)


@pytest.mark.parametrize(
    "words",
    [{}, {"kind": "get"}, {"kind": "get", "key": 1, "number": 1},
     {"kind": "get", "key": "key", "number": "1"}, {"kind": "sing", "key": "key", "number": 1},
     {"kind": "set", "key": "key", "number": 1},
     {"kind": "set", "key": "key", "number": 1, "value": 7},
     {"kind": "set", "key": "key", "number": 1, "value": "no hex"}],
    ids=str,
)  # fmt: skip
def test_malformed_request_ends_its_connection(where: Endpoint, words: dict[str, object]) -> None:
    with contextlib.closing(asks(where)) as link:
        link.send(words)
        with pytest.raises((EOFError, OSError)):
            link.expect(Deadline(FAR))
    assert holds_its_value(where)


def test_server_survives_ten_thousand_random_messages(where: Endpoint) -> None:
    """No exception escapes from the server's thread, and ranks still connect."""
    chance = random.Random(9)
    for number in range(10_000):
        with socket.create_connection((where.host, where.port)) as sock:
            sock.sendall(chance.randbytes(chance.randrange(200)))
        if number % 2000 == 1000:
            assert holds_its_value(where)
    assert holds_its_value(where)


def test_broken_connection_is_reopened(where: Endpoint) -> None:
    with contextlib.closing(store(where)) as rank:
        rank._link.cut()
        assert rank.try_get("key") == b"value"


def test_stale_answer_is_not_taken_for_next_request(where: Endpoint) -> None:
    with contextlib.closing(store(where)) as rank:
        # No caller waits for the answer to this request.
        rank._link.send({"kind": "get", "key": "key", "number": -1})
        assert rank.try_get("another") is None


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("key", bytes((1 << 20) + 1), r"'key' .*the value has 1048577 bytes; .* at most 1048576"),
        ("k" * 1025, b"", "the key has 1025 letters; .* at most 1024"),
    ],
    ids=["value", "key"],
)
def test_store_refuses_long_key_or_value_and_continues(
    where: Endpoint, key: str, value: bytes, why: str
) -> None:
    with contextlib.closing(store(where)) as rank:
        for publish in (rank.set, rank.put_if_absent):
            with pytest.raises(RendezvousError, match=why):
                publish(key, value)
        longest = b"a" * (1 << 20)
        rank.set("key", longest)
        assert rank.try_get("key") == longest


def test_server_refuses_long_value_from_any_peer(where: Endpoint) -> None:
    with contextlib.closing(asks(where)) as link:
        long = "00" * ((1 << 20) + 1)
        link.send({"kind": "set", "key": "key", "value": long, "number": 1})
        assert "at most" in link.expect(Deadline(FAR))["why"]
        longer = {"kind": "set", "key": "key", "value": 2 * long, "number": 2}
        with pytest.raises((EOFError, OSError)):
            assert link.send(longer) or link.expect(Deadline(FAR))
    assert holds_its_value(where)


def test_full_store_raises_until_key_is_deleted(
    where: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_BYTES", 10_000)
    with contextlib.closing(store(where)) as rank:
        rank.set("large", bytes(4000))
        rank.set("large", bytes(4000))  # The new value replaces the old one and needs no room.
        with pytest.raises(RendezvousError, match=r"set of 'more' .*the store is full: it has 2"):
            rank.set("more", bytes(1000))
        assert rank.put_if_absent("large", bytes(1)) == bytes(4000)
        rank.delete("large")
        rank.set("more", bytes(1000))
        assert rank.try_get("more") == bytes(1000)


def asks_quickly(where: Endpoint) -> bool:
    """Return whether the server answers another rank at once."""
    with contextlib.closing(store(where)) as another:
        since = time.monotonic()
        for _ in range(20):
            another.set("another", b"1")
        return time.monotonic() - since < FAR


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """Yield an address of a server whose sockets have small send buffers.

    If the server waited for a peer that does not read, it would wait longer than FAR seconds.
    """
    monkeypatch.setattr(link_module, "_SEND_S", 2 * FAR)
    listen = tcp_store.listen

    def listen_narrowly(*arguments: Any) -> socket.socket | None:
        listening = listen(*arguments)
        if listening is not None:  # Accepted sockets inherit the option.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        return listening

    monkeypatch.setattr(tcp_store, "listen", listen_narrowly)
    address = free_address()
    with contextlib.closing(store(address, serve=True)) as first:
        first.set("key", b"value")
        first.set("large", bytes(1 << 20))
        yield address


def test_peer_that_reads_no_answers_does_not_delay_others(narrow: Endpoint) -> None:
    with contextlib.closing(asks(narrow)) as link:
        for number in range(2):
            link.send({"kind": "get", "key": "large", "number": number})
        assert asks_quickly(narrow)
        # The peer has lost no answer, and its next request succeeds.
        assert [link.expect(Deadline(FAR))["number"] for _ in range(2)] == [0, 1]
        link.send({"kind": "get", "key": "key", "number": 2})
        assert link.expect(Deadline(FAR))["number"] == 2


def test_peer_that_floods_and_reads_nothing_is_dropped(narrow: Endpoint) -> None:
    with contextlib.closing(asks(narrow)) as link:
        link.write(500 * encoded({"kind": "get", "key": "large", "number": 1}))
        assert asks_quickly(narrow)
        with pytest.raises((EOFError, OSError)):
            assert len([link.expect(Deadline(FAR)) for _ in range(500)]) < 500


def test_incomplete_request_does_not_delay_others(where: Endpoint) -> None:
    with contextlib.closing(asks(where)) as link:
        link.write(encoded({"kind": "set", "key": "key", "value": "00", "number": 1})[:-5])
        assert asks_quickly(where)
    assert holds_its_value(where)


def test_full_server_drops_connection_silent_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_store, "_room", lambda: 3)
    address = free_address()
    with contextlib.ExitStack() as opened:
        ranks = [
            opened.enter_context(contextlib.closing(store(address, serve=number == 0)))
            for number in range(3)
        ]
        ranks[0].set("key", b"value")  # Now rank 1 has been silent longest.
        opened.enter_context(contextlib.closing(asks(address)))
        with pytest.raises(EOFError):
            ranks[1]._link.expect(Deadline(FAR))
        # Rank 1 connects again at its next request.
        assert [rank.try_get("key") for rank in ranks] == [b"value"] * 3


SERVER = """
    import sys
    from tests.start.test_stores import Endpoint, store
    served = store(Endpoint("127.0.0.1", int(sys.argv[1]), "a test"), serve=True)
    served.set("ready", b"")
    assert "torch" not in sys.modules
    sys.stdin.read()
    """


def test_rank_waits_for_server_process_and_notices_its_end_without_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = free_address()
    with (
        started("-c", textwrap.dedent(SERVER), address.port) as rank_0,
        contextlib.closing(store(address)) as rank,
    ):
        assert rank.get("ready", Deadline(FAR)) == b""
        assert rank_0.stdin is not None
        rank_0.stdin.close()
        assert rank_0.wait(FAR) == 0
        monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.3)
        with pytest.raises(RendezvousError, match=r"get of 'ready' at .*has ended"):
            rank.try_get("ready")
