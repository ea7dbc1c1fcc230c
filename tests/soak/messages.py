"""Mutated messages at everything that listens or decodes: what gets out that must not?

What may come of one is an error of ours, or the end of the connection that it came by. Anything
else is told: another exception, in whatever thread; a listener that serves nobody any more; a
decoder that takes long.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.backends.peers.hub import Hub
from collective.backends.peers.link import Link, Message
from collective.backends.peers.monitor import Monitor
from collective.backends.shm import ShmBackend
from collective.backends.shm.ring import Ring
from collective.communicator import Communicator, objects
from collective.contract.backend import COLLECTIVE_TAG
from collective.contract.secret import Secret
from collective.deadline import Deadline
from collective.start.file_store import FileStore
from collective.start.sealed_store import SealedStore
from collective.testing import RankPool
from tests.backends.peers.test_monitor import KEY, world
from tests.backends.peers.test_strangers import ENTRY, LOOPBACK, answer_to, complete, join, knock
from tests.start.test_stores import asks, free_address, holds_its_value
from tests.start.test_stores import store as tcp_store

from .findings import EDGES, Findings, framed, mutated, watched

__all__ = ["TARGETS"]

# Longer than anything here takes on the busiest machine.
_FAR_S = 60.0


# -- the hub -------------------------------------------------------------------------------------


def _strangers(address: str | None, dice: random.Random, mutations: int) -> Findings:
    """Whoever knows no key, with what almost proves that he does."""
    found = Findings()
    with watched(found):
        hub = Hub(2, address, Deadline(_FAR_S * 1000), KEY)
        rank = join(hub.address, 0, 2)
        while found.made < mutations:
            with contextlib.suppress(OSError), knock(hub.address) as sock:
                proof = answer_to(sock.recv(1000)) if dice.random() < 0.1 else bytes(64)
                other = mutated(proof, dice)
                sock.sendall(b"GET / HTTP/1.1\r\n" if other == proof else other)
            found.made += 1
        for link in (rank, join(hub.address, 1, 2)):
            if link.expect(Deadline(_FAR_S))["kind"] != "complete":
                found.problems.append("the ranks do not meet any more")
            link.close()
    return found


_TO_HUB = (
    {"kind": "bye"},
    {"kind": "left", "channel": "world", "members": [0, 1], "finished": 3},
    {"kind": "heard", "channel": "world", "members": [1]},
    {"kind": "stall", "channel": "world", "members": [0, 1], "asks": [1]},
    {"kind": "report", "channel": "world", "entries": [ENTRY], "finished": 0, "started": 1},
    {"kind": "failure", "channel": "world", "members": [0, 1],
     "failure": {"kind": "lost", "rank": 0, "text": "x", "ranks": [1]}},
)  # fmt: skip


def _liars(dice: random.Random, mutations: int) -> Findings:
    """Ranks that say to the hub what no rank says."""
    found, size = Findings(), 60
    with watched(found):
        while found.made < mutations:
            hub = Hub(size, None, Deadline(_FAR_S), KEY)
            honest, *others = complete(hub.address, size)
            for link in others:
                with contextlib.suppress(OSError):
                    for _ in range(5):
                        found.made += 1
                        link.write(framed(dice.choice(_TO_HUB), dice))
            # It is still served: asked, the hub asks in turn.
            honest.send({"kind": "stall", "channel": "here", "members": [0], "asks": None})
            message: Message = {}
            while message.get("channel") != "here":
                message = honest.expect(Deadline(_FAR_S))
                found.ends[message["kind"]] += 1
            for link in (honest, *others):
                link.close()
    return found


# -- what a rank hears and reads ---------------------------------------------------------------

_FROM_HUB = (
    {"kind": "lost", "rank": 1, "why": "x"},
    {"kind": "report", "channel": "world"},
    {"kind": "heard", "channel": "world", "rank": 1},
    {"kind": "left", "channel": "world", "members": [0, 1], "finished": 3, "rank": 1},
    {"kind": "late", "channel": "world", "late": {"1": {"entries": [ENTRY], "finished": 0,
                                                       "started": 1}}},
    {"kind": "failure", "channel": "world", "members": [0, 1], "rank": 1,
     "failure": {"kind": "lost", "rank": 0, "text": "x", "ranks": [1]}},
)  # fmt: skip


def _monitors(dice: random.Random, mutations: int) -> Findings:
    """A hub that says to a rank what no hub says."""
    found = Findings()
    with watched(found), tempfile.TemporaryDirectory() as directory:
        store = FileStore(directory)
        while found.made < mutations:
            ours, theirs = socket.socketpair()
            monitor = Monitor(world(0, 2, store), Link(ours), ["here", "here"], Secret(KEY))
            data = framed(dice.choice(_FROM_HUB), dice)
            with theirs:
                theirs.sendall(data)
                theirs.shutdown(socket.SHUT_WR)
                # It reads to the end, and then takes the hub for gone.
                theirs.settimeout(_FAR_S)
                with contextlib.suppress(OSError):
                    while theirs.recv(1 << 16):
                        pass
            found.hold(data, lambda: monitor.channel.check("all_reduce"))  # noqa: B023
            monitor.channel.close()
    return found


def _published(dice: random.Random, mutations: int) -> Findings:
    """A store that holds what rank 0 does not publish."""
    found = Findings()
    meeting = {"address": "collective-none", "key": "00" * 32}
    with watched(found), tempfile.TemporaryDirectory() as directory:
        store = FileStore(directory)
        with contextlib.ExitStack() as files:
            large = files.enter_context(open(f"{directory}/large", "wb"))
            large.truncate(1 << 20)
            path = f"/proc/self/fd/{large.fileno()}".encode()
            for number in range(mutations):
                if number % 2:
                    data = framed(meeting, dice)[4:]
                    store.set("monitor", data)
                    found.hold(data, lambda: Monitor.start(world(1, 2, store), Deadline(0.002)))
                else:
                    paths = (path, b"/dev/null", b"/", large.name.encode(), directory.encode())
                    data = dice.choice(paths)
                    data = data if dice.random() < 0.1 else mutated(data, dice)
                    store.set("shm-test", data)
                    found.hold(
                        data,
                        lambda: ShmBackend.connect(world(1, 2, store), Deadline(0.002)).close(),
                    )
    return found


# -- the store that rank 0 serves, and sealed ones -------------------------------------------------

_QUESTIONS = (
    {"kind": "set", "key": "other", "value": "00ff", "number": 1},
    {"kind": "get", "key": "key", "number": 2},
    {"kind": "delete", "key": "other", "number": 3},
    {"kind": "put", "key": "other", "value": "00ff", "number": 4},
)


def _tcp_store(dice: random.Random, mutations: int) -> Findings:
    """Whoever reaches the store that rank 0 serves, with a proof that is wrong, or a question."""
    found = Findings()
    where = free_address()
    with watched(found), contextlib.closing(tcp_store(where, serve=True)) as first:
        first.set("key", b"value")
        while found.made < mutations:
            with contextlib.suppress(OSError):
                if dice.random() < 0.5:
                    with knock(f"{where.host} {where.port}") as sock:
                        found.made += 1
                        sock.sendall(mutated(bytes(64), dice))
                    continue
                with contextlib.closing(asks(where)) as link:
                    for _ in range(5):
                        found.made += 1
                        question = dice.choice(_QUESTIONS)
                        # One may well delete the key that is looked for.
                        link.write(framed({**question, "key": "other"}, dice))
        first.set("key", b"value")
        if not holds_its_value(where):
            found.problems.append("the store has lost a value")
    return found


def _sealed_store(dice: random.Random, mutations: int) -> Findings:
    """A store whose values somebody has changed who does not know the secret."""
    found = Findings()
    with tempfile.TemporaryDirectory() as directory:
        inner = FileStore(directory)
        store = SealedStore(inner, Secret(KEY))
        store.set("key", b"value" * 20)
        (name,) = os.listdir(directory)
        sealed = inner.try_get(name)
        assert sealed is not None
        for _ in range(mutations):
            data = mutated(sealed, dice)
            inner.set(name, data)
            found.hold(data, lambda: store.try_get("key"))
            if data != sealed and found.ends["accepted"]:
                found.problems.append(f"taken for the value: {data!r}")
                break
            found.ends.pop("accepted", None)
    return found


# -- objects --------------------------------------------------------------------------------------

_OBJECTS: tuple[Any, ...] = (
    None,
    {"a": [1, 2.5, "é", None, True], "b": (b"bytes", 1 << 2000, {1, 2}, frozenset({"x"}), 2j)},
    [np.arange(12.0).reshape(3, 4), np.float32(2), np.zeros((0, 4), "int8"), np.array(True)],
    {"deep": [[[[[[[[{"x": np.ones(3, "complex64")}]]]]]]]]},
    "text" * 50,
)


def _objects(dice: random.Random, mutations: int) -> Findings:
    """Bytes that are almost those of an object."""
    found = Findings()
    encoded = [objects.encode(value).tobytes() for value in _OBJECTS]
    while found.made < mutations:
        data = mutated(dice.choice(encoded), dice)
        found.hold(data, lambda: objects.decode(np.frombuffer(data, np.uint8)))  # noqa: B023
    return found


# -- the rings of shm -----------------------------------------------------------------------------


def _rings(dice: random.Random, mutations: int) -> Findings:
    """A peer that writes to its ring what no sender writes."""
    found = Findings()
    with RankPool(2, "shm", timeout=_FAR_S * 1000) as pool:
        while found.made < mutations:
            count = min(2000, mutations - found.made)
            outcome = pool.run(damaged_rings, dice.randrange(1 << 30), count)[0]
            found.made += count
            found.ends.update(outcome[0])
            found.problems += outcome[1]
    return found


def damaged_rings(comm: Communicator, seed: int, count: int) -> tuple[dict[str, int], list[str]]:
    """Receive, on rank 0, what rank 1 puts into a ring; a new communicator each time."""
    dice = random.Random(seed)  # the ranks draw alike
    found = Findings()
    for _ in range(count):
        group = comm.dup()
        header, data = _header(dice), dice.randbytes(dice.choice((0, 8, 1024, 4096)))
        into = np.empty(128) if dice.random() < 0.5 else None
        head = dice.choice((dice.getrandbits(63), *EDGES[:-1])) if dice.random() < 0.2 else None
        if comm.rank == 1:
            backend: Any = group.transport
            ring = Ring(backend._control, 1, 0)
            words = np.array(header, np.int64).view(np.uint8)
            # All of it is in the ring at once, and nothing has to wait.
            assert not [*ring.write(np.concatenate([words, np.frombuffer(data, np.uint8)]))]
            if head is not None:
                ring._counts[0] = head
        comm.barrier()
        if comm.rank == 0:
            found.hold(
                (header, data[:16]),
                lambda: group.recv(into, 1, tag=3, timeout=0.002),  # noqa: B023
            )
        comm.barrier()
        group.leave()
    return dict(found.ends), found.problems


def _header(dice: random.Random) -> list[int]:
    """Return length, tag and address."""

    def number(*usual: int) -> int:
        edges = (*EDGES[:-1], dice.getrandbits(63), -1, -(1 << 63))
        return dice.choice(usual) if dice.random() < 0.6 else dice.choice(edges)

    tags = (3, COLLECTIVE_TAG)
    return [number(8, 1024), number(*tags), number(0, 4096)]


#: What is given mutated messages: a name, and what gives as many as asked.
TARGETS: dict[str, Callable[[random.Random, int], Findings]] = {
    "hub, strangers over TCP": lambda dice, count: _strangers(LOOPBACK, dice, count),
    "hub, strangers on the host": lambda dice, count: _strangers(None, dice, count),
    "hub, ranks": _liars,
    "monitor": _monitors,
    "published": _published,
    "tcp store": _tcp_store,
    "sealed store": _sealed_store,
    "objects": _objects,
    "rings": _rings,
}
