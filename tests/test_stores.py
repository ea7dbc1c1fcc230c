"""What every store has in common; and that which rank 0 serves to those who know the job's secret.

See also test_sealed_store.py, and test_tcp_store.py.
"""

from __future__ import annotations

import contextlib
import random
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collective.backends.peers.link import Link, connect
from collective.contract.secret import Secret
from collective.contract.store import Store
from collective.errors import RendezvousError, UnsupportedError
from collective.start import tcp_store as private_store
from collective.start.file_store import FileStore
from collective.start.memory_store import MemoryStore
from collective.start.rendezvous import Endpoint
from collective.start.sealed_store import SealedStore
from collective.start.tcp_store import PrivateStore
from tests.hosts import free_port
from tests.interpreter import run_together, started
from tests.test_monitor import FAR

KINDS = ("file", "memory", "private", "sealed", "tcp", "torch's")
RANKS, KEYS = 6, 25
FAR_S = 60.0

SECRET = Secret(bytes(range(32)))
#: Returns a rank's own store.
Opener = Callable[[], Store]


def free_address() -> Endpoint:
    return Endpoint("127.0.0.1", free_port(), "a test")


def store(where: Endpoint, *, serve: bool = False, secret: Secret = SECRET, timeout: float = FAR):
    return PrivateStore(where, secret, serve=serve, spans_hosts=False, timeout=timeout)


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    directory = tmp_path / "store"
    with contextlib.ExitStack() as opened:
        if request.param == "file":
            yield lambda: FileStore(directory)
        elif request.param == "sealed":
            yield lambda: SealedStore(FileStore(directory), Secret(bytes(32)))
        elif request.param == "memory":
            shared = MemoryStore()
            yield lambda: shared
        elif request.param == "private":
            where = free_address()

            def private(serve: bool = False) -> Store:
                return opened.enter_context(contextlib.closing(store(where, serve=serve)))

            private(serve=True)
            yield private
        elif request.param == "torch's":
            dist = pytest.importorskip("torch.distributed")
            from collective.adapters.torch.plugin import TorchStore

            files = str(tmp_path / "files")
            yield lambda: TorchStore(dist.PrefixStore("a", dist.FileStore(files, RANKS)))
        else:
            pytest.importorskip("torch")
            from tests import test_tcp_store as tcp

            at = tcp.endpoint()
            first = tcp.store(at, serve=True, timeout=FAR_S)
            yield lambda: tcp.store(at, serve=False, timeout=FAR_S)
            del first


def test_what_one_publishes_the_others_read(opener: Opener) -> None:
    one, other = opener(), opener()
    assert other.try_get("key") is None
    for value in (b"value", b"", b"\0\xff" * 100_000, b"again"):
        one.set("key", value)
        assert other.get("key", time.monotonic()) == value
        assert other.try_get("key") == value
    one.set("another", b"")
    other.delete("key")
    other.delete("key")
    assert one.try_get("key") is None
    assert one.try_get("another") == b""


def test_what_nobody_publishes_is_missed_by_its_name(opener: Opener) -> None:
    with pytest.raises(RendezvousError, match="'key'"):
        opener().get("key", time.monotonic())


def test_one_value_wins_and_everybody_reads_it(opener: Opener) -> None:
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


def test_what_is_put_again_does_not_win(opener: Opener) -> None:
    store = opener()
    values = [store.put_if_absent("key", value) for value in (b"first", b"second", b"first")]
    assert values == [b"first"] * 3


def test_any_bytes_may_win(opener: Opener) -> None:
    store, value = opener(), bytes(range(256))
    assert store.put_if_absent("key", value) == value
    assert store.try_get("key") == value


def test_what_was_set_stays(opener: Opener) -> None:
    store = opener()
    store.set("key", b"set before")
    assert store.put_if_absent("key", b"put") == b"set before"


def test_what_was_deleted_may_be_put(opener: Opener) -> None:
    store = opener()
    store.put_if_absent("key", b"first")
    store.delete("key")
    assert store.put_if_absent("key", b"second") == b"second"


