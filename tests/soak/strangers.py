"""Strangers at every port of a running job: do they slow it down, stay, or get in?

Two ranks on two hosts connect again and again, make calls and groups, let a third process join, and
close. Meanwhile strangers connect to all ports at which the ranks may listen: from the host of
rank 0 and from a host of their own, both as another user if this process is root's. They close
their connections at once, reset them, hold them, or send garbage, single bytes, half of a proof,
the proof of another connection's handshake, or a correct proof of another secret. In turns with
that, as a control, they do the same to ports of their own, so that only the job's reactions make a
difference.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import os
import random
import resource
import socket
import statistics
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import collective
from collective.control.link import Challenge, Link
from collective.deadline import Deadline
from collective.errors import ExcludedError
from tests.support.network_hosts import Hosts, Job

__all__ = ["KINDS", "LISTENERS", "Strangers", "strangers"]

KINDS = ("closed", "reset", "held", "garbage", "slow", "half", "recorded", "mistaken")
#: Modules whose sockets the strangers reach, and what these listen for.
LISTENERS = {"tcp_store": "store", "hub": "hub", "standby": "standby", "connecting": "tcp"}
# Connections that the strangers of one host hold at once.
_HELD = 400
# A secret that is not the job's, and how long a stranger waits for the answer to its proof.
_OTHER_KEY, _ANSWER_S = b"k" * 32, 0.3
_PATIENCE_S = 1800.0
# The strangers go to the job and to themselves in turns of this length.
_TURN_S = 4.0
# How long the threads of a closed communicator may take to end on a busy machine.
_CLOSING_S = 10.0
_NOBODY = 65534
_STORE, _PORTS = 29700, range(29710, 29718)
# Hosts: two of ranks, one of the process that joins them, and one of strangers.
_JOINER, _STRANGER = 2, 3


@dataclass
class Strangers:
    """Result of :func:`strangers`.

    Attributes:
        made: number of connections to the job, by what the stranger did.
        listeners: number of connections to the job, by what listened there.
        seconds: durations of each kind of call, by kind: while the strangers were elsewhere, and
            while they were at the job's ports.
        memory: bytes by which the processes of the job have grown, at most, since the strangers
            came.
        problems: a line for each descriptor that was left, each wrong result, and each stranger
            that got in.
    """

    made: Counter[str]
    listeners: Counter[str]
    seconds: dict[str, tuple[list[float], list[float]]]
    memory: int
    problems: list[str]

    def medians(self) -> Iterator[tuple[str, float, float]]:
        """Yield each kind of call with its median durations without and with strangers.

        A short run has no call of some kinds.
        """
        for kind, (quiet, attacked) in self.seconds.items():
            if quiet and attacked:
                yield kind, statistics.median(quiet), statistics.median(attacked)


def strangers(directory: Path, count: int) -> Strangers:
    """Run a job in ``directory``, to whose ports strangers make connections.

    Args:
        directory: empty directory for the files of the hosts.
        count: number of connections.
    """
    module = [sys.executable, "-m", "tests.soak.strangers"]
    with Hosts(4, directory) as hosts:
        job = hosts.start(
            [(host, [*module, "job", str(directory / "stop")], _place(hosts, host))
             for host in (0, 1, _JOINER)]
        )  # fmt: skip
        job.until("ready", timeout=_PATIENCE_S)
        addresses = [host.address for host in hosts.hosts[:_STRANGER]]
        attack = hosts.start(
            [(host, [*module, "attack", str(count // 2), *addresses], {})
             for host in (0, _STRANGER)]
        )  # fmt: skip
        try:
            attack.wait(_PATIENCE_S)
        finally:
            (directory / "stop").touch()
        job.succeed(_PATIENCE_S)
        return _result(job, attack)


def _place(hosts: Hosts, host: int) -> dict[str, str]:
    variables = {
        "COLLECTIVE_BACKEND": "tcp",
        "COLLECTIVE_SECRET": "of this test, and of nobody else",
        "COLLECTIVE_STORE": f"tcp://{hosts.hosts[0].address}:{_STORE}",
        "COLLECTIVE_PORT": f"{_PORTS[0]}-{_PORTS[-1]}",
        "COLLECTIVE_TIMEOUT": str(_PATIENCE_S),
    }
    if host == _JOINER:
        return {**variables, "COLLECTIVE_JOIN": "on"}
    own = {"RANK": host, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    return {**variables, **{f"COLLECTIVE_{key}": str(value) for key, value in own.items()}}


def _result(job: Job, attack: Job) -> Strangers:
    reports = [ast.literal_eval(line) for line in _said(job)]
    problems = [problem for report in reports for problem in report["problems"]]
    problems += [line for line in str(attack).splitlines() if line and "SAID" not in line]
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    for kind, since, duration in reports[0]["durations"]:
        both = seconds.setdefault(kind, ([], []))
        if _attacked(since) == _attacked(since + duration) or duration > _TURN_S:
            both[_attacked(since) or duration > _TURN_S].append(duration)
    bound: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for since, role, *place in sorted(bind for report in reports for bind in report["bound"]):
        bound.setdefault(tuple(place), []).append((since, role))
    made, listeners = Counter[str](), Counter[str]()
    for line in _said(attack):
        for since, kind, *place in ast.literal_eval(line):
            made[kind] += 1
            roles = bound.get(tuple(place), [])
            latest = bisect.bisect(roles, (since, ""))
            listeners[roles[latest - 1][1] if latest else "unknown"] += 1
    return Strangers(
        made, listeners, seconds, max(report["memory"] for report in reports), problems
    )


def _said(job: Job) -> list[str]:
    return [line[5:] for line in str(job).splitlines() if line.startswith("SAID ")]


def _attacked(moment: float) -> bool:
    """Return whether the strangers are at the job's ports at this time of the monotonic clock."""
    return int(moment / _TURN_S) % 2 == 1


