"""Mutated messages for every listener and decoder: does any cause a forbidden effect?

A message may cause a ``CollectiveError``, or the end of its connection. Every other effect is a
problem: another exception in any thread, a listener that stops serving, or a slow decoder.
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

from collective.backends.peers.monitor import Monitor
from collective.backends.shm import ShmBackend
from collective.backends.shm.ring import Ring
from collective.communicator import Communicator, objects
from collective.contract.backend import COLLECTIVE_TAG
from collective.control.link import Link, Message
from collective.control.secret import Secret
from collective.deadline import Deadline
from collective.start.stores import FileStore, SealedStore
from collective.testing import RankPool
from tests.backends.peers.test_monitor import KEY, hub_of, world
from tests.backends.peers.test_strangers import ENTRY, LOOPBACK, answer_to, complete, join, knock
from tests.start.test_stores import asks, free_address, holds_its_value
from tests.start.test_stores import store as tcp_store

from .findings import EDGES, Findings, framed, mutated, watched

__all__ = ["TARGETS"]

# No step here takes longer, even on the busiest machine.
_FAR_S = 60.0


# -- the hub -------------------------------------------------------------------------------------


def _strangers(address: str | None, dice: random.Random, mutations: int) -> Findings:
    """Connect to the hub without its key, and send almost correct proofs."""
    findings = Findings()
    with watched(findings):
        hub = hub_of(2, address, _FAR_S * 1000)
        rank = join(hub.address, 0, 2)
        while findings.made < mutations:
            with contextlib.suppress(OSError), knock(hub.address) as sock:
                proof = answer_to(sock.recv(1000)) if dice.random() < 0.1 else bytes(64)
                other = mutated(proof, dice)
                sock.sendall(b"GET / HTTP/1.1\r\n" if other == proof else other)
            findings.made += 1
        for link in (rank, join(hub.address, 1, 2)):
            if link.expect(Deadline(_FAR_S))["kind"] != "complete":
                findings.problems.append("the ranks do not meet any more")
            link.close()
    return findings


_WAITS = [["recv(tag=0)", "x.py:4 in main", False, [1], ["recv", 0, None, 1]]]
_TO_HUB = (
    {"kind": "bye"},
    {"kind": "left", "channel": "world", "members": [0, 1], "finished": 3, "dropped": False,
     "last": "barrier()"},
    {"kind": "heard", "channel": "world", "members": [1]},
    {"kind": "stall", "channel": "world", "members": [0, 1], "asks": [1], "within": 0.1},
    {"kind": "report", "channel": "world", "entries": [ENTRY], "finished": 0, "started": 1,
     "waits": _WAITS},
    {"kind": "failure", "channel": "world", "members": [0, 1],
     "failure": {"kind": "lost", "rank": 0, "text": "x", "ranks": [1]}},
)  # fmt: skip


def _liars(dice: random.Random, mutations: int) -> Findings:
    """Send the hub, from authenticated ranks, messages that no rank sends."""
    findings, size = Findings(), 60
    with watched(findings):
        while findings.made < mutations:
            hub = hub_of(size, None, _FAR_S)
            honest, *others = complete(hub.address, size)
            for link in others:
                with contextlib.suppress(OSError):
                    for _ in range(5):
                        findings.made += 1
                        link.write(framed(dice.choice(_TO_HUB), dice))
            # The hub still serves the honest rank: it answers the stall with a message.
            stall = {"kind": "stall", "channel": "here", "members": [0]}
            honest.send({**stall, "asks": None, "within": None})
            message: Message = {}
            while message.get("channel") != "here":
                message = honest.expect(Deadline(_FAR_S))
                findings.ends[message["kind"]] += 1
            for link in (honest, *others):
                link.close()
    return findings


# -- messages to a rank, and values that it reads ------------------------------------------------

_FROM_HUB = (
    {"kind": "lost", "rank": 1, "why": "x"},
    {"kind": "report", "channel": "world"},
    {"kind": "heard", "channel": "world", "rank": 1},
    {"kind": "left", "channel": "world", "members": [0, 1], "finished": 3, "rank": 1,
     "dropped": False, "last": "barrier()"},
    {"kind": "late", "channel": "world", "late": {"1": {"entries": [ENTRY], "finished": 0,
                                                       "started": 1, "waits": _WAITS}}},
    {"kind": "failure", "channel": "world", "members": [0, 1], "rank": 1,
     "failure": {"kind": "lost", "rank": 0, "text": "x", "ranks": [1]}},
)  # fmt: skip


def _monitors(dice: random.Random, mutations: int) -> Findings:
    """Send a rank's monitor messages that no hub sends."""
    findings = Findings()
    with watched(findings), tempfile.TemporaryDirectory() as directory:
        store = FileStore(directory)
        while findings.made < mutations:
            near, far = socket.socketpair()
            monitor = Monitor(world(0, 2, store), Link(near), ["here", "here"], Secret(KEY))
            data = framed(dice.choice(_FROM_HUB), dice)
            with far:
                far.sendall(data)
                far.shutdown(socket.SHUT_WR)
                # The monitor reads to the end, and then concludes that the hub is gone.
                far.settimeout(_FAR_S)
                with contextlib.suppress(OSError):
                    while far.recv(1 << 16):
                        pass
            findings.hold(data, lambda: monitor.channel.check("all_reduce"))  # noqa: B023
            monitor.channel.close()
    return findings


