"""What every store has in common: what is set is read, and of what is put the first stays."""

from __future__ import annotations

import contextlib
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collective.contract.secret import Secret
from collective.contract.store import Store
from collective.errors import RendezvousError, UnsupportedError
from collective.start.file_store import FileStore
from collective.start.memory_store import MemoryStore
from collective.start.private_store import PrivateStore
from collective.start.sealed_store import SealedStore
from tests.interpreter import run_together
from tests.test_private_store import SECRET, free_address

KINDS = ("file", "memory", "private", "sealed", "tcp", "torch's")
RANKS, KEYS = 6, 25
FAR_S = 60.0

#: Returns a rank's own store.
Opener = Callable[[], Store]


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
                made = PrivateStore(where, SECRET, serve=serve, spans_hosts=False, timeout=FAR_S)
                return opened.enter_context(contextlib.closing(made))

            private(serve=True)
            yield private
        elif request.param == "torch's":
            dist = pytest.importorskip("torch.distributed")
            from collective.adapters.torch.plugin import TorchStore

            files = str(tmp_path / "files")
            yield lambda: TorchStore(dist.PrefixStore("a", dist.FileStore(files, RANKS)))
        else:
            pytest.importorskip("torch")
            from tests.test_tcp_store import endpoint, store

            at = endpoint()
            first = store(at, serve=True, timeout=FAR_S)
            yield lambda: store(at, serve=False, timeout=FAR_S)
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
