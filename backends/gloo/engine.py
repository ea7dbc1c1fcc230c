"""Gloo's process group: listening, connecting, and cutting their connections."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from collective.backends.peers.monitored import Pairing, listens_at
from collective.contract.process import keep_in_children
from collective.deadline import Deadline
from collective.errors import BackendError, BackendUnavailableError, ConfigError
from collective.install import hint

from .waiting import Elsewhere

if TYPE_CHECKING:
    from collective.contract.world import World

# The members that are used here are missing from torch's type stubs.
_dist: Any = torch.distributed

#: The tag of the receive that :func:`cut` posts. No rank sends with this tag.
CUT_TAG = 2**31 - 1
# Gloo's smallest unit of time: Gloo would take a shorter timeout as no timeout at all.
_CUT_S = 0.001
# Seconds between two checks that the awaited ranks can still connect, and seconds that Gloo may
# take to notice that connecting was given up.
_LOOK_S, _GIVE_UP_S = 0.02, 2.0
# Gloo publishes a record for each rank. It has a name and an address (a sockaddr_storage and a
# number), each preceded by its length. Then follow the numbers that the peers must send when they
# connect, one per peer. A length or number has this many bytes.
_NUMBER_BYTES = 8


def seconds(number: float) -> timedelta:
    """Return ``number`` seconds in the form that Gloo needs: whole milliseconds, at least one."""
    return timedelta(milliseconds=max(1, round(1000 * number)))


def device(world: World) -> Any:
    """Return the device of this rank's process group: its listening address and I/O thread.

    The port is any free one.

    Raises:
        ConfigError: this host does not have the address at which it should listen.
        BackendUnavailableError: this PyTorch has no Gloo.
    """
    make = getattr(getattr(_dist, "ProcessGroupGloo", None), "create_device", None)
    if make is None:
        raise BackendUnavailableError(
            f"gloo: PyTorch {torch.__version__} was built without Gloo. Install one with it: "
            f"{hint('torch')}"
        )
    host = listens_at(world)
    try:
        listening = make(hostname=host)
    except RuntimeError as error:
        raise ConfigError(
            f"gloo: host {world.host} cannot listen on {host}: {_first_line(error)} "
            f"[rank {world.rank} of {world.size}]. Set COLLECTIVE_INTERFACE to the interface "
            "that reaches the other hosts (`collective doctor` lists them)."
        ) from error
    keep_in_children(listening)
    return listening


class AddressStore(_dist.Store):  # type: ignore[misc]
    """Store for Gloo: each rank offers its address and reads the addresses of the other ranks.

    Args:
        pairing: the ranks, whose channel carries the addresses.
        name: name of the process group, used once.

    Attributes:
        raised: the exception that a wait for an address raised, or None.
    """

    def __init__(self, pairing: Pairing, name: str) -> None:
        super().__init__()
        self._pairing = pairing
        self._channel = pairing.channel
        self._name = name
        # Gloo passes on no more than the text of an exception, so keep the exception here.
        self.raised: BaseException | None = None
        self._given_up = False
        self._own = b""

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port where this rank listens; None if it has offered no address yet."""
        return next((address for address, _ in _expected(self._own)), None)

    def set(self, key: str, value: Any) -> None:
        """Offer this rank's address."""
        self._own = bytes(value)
        self._channel.offer(self._name, self._own.hex())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there, up to our own deadline instead of ``timeout``."""
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        """Return a rank's address; wait until the rank has offered it."""
        rank, wait = int(key.rpartition("/")[2]), None
        try:
            while (text := self._channel.offered(self._name).get(rank)) is None:
                if self._given_up:
                    raise BackendError("gloo: connecting was given up", "gloo")
                wait = wait or self._pairing.wait(rank)
                wait.turn()
            return bytes.fromhex(text)
        except BaseException as error:
            self.raised = error
            raise

    def give_up(self) -> None:
        """End the waits of the thread that connects through this store.

        Of two ranks one connects, and the other one waits for that inside Gloo, where nothing can
        interrupt it. If the connecting rank has died, Gloo waits five times the deadline that it
        was given. But Gloo accepts any connection that sends the number expected of the peer. So
        this rank connects to itself and sends the peers' numbers.
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
    deadline: Deadline,
    look: Callable[[], None],
) -> Any:
    """Return a process group, connected to those of the other ranks.

    Args:
        meeting: store in which the ranks find each other's addresses.
        rank: this rank.
        size: number of ranks.
        listening: the device that :func:`device` returned.
        deadline: deadline of connecting.
        look: called repeatedly meanwhile; raises if not all of the other ranks will connect.

    Raises:
        BackendError: the connection failed.
        Exception: ``look`` raised it, or ``meeting`` raised it while it waited.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [listening]
    options._threads = 0  # they would run Gloo's own collectives; messages need none
    options._timeout = seconds(deadline.left())
    groups: list[Any] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            groups.append(_dist.ProcessGroupGloo(meeting, rank, size, options))
        except BaseException as error:  # the waiting thread raises it
            errors.append(error)

    # Connect in another thread: a peer may die meanwhile, and Gloo would keep waiting for it.
    making = Elsewhere(make)
    try:
        while not making.over.acquire(timeout=_LOOK_S):
            look()
    except BaseException:
        meeting.give_up()
        # It takes longer only if a host does not answer; then Gloo's own deadline ends it.
        if making.over.acquire(timeout=_GIVE_UP_S) and groups:
            cut(groups[0], rank, size)
        raise
    if groups:
        keep_in_children(groups[0])
        return groups[0]
    error = errors.pop()
    if meeting.raised is not None:
        raise meeting.raised from None
    if not isinstance(error, RuntimeError):
        raise error
    raise BackendError(
        f"gloo: connecting {size} ranks: {_first_line(error)} [rank {rank}]", "gloo"
    ) from error


def _expected(own: bytes) -> list[tuple[tuple[str, int], bytes]]:
    """Return a pair for each peer: the address where a rank listens, and the peer's number.

    The list is empty if ``own`` has an unknown format.

    Args:
        own: the record that Gloo publishes of the rank; see ``_NUMBER_BYTES``.
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
        return []  # another version of Gloo: Gloo's own deadline ends the wait
    listening = host, int.from_bytes(address[2:4], "big")
    starts = range(0, len(numbers), _NUMBER_BYTES)
    return [(listening, numbers[at : at + _NUMBER_BYTES]) for at in starts]


def cut(group: Any, rank: int, size: int) -> None:
    """Close the connections of ``group``: every call on it fails, here and at the peers.

    Gloo has no call that closes them, and no way to interrupt a message. But a receive that
    times out closes all connections of its process group, so that a late message cannot match
    another receive. So this function posts a receive that no rank will answer.
    """
    nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
    for peer in range(size):
        if peer != rank:
            # A connection that is closed already raises at once; then the next peer is tried.
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, CUT_TAG).wait(seconds(_CUT_S))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
