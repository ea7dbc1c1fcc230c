"""MASTER_PORT of `collective run`: no other program gets the port before rank 0 serves there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.support.launches import Launches, launched, launches

__all__ = ["launches"]  # the fixture

#: A launcher in which another program takes each TCP port at the moment when a socket gives it
#: back. No program that looks for free ports can be faster.
LAUNCHER = """
import socket, sys
from collective.tools.cli.main import main

close = socket.socket.close
loot = []

def closing(self):
    inet = self.fileno() >= 0 and self.family in (socket.AF_INET, socket.AF_INET6)
    port = self.getsockname()[1] if inet else 0
    close(self)
    if port:
        loot.append(socket.create_server(("", port)))
        print(f"taken: {port}", file=sys.stderr, flush=True)

socket.socket.close = closing
sys.exit(main(sys.argv[1:]))
"""

UNMODIFIED = """
import os, sys
import torch, torch.distributed as dist

print(f"wanted: {os.environ['MASTER_PORT']}", file=sys.stderr, flush=True)
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
print(f"sum {x[0]:g}")
dist.destroy_process_group()
"""

#: Functions for ranks: a thief that binds the port, and a server as torch's.
PORT = """
import errno, socket
port = int(os.environ["MASTER_PORT"])

def await_file(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def steal():
    for _ in range(100):
        for address in "127.0.0.1", "127.0.0.2", "0.0.0.0":
            with socket.socket() as thief:
                code = 0
                try:
                    thief.bind((address, port))
                except OSError as error:
                    code = error.errno
                if code != errno.EADDRINUSE:
                    return f"stolen at {address}, code {code}"
    return "held"

def serve():
    with socket.create_server(("", port)) as server:
        arrive()
        server.accept()[0].close()

def call():
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        pass
"""


@pytest.fixture
def warm_launches(tmp_path: Path) -> Iterator[Launches]:
    """Yield launches whose processes start with PyTorch already imported."""
    with launched(tmp_path, warm.python()) as launches:
        yield launches


def test_thief_of_freed_ports_does_not_get_port_of_torch(warm_launches: Launches) -> None:
    pytest.importorskip("torch")
    (warm_launches.directory / "launcher.py").write_text(LAUNCHER)
    (warm_launches.directory / "unmodified.py").write_text(UNMODIFIED)
    done = warm_launches.execute("launcher.py", "run", "-n", "2", "unmodified.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2", "[1] sum 2"]
    # The thief is at work: it gets the port once the run has ended.
    port = next(line for line in done.stderr.splitlines() if "wanted: " in line).split()[-1]
    assert done.stderr.splitlines()[-1] == f"taken: {port}", done.stderr


def test_port_is_held_until_rank_0_listens(launches: Launches) -> None:
    script = launches.script(
        PORT
        + """
if rank == 1:
    print(steal())
    open("tried", "w").close()
    await_file("arrived-0")
    call()
else:
    await_file("tried")
    serve()
"""
    )
    done = launches.run("-n", "2", script)
    assert (done.stdout, done.returncode) == ("[1] held\n", 0), done.stderr


def test_port_of_restart_is_held(launches: Launches) -> None:
    script = launches.script(
        PORT
        + """
print(os.environ["TORCHELASTIC_RESTART_COUNT"], steal())
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""
    )
    done = launches.run("-n", "1", "--max-restarts", "1", script)
    assert done.stdout == "[0] 0 held\n[0] 1 held\n", done.stderr


def test_port_is_held_until_replacement_of_rank_0_listens(launches: Launches) -> None:
    script = launches.script(
        PORT
        + """
if rank == 0:
    joins = "COLLECTIVE_JOIN" in os.environ
    if joins:
        await_file("tried")
    serve()
    if not joins:
        os.kill(os.getpid(), signal.SIGKILL)
else:
    await_file("arrived-0")
    first = open("arrived-0").read()
    call()
    while os.path.exists(f"/proc/{first}"):
        time.sleep(0.01)
    print(steal())
    open("tried", "w").close()
    while open("arrived-0").read() == first:
        time.sleep(0.01)
    call()
"""
    )
    done = launches.run("-n", "2", "--replace", "--min-ranks", "1", script)
    assert (done.stdout, done.returncode) == ("[1] held\n", 0), done.stderr
