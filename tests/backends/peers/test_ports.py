"""Ports at which ranks listen if ``COLLECTIVE_PORT`` bounds them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collective.backends.peers.monitor import Monitor
from collective.control.link import listen
from collective.control.ports import Ports
from collective.deadline import Deadline
from collective.errors import ConfigError, RendezvousError
from collective.platform import port_holder
from collective.start.stores import FileStore
from tests.support.interpreter import run_python
from tests.support.network_hosts import free_port

from .test_monitor import world

LOOPBACK = "127.0.0.1"
NOBODY = 65534


@pytest.fixture
def free() -> Ports:
    """Return three ports in a row that nobody uses."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            for port in range(first, first + 3):
                opened.enter_context(socket.create_server((LOOPBACK, port)))
            return Ports(first, first + 2)


@contextlib.contextmanager
def listener(ports: Ports, host: str = LOOPBACK) -> Iterator[tuple[socket.socket, int]]:
    """Yield a socket that listens at one of ``ports``, and its port."""
    sock, address = listen(host, ports)
    with sock:
        yield sock, int(address.partition(" ")[2])


def test_listeners_of_a_host_take_consecutive_ports(free: Ports) -> None:
    with listener(free) as (_, first), listener(free) as (_, second), listener(free) as (_, third):
        assert [first, second, third] == [free.first, free.first + 1, free.last]


def test_ports_bound_listeners_over_ipv6(free: Ports) -> None:
    if not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("the system has no IPv6")
    with listener(free, "::1") as (sock, port):
        assert sock.getsockname()[:2] == ("::1", port)
        assert port in range(free.first, free.last + 1)


def test_port_is_free_again_while_connections_of_last_listener_stay(free: Ports) -> None:
    with listener(free) as (sock, port), socket.create_connection((LOOPBACK, port)) as connection:
        accepted, _ = sock.accept()
        sock.close()
        with listener(free) as (_, again):
            assert again == port
        # The side that ends a connection keeps its port in TIME_WAIT.
        accepted.close()
        assert connection.recv(1) == b""
    with listener(free) as (_, again):
        assert again == port


def test_port_in_use_is_named_with_its_holder(free: Ports) -> None:
    port = free.first
    with socket.create_server((LOOPBACK, port)), pytest.raises(ConfigError) as caught:
        listen(LOOPBACK, Ports(port, port))
    text = str(caught.value)
    assert f"COLLECTIVE_PORT={port} " in text
    assert f"port {port} is in use by process {os.getpid()} ({sys.orig_argv[0]}"[:60] in text
    assert "Choose a longer range" in text


def test_range_that_is_too_small_names_some_holders(free: Ports) -> None:
    with contextlib.ExitStack() as opened:
        for port in range(free.first, free.last + 1):
            opened.enter_context(socket.create_server((LOOPBACK, port)))
        with pytest.raises(ConfigError) as caught:
            listen(LOOPBACK, free)
    assert len(re.findall("is in use by process", str(caught.value))) == 3


def as_nobody(program: str, server: socket.socket | None = None) -> str:
    """Return the value of an expression for another user, in a forked child without ``server``."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        text = "it ended early"
        try:
            if server is not None:
                server.close()
            os.setgroups([])
            os.setuid(NOBODY)
            text = str(eval(program))
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_port_that_is_not_permitted_is_named_with_remedy() -> None:
    least = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if least < 3:
        pytest.skip("this system permits every port to every user")
    text = as_nobody("listen('127.0.0.1', Ports(1, 2))")
    assert text.startswith("ConfigError: port: no port of COLLECTIVE_PORT=1-2 is free"), text
    assert f"port 1 is not permitted to user {NOBODY}" in text
    assert "Choose ports from 1024 on" in text


def test_holder_of_another_user_is_named_by_its_number(free: Ports) -> None:
    with socket.create_server((LOOPBACK, free.first)) as server:
        text = as_nobody(f"port_holder({free.first})", server)
    assert text == "a process of user 0"
    assert port_holder(free.first) == ""


def test_address_of_another_host_is_no_matter_of_ports(free: Ports) -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listen("192.0.2.1", free)


def test_ranks_with_different_ports_are_refused(tmp_path: Path, free: Ports) -> None:
    store = FileStore(tmp_path)

    def meet(rank: int) -> str:
        place = {"local_rank": 0, "local_size": 1, "address": LOOPBACK}
        here = world(rank, 2, store, ports=free if rank else None, **place)
        with pytest.raises(RendezvousError) as caught:
            Monitor.start(here, Deadline(60.0))
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        errors = list(pool.map(meet, range(2)))
    for error in errors:
        assert "any ports (COLLECTIVE_PORT is not set)" in error
        assert f"rank 1 on here at COLLECTIVE_PORT={free}" in error


PROGRAM = """
import sys, time
import numpy as np
import collective
from collective.errors import CollectiveError

