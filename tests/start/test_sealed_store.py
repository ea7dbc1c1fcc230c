"""The secret of a job: keys derived from it, its confidentiality, and stores sealed with it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from collective.backends.peers.monitor import Monitor
from collective.contract.world import World
from collective.control.secret import Secret, hkdf
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import ConfigError, InvalidArgumentError, RendezvousError
from collective.start.certificates import resolve
from collective.start.config import load
from collective.start.connecting import connect
from collective.start.stores import FileStore, SealedStore, seal
from collective.tools.cli.main import main
from tests.backends.peers.test_monitor import FAR, world
from tests.start.test_stores import free_address, store
from tests.start.test_world import world as world_of
from tests.support.interpreter import ROOT, printed
from tests.support.launches import DEADLINE_S, Launches, launches  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("nowhere")
SECRET = Secret(bytes(range(32)))
TEXT = "5ca1ab1e" * 8


# -- keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "salt", "info", "wanted"),
    [
        (
            "0b" * 22, bytes(range(13)).hex(), bytes(range(0xF0, 0xFA)).hex(),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)).hex(), bytes(range(0x60, 0xB0)).hex(),
            bytes(range(0xB0, 0x100)).hex(),
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41"
            "c65e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            "0b" * 22, "", "",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["A.1", "A.2", "A.3"],
)  # fmt: skip
def test_hkdf_gives_keys_of_rfc_5869(secret: str, salt: str, info: str, wanted: str) -> None:
    inputs = (bytes.fromhex(text) for text in (secret, salt, info))
    assert hkdf(*inputs, len(wanted) // 2).hex() == wanted


def test_secret_key_differs_for_each_purpose_and_job() -> None:
    secrets = [SECRET, SECRET.within("job"), SECRET.within("job", ""), SECRET.within("jo", "b")]
    secrets += [SECRET.within("job").within("session"), SECRET.within("job", "session")]
    keys = [secret.key(purpose) for secret in secrets for purpose in ("hub", "store values", "")]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert SECRET.within("job").key("hub") == Secret(bytes(range(32))).within("job").key("hub")


# -- sealed stores --------------------------------------------------------------------------


class Recording(FileStore):
    """A store that remembers every published value."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.seen: list[tuple[str, bytes]] = []

    def set(self, key: str, value: bytes) -> None:
        self.seen.append((key, value))
        super().set(key, value)


def test_sealed_store_get_of_absent_key_mentions_another_secret(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match=r"'key'.*a rank with another secret, or none"):
        SealedStore(FileStore(tmp_path), SECRET).get("key", Deadline(0.0))


def test_sealed_store_hides_names_of_keys_and_secret(tmp_path: Path) -> None:
    below = Recording(tmp_path)
    store = SealedStore(below, SECRET.within("job"))
    store.set("monitor", b"10.0.0.1 4711")
    ((name, sealed),) = below.seen
    assert "monitor" not in name
    seen = name.encode() + sealed
    for key in ("hub", "gloo", "store names", "store values"):
        assert SECRET.within("job").key(key) not in seen


def name_of(store: Store, key: str) -> str:
    return store._name(key)  # type: ignore[attr-defined,no-any-return]


FORGED: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda sealed: b"",
    "plain text": lambda sealed: b'{"address": "10.0.0.6 1"}' * 4,
    "first byte changed": lambda sealed: bytes([sealed[0] ^ 1]) + sealed[1:],
    "byte of the value changed": lambda s: s[:16] + bytes([s[16] ^ 1]) + s[17:],
    "last byte changed": lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
    "last byte missing": lambda sealed: sealed[:-1],
    "byte appended": lambda sealed: sealed + b"\0",
    "a tag alone": lambda sealed: sealed[-32:],
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_sealed_store_refuses_forged_value_and_names_key(
    tmp_path: Path, forge: Callable[[bytes], bytes]
) -> None:
    below = FileStore(tmp_path)
    store = SealedStore(below, SECRET)
    store.set("key", b"value")
    name = name_of(store, "key")
    below.set(name, forge(below.get(name, Deadline(0.0))))
    wanted = rf"store at {tmp_path} holds a value for 'key' that does not belong to this job"
    for read in (lambda: store.try_get("key"), lambda: store.get("key", Deadline(0.0))):
        with pytest.raises(RendezvousError, match=wanted):
            read()


