"""The stores of ranks on several hosts: the store of rank 0, and the store of torchrun's agent.

See also start/test_stores.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

from collective.control.secret import Secret
from collective.control.store import PrefixedStore, Store
from collective.deadline import Deadline
from collective.errors import BackendUnavailableError, RendezvousError
from collective.start import tcp_store, torch_store
from collective.start.rendezvous import Endpoint
from collective.start.stores import seal
from collective.start.tcp_store import StoreServer, TcpStore
from collective.start.torch_store import AgentStore
from tests import warm
from tests.start.test_choice import slurm
from tests.support.interpreter import ROOT, started
from tests.support.network_hosts import Hosts, free_port, needs_hosts

# A limit for any step here on a busy machine, including the import of torch.
DEADLINE_S = 60.0
SECRET = Secret(bytes(range(32)))


def endpoint(port: int | None = None, host: str = "127.0.0.1", **kind: bool) -> Endpoint:
    return Endpoint(
        host, free_port() if port is None else port, "MASTER_ADDR and MASTER_PORT", **kind
    )


def store(
    where: Endpoint, *, serve: bool, spans_hosts: bool = False, timeout: float = 30.0
) -> TcpStore:
    return TcpStore(where, SECRET, serve=serve, spans_hosts=spans_hosts, deadline=Deadline(timeout))


def process(
    body: str, *arguments: object
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run a program that ends when its standard input is closed."""
    return started("-c", textwrap.dedent(body), *arguments, python=warm.python())


def soon() -> Deadline:
    return Deadline(DEADLINE_S)


class Kind(NamedTuple):
    """A store that a process serves.

    Attributes:
        connect: function that returns one rank's store, given an endpoint and a timeout in seconds.
        server: program that serves the store at a port and publishes ``ready``.
        module: module that defines the store.
        served: whether a launcher serves the store.
        who: name of the server in error texts.
    """

    connect: Callable[[Endpoint, float], Store]
    server: str
    module: ModuleType
    served: bool
    who: str

    def endpoint(self, port: int | None = None, host: str = "127.0.0.1") -> Endpoint:
        return endpoint(port, host, served=self.served)


def _connect_to_agent(where: Endpoint, timeout: float) -> Store:
    pytest.importorskip("torch")
    return PrefixedStore(AgentStore(where, Deadline(timeout)), "job/")


RANK_0 = Kind(
    lambda where, timeout: store(where, serve=False, timeout=timeout),
    """
    import os, sys
    from collective.control.secret import Secret
    from collective.deadline import Deadline
    from collective.start.rendezvous import Endpoint
    from collective.start.tcp_store import TcpStore
    where, secret = Endpoint("127.0.0.1", int(sys.argv[1]), "test"), Secret(bytes(range(32)))
    deadline = Deadline(30.0)
    served = TcpStore(where, secret, serve=True, spans_hosts=False, deadline=deadline)
    served.set("ready", b"")
    print(os.getpid(), flush=True)
    sys.stdin.read()
    """,
    tcp_store,
    False,
    "[Rr]ank 0",
)
AGENT = Kind(
    _connect_to_agent,
    """
    import os, sys
    import torch.distributed as dist
    served = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    served.set("job/ready", b"")
    print(os.getpid(), flush=True)
    sys.stdin.read()
    """,
    torch_store,
    True,
    "torchrun's agent",
)
kinds = pytest.mark.parametrize("kind", [RANK_0, AGENT], ids=["rank 0", "agent"])


# -- keys and waiting ----------------------------------------------------------------------


def test_agent_stores_of_two_launches_do_not_share_keys() -> None:
    dist = pytest.importorskip("torch.distributed")
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection = AgentStore(endpoint(served.port, served=True), Deadline(30.0))
    one, other = PrefixedStore(connection, "one/"), PrefixedStore(connection, "another/")
    one.set("key", b"mine")
    assert other.try_get("key") is None


def test_get_raises_at_its_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    alone = store(endpoint(), serve=True)
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"nobody published 'key' at 127\.0\.0\.1:"):
        alone.get("key", Deadline(0.3))
    assert time.monotonic() - start >= 0.3
    assert capfd.readouterr().err == ""