since = time.monotonic()
try:
    with collective.init() as comm:
        if sys.argv[1] == "group":
            import socket
            if comm.rank == 0:
                taken = socket.create_server(("127.0.0.1", int(sys.argv[2])))
            comm.barrier()
            try:
                comm.dup()
            except CollectiveError as error:
                print(f"SAID {type(error).__name__}: {error}", flush=True)
                assert time.monotonic() - since < 20
                try:
                    comm.all_reduce(np.ones(1))
                except CollectiveError as error:
                    print(f"SAID {type(error).__name__}: {error}", flush=True)
            time.sleep(1)
        print("connected", flush=True)
except CollectiveError as error:
    print(f"SAID {type(error).__name__}: {error}", flush=True)
    time.sleep(2)  # until the other ranks have the error
    assert time.monotonic() - since < 20
"""


def said(tmp_path: Path, size: int, ports: Ports, *arguments: object) -> list[str]:
    """Run a program with ranks of this host over tcp; return what each rank printed."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_python(
        "-m", "collective", "run", "-n", str(size), "program.py", *arguments,
        cwd=tmp_path, COLLECTIVE_BACKEND="tcp", COLLECTIVE_PORT=str(ports),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "SAID" in line or "connected" in line]


def test_flat_ranks_of_a_host_connect_with_a_port_each(tmp_path: Path, free: Ports) -> None:
    lines = said(tmp_path, 3, free, "init")
    assert sorted(lines) == [f"[{rank}] connected" for rank in range(3)]


def test_too_few_ports_for_the_ranks_of_a_host_reach_every_rank(
    tmp_path: Path, free: Ports
) -> None:
    lines = said(tmp_path, 3, Ports(free.first, free.first), "init")
    assert len(lines) == 3, lines
    for line in lines:
        assert f"COLLECTIVE_PORT={free.first} is free" in line
    assert any("is in use by process" in line for line in lines)


def test_too_few_ports_where_no_launcher_serves_the_store_reach_every_rank(
    tmp_path: Path, free: Ports
) -> None:
    """The hub of rank 0 has the only port, and no rank gets one for its standby."""
    (tmp_path / "program.py").write_text(PROGRAM)
    met = {"COLLECTIVE_BACKEND": "tcp", "COLLECTIVE_STORE": f"tcp://127.0.0.1:{free.last}",
           "COLLECTIVE_PORT": str(free.first), "COLLECTIVE_SIZE": "3",
           "COLLECTIVE_LOCAL_RANK": "0", "COLLECTIVE_LOCAL_SIZE": "1",
           "COLLECTIVE_INTERFACE": "lo", "COLLECTIVE_START_TIMEOUT": "15"}  # fmt: skip

    def meet(rank: str) -> str:
        return run_python("program.py", "init", cwd=tmp_path, **met, COLLECTIVE_RANK=rank).stdout

    with ThreadPoolExecutor(3) as pool:
        for text in pool.map(meet, "012"):
            assert re.search(r"SAID RendezvousError: rendezvous: rank \d: port: no port", text)
            assert f"port {free.first} is in use by process" in text


def test_taken_port_of_a_group_reaches_every_rank_and_breaks_the_communicator(
    tmp_path: Path, free: Ports
) -> None:
    lines = said(tmp_path, 3, Ports(free.first, free.first + 1), "group", free.first)
    errors = [line for line in lines if "SAID" in line]
    assert len(errors) == 6, lines
    assert len(lines) == 9, lines
    for line in errors:
        assert f"COLLECTIVE_PORT={Ports(free.first, free.first + 1)} is free" in line