OTHERS = {
    "another key": (SECRET, "other"),
    "another job": (SECRET.within("job"), "key"),
    "an earlier meeting": (SECRET.within("job").within("session 1"), "key"),
    "another secret": (Secret(bytes(32)), "key"),
}


@pytest.mark.parametrize(("secret", "key"), OTHERS.values(), ids=OTHERS)
def test_sealed_store_refuses_value_sealed_for_another_use(
    tmp_path: Path, secret: Secret, key: str
) -> None:
    """A stranger copies a value that it has seen to the name of another key."""
    below = FileStore(tmp_path)
    other_store = SealedStore(below, secret)
    other_store.set(key, b"value")
    store = SealedStore(below, SECRET)
    assert store.try_get("key") is None  # The key has another name in this store.
    below.set(name_of(store, "key"), below.get(name_of(other_store, key), Deadline(0.0)))
    with pytest.raises(RendezvousError, match="does not belong to this job"):
        store.try_get("key")


def test_seal_without_secret_returns_the_store(tmp_path: Path) -> None:
    below = FileStore(tmp_path)
    assert seal(below, None) is below


# -- the hub --------------------------------------------------------------------------------


def meet(store: Store, *secrets: Secret | None, timeout: float = FAR) -> list[Any]:
    """Start one monitor for each secret; return the monitors, or the errors in their places."""

    def rank(number: int) -> Any:
        secret = secrets[number]
        own_world = world(number, len(secrets), seal(store, secret), secret=secret)
        try:
            return Monitor.start(own_world, Deadline(timeout))
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(rank, range(len(secrets))))


def test_hub_key_is_not_published(tmp_path: Path) -> None:
    store = Recording(tmp_path)
    for monitor in meet(store, SECRET, SECRET):
        monitor.channel.close()
    ((_, sealed),) = store.seen
    assert list(json.loads(sealed[16:-32])) == ["address"]
    assert SECRET.key("hub").hex().encode() not in sealed


def test_monitors_of_each_meeting_share_a_new_secret(tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        first, second = meet(FileStore(tmp_path), SECRET, SECRET)
        assert first.secret.key("gloo") == second.secret.key("gloo")
        keys.add(first.secret.key("gloo"))
        for monitor in (first, second):
            monitor.channel.close()
    assert len(keys) == 2


@pytest.mark.parametrize("other", [Secret(bytes(32)), None], ids=["another", "none"])
def test_rank_with_another_secret_or_none_cannot_join(tmp_path: Path, other: Secret | None) -> None:
    first, second = meet(FileStore(tmp_path), SECRET, other, timeout=0.5)
    assert f"after 0.5 s rank 1 of 2 has not joined at {tmp_path}; no other connection" in str(
        first
    )
    assert f"rank 0 of 2 ({tmp_path}) did not answer within 0.5 s [rank 1]. " in str(second)
    remedy = (
        "its secret most likely differs. Compare `sha256sum` of the file in COLLECTIVE_SECRET on"
    )
    if other is None:
        remedy = "or it has a secret and this rank has none."
    assert remedy in str(second)


def test_rank_with_hub_address_and_another_secret_is_reported(
    tmp_path: Path,
) -> None:
    """The hub lists the rank's address among those that did not prove knowledge of the key."""
    below = FileStore(tmp_path)

    class Leaks(SealedStore):
        """A sealed store that also publishes the hub's address to ranks with the other secret."""

        def set(self, key: str, value: bytes) -> None:
            super().set(key, value)
            SealedStore(below, other).set(key, value)

    other = Secret(bytes(32))

    def rank(number: int, secret: Secret, store: Store, timeout: float) -> Any:
        here = {"local_size": 1, "address": "127.0.0.1"}
        with pytest.raises(RendezvousError) as caught:
            Monitor.start(world(number, 2, store, secret=secret, **here), Deadline(timeout))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        # The second rank keeps trying after the first has given up, and reports the earlier reply.
        first = pool.submit(rank, 0, SECRET, Leaks(below, SECRET), 2.0)
        second = pool.submit(rank, 1, other, SealedStore(below, other), 4.0)
        assert re.search(
            r"; \d+ connections from 127\.0\.0\.1 were refused because their secret differs",
            first.result(),
        )
        assert "it does not know this job's key. Most likely its secret" in second.result()


def test_rank_0_counts_the_secrets_that_its_store_refused() -> None:
    other = Secret(bytes(32))
    with contextlib.closing(store(free_address(), serve=True, secret=SECRET)) as served:
        with pytest.raises(RendezvousError, match="Most likely its secret differs"):
            store(served._endpoint, secret=other, timeout=0.3)
        here = {"local_size": 1, "address": "127.0.0.1"}
        with pytest.raises(RendezvousError) as caught:
            Monitor.start(world(0, 2, seal(served, SECRET), secret=SECRET, **here), Deadline(0.5))
    assert re.search(
        rf"after 0\.5 s rank 1 of 2 has not joined at {served}; \d+ connections? from 127\.0\.0\.1 "
        r"w\w+ refused because their secret differs\. Compare `sha256sum` of the file in COLL",
        str(caught.value),
    )


def test_rank_0_that_nobody_reaches_says_what_to_check(tmp_path: Path) -> None:
    here = {"local_size": 1, "address": "127.0.0.1"}
    with pytest.raises(RendezvousError) as caught:
        Monitor.start(
            world(0, 2, seal(FileStore(tmp_path), SECRET), secret=SECRET, **here), Deadline(0.1)
        )
    text = str(caught.value)
    assert (
        "no other connection came. Check that every rank was started, that all ranks have" in text
    )
    assert "no firewall blocks 127.0.0.1. Compare `sha256sum`" in text


@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "no secret"])
def test_rank_0_that_serves_and_that_nobody_reaches_does_not_suspect_the_secret(
    secret: Secret | None,
) -> None:
    # A rank with another secret would have connected to the store, and been refused there.
    here = {"local_size": 1, "address": "127.0.0.1"}
    own = {} if secret is None else {"secret": secret}
    with (
        contextlib.closing(store(free_address(), serve=True, **own)) as served,
        pytest.raises(RendezvousError) as caught,
    ):
        Monitor.start(world(0, 2, served, secret=secret, **here), Deadline(0.1))
    text = str(caught.value)
    assert "was started in this time (COLLECTIVE_START_TIMEOUT), that all ranks have this" in text
    assert "secret" not in text