def test_get_from_agent_raises_at_its_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    dist = pytest.importorskip("torch.distributed")
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = _connect_to_agent(endpoint(served.port, served=True), 30.0)
    start = time.monotonic()
    with pytest.raises(RendezvousError, match=r"nobody published 'key' at 127\.0\.0\.1:"):
        client.get("key", Deadline(0.3))
    assert time.monotonic() - start >= 0.3
    assert capfd.readouterr().err == ""  # The wait of torch itself would print pages of text.


@kinds
def test_store_waits_for_its_server(kind: Kind) -> None:
    where = kind.endpoint()
    with process(kind.server, where.port):  # The start takes as long as the import of torch.
        client = kind.connect(where, DEADLINE_S)
        assert client.get("ready", soon()) == b""


def test_second_store_of_rank_0_reuses_its_server() -> None:
    where = endpoint()
    first = store(where, serve=True)
    first.set("key", b"value")
    del first
    assert store(where, serve=True).try_get("key") == b"value"


# -- beside torch.distributed --------------------------------------------------------------


def test_port_of_torch_distributed_is_refused_with_remedy() -> None:
    dist = pytest.importorskip("torch.distributed")
    distributed_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wanted = r"in use .* by torch\.distributed in this one.*COLLECTIVE_STORE=tcp://HOST:PORT"
    with pytest.raises(RendezvousError, match=wanted):
        store(endpoint(distributed_store.port), serve=True)
    # The server of torch.distributed sends nothing before it has received a request.
    with pytest.raises(RendezvousError, match=r"not rank 0 of this job.*torch\.distributed's"):
        store(endpoint(distributed_store.port), serve=False, timeout=0.5)


def test_torch_distributed_works_at_port_of_agent() -> None:
    body = """
        import sys
        import torch.distributed as dist
        from collective.deadline import Deadline
        from collective.start.rendezvous import Endpoint
        from collective.start.torch_store import AgentStore
        port = int(sys.argv[1])
        agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        ours = AgentStore(Endpoint("127.0.0.1", port, "test", served=True), Deadline(30.0))
        ours.set("key", b"value")
        theirs = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=theirs, rank=0, world_size=1)
        dist.barrier()
        assert ours.try_get("key") == b"value"
        dist.destroy_process_group()
        """
    pytest.importorskip("torch")
    with process(body, free_port()) as running:
        _, err = running.communicate("", DEADLINE_S)
        assert running.returncode == 0, err


# -- listening addresses -------------------------------------------------------------------


def listening(port: int) -> set[str]:
    """Return the local addresses, in the format of /proc/net, with a listener at this port."""
    addresses = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                address, _, number = line.split()[1].rpartition(":")
                if int(number, 16) == port and line.split()[3] == "0A":
                    addresses.add(address)
    return addresses


def test_server_listens_only_at_its_address() -> None:
    where = endpoint()
    store(where, serve=True, spans_hosts=True)
    assert listening(where.port) == {"0100007F"}


@pytest.mark.parametrize(("spans_hosts", "address"), [(True, "00000000"), (False, "0101007F")])
def test_server_whose_own_name_is_loopback_listens_everywhere_for_hosts(
    monkeypatch: pytest.MonkeyPatch, spans_hosts: bool, address: str
) -> None:
    """Imitate Debian: the /etc/hosts of node1, and of no other host, has ``127.0.1.1 node1``."""
    resolve = socket.getaddrinfo

    def debian(host: str, *arguments: object, **options: object) -> object:
        return resolve("127.0.1.1" if host == "node1" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    where = endpoint(host="node1")
    served = store(where, serve=True, spans_hosts=spans_hosts)
    served.set("key", b"")
    assert listening(where.port) == {address}


# -- failures ------------------------------------------------------------------------------


def test_server_at_port_in_use_raises_with_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"port {port} .*in use.*COLLECTIVE_STORE=tcp://HOST:PORT"
        ):
            store(endpoint(port), serve=True)


@pytest.mark.parametrize("serve", [True, False], ids=["rank 0", "rank 1"])
def test_unresolvable_host_name_raises_with_remedy(serve: bool) -> None:
    with pytest.raises(
        RendezvousError, match=r"no-such-host\.invalid.*MASTER_ADDR.*does not resolve.*Correct"
    ):
        store(endpoint(1, host="no-such-host.invalid"), serve=serve)


