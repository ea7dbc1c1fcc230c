"""The store of ranks on several hosts: what it keeps, where it listens, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from collective.errors import BackendUnavailableError, RendezvousError
from collective.start import torch_store as tcp_store
from collective.start.rendezvous import Endpoint
from collective.start.torch_store import TcpStore
from tests import warm
from tests.hosts import Hosts, free_port, needs_hosts
from tests.interpreter import started
from tests.test_choice import slurm

pytest.importorskip("torch")
# How long anything here may take on a busy machine, importing torch included.
DEADLINE_S = 60.0


def endpoint(port: int | None = None, host: str = "127.0.0.1", **kind: bool) -> Endpoint:
    return Endpoint(
        host, free_port() if port is None else port, "MASTER_ADDR and MASTER_PORT", **kind
    )


def store(
    where: Endpoint, *, serve: bool, spans_hosts: bool = False, timeout: float = 30.0
) -> TcpStore:
    return TcpStore(where, "job/", serve=serve, spans_hosts=spans_hosts, timeout=timeout)


SERVER = """
    import os
    import sys
    from collective.start.rendezvous import Endpoint
    from collective.start.torch_store import TcpStore
    port = int(sys.argv[1])
    store = TcpStore(Endpoint("127.0.0.1", port, "test"), "job/", serve=True, spans_hosts=False,
                     timeout=30.0)
    store.set("ready", b"")
    print(os.getpid(), flush=True)
    sys.stdin.read()
    """


def process(
    body: str, *arguments: object
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run a program that ends when its standard input does."""
    return started("-c", textwrap.dedent(body), *arguments, python=warm.python())


def soon() -> float:
    return time.monotonic() + DEADLINE_S


# -- what it keeps -------------------------------------------------------------------------


def test_jobs_that_share_a_server_do_not_see_each_other() -> None:
    where = endpoint()
    mine = store(where, serve=True)
    other = TcpStore(where, "another/", serve=False, spans_hosts=False, timeout=30.0)
    mine.set("key", b"mine")
    assert other.try_get("key") is None


def test_get_waits_for_what_comes_later() -> None:
    where = endpoint()
    one, other = store(where, serve=True), store(where, serve=False)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(other.get("key", soon())))
    waiting.start()
    # The same connection serves other threads meanwhile.
    other.set("other", b"1")
    assert one.get("other", soon()) == b"1"
    one.set("key", b"late")
    waiting.join(DEADLINE_S)
    assert found == [b"late"]


def test_get_gives_up_at_its_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    alone = store(endpoint(), serve=True)
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"nobody published 'key' at 127\.0\.0\.1:"):
        alone.get("key", start + 0.3)
    assert time.monotonic() - start >= 0.3
    assert capfd.readouterr().err == ""  # torch's own wait writes pages of it


def test_server_is_waited_for() -> None:
    where = endpoint()
    with process(SERVER, where.port):  # takes as long as importing torch does
        client = store(where, serve=False, timeout=DEADLINE_S)
        assert client.get("ready", soon()) == b""


def test_second_store_of_rank_0_uses_the_server_it_has() -> None:
    where = endpoint()
    first = store(where, serve=True)
    first.set("key", b"value")
    del first
    assert store(where, serve=True).try_get("key") == b"value"


def test_a_program_may_use_torch_distributed_at_the_same_port() -> None:
    body = """
        import sys
        import torch.distributed as dist
        from collective.start.rendezvous import Endpoint
        from collective.start.torch_store import TcpStore
        for first in ("ours", "theirs"):
            port = int(sys.argv.pop())
            def ours():
                where = Endpoint("127.0.0.1", port, "test")
                store = TcpStore(where, "job/", serve=True, spans_hosts=False, timeout=30.0)
                store.set("key", b"value")
                assert store.try_get("key") == b"value"
            def theirs():
                where = f"tcp://127.0.0.1:{port}"
                dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
                dist.barrier()
            for each in sorted((ours, theirs), key=lambda f: f.__name__ != first):
                each()
            dist.destroy_process_group()
        """
    with process(body, free_port(), free_port()) as running:
        _, err = running.communicate("", DEADLINE_S)
        assert running.returncode == 0, err


# -- where it listens ----------------------------------------------------------------------


