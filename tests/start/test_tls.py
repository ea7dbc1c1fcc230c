"""TLS on control connections: what an eavesdropper reads, and which ranks the hub admits."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collective.backends.peers.hub import Hub
from collective.control.link import Link, Tls, connect
from collective.control.secret import Secret
from collective.deadline import Deadline
from collective.errors import ConfigError, RendezvousError
from collective.start.certificates import resolve
from collective.start.config import load
from collective.start.tcp_store import TcpStore
from collective.tools.doctor import across_hosts
from tests.backends.peers.test_monitor import FAR, KEY, hub_of, start
from tests.start.test_stores import free_address, store
from tests.start.test_world import world as world_of

pytestmark = pytest.mark.usefixtures("nowhere")
TEXT = "5ca1ab1e" * 8
LOOPBACK = "127.0.0.1"


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def authority(directory: Path, name: str) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    ca, ca_key = str(directory / f"{name}-ca.pem"), str(directory / f"{name}-ca.key")
    openssl("req", "-x509", *key, "-subj", f"/CN={name}", "-keyout", ca_key, "-out", ca)
    rank, request = str(directory / name), str(directory / "request")
    openssl("req", *key, "-subj", "/CN=rank", "-keyout", f"{rank}.key", "-out", request)
    openssl("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-out", f"{rank}.pem")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with certificates of two authorities, the job's and another one."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl, which makes certificates")
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "other"):
        authority(directory, name)
    encrypted = ["-passout", "pass:word", "-in", str(directory / "ours.key")]
    openssl("ec", "-aes256", *encrypted, "-out", str(directory / "encrypted.key"))
    for key in directory.glob("*.key"):
        key.chmod(0o600)
    return directory


def settings(
    directory: Path,
    name: str = "ours",
    *,
    cert: str = "",
    key: str = "",
    ca: str = "ours-ca.pem",
    **changes: str,
) -> dict[str, str]:
    folder = Path(tempfile.mkdtemp(dir=directory))
    files = {"tls.crt": cert or f"{name}.pem", "tls.key": key or f"{name}.key", "ca.crt": ca}
    for link, file in files.items():
        (folder / link).symlink_to(directory / file)
    return {"tls": str(folder), "secret": TEXT, **changes}


@pytest.fixture
def tls(certificates: Path) -> Tls:
    contexts = resolve(load(settings(certificates))).tls
    assert contexts is not None
    return contexts


def complete(address: str, size: int, tls: Tls | None) -> list[Link]:
    """Connect all ranks to a hub, and check that the hub reports that the ranks are complete."""
    links = [connect(address, KEY, Deadline(FAR), tls) for _ in range(size)]
    for rank, link in enumerate(links):
        link.send({"kind": "here", "rank": rank, "size": size, "host": "a host by its name"})
    for link in links:
        assert link.expect(Deadline(FAR))["kind"] == "complete"
    return links


def close(links: list[Link]) -> None:
    for link in links:
        link.close()


@pytest.fixture
def hub(tls: Tls) -> Hub:
    return hub_of(2, LOOPBACK, tls=tls)


def knock(hub: Hub) -> socket.socket:
    host, port = hub.address.split()
    return socket.create_connection((host, int(port)), FAR)


# -- behaviour that does not depend on TLS --------------------------------------------------


def test_tls_link_passes_messages_of_any_length_both_ways(hub: Hub, tls: Tls) -> None:
    """Each rank receives the other rank's failures; both ranks send before they read."""
    links = complete(hub.address, 2, tls)
    texts = ["a" * length for length in (1, 1 << 14, (1 << 14) + 1, 1 << 20)]
    failure = {"kind": "failed", "rank": 0, "ranks": []}

    def send(rank: int) -> None:
        for text in texts:
            header = {"channel": "world", "members": [0, 1], "finished": None}
            links[rank].send({"kind": "failure", **header, "failure": {**failure, "text": text}})

    with ThreadPoolExecutor(2) as pool:
        sending = [pool.submit(send, rank) for rank in range(2)]
        for link in links:
            assert [link.expect(Deadline(FAR))["failure"]["text"] for _ in texts] == texts
        for future in sending:
            future.result()
    close(links)


def test_tls_monitors_of_several_hosts_meet(tmp_path: Path, tls: Tls) -> None:
    far = {"local_size": 1, "address": LOOPBACK, "tls": tls, "secret": Secret(TEXT.encode())}
    monitors = start(range(3), 3, tmp_path, **far)
    monitors[2].channel.offer("name", "text")
    for monitor in monitors:
        assert monitor.hosts == ["here"] * 3
        monitor.channel.close()