def test_of_processes_one_wins(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import sys, time
        from collective.start.file_store import FileStore
        store = FileStore({str(tmp_path / "store")!r})
        store.set("here-" + sys.argv[1], b"")
        for rank in range(4):
            store.get(f"here-{{rank}}", time.monotonic() + {FAR_S})
        for key in range(100):
            print(store.put_if_absent(f"key-{{key}}", sys.argv[1].encode()).decode())
    """)
    done = run_together(*(["-c", program, rank] for rank in range(4)), timeout=FAR_S)
    outputs = [each.stdout.split() for each in done]
    assert len(outputs[0]) == 100, done[0].stderr
    assert outputs == [outputs[0]] * 4


def test_nothing_else_is_left_in_the_directory(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    for value in (b"first", b"second"):
        store.put_if_absent("key", value)
    assert [path.name for path in store.directory.iterdir()] == ["key"]


def test_a_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.directory.rmdir()
    with pytest.raises(RendezvousError, match="COLLECTIVE_STORE"):
        store.put_if_absent("key", b"value")


def test_a_store_that_cannot_says_which_can() -> None:
    class Simple(MemoryStore):
        put_if_absent = Store.put_if_absent

    with pytest.raises(UnsupportedError, match=r"Simple, which cannot .* COLLECTIVE_STORE=DIR"):
        Simple().put_if_absent("key", b"value")


def test_a_stranger_cannot_win(tmp_path: Path) -> None:
    plain = FileStore(tmp_path / "store")
    sealed = SealedStore(plain, SECRET)
    sealed.put_if_absent("key", b"value")
    (name,) = (path.name for path in plain.directory.iterdir())
    plain.set(name, b"a stranger's, of no use whatever it says, since it has no tag at all")
    with pytest.raises(RendezvousError, match="does not know its secret"):
        sealed.put_if_absent("key", b"value")


# -- that of rank 0, for those who know the secret ---------------------------------------


@pytest.fixture
def where() -> Iterator[Endpoint]:
    """An address at which this process serves."""
    address = free_address()
    with contextlib.closing(store(address, serve=True)) as first:
        first.set("key", b"value")
        yield address


def asks(where: Endpoint) -> Link:
    """Return a link of a rank that then says what no store says."""
    return connect(f"{where.host} {where.port}", SECRET.key("store"), FAR)


def holds_its_value(where: Endpoint) -> bool:
    with contextlib.closing(store(where)) as another:
        return another.get("key", time.monotonic() + FAR) == b"value"


def test_the_next_init_of_rank_0_uses_the_server_it_has(where: Endpoint) -> None:
    with contextlib.closing(store(where, serve=True)) as again:
        assert again.try_get("key") == b"value"


def test_another_secret_is_not_served_at_the_same_address(where: Endpoint) -> None:
    with pytest.raises(RendezvousError, match=r"another secret.*Set another port"):
        store(where, serve=True, secret=Secret(bytes(32)))


def test_a_rank_with_another_secret_is_refused_with_the_remedy(where: Endpoint) -> None:
    wanted = rf"{where} \(a test\) is not rank 0 of this job: .*COLLECTIVE_SECRET_FILE"
    with pytest.raises(RendezvousError, match=wanted):
        store(where, secret=Secret(bytes(32)), timeout=0.3)


def test_a_port_in_use_is_named() -> None:
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
def test_a_question_of_the_wrong_shape_ends_its_asker_s_connection(
    where: Endpoint, words: dict[str, object]
) -> None:
    with contextlib.closing(asks(where)) as link:
        link.send(words)
        with pytest.raises((EOFError, OSError)):
            link.expect(FAR)
    assert holds_its_value(where)


def test_ten_thousand_random_strings(where: Endpoint) -> None:
    """No exception escapes in the server's thread, and ranks connect meanwhile."""
    chance = random.Random(9)
    for number in range(10_000):
        with socket.create_connection((where.host, where.port)) as sock:
            sock.sendall(chance.randbytes(chance.randrange(200)))
        if number % 2000 == 1000:
            assert holds_its_value(where)
    assert holds_its_value(where)


def test_a_connection_that_broke_is_made_again(where: Endpoint) -> None:
    with contextlib.closing(store(where)) as rank:
        rank._link.cut()
        assert rank.try_get("key") == b"value"


def test_an_answer_that_was_given_up_is_not_taken_for_the_next(where: Endpoint) -> None:
    with contextlib.closing(store(where)) as rank:
        # A question whose answer nobody waits for.
        rank._link.send({"kind": "get", "key": "key", "number": -1})
        assert rank.try_get("another") is None


SERVER = """
    import sys
    from tests.test_stores import Endpoint, store
    served = store(Endpoint("127.0.0.1", int(sys.argv[1]), "a test"), serve=True)
    served.set("ready", b"")
    assert "torch" not in sys.modules
    sys.stdin.read()
    """


def test_without_torch_a_server_in_another_process_is_waited_for_and_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = free_address()
    with (
        started("-c", textwrap.dedent(SERVER), address.port) as rank_0,
        contextlib.closing(store(address)) as rank,
    ):
        assert rank.get("ready", time.monotonic() + FAR) == b""
        assert rank_0.stdin is not None
        rank_0.stdin.close()
        assert rank_0.wait(FAR) == 0
        monkeypatch.setattr(private_store, "_ANSWER_S", 0.3)
        with pytest.raises(RendezvousError, match=r"get of 'ready' at .*has ended"):
            rank.try_get("ready")