def _published(dice: random.Random, mutations: int) -> Findings:
    """Connect by a store with values that rank 0 never publishes."""
    findings = Findings()
    meeting = {"address": "collective-none", "key": "00" * 32}
    with watched(findings), tempfile.TemporaryDirectory() as directory:
        store = FileStore(directory)
        with contextlib.ExitStack() as files:
            large = files.enter_context(open(f"{directory}/large", "wb"))
            large.truncate(1 << 20)
            path = f"/proc/self/fd/{large.fileno()}".encode()
            for number in range(mutations):
                if number % 2:
                    data = framed(meeting, dice)[4:]
                    store.set("monitor", data)
                    findings.hold(data, lambda: Monitor.start(world(1, 2, store), Deadline(0.002)))
                else:
                    paths = (path, b"/dev/null", b"/", large.name.encode(), directory.encode())
                    data = dice.choice(paths)
                    data = data if dice.random() < 0.1 else mutated(data, dice)
                    store.set("shm-test", data)
                    findings.hold(
                        data,
                        lambda: ShmBackend.connect(world(1, 2, store), Deadline(0.002)).close(),
                    )
    return findings


# -- the store served by rank 0, and sealed stores ------------------------------------------------

_QUESTIONS = (
    {"kind": "set", "key": "other", "value": "00ff", "number": 1},
    {"kind": "get", "key": "key", "number": 2},
    {"kind": "delete", "key": "other", "number": 3},
    {"kind": "put", "key": "other", "value": "00ff", "number": 4},
)


def _tcp_store(dice: random.Random, mutations: int) -> Findings:
    """Send rank 0's store a wrong proof, or mutated requests on an authenticated connection."""
    findings = Findings()
    where = free_address()
    with watched(findings), contextlib.closing(tcp_store(where, serve=True)) as first:
        first.set("key", b"value")
        while findings.made < mutations:
            with contextlib.suppress(OSError):
                if dice.random() < 0.5:
                    with knock(f"{where.host} {where.port}") as sock:
                        findings.made += 1
                        sock.sendall(mutated(bytes(64), dice))
                    continue
                with contextlib.closing(asks(where)) as link:
                    for _ in range(5):
                        findings.made += 1
                        request = dice.choice(_QUESTIONS)
                        # A request could delete the key that is checked below, so use another.
                        link.write(framed({**request, "key": "other"}, dice))
        first.set("key", b"value")
        if not holds_its_value(where):
            findings.problems.append("the store has lost a value")
    return findings