def test_server_at_address_of_another_host_raises() -> None:
    # No host has this address, which is reserved for documentation.
    with pytest.raises(RendezvousError, match=r"cannot listen at 203\.0\.113\.9.*127\.0\.0\.1"):
        store(endpoint(host="203.0.113.9"), serve=True)


@kinds
def test_store_without_server_raises_after_timeout(
    kind: Kind, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = rf"no server answered.* within 0\.5 s.*{kind.who} serves there"
    with pytest.raises(RendezvousError, match=wanted):
        kind.connect(kind.endpoint(), 0.5)
    assert capfd.readouterr().err == ""


@kinds
def test_store_at_port_of_another_program_raises(kind: Kind) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()  # This server never sends anything.
        wanted = "not a store of torch" if kind.served else "not rank 0 of this job: timed out"
        with pytest.raises(RendezvousError, match=wanted):
            kind.connect(kind.endpoint(other.getsockname()[1]), 2.0)


@kinds
@pytest.mark.parametrize("what", ["set", "get", "try_get", "delete"])
def test_request_after_server_exit_raises_quickly(kind: Kind, what: str) -> None:
    where = kind.endpoint()
    with process(kind.server, where.port) as server:
        client = kind.connect(where, DEADLINE_S)
        client.get("ready", soon())
        _, err = server.communicate("", DEADLINE_S)  # The exit of the server does not hang.
        assert (server.returncode, err) == (0, "")
        arguments = {"set": (b"",), "get": (soon(),)}.get(what, ())
        since = time.monotonic()
        with pytest.raises(
            RendezvousError, match=rf"'ready'.*{kind.who} serves this store, and it has ended"
        ):
            getattr(client, what)("ready", *arguments)
        assert time.monotonic() - since < DEADLINE_S / 2


@kinds
def test_get_raises_when_server_is_killed(kind: Kind) -> None:
    where = kind.endpoint()
    with process(kind.server, where.port) as server:
        client = kind.connect(where, DEADLINE_S)
        client.get("ready", soon())
        killing = threading.Timer(0.2, server.kill)
        killing.start()
        since = time.monotonic()
        with pytest.raises(
            RendezvousError, match=rf"'key'.*{kind.who} serves this store, and it has ended"
        ):
            client.get("key", soon())
        assert time.monotonic() - since < DEADLINE_S / 2
        killing.join()


def stop(server: subprocess.Popen[str]) -> None:
    """Stop a server and wait until all its threads have stopped: until then it may answer."""
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while {stat.read_text().rpartition(") ")[2][0] for stat in tasks.glob("*/stat")} != {"T"}:
        time.sleep(0.002)


@kinds
def test_request_to_stopped_server_raises_after_timeout(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitate a pulled cable: no packet ends the connection."""
    monkeypatch.setattr(kind.module, "_ANSWER_S", 0.5)
    monkeypatch.setattr(kind.module, "CONNECT_S", 0.4)
    where = kind.endpoint()
    with process(kind.server, where.port) as server:
        client = kind.connect(where, DEADLINE_S)
        client.get("ready", soon())
        stop(server)
        for seconds, call in (
            (0.4, lambda: client.get("key", Deadline(0.2))),
            (0.5, lambda: client.set("key", b"")),
            (0.5, lambda: client.try_get("key")),
        ):
            with pytest.raises(RendezvousError, match=rf"no answer within {seconds:g} s"):
                call()


def test_rank_recovers_when_stopped_server_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "_ANSWER_S", 0.3)
    where = RANK_0.endpoint()
    with process(RANK_0.server, where.port) as server:
        client = RANK_0.connect(where, DEADLINE_S)
        client.get("ready", soon())
        stop(server)
        with pytest.raises(RendezvousError, match="no answer"):
            client.set("key", b"late")
        os.kill(server.pid, signal.SIGCONT)
        # The rank must not take the stale answer for the answer to this request.
        monkeypatch.setattr(tcp_store, "_ANSWER_S", DEADLINE_S)
        assert client.try_get("nothing") is None
        assert client.try_get("key") == b"late"


@kinds
def test_program_exits_while_a_request_hangs(kind: Kind) -> None:
    where = kind.endpoint()
    body = """
        import sys
        from tests.start import test_tcp_store as here
        from collective.errors import RendezvousError
        kind = here.AGENT if sys.argv[2] == "True" else here.RANK_0
        store = kind.connect(kind.endpoint(int(sys.argv[1])), 60.0)
        print("connected", flush=True)
        sys.stdin.readline()
        kind.module._ANSWER_S = 0.2
        try:
            store.set("key", b"")
        except RendezvousError:
            print("late", flush=True)
        """
    if kind.served:
        pytest.importorskip("torch")
    with (
        process(kind.server, where.port) as server,
        process(body, where.port, kind.served) as rank_1,
    ):
        assert rank_1.stdout is not None
        assert rank_1.stdout.readline() == "connected\n"
        stop(server)
        out, err = rank_1.communicate("\n", DEADLINE_S)
        assert (rank_1.returncode, out) == (0, "late\n"), err


def test_agent_store_without_torch_raises_with_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install .*\[torch\].*tcp://HOST:PORT"):
        AgentStore(endpoint(served=True), Deadline(30.0))


# -- ranks on simulated hosts --------------------------------------------------------------

EXCHANGE = """
    from collective.deadline import Deadline
    from collective.start.choice import choose
    from collective.start.config import load
    from collective.start.resolver import build
    config = load({})
    world = build(config, choose(config))
    end = Deadline(60.0)
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
def test_ranks_on_two_hosts_meet(launcher: str, tmp_path: Path) -> None:
    needs_hosts()
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(EXCHANGE))
    (tmp_path / "hosts").mkdir()
    with Hosts(2, tmp_path / "hosts") as hosts:
        first, second = (host.address for host in hosts.hosts)
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
    addresses = f"{first} {first} {second} {second}"
    assert lines == [f"found {rank} {launcher} hierarchical {addresses}" for rank in range(4)]


def variables(launcher: str, rank: int) -> dict[str, str]:
    """Return the variables of one of four ranks on two hosts."""
    if launcher == "slurm":
        job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "host[0-1]"}
        return {**slurm(rank, 4, rank % 2, rank // 2, "2(x2)", 2), **job}
    local = {"COLLECTIVE_LOCAL_RANK": str(rank % 2), "COLLECTIVE_LOCAL_SIZE": "2"}
    ranks = {"COLLECTIVE_RANK": str(rank), "COLLECTIVE_SIZE": "4"}
    return {**ranks, **local, "COLLECTIVE_STORE": "tcp://host0:29500"}


# -- with NumPy alone ----------------------------------------------------------------------

ALONE = """
    import importlib.util
    import os
    import sys
    import numpy as np
    assert importlib.util.find_spec("torch") is None
    import collective
    comm = collective.init(**eval(sys.argv[1]))
    total = comm.all_reduce(np.arange(4.0) + comm.rank)
    group = comm.split(comm.rank % 2)
    assert comm.membership.agree()
    comm.barrier()  # rank 0 serves the store, where the others read what was agreed
    print(comm.backend, comm.rank, total.tolist(), group.all_reduce(np.ones(1)).tolist())
    comm.close()
    assert "torch" not in sys.modules
    """


@pytest.fixture
def numpy_alone(tmp_path: Path) -> list[str]:
    """Return the arguments of a Python that has NumPy, this project, and no other package."""
    packages = tmp_path / "packages"
    packages.mkdir()
    installed = Path(np.__file__).parent
    for name in (installed.name, "numpy.libs"):
        if (installed.parent / name).exists():
            (packages / name).symlink_to(installed.parent / name)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(ALONE))
    # Without -S, the site module would add all installed packages.
    return ["-S", str(program)]


@pytest.mark.parametrize("secret", ["", "of this test, and of nobody else"], ids=["open", "secret"])
@pytest.mark.parametrize("said_by", ["arguments", "variables"])
def test_ranks_with_only_numpy_meet_at_an_address(
    numpy_alone: list[str], tmp_path: Path, secret: str, said_by: str
) -> None:
    size, address = 3, f"tcp://127.0.0.1:{free_port()}"
    base = {name: text for name, text in os.environ.items() if not name.startswith("COLLECTIVE_")}
    base["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(tmp_path / "packages")])
    if secret:
        base["COLLECTIVE_SECRET"] = secret
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(size):
            place = {"rank": rank, "size": size, "local_rank": rank, "local_size": size}
            arguments = {**place, "store": address} if said_by == "arguments" else {}
            environment = base if arguments else {
                **base, "COLLECTIVE_STORE": address,
                **{f"COLLECTIVE_{name.upper()}": str(value) for name, value in place.items()},
            }  # fmt: skip
            ranks.append(stack.enter_context(started(*numpy_alone, arguments, env=environment)))
        ended = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    for rank, (out, err) in enumerate(ended):
        alike = [2.0, 1.0, 2.0][rank]
        assert out == f"shm {rank} [3.0, 6.0, 9.0, 12.0] [{alike}]\n", err


FORKING = """
    import gc
    import os
    import sys
    from tests.start.test_tcp_store import endpoint, store

    store = store(endpoint(int(sys.argv[1])), serve=True)
    child = os.fork()
    if child == 0:
        del store
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    store.set("key", b"served")
    print(store.try_get("key").decode())
    """


def test_server_survives_end_of_forked_child() -> None:
    with process(FORKING, free_port()) as running:
        output, errors = running.communicate(timeout=DEADLINE_S)
    assert output == "served\n", errors


def joined(server: StoreServer) -> TcpStore:
    """Return the connection of a rank to a launcher's store."""
    return TcpStore(
        server.endpoint, SECRET, serve=False, spans_hosts=False, deadline=soon(),
        server="the launcher",
    )  # fmt: skip


LOST = [("boot 4026531836", 17), ("boot 4026531836", 18)]


def heard(rank: Store, processes: list[tuple[str, int]]) -> None:
    """Wait until a rank has heard that ``processes``, and no others, are lost."""
    limit = soon()
    while rank.announced() != set(processes):
        assert not limit.expired, rank.announced()
        time.sleep(0.005)


def test_announced_losses_reach_ranks_that_ask_nothing() -> None:
    with StoreServer("127.0.0.1", SECRET) as server, contextlib.closing(joined(server)) as rank:
        rank.set("key", b"value")
        assert rank.announced() == set()
        for count in (1, 2):
            server.announce(LOST[count - 1 : count])
            heard(rank, LOST[:count])
        assert rank.try_get("key") == b"value"


def test_losses_that_come_with_an_answer_are_heard() -> None:
    with StoreServer("127.0.0.1", SECRET) as server, contextlib.closing(joined(server)) as rank:
        rank.set("key", b"value")
        server.announce(LOST)
        assert rank.try_get("key") == b"value"
        assert rank.announced() == set(LOST)


def test_rank_that_comes_later_hears_earlier_losses_with_its_first_answer() -> None:
    with StoreServer("127.0.0.1", SECRET) as server:
        server.announce(LOST)
        with contextlib.closing(joined(server)) as rank:
            rank.try_get("key")
            assert rank.announced() == set(LOST)


def test_losses_pass_through_wrapped_stores() -> None:
    with StoreServer("127.0.0.1", SECRET) as server, contextlib.closing(joined(server)) as rank:
        wrapped = PrefixedStore(seal(rank, SECRET), "prefix")
        wrapped.set("key", b"value")
        server.announce(LOST)
        heard(wrapped, LOST)


def test_closed_store_has_heard_no_further_losses() -> None:
    with StoreServer("127.0.0.1", SECRET) as server:
        rank = joined(server)
        rank.set("key", b"value")
        rank.close()
        server.announce(LOST)
        assert rank.announced() == set()


def test_launchers_own_access_and_ranks_use_the_same_values() -> None:
    with StoreServer("127.0.0.1", SECRET) as server, contextlib.closing(joined(server)) as rank:
        own = server.store()
        own.set("key", b"value")
        assert rank.try_get("key") == b"value"
        assert rank.put_if_absent("first", b"rank") == own.put_if_absent("first", b"own") == b"rank"
        own.delete("key")
        assert rank.try_get("key") is None


def test_launchers_store_ends_though_its_thread_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    released, run = threading.Event(), tcp_store.Server.run
    monkeypatch.setattr(tcp_store.Server, "run", lambda self: (released.wait(), run(self)))
    monkeypatch.setattr(tcp_store, "_END_S", 0.05)
    with StoreServer("127.0.0.1", SECRET) as server:
        pass
    released.set()
    server._thread.join()
