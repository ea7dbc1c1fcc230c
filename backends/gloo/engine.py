"""Gloo's process groups: where they listen, how they meet, and how they are cut."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from collective.contract.forking import keep_in_children
from collective.deadline import Deadline
from collective.errors import BackendError, BackendUnavailableError, ConfigError
from collective.install import hint

from .waiting import Elsewhere

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel, Wait
    from collective.contract.world import World

# What is used of it is not in its type stubs.
_dist: Any = torch.distributed

__all__ = ["CUT_TAG", "AddressStore", "cut", "device", "ended", "process_group", "seconds"]

#: The tag of the receive that :func:`cut` posts; nobody sends to it.
CUT_TAG = 2**31 - 1
# The threads of this process (Linux).
_TASKS = "/proc/self/task"
_IO_THREAD, _NAMING_TRIES = "gloo_tcp_loop", 50
# Shorter than Gloo's smallest unit it would mean "for ever".
_CUT_S = 0.001
# How often it is looked whether those who are awaited will connect at all, and how long Gloo may
# take to notice that nobody waits any more.
_LOOK_S, _GIVE_UP_S = 0.02, 2.0
# What Gloo lets the peers know: the lengths of a name and of an address (a sockaddr_storage and a
# number), each before what it is of, and the number that each peer is to say when it connects.
_NUMBER_BYTES = 8


def seconds(number: float) -> timedelta:
    """Return ``number`` of seconds as Gloo wants them: whole milliseconds, not 0."""
    return timedelta(milliseconds=max(1, round(1000 * number)))


def device(world: World) -> Any:
    """Return the address and the I/O thread of this rank, for its process groups.

    Ranks of one host listen on loopback, others on the configured interface or, without
    one, at the address that the other hosts know this one by. The port is free.

    Raises:
        ConfigError: there is no such interface, or the address is not this host's.
        BackendUnavailableError: this PyTorch has no Gloo.
    """
    make = getattr(getattr(_dist, "ProcessGroupGloo", None), "create_device", None)
    if make is None:
        raise BackendUnavailableError(
            f"gloo: PyTorch {torch.__version__} was built without Gloo. Install one with it: "
            f"{hint('torch')}"
        )
    interface = world.options.get("interface", "")
    if world.local_size == world.size:
        return _made(make, world, "loopback", hostname="127.0.0.1")
    if not interface:
        return _made(make, world, f"address {world.address!r}", hostname=world.address)
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise ConfigError(
            f"gloo: interface {interface!r}; this host, {world.host}, has {', '.join(known)} "
            f"[rank {world.rank} of {world.size}]. Set COLLECTIVE_INTERFACE to the one that "
            "reaches the other hosts (`collective doctor` tells their addresses)."
        )
    return _made(make, world, f"interface {interface!r}", interface=interface)


def _made(make: Callable[..., Any], world: World, what: str, **where: str) -> Any:
    known = _threads() if os.path.isdir(_TASKS) else None
    try:
        made = make(**where)
    except RuntimeError as error:
        raise ConfigError(
            f"gloo: {what} cannot be listened on by host {world.host}: {_first_line(error)} "
            f"[rank {world.rank} of {world.size}]. Set COLLECTIVE_INTERFACE to the interface "
            "that reaches the other hosts (`collective doctor` lists them)."
        ) from error
    keep_in_children(made)
    if known is not None:
        _let_it_queue(known)
    return made


def _threads() -> set[str]:
    """Return the ids of this process's threads."""
    return set(os.listdir(_TASKS))


def _let_it_queue(known: set[str]) -> None:
    """Let Gloo's new I/O thread not push aside whoever runs when something arrives.

    Gloo holds a lock of the connection while it sends. Whom the I/O thread pushes aside is
    often just that sender, and then it polls for the lock until its time slice is over: 4 ms
    instead of 0.1 for a short message, in half of the calls on busy cores. A thread of class
    SCHED_BATCH waits until the core is given away, which in a call is at once (sched(7)).
    """
    for _ in range(_NAMING_TRIES):
        for thread in _threads() - known:
            # One that has ended meanwhile, or a system that forbids it: it goes as it is.
            with contextlib.suppress(OSError):
                if Path(_TASKS, thread, "comm").read_text().strip() == _IO_THREAD:
                    if os.sched_getscheduler(int(thread)) == os.SCHED_OTHER:
                        os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
                    return
        time.sleep(0.001)  # it has not given itself its name yet