def test_rank_0_without_a_secret_says_so_when_it_refuses_secrets() -> None:
    here = {"local_size": 1, "address": "127.0.0.1"}
    with contextlib.closing(store(free_address(), serve=True)) as served:
        with pytest.raises(RendezvousError):
            store(served._endpoint, secret=Secret(bytes(32)), timeout=0.3)
        with pytest.raises(RendezvousError) as caught:
            Monitor.start(world(0, 2, served, **here), Deadline(0.1))
    assert "because their secret differs: this rank has none. Set COLLECTIVE_SECRET" in str(
        caught.value
    )


# -- sources of the secret --------------------------------------------------------------------


def file_of(directory: Path, text: bytes = TEXT.encode(), mode: int = 0o600) -> Path:
    path = directory / "secret"
    path.write_bytes(text)
    path.chmod(mode)
    return path


def hub_key(**arguments: object) -> bytes:
    secret = resolve(load(arguments)).secret
    assert secret is not None
    return secret.key("hub")


LINE_END = b"\n"
SOURCES = {
    "the environment": lambda here: os.environ.update(COLLECTIVE_SECRET=TEXT),
    "a file": lambda here: os.environ.update(COLLECTIVE_SECRET=f"file:{file_of(here)}"),
    "a file with a line's end": lambda here: os.environ.update(
        COLLECTIVE_SECRET=f"file:{file_of(here, TEXT.encode() + LINE_END)}"
    ),
    "a file named by the settings": lambda here: (
        file_of(here), (here / "collective.toml").write_text('secret = "file:secret"'),
        (here / "collective.toml").chmod(0o600),
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_secret_is_the_same_from_each_source(
    nowhere: Path, source: Callable[[Path], object]
) -> None:
    source(nowhere)
    assert hub_key() == Secret(TEXT.encode()).key("hub")


@pytest.mark.parametrize("given", [TEXT, TEXT.encode(), Secret(TEXT.encode())], ids=type)
def test_secret_as_argument_is_used(given: object) -> None:
    assert hub_key(secret=given) == Secret(TEXT.encode()).key("hub")


def test_secret_without_source_is_none() -> None:
    assert resolve(load({})).secret is None


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "readable by the group": (lambda here: file_of(here, mode=0o640), r"mode 0640; .*chmod 600"),
    "readable by all": (lambda here: file_of(here, mode=0o604), r"mode 0604"),
    "missing": (lambda here: here / "none", r"No such file.*exist on every host, with mode 0600"),
    "short": (lambda here: file_of(here, b"x" * 15), r"15 bytes; it must have 16"),
    "long": (lambda here: file_of(here, b"x" * 5000), r"it must have 16 to 4096"),
    "a directory": (lambda here: here, r"Is a directory|mode"),
    "a pipe": (lambda here: os.mkfifo(here / "pipe", 0o600) or here / "pipe", r"must be a file"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_secret_file_that_is_unsafe_or_unusable_raises(
    nowhere: Path, make: Callable[[Path], Path], why: str
) -> None:
    os.environ["COLLECTIVE_SECRET"] = f"file:{make(nowhere)}"
    with pytest.raises(ConfigError, match=why):
        resolve(load({}))


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give a file away")
def test_secret_file_of_another_user_raises(nowhere: Path) -> None:
    path = file_of(nowhere)
    os.chown(path, 12345, 12345)
    os.environ["COLLECTIVE_SECRET"] = f"file:{path}"
    with pytest.raises(ConfigError, match="owner uid 12345"):
        resolve(load({}))


# -- confidentiality of the secret ---------------------------------------------------------------


def _settings_of_the_doctor() -> object:
    from collective.tools import doctor

    return doctor._settings()


def _too_short() -> object:
    os.environ["COLLECTIVE_SECRET"] = TEXT[:15]
    with pytest.raises(ConfigError) as caught:
        load({})
    return caught.value


def _in_a_file_for_all() -> object:
    path = Path("collective.toml")
    path.write_text(f'secret = "{TEXT}"')
    path.chmod(0o644)
    del os.environ["COLLECTIVE_SECRET"]
    with pytest.raises(ConfigError, match="decides who may join") as caught:
        load({})
    return caught.value


SHOWN: dict[str, Callable[[], object]] = {
    "the settings": lambda: load({}),
    "the world": lambda: world_of(size=1),
    "the secret": lambda: (load({}).secret, f"{load({}).secret}", [load({}).secret]),
    "the doctor": _settings_of_the_doctor,
    "the error of a short one": _too_short,
    "the error of a file of settings": _in_a_file_for_all,
}


@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_secret_is_absent_from_texts_and_reprs(show: Callable[[], object]) -> None:
    os.environ["COLLECTIVE_SECRET"] = TEXT
    shown = show()
    for text in (str(shown), repr(shown)):
        assert TEXT[:15] not in text
        assert TEXT[:15].encode().hex() not in text


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_config_command_shows_that_secret_is_set(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["COLLECTIVE_SECRET"] = TEXT
    assert main(["config", *options]) == 0
    out = capsys.readouterr().out
    assert TEXT[:15] not in out
    if options:
        setting = json.loads(out)["settings"]["secret"]
        assert setting == {"value": "set", "origin": "environment COLLECTIVE_SECRET"}
    else:
        (line,) = (line for line in out.splitlines() if line.startswith("secret "))
        assert line.split(maxsplit=2) == ["secret", "set", "environment COLLECTIVE_SECRET"]


def test_secret_pickling_raises_type_error() -> None:
    with pytest.raises(TypeError, match="a secret is not pickled"):
        pickle.dumps(SECRET)


# -- collective run -----------------------------------------------------------------------------

# The program looks at everything that any process of this host can read of other processes.
LOOKS = """
    import contextlib, pathlib

    def of_processes(name):
        # The contents of this file of each process that this user may look at, by its number.
        contents = {}
        for path in pathlib.Path("/proc").glob("[0-9]*/" + name):
            # A process of another test may end between the listing and the reading.
            with contextlib.suppress(OSError):
                contents[int(path.parts[2])] = path.read_bytes()
        return contents

    secret = os.environ["COLLECTIVE_SECRET"]
    lines = of_processes("cmdline").values()
    assert len(lines) > 2
    assert not any(secret.encode() in line for line in lines)
    directory = pathlib.Path(os.environ["COLLECTIVE_STORE"])
    assert directory.stat().st_mode & 0o077 == 0
    import collective
    with collective.init() as comm:
        found = comm.all_gather_object(secret)
        assert set(found) == {secret}, found
        assert comm.backend == os.environ["COLLECTIVE_BACKEND"]
    print("secret", secret)
    """


def run(launches: Launches, backend: str, **changes: str) -> str:  # noqa: F811
    """Run two ranks and return their secret."""
    done = launches.run("-n", "2", "--backend", backend, launches.script(LOOKS), **changes)
    assert done.returncode == 0, done.stderr
    (secret,) = {line.split()[2] for line in done.stdout.splitlines() if "secret" in line}
    launches.assert_nothing_left()
    return secret


def test_collective_run_creates_a_secret_for_each_launch(launches: Launches) -> None:  # noqa: F811
    secrets = {run(launches, "shm"), run(launches, "shm", COLLECTIVE_SECRET=TEXT)}
    assert len(secrets) == 2
    assert all(len(bytes.fromhex(secret)) == 32 for secret in secrets)
    assert TEXT not in secrets


def test_collective_run_keeps_secret_from_mpiexec(
    launches: Launches,  # noqa: F811
) -> None:
    """An mpiexec may send its variables over a network or put them on a command line."""
    python = ROOT / ".mpi" / "mpich" / "bin" / "python"
    if not python.exists():
        pytest.skip("no MPICH in .mpi")
    body = (
        LOOKS
        + """
    environments = of_processes("environ")
    for pid, name in of_processes("comm").items():
        if name.startswith((b"mpiexec", b"hydra")) and pid in environments:
            assert secret.encode() not in environments[pid], name
            print("looked at", name.decode().strip())
    """
    )
    shown = printed(
        "-m", "collective", "run", "-n", "2", "--backend", "mpi", launches.script(body),
        python=python, cwd=launches.directory, env=launches.environment(), timeout=DEADLINE_S,
    )  # fmt: skip
    assert "looked at mpiexec" in shown


# -- without a secret -----------------------------------------------------------------------------

TWO_HOSTS = {"rank": 0, "size": 2, "local_rank": 0, "local_size": 1}
AT_AN_ADDRESS = {**TWO_HOSTS, "store": "tcp://127.0.0.1:29511"}


def test_build_across_hosts_without_secret_warns() -> None:
    with pytest.warns(RuntimeWarning, match=r"meet at 127\.0\.0\.1:29511 without.*SECRET=file:"):
        assert world_of(**AT_AN_ADDRESS).open


UNWARNED: dict[str, tuple[dict[str, object], dict[str, str], bool]] = {
    "with a secret": (AT_AN_ADDRESS, {"COLLECTIVE_SECRET": TEXT}, False),
    "silenced": (AT_AN_ADDRESS, {"COLLECTIVE_SECRET": "none"}, True),
    "by another rank": ({**AT_AN_ADDRESS, "rank": 1}, {}, True),
    "on one host": ({**AT_AN_ADDRESS, "local_size": 2}, {}, False),
    "in a private directory": ({**TWO_HOSTS, "store": "store"}, {}, False),
}


@pytest.mark.parametrize(("arguments", "environ", "open_"), UNWARNED.values(), ids=UNWARNED)
def test_build_in_safe_or_silenced_world_prints_no_warning(
    arguments: dict[str, object], environ: dict[str, str], open_: bool
) -> None:
    os.environ.update(environ)
    assert world_of(**arguments).open is open_


OBJECTS: dict[str, Callable[[Any], object]] = {
    "broadcast_object": lambda comm: comm.broadcast_object(1, pickle=True),
    "gather_object": lambda comm: comm.gather_object(1, pickle=True),
    "all_gather_object": lambda comm: comm.all_gather_object(1, pickle=True),
    "scatter_object": lambda comm: comm.scatter_object([1], pickle=True),
    "send_object": lambda comm: comm.send_object(1, 0, pickle=True),
    "recv_object": lambda comm: comm.recv_object(0, pickle=True),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_object_calls_refuse_pickle_in_open_world(name: str) -> None:
    open_world = World(0, 1, 0, 1, "here", "none", "job", FileStore("store"), open=True)
    with connect(open_world, "threads") as comm, comm.dup() as child:
        for communicator in (comm, child):
            with pytest.raises(InvalidArgumentError, match=rf"{name}: pickle=True.*SECRET=file:"):
                OBJECTS[name](communicator)
        assert comm.all_gather_object({"plain": [1, 2.0, "data"]}) == [{"plain": [1, 2.0, "data"]}]
