"""TLS around the arrays of the ``tcp`` transport, if the ranks have certificates."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.backends.peers.monitored import Pairing
from collective.backends.tcp.connecting import Connection, connect_all
from collective.backends.tcp.stream import stream_of
from collective.contract.world import World
from collective.control.link import Tls
from collective.control.link import connect as link_to
from collective.deadline import Deadline
from collective.start.certificates import resolve
from collective.start.config import load
from collective.start.connecting import connect
from collective.start.stores import FileStore, MemoryStore
from tests.backends.peers.test_monitor import FAR
from tests.backends.tcp.test_connecting import KEY, Meeting, Member
from tests.start.test_tls import TEXT, authority
from tests.support.on_ranks import on_ranks, ranks_of

two = ranks_of(("tcp", 2), timeout=40.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a certificate, its key, and its authority."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes certificates")
    made = tmp_path_factory.mktemp("certificates")
    authority(made, "ours")
    for name, file in {
        "tls.crt": "ours.pem",
        "tls.key": "ours.key",
        "ca.crt": "ours-ca.pem",
    }.items():
        shutil.copy(made / file, made / name)
    (made / "tls.key").chmod(0o600)
    return made


def contexts(directory: Path) -> Tls:
    tls = resolve(load({"tls": str(directory), "secret": TEXT})).tls
    assert tls is not None
    return tls


def joined(meeting: Meeting, rank: int, tls: Tls | None) -> dict[int, Connection]:
    """Connect a rank that takes itself for the only one of its host."""
    member: Any = Member(meeting, rank)
    here = World(rank, 2, 0, 1, "here", "none", "job", MemoryStore(), tls=tls)
    return connect_all(
        Pairing(here, member, member, range(2), "connect", Deadline(FAR), lambda: None)
    )


def refuse(what: str) -> Any:
    raise AssertionError(what)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_arrays_are_plain_on_the_wire_only_without_certificates(
    directory: Path, encrypted: bool
) -> None:
    tls, meeting = contexts(directory) if encrypted else None, Meeting(2)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda rank: joined(meeting, rank, tls)[1 - rank], range(2)))
    content = np.frombuffer(b"plain bytes " * 5, np.uint8)
    sender, receiver = (stream_of(*end, refuse) for end in ends)
    with sender.sock, receiver.sock:
        assert list(sender.write(content, 7)) == []
        wire = receiver.sock.recv(1 << 16, socket.MSG_PEEK)
        assert (b"plain bytes" in wire) is not encrypted
        prefix, out = receiver.prefix(), np.empty_like(content)
        assert prefix is not None
        assert prefix[:2] == (content.size, 7)
        assert list(receiver.read(prefix, out)) == []
        np.testing.assert_array_equal(out, content)


def test_rank_without_certificate_is_turned_away(directory: Path) -> None:
    meeting, tls = Meeting(2), contexts(directory)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(joined, meeting, 0, tls)
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
        for stranger in (None, Tls(nobody, tls.listening)):
            with pytest.raises(OSError):  # noqa: PT011  TLS and the handshake say it in many ways
                link_to(meeting.address(0), KEY, Deadline(2.0), stranger)
        second = pool.submit(joined, meeting, 1, tls)
        for connections in (first.result(FAR), second.result(FAR)):
            for connection in connections.values():
                connection.sock.close()


@on_ranks("two")
def test_encrypted_ranks_exchange_arrays_of_any_length(
    comm: Any, directory: Path, tmp_path: Path
) -> None:
    world = dataclasses.replace(
        comm.inner.transport._world, job="another", store=FileStore(tmp_path), local_rank=0,
        local_size=1, tls=contexts(directory),
    )  # fmt: skip
    peer = 1 - comm.rank
    with connect(world, "tcp", timeout=20.0) as secure:
        for length in (0, 1, 100, 4096, 70_001, 3_000_000):
            x = np.arange(length) + comm.rank
            np.testing.assert_array_equal(secure.sendrecv(x, peer, peer), np.arange(length) + peer)
            total = secure.all_reduce(x)
            np.testing.assert_array_equal(total, 2 * np.arange(length) + 1)
        group = secure.dup()
        assert group.all_gather(np.array([comm.rank])).tolist() == [0, 1]
        group.close()