# -- the job --------------------------------------------------------------------------------------


def _job(stop: Path) -> None:
    """Run one process of the job until ``stop`` exists; print what :func:`_result` reads."""
    durations: list[tuple[str, float, float]] = []
    problems: list[str] = []
    bound: list[tuple[float, str, str, int]] = []
    sys.addaudithook(lambda event, arguments: _note_bind(bound, event, arguments))
    before, memory = Counter[str](), [0]
    for number in range(1 << 30):
        going = _round(stop, durations, problems)
        if number == 1:
            time.sleep(_CLOSING_S / 10)  # the peers close their ends
            before = _descriptors()
            print("ready", flush=True)
        if number > 0:
            memory.append(_memory())
        if not going:
            break
    end = time.monotonic() + _CLOSING_S
    while (left := _descriptors() - before) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        problems.append(f"rank {_rank()}: descriptors are left: {sorted(left.elements())}")
    report = {"durations": durations, "problems": problems, "bound": bound,
              "memory": max(memory[1:]) - memory[1]}  # fmt: skip
    print("SAID", report, flush=True)


def _note_bind(bound: list[tuple[float, str, str, int]], event: str, arguments: Any) -> None:
    if event == "socket.bind" and isinstance(arguments[1], tuple):
        frame: Any = sys._getframe()
        while frame is not None:
            module = frame.f_globals["__name__"].rpartition(".")[2]
            if module in LISTENERS:
                bound.append((time.monotonic(), LISTENERS[module], *arguments[1][:2]))
                return
            frame = frame.f_back


def _round(stop: Path, durations: list[tuple[str, float, float]], problems: list[str]) -> bool:
    """Connect, make calls, grow, make calls and close; return whether to go on."""

    @contextlib.contextmanager
    def timed(kind: str) -> Iterator[None]:
        since = time.monotonic()
        yield
        durations.append((kind, since, time.monotonic() - since))

    joins = "COLLECTIVE_JOIN" in os.environ
    with timed("join" if joins else "init"):
        comm = _joined() if joins else collective.init()
    if not joins:
        for _ in range(5):
            _calls(comm, timed, problems)
        with timed("wait for a joiner"):
            while not comm.all_reduce(np.array([comm.membership.waiting()]), op="min")[0]:
                time.sleep(0.01)
        with timed("grow"):
            comm = comm.grow()
    if comm.size != 3:
        problems.append(f"rank {comm.rank}: {comm.size} ranks")
    _calls(comm, timed, problems)
    going: bool = comm.broadcast_object(not stop.exists())
    comm.close()
    return going


def _joined() -> Any:
    while True:
        # Between two rounds the ranks have ended.
        with contextlib.suppress(ExcludedError):
            return collective.init()
        time.sleep(0.01)