class AddressStore(_dist.Store):  # type: ignore[misc]
    """What Gloo takes for a store: each rank offers its address, and reads the others'.

    Args:
        channel: the communicator's, over which they travel.
        name: of the process group, used once.
        wait_for: called with a rank whose address is not there yet.
    """

    def __init__(self, channel: Channel, name: str, wait_for: Callable[[int], Wait]) -> None:
        super().__init__()
        self._channel = channel
        self._name = name
        self._wait_for = wait_for
        # What waiting raised: Gloo hands on no more than its text.
        self.raised: BaseException | None = None
        self._given_up = False
        self._own = b""

    def set(self, key: str, value: Any) -> None:
        """Offer this rank's address."""
        self._own = bytes(value)
        self._channel.offer(self._name, self._own.hex())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` are there. The deadline is ours, not Gloo's."""
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        """Return a rank's address, waiting for it."""
        rank, wait = int(key.rpartition("/")[2]), None
        try:
            while (text := self._channel.offered(self._name).get(rank)) is None:
                if self._given_up:
                    raise BackendError("gloo: connecting was given up", "gloo")
                wait = wait or self._wait_for(rank)
                wait.turn()
            return bytes.fromhex(text)
        except BaseException as error:
            self.raised = error
            raise

    def give_up(self) -> None:
        """End the waits of whoever connects by this.

        Of two ranks one connects and the other waits for that, in Gloo, which nobody interrupts: if
        the one has died it waits five times the deadline that it was given. But it takes whoever
        says the right number for the peer, and that is this rank itself then.
        """
        self._given_up = True
        for address, number in _expected(self._own):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(address, _GIVE_UP_S) as sock,
            ):
                sock.sendall(number)


def process_group(
    meeting: AddressStore,
    rank: int,
    size: int,
    listening: Any,
    threads: int,
    deadline: Deadline,
    look: Callable[[], None],
) -> Any:
    """Return a process group, connected to those of the other ranks.

    Args:
        meeting: where the ranks find each other.
        rank: this rank.
        size: how many there are.
        listening: what :func:`device` returned.
        threads: how many collectives can run at once; messages need none.
        deadline: for the connection.
        look: called again and again meanwhile; raises if the others will not all connect.

    Raises:
        BackendError: the connection failed.
        Exception: what ``look`` raised, or ``meeting`` while it waited.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [listening]
    options._threads = threads
    options._timeout = seconds(deadline.left())
    made: list[Any] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            made.append(_dist.ProcessGroupGloo(meeting, rank, size, options))
        except BaseException as error:  # whatever it is, it is that of the thread which waits
            failed.append(error)

    # Not in this thread: a peer may die meanwhile, and Gloo would wait for it.
    making = Elsewhere(make)
    try:
        while not making.over.acquire(timeout=_LOOK_S):
            look()
    except BaseException:
        meeting.give_up()
        # Longer it takes only where a host does not answer: then Gloo's own deadline ends it.
        if making.over.acquire(timeout=_GIVE_UP_S) and made:
            cut(made[0], rank, size)
        raise
    if made:
        keep_in_children(made[0])
        return made[0]
    error = failed.pop()
    if meeting.raised is not None:
        raise meeting.raised from None
    if not isinstance(error, RuntimeError):
        raise error
    raise BackendError(
        f"gloo: connecting {size} ranks: {_first_line(error)} [rank {rank}]", "gloo"
    ) from error


def _expected(own: bytes) -> list[tuple[tuple[str, int], bytes]]:
    """Return where a rank listens, and what its peers say there; nothing if that is not clear.

    Args:
        own: what Gloo lets the peers know of it.
    """
    start = _NUMBER_BYTES + int.from_bytes(own[:_NUMBER_BYTES], sys.byteorder)
    end = start + _NUMBER_BYTES
    end += int.from_bytes(own[start:end], sys.byteorder)
    address, numbers = own[start + _NUMBER_BYTES : end], own[end:]
    family = int.from_bytes(address[:2], sys.byteorder)
    hosts = {int(socket.AF_INET): address[4:8], int(socket.AF_INET6): address[8:24]}
    try:
        host = socket.inet_ntop(family, hosts[family])
    except (KeyError, ValueError):
        return []  # another version of Gloo: its own deadline ends the wait
    listening = host, int.from_bytes(address[2:4], "big")
    starts = range(0, len(numbers), _NUMBER_BYTES)
    return [(listening, numbers[at : at + _NUMBER_BYTES]) for at in starts]


def cut(group: Any, rank: int, size: int) -> None:
    """Close the connections of ``group``: whatever runs on it fails, here and at the peers.

    Gloo has no call for that, and no way to interrupt a message. But a receive that times
    out closes all connections of its process group, lest a message that comes late be
    taken for another: so one is posted that nobody will answer.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(size):
        if peer != rank:
            # Those that are closed already raise at once, and the next one is tried.
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, CUT_TAG).wait(seconds(_CUT_S))


def ended(work: Any) -> bool:
    """Tell whether a collective of Gloo's that was cut has ended, as it should at once."""
    for _ in range(100):
        if work.is_completed():
            return True
        time.sleep(0.001)
    return False


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
