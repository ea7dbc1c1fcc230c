"""The store that rank 0 serves to those who know the job's secret; see also test_sealed_store."""

from __future__ import annotations

import contextlib
import random
import socket
import textwrap
import time
from collections.abc import Iterator

import pytest

from collective.backends.peers.link import Link, connect
from collective.contract.secret import Secret
from collective.errors import RendezvousError
from collective.start import private_store
from collective.start.private_store import PrivateStore
from collective.start.rendezvous import Endpoint
from tests.hosts import free_port
from tests.interpreter import started
from tests.test_monitor import FAR

SECRET = Secret(bytes(range(32)))


def free_address() -> Endpoint:
    return Endpoint("127.0.0.1", free_port(), "a test")


def store(where: Endpoint, *, serve: bool = False, secret: Secret = SECRET, timeout: float = FAR):
    return PrivateStore(where, secret, serve=serve, spans_hosts=False, timeout=timeout)


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
    from tests.test_private_store import Endpoint, store
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