def listening(port: int) -> set[str]:
    """Return the addresses, as /proc/net writes them, at which this port is listened to."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                address, _, number = line.split()[1].rpartition(":")
                if int(number, 16) == port and line.split()[3] == "0A":
                    found.add(address)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_listens_at_its_address_and_nowhere_else() -> None:
    where = endpoint()
    store(where, serve=True, spans_hosts=True)
    assert listening(where.port) == {"0100007F"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("spans_hosts", "address"), [(True, "00000000"), (False, "0101007F")])
def test_own_name_that_stands_for_loopback_is_no_place_for_other_hosts(
    monkeypatch: pytest.MonkeyPatch, spans_hosts: bool, address: str
) -> None:
    """As Debian has it: ``127.0.1.1 node1`` in the /etc/hosts of node1, and only there."""
    resolve = socket.getaddrinfo

    def debian(host: str, *arguments: object, **options: object) -> object:
        return resolve("127.0.1.1" if host == "node1" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    where = endpoint(host="node1")
    served = store(where, serve=True, spans_hosts=spans_hosts)
    served.set("key", b"")
    assert listening(where.port) == {address}


# -- what goes wrong -----------------------------------------------------------------------


def test_port_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RendezvousError, match=rf"port {port} .*in use.*Set another port"):
            store(endpoint(port), serve=True)


@pytest.mark.parametrize("serve", [True, False], ids=["rank 0", "rank 1"])
def test_wrong_host_name(serve: bool) -> None:
    with pytest.raises(
        RendezvousError, match=r"no-such-host\.invalid.*MASTER_ADDR.*does not resolve.*Correct"
    ):
        store(endpoint(1, host="no-such-host.invalid"), serve=serve)


def test_address_of_another_host_on_rank_0() -> None:
    # Reserved for documentation: a host that has it would be a strange one.
    with pytest.raises(RendezvousError, match=r"cannot listen at 203\.0\.113\.9.*127\.0\.0\.1"):
        store(endpoint(host="203.0.113.9"), serve=True)


@pytest.mark.parametrize(
    ("served", "who"), [(False, "rank 0 serves there"), (True, "torchrun's agent serves there")]
)
def test_nobody_answers(served: bool, who: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RendezvousError, match=rf"nobody answered.* within 0\.5 s.*{who}"):
        store(endpoint(served=served), serve=False, timeout=0.5)
    assert capfd.readouterr().err == ""


def test_something_else_listens_there() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()  # and never says a word
        with pytest.raises(RendezvousError, match="no store of torch's"):
            store(endpoint(other.getsockname()[1]), serve=False, timeout=2.0)


# As TCPStore's clients begin: a query of kind 0 with a number by which they know each other; then
# one of kind 1, to set a key of ten letters, of which three arrive.
HALF_A_REQUEST = b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + struct.pack("<Q", 10) + b"abc"


@pytest.mark.skipif(tcp_store._version() < (2, 8), reason="torch has no server for that before 2.8")
def test_half_a_request_of_a_stranger_stops_nobody() -> None:
    where = endpoint()
    store(where, serve=True).set("key", b"value")
    with socket.create_connection((where.host, where.port)) as stranger:
        stranger.sendall(HALF_A_REQUEST)
        # It is read before what comes on a later connection.
        assert store(where, serve=False, timeout=5.0).get("key", soon()) == b"value"


@pytest.mark.parametrize("what", ["set", "get", "try_get", "delete"])
def test_rank_0_has_left(what: str) -> None:
    where = endpoint()
    with process(SERVER, where.port) as rank_0:
        client = store(where, serve=False, timeout=DEADLINE_S)
        client.get("ready", soon())
        _, err = rank_0.communicate("", DEADLINE_S)  # and its end does not hang
        assert (rank_0.returncode, err) == (0, "")
        arguments = {"set": (b"",), "get": (soon(),)}.get(what, ())
        with pytest.raises(RendezvousError, match="rank 0 serves it, and has ended"):
            getattr(client, what)("ready", *arguments)


def stop(server: subprocess.Popen[str]) -> None:
    """Stop a server, and return when all its threads have: until then it may answer."""
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while {each.read_text().rpartition(") ")[2][0] for each in tasks.glob("*/stat")} != {"T"}:
        time.sleep(0.002)


def test_server_that_stops_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the cable is pulled: nobody says that the connection is over."""
    monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.5)
    monkeypatch.setattr(tcp_store, "CONNECT_S", 0.5)
    where = endpoint()
    with process(SERVER, where.port) as rank_0:
        client = store(where, serve=False, timeout=DEADLINE_S)
        client.get("ready", soon())
        stop(rank_0)
        for call in (
            lambda: client.get("key", time.monotonic() + 0.2),
            lambda: client.set("key", b""),
            lambda: client.try_get("key"),
        ):
            with pytest.raises(RendezvousError, match=r"no answer within 0\.5 s"):
                call()