def test_tls_store_passes_large_values(tls: Tls) -> None:
    where, secret = free_address(), Secret(TEXT.encode())
    options = {"spans_hosts": True, "deadline": Deadline(FAR), "tls": tls}
    with (
        contextlib.closing(TcpStore(where, secret, serve=True, **options)) as server,
        contextlib.closing(TcpStore(where, secret, serve=False, **options)) as client,
    ):
        server.set("key", b"value" * 200_000)
        assert client.try_get("key") == b"value" * 200_000


# -- eavesdroppers and strangers -----------------------------------------------------------


@contextlib.contextmanager
def tapped(hub: Hub) -> Iterator[tuple[str, bytearray]]:
    """Relay a connection to the hub; yield the relay's address and the bytes that it has seen."""
    seen = bytearray()
    with socket.create_server((LOOPBACK, 0)) as listening:

        def relay() -> None:
            with listening.accept()[0] as client, knock(hub) as server:
                back = threading.Thread(target=pump, args=(server, client))
                back.start()
                pump(client, server)
                back.join()

        def pump(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while chunk := source.recv(1 << 16):
                    seen.extend(chunk)
                    target.sendall(chunk)
            for sock in (source, target):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

        relaying = threading.Thread(target=relay)
        relaying.start()
        yield f"{LOOPBACK} {listening.getsockname()[1]}", seen
        relaying.join(FAR)


@pytest.mark.parametrize("with_tls", [True, False], ids=["TLS", "plain"])
def test_tls_hides_messages_from_eavesdropper(tls: Tls, with_tls: bool) -> None:
    used = tls if with_tls else None
    hub = hub_of(1, LOOPBACK, tls=used)
    with tapped(hub) as (address, seen):
        close(complete(address, 1, used))
    assert (b"a host by its name" in seen) is not with_tls
    assert (b"collective 1" in seen) is not with_tls


STRANGERS: dict[str, Callable[[Path], Tls | None]] = {
    "no certificate": lambda directory: None,
    "certificate of another authority": lambda directory: resolve(
        load(settings(directory, "other"))
    ).tls,
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_hub_refuses_rank_without_certificate_of_its_authority(
    hub: Hub, tls: Tls, certificates: Path, stranger: Callable[[Path], Tls | None]
) -> None:
    """The rank knows the job's key, but has no certificate of the job's authority."""
    with pytest.raises(OSError, match=r"timed out|(?i:unknown.ca)"):
        connect(hub.address, KEY, Deadline(0.5), stranger(certificates))
    close(complete(hub.address, 2, tls))


def test_error_of_missing_rank_counts_refused_certificates(
    hub: Hub, tls: Tls, certificates: Path
) -> None:
    with pytest.raises(OSError, match=r"(?i:unknown.ca)"):
        connect(hub.address, KEY, Deadline(FAR), resolve(load(settings(certificates, "other"))).tls)
    link = connect(hub.address, KEY, Deadline(FAR), tls)
    link.send({"kind": "here", "rank": 0, "size": 2, "host": "a host"})
    hub.give_up()
    with contextlib.closing(link):
        why = link.expect(Deadline(FAR))["why"]
    assert "1 connection from 127.0.0.1 did not prove knowledge of this job's key, such as" in why
    assert "ranks with other certificates, or none (COLLECTIVE_TLS)" in why


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_store_counts_ranks_without_certificate_of_its_authority(
    tls: Tls, certificates: Path, stranger: Callable[[Path], Tls | None]
) -> None:
    here = free_address()
    with contextlib.closing(store(here, serve=True, tls=tls)) as served:
        for theirs in (tls, stranger(certificates)):
            with contextlib.suppress(RendezvousError):
                store(here, timeout=0.5, tls=theirs).close()
        assert served.try_get("key") is None  # the server has seen the end of the connections
        mistaken, refused = served.refusals()
        assert mistaken == {}
        assert refused["127.0.0.1"] >= 1


def test_connect_to_hub_of_another_authority_raises_os_error(tls: Tls, certificates: Path) -> None:
    other = resolve(load(settings(certificates, "other"))).tls
    hub = hub_of(1, LOOPBACK, 0.5, other)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        connect(hub.address, KEY, Deadline(FAR), tls)


def test_connect_with_tls_to_hub_without_tls_raises_os_error(tls: Tls) -> None:
    hub = hub_of(1, LOOPBACK)
    with pytest.raises(OSError, match=r"(?i)wrong.version.number|packet length"):
        connect(hub.address, KEY, Deadline(FAR), tls)
    close(complete(hub.address, 1, None))


def test_connect_with_certificate_and_wrong_key_raises(hub: Hub, tls: Tls) -> None:
    with pytest.raises(ConnectionError, match="its key differs"):
        connect(hub.address, bytes(32), Deadline(FAR), tls)
    close(complete(hub.address, 2, tls))


def test_hub_survives_random_bytes_and_half_handshakes(hub: Hub, tls: Tls) -> None:
    first = connect(hub.address, KEY, Deadline(FAR), tls)
    chance = random.Random(10)
    begun = b"\x16\x03\x01"  # first bytes of a record of TLS's handshake
    with contextlib.ExitStack() as held:
        for number in range(1000):
            sock = held.enter_context(knock(hub)) if number % 50 == 0 else knock(hub)
            with contextlib.suppress(OSError):
                sock.sendall(begun * (number % 2) + chance.randbytes(chance.randrange(300)))
            if number % 50:
                sock.close()
        first.close()
        close(complete(hub.address, 2, tls))


# -- settings -------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Path], dict[str, str]], str]] = {
    "no key": (lambda d: settings(d, key="none"), r"tls: .*tls\.key.*: No such file"),
    "no directory": (lambda d: settings(d, tls=str(d / "none")), r"tls: .*none/tls\.key"),
    "no secret": (lambda d: settings(d, secret=""), "no secret; .*COLLECTIVE_SECRET"),
    "missing file": (lambda d: settings(d, ca="none"), r"tls: .*No such file.*ca\.crt"),
    "key of another certificate": (
        lambda d: settings(d, key="other.key"), r"(?i)key.values.mismatch",
    ),
    "key in place of certificate": (
        lambda d: settings(d, cert="ours.key"), "PEM files",
    ),
    "encrypted key": (
        lambda d: settings(d, key="encrypted.key"), "the key is encrypted",
    ),
    "key readable by all": (
        lambda d: settings(d, key=_readable(d)), r"tls: .*mode 0644; .*chmod 600",
    ),
}  # fmt: skip


def _readable(directory: Path) -> str:
    copy = directory / "readable.key"
    shutil.copy(directory / "ours.key", copy)
    copy.chmod(0o644)
    return copy.name


@pytest.mark.parametrize(("make", "why"), WRONG.values(), ids=WRONG)
def test_build_with_unusable_tls_settings_raises_config_error(
    certificates: Path, make: Callable[[Path], dict[str, str]], why: str
) -> None:
    arguments = {key: value for key, value in make(certificates).items() if value}
    with pytest.raises(ConfigError, match=why):
        world_of(**arguments)


def test_build_without_settings_uses_no_tls() -> None:
    assert world_of().tls is None


# -- the report of doctor --------------------------------------------------------------------

BY_TORCHRUN = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0") | {
    "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
OPEN, KNOWN, HIDDEN = (False, False), (True, False), (True, True)
DOCTOR: dict[str, tuple[tuple[str, ...], dict[str, str], tuple[tuple[bool, bool], ...]]] = {
    "nothing": ((), {}, (OPEN, OPEN, OPEN)),
    "a secret": (("secret",), {}, (KNOWN, KNOWN, KNOWN)),
    "certificates": (
        ("secret", "tls"), {}, (HIDDEN, HIDDEN, HIDDEN),
    ),
    "certificates under torchrun": (
        ("secret", "tls"), BY_TORCHRUN, (KNOWN, HIDDEN, HIDDEN),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "environ", "wanted"), DOCTOR.values(), ids=DOCTOR)
def test_doctor_reports_authentication_and_encryption(
    certificates: Path,
    given: tuple[str, ...],
    environ: dict[str, str],
    wanted: tuple[tuple[bool, bool], ...],
) -> None:
    os.environ.update(environ)
    connections = across_hosts(load({key: settings(certificates)[key] for key in given}))
    assert connections.pop("error") == ""
    assert (
        tuple((kind["authenticated"], kind["encrypted"]) for kind in connections.values()) == wanted
    )


def test_doctor_reports_unusable_secret_file(tmp_path: Path) -> None:
    connections = across_hosts(load({"secret": f"file:{tmp_path / 'none'}"}))
    assert "No such file" in connections["error"]
    assert connections["joining"] == {"authenticated": False, "encrypted": False}