def _sealed_store(dice: random.Random, mutations: int) -> Findings:
    """Read from a sealed store a value that was changed without the secret."""
    findings = Findings()
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
            findings.hold(data, lambda: store.try_get("key"))
            if data != sealed and findings.ends["accepted"]:
                findings.problems.append(f"accepted a changed value: {data!r}")
                break
            findings.ends.pop("accepted", None)
    return findings


# -- objects --------------------------------------------------------------------------------------

_OBJECTS: tuple[Any, ...] = (
    None,
    {"a": [1, 2.5, "é", None, True], "b": (b"bytes", 1 << 2000, {1, 2}, frozenset({"x"}), 2j)},
    [np.arange(12.0).reshape(3, 4), np.float32(2), np.zeros((0, 4), "int8"), np.array(True)],
    {"deep": [[[[[[[[{"x": np.ones(3, "complex64")}]]]]]]]]},
    "text" * 50,
)


def _objects(dice: random.Random, mutations: int) -> Findings:
    """Decode mutated bytes of encoded objects."""
    findings = Findings()
    encoded = [objects.encode(value).tobytes() for value in _OBJECTS]
    while findings.made < mutations:
        data = mutated(dice.choice(encoded), dice)
        findings.hold(data, lambda: objects.decode(np.frombuffer(data, np.uint8)))  # noqa: B023
    return findings


# -- the rings of shm -----------------------------------------------------------------------------


def _rings(dice: random.Random, mutations: int) -> Findings:
    """Receive from a peer that writes to its ring what no sender writes."""
    findings = Findings()
    with RankPool(2, "shm", timeout=_FAR_S * 1000) as pool:
        while findings.made < mutations:
            count = min(2000, mutations - findings.made)
            outcome = pool.run(damaged_rings, dice.randrange(1 << 30), count)[0]
            findings.made += count
            findings.ends.update(outcome[0])
            findings.problems += outcome[1]
    return findings


def damaged_rings(comm: Communicator, seed: int, count: int) -> tuple[dict[str, int], list[str]]:
    """Receive on rank 0 what rank 1 writes into a ring; each message has a new communicator."""
    dice = random.Random(seed)  # both ranks draw the same numbers
    findings = Findings()
    for _ in range(count):
        group = comm.dup()
        header, data = _header(dice), dice.randbytes(dice.choice((0, 8, 1024, 4096)))
        into = np.empty(128) if dice.random() < 0.5 else None
        head = dice.choice((dice.getrandbits(63), *EDGES[:-1])) if dice.random() < 0.2 else None
        if comm.rank == 1:
            backend: Any = group.inner.transport
            ring = Ring(backend._control, 1, 0)
            words = np.array(header, np.int64).view(np.uint8)
            # The whole message fits into the ring, so write() never waits.
            assert not [*ring.write(np.concatenate([words, np.frombuffer(data, np.uint8)]))]
            if head is not None:
                ring._counts[0] = head
        comm.barrier()
        if comm.rank == 0:
            findings.hold(
                (header, data[:16]),
                lambda: group.recv(into, 1, tag=3, timeout=0.002),  # noqa: B023
            )
        comm.barrier()
        group.inner.leave()
    return dict(findings.ends), findings.problems


def _header(dice: random.Random) -> list[int]:
    """Return the length, the tag and the address of a header, some of them unusual."""

    def number(*usual: int) -> int:
        edges = (*EDGES[:-1], dice.getrandbits(63), -1, -(1 << 63))
        return dice.choice(usual) if dice.random() < 0.6 else dice.choice(edges)

    tags = (3, COLLECTIVE_TAG)
    return [number(8, 1024), number(*tags), number(0, 4096)]


#: The targets of mutated messages: a name, and the function that sends a number of them.
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