def test_program_ends_though_a_call_hangs() -> None:
    where = endpoint()
    body = """
        import sys
        from collective.start import torch_store as tcp_store
        from collective.errors import RendezvousError
        from collective.start.rendezvous import Endpoint
        store = tcp_store.TcpStore(Endpoint("127.0.0.1", int(sys.argv[1]), "test"), "job/",
                                   serve=False, spans_hosts=False, timeout=60.0)
        print("connected", flush=True)
        sys.stdin.readline()
        tcp_store._ANSWER_S = 0.2
        try:
            store.set("key", b"")
        except RendezvousError:
            print("late", flush=True)
        """
    with process(SERVER, where.port) as rank_0, process(body, where.port) as rank_1:
        assert rank_1.stdout is not None
        assert rank_1.stdout.readline() == "connected\n"
        stop(rank_0)
        out, err = rank_1.communicate("\n", DEADLINE_S)
        assert (rank_1.returncode, out) == (0, "late\n"), err


def test_without_torch_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install .*\[torch\]"):
        store(endpoint(), serve=True)


# -- hosts of their own --------------------------------------------------------------------

EXCHANGE = """
    import time
    from collective.start.choice import choose
    from collective.start.config import load
    from collective.start.resolver import build
    config = load({})
    world = build(config)
    end = time.monotonic() + 60
    ranks = range(world.size)
    world.store.set(f"address-{world.rank}", world.address.encode())
    found = [world.store.get(f"address-{rank}", end).decode() for rank in ranks]
    # In one write: torchrun starts ranks with -u, and they share a pipe.
    line = " ".join(["found", str(world.rank), world.launcher, choose(config).name, *found])
    print(line + "\\n", end="", flush=True)
    world.store.set(f"done-{world.rank}", b"")
    if world.rank == 0:  # it serves the others
        for rank in ranks:
            world.store.get(f"done-{rank}", end)
    """


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "collective"])
def test_ranks_of_two_hosts_meet(launcher: str, tmp_path: Path) -> None:
    needs_hosts()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(EXCHANGE))
    (tmp_path / "hosts").mkdir()
    with Hosts(2, tmp_path / "hosts") as hosts:
        one, other = (host.address for host in hosts.hosts)
        if launcher == "torchrun":
            job = hosts.torchrun(2, [str(script)])
        else:
            job = hosts.start(
                [
                    (rank // 2, [warm.python(), str(script)], variables(launcher, rank))
                    for rank in range(4)
                ]
            )
        printed = job.succeed(90.0)
    lines = sorted(line for line in printed.splitlines() if line.startswith("found"))
    addresses = f"{one} {one} {other} {other}"
    assert lines == [f"found {rank} {launcher} hierarchical {addresses}" for rank in range(4)]


def variables(launcher: str, rank: int) -> dict[str, str]:
    """Return the variables of one of four ranks on two hosts."""
    if launcher == "slurm":
        job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "host[0-1]"}
        return {**slurm(rank, 4, rank % 2, rank // 2, "2(x2)", 2), **job}
    local = {"COLLECTIVE_LOCAL_RANK": str(rank % 2), "COLLECTIVE_LOCAL_SIZE": "2"}
    ranks = {"COLLECTIVE_RANK": str(rank), "COLLECTIVE_SIZE": "4"}
    return {**ranks, **local, "COLLECTIVE_STORE": "tcp://host0:29500"}


FORKING = """
    import gc
    import os
    import sys
    from collective.start import torch_store as tcp_store
    from collective.start.rendezvous import Endpoint

    place = Endpoint("127.0.0.1", int(sys.argv[1]), "test")
    store = tcp_store.TcpStore(place, "job/", serve=True, spans_hosts=False, timeout=30.0)
    child = os.fork()
    if child == 0:
        del store
        tcp_store._serving.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    store.set("key", b"served")
    print(store.try_get("key").decode())
    """


def test_the_end_of_a_forked_child_is_not_the_server_s() -> None:
    with process(FORKING, free_port()) as running:
        output, errors = running.communicate(timeout=DEADLINE_S)
    assert output == "served\n", errors