def _calls(comm: Any, timed: Any, problems: list[str]) -> None:
    for kind, length, turns in (("short", 1, 50), ("long", 1 << 17, 10)):
        x = np.full(length, comm.rank + 1.0)
        for _ in range(turns):
            with timed(f"{kind}, {comm.size} ranks"):
                total = comm.all_reduce(x)
            if not (total == comm.size * (comm.size + 1) / 2).all():
                problems.append(f"rank {comm.rank}: a wrong sum over {comm.size} ranks")
    with timed(f"group, {comm.size} ranks"):
        group = comm.dup()
    if group.all_reduce(np.ones(1))[0] != comm.size:
        problems.append(f"rank {comm.rank}: a wrong sum of a group")
    group.close()


def _descriptors() -> Counter[str]:
    """Return what this process has open, and how often."""
    kinds = Counter[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            kinds[os.readlink(f"/proc/self/fd/{descriptor}").partition("[")[0]] += 1
    return kinds


def _rank() -> str:
    return os.environ.get("COLLECTIVE_RANK", "that joins")


def _memory() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# -- the strangers --------------------------------------------------------------------------------


def _recorded() -> bytes:
    """Return what the connecting side sends in a handshake of another job."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(ours)
        proving = threading.Thread(target=_prove, args=(link, 5.0))
        proving.start()
        theirs.sendall(Challenge().greeting)
        proof = theirs.recv(1000)
        theirs.shutdown(socket.SHUT_RDWR)
        proving.join()
        return proof


def _prove(link: Link, seconds: float) -> None:
    with contextlib.suppress(EOFError, OSError):
        link.prove(_OTHER_KEY, Deadline(seconds))
        print("a stranger got in with another secret", flush=True)


def _control() -> tuple[str, int]:
    """Listen for a control: accept each connection, and close it some time later."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    accepted: deque[socket.socket] = deque()

    def accept() -> None:
        while True:
            accepted.append(listening.accept()[0])
            if len(accepted) > 100:
                accepted.popleft().close()

    threading.Thread(target=accept, daemon=True).start()
    address: tuple[str, int] = listening.getsockname()
    return address


def _attack(count: int, hosts: list[str]) -> list[tuple[float, str, str, int]]:
    """Make connections to all ports of the hosts; return time, kind and place of each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    socket.getaddrinfo("127.0.0.1", 1)  # another user may not be able to import what this needs
    if os.geteuid() == 0:
        os.setgroups([])
        os.setuid(_NOBODY)
    own, places = _control(), [(host, port) for host in hosts for port in (_STORE, *_PORTS)]
    dice, recorded = random.Random(7), _recorded()
    made: list[tuple[float, str, str, int]] = []
    held: deque[socket.socket] = deque()
    end = time.monotonic() + _PATIENCE_S / 2
    while len(made) < count and time.monotonic() < end:
        attacked = _attacked(time.monotonic())
        place = dice.choice(places) if attacked else own
        kind = dice.choice(KINDS)
        with contextlib.suppress(OSError):
            sock = socket.create_connection(place, 0.5)
            if attacked:
                made.append((time.monotonic(), kind, *place))
            _talk(sock, kind, recorded, dice)
            if kind in ("closed", "reset"):
                sock.close()
            else:
                held.append(sock)
        while len(held) > _HELD:
            _drop(held.popleft())
        if held:  # a slow stranger sends a byte now and then
            with contextlib.suppress(OSError):
                dice.choice(held).send(b"c")
    return made


def _talk(sock: socket.socket, kind: str, recorded: bytes, dice: random.Random) -> None:
    if kind == "mistaken":
        _prove(Link(sock), _ANSWER_S)
    sock.setblocking(False)
    if kind == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif kind in ("half", "recorded"):
        sock.send(recorded if kind == "recorded" else recorded[: len(recorded) // 2])
    elif kind == "garbage":
        sock.send(dice.randbytes(dice.choice((3, 64, 900))))


def _drop(sock: socket.socket) -> None:
    """Close a connection, on which only the greeting and a refusal may have come."""
    answer = b""
    with sock, contextlib.suppress(OSError):
        while part := sock.recv(1000):
            answer += part
    if answer[len(Challenge().greeting) :] not in (b"", Challenge.refusal):
        print(f"a stranger got in: {answer!r}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "job":
        _job(Path(sys.argv[2]))
    else:
        print("SAID", _attack(int(sys.argv[2]), sys.argv[3:]), flush=True)
