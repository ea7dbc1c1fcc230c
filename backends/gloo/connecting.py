"""How the ranks come to be connected by Gloo, with each other and with nobody else.

Gloo lets in whoever connects to a rank's port and says the number that it expects of a peer, a
small one: a stranger can be there first, in a peer's stead. So the ranks prove to each other who
they are over every connection that Gloo has made. Each tells the monitor's hub what it
found, and if anybody found a stranger all connect anew, at other ports.
"""

from __future__ import annotations

import contextlib
import hmac
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from collective.deadline import Deadline
from collective.errors import BackendError, CommunicatorAbortedError

from .engine import CUT_TAG, AddressStore, cut, device, process_group, seconds

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel, Wait
    from collective.contract.world import World

__all__ = ["Connector", "is_broken_after"]

# Every communicator has a process group for collectives, with a thread, and one for messages.
_GROUPS = (("collectives", 1), ("messages", 0))
# How long a proof may take once Gloo is connected, and, for a rank that is not, the others' word.
_PROOF_S, _WORD_S = 5.0, 10.0
_PROOF_BYTES = 32
# A stranger who is there each time, or a network that does not work, is no matter of patience.
_ATTEMPTS = 8


class Connector:
    """Connects the ranks of one communicator.

    Args:
        world: where they meet.
        channel: the communicator's.
        parent: that through which its ranks are watched until it stands.
        ranks: their numbers there.
        where: the operation, for errors.
        deadline: the operation's.
        look: raises if it is known otherwise that the others will not all connect.
    """

    def __init__(
        self,
        world: World,
        channel: Channel,
        parent: Channel,
        ranks: Sequence[int],
        where: str,
        deadline: Deadline,
        look: Callable[[], None],
    ) -> None:
        self._world = world
        self._channel = channel
        self._parent = parent
        self._ranks = ranks
        self._where = where
        self._look = look
        self._deadline = deadline
        self._key = channel.secret.key("gloo")

    def connect(self, listening: Any) -> tuple[tuple[Any, ...], Any]:
        """Return the process groups, and the device at which they listen.

        Args:
            listening: the device to begin with.

        Raises:
            BackendError: Gloo does not connect this rank.
            CommunicatorAbortedError, CollectiveTimeoutError: another rank is gone, or late.
        """
        groups: list[Any] = []
        for purpose, threads in _GROUPS if self._channel.size > 1 else ():
            for attempt in range(_ATTEMPTS):
                made, flaws = self._attempt(f"{purpose}-{attempt}", threads, listening)
                if not flaws:
                    break
                # At another port, since whoever was in a peer's stead knows this one.
                listening = device(self._world)
            else:
                raise BackendError("; ".join(flaws), "gloo")
            groups.append(made)
        return tuple(groups), listening

    def _attempt(self, name: str, threads: int, listening: Any) -> tuple[Any, list[str]]:
        """Return a process group, and why some ranks have to connect anew."""
        rank, size = self._channel.rank, self._channel.size
        meeting = AddressStore(self._channel, f"addresses {name}", self._wait_for)
        group, flaw = None, ""
        try:
            watching = self._parent.wait(self._where, self._deadline)

            def look() -> None:
                watching.check()
                self._look()

            group = process_group(meeting, rank, size, listening, threads, self._deadline, look)
            self._prove(name, group)
        except BackendError as error:
            # Its text alone: of its traceback this frame is part, and would keep Gloo's sockets.
            flaw = str(error)
        # Even a rank that is connected as it should be goes on only with all others: Gloo's groups
        # cannot take one rank anew.
        flaws = self._flaws(f"flaws {name}", flaw)
        # Not before: ranks that are still connecting ask for it.
        self._channel.withdraw(f"addresses {name}")
        if flaws and group is not None:
            cut(group, rank, size)
        if flaws and flaw:
            warnings.warn(f"{flaw}; connecting anew", RuntimeWarning, stacklevel=2)
        return group, flaws

    def _wait_for(self, rank: int) -> Wait:
        return self._parent.wait(self._where, self._deadline, [self._ranks[rank]])

    def _prove(self, what: str, group: Any) -> None:
        """Send a proof over each connection of ``group``, and see those of the others.

        Raises:
            BackendError: whoever is at the other end of one has sent none.
        """
        rank = self._channel.rank
        peers = [peer for peer in range(self._channel.size) if peer != rank]
        # Not to be known by strangers either: Gloo cannot refuse a message for its tag.
        tag = int.from_bytes(self._proof(what)[:8], "big") % CUT_TAG
        deadline = self._deadline.within(_PROOF_S)
        # Gloo does not hold the memory that it sends from.
        coming, going, works = {}, {}, []
        # All are under way before one is waited for, or a single stranger who says nothing would
        # take the time that the others have.
        for peer in peers:
            coming[peer] = torch.zeros(_PROOF_BYTES, dtype=torch.uint8)
            mine = bytearray(self._proof(f"{what} {rank} {peer}"))
            going[peer] = torch.frombuffer(mine, dtype=torch.uint8)
            with self._connection_of(peer):
                works.append((peer, group.recv([coming[peer]], peer, tag)))
                works.append((peer, group.send([going[peer]], peer, tag)))
        for peer, work in works:
            with self._connection_of(peer):
                work.wait(seconds(deadline.left()))
        for peer in peers:
            with self._connection_of(peer):
                theirs = self._proof(f"{what} {peer} {rank}")
                if not hmac.compare_digest(coming[peer].numpy().tobytes(), theirs):
                    raise RuntimeError("its proof is wrong")

    @contextlib.contextmanager
    def _connection_of(self, peer: int) -> Iterator[None]:
        """Say whose connection it is of which Gloo says what is wrong."""
        try:
            yield
        except RuntimeError as error:
            raise BackendError(
                f"gloo: whoever is connected to {self._world.address} as rank {peer} has not "
                f"proved to know this job's secret: {str(error).partition(chr(10))[0]} [rank "
                f"{self._channel.rank} of {self._channel.size}]",
                "gloo",
            ) from error

    def _proof(self, what: str) -> bytes:
        return hmac.digest(self._key, what.encode(), "sha256")

    def _flaws(self, name: str, flaw: str) -> list[str]:
        """Tell the others whether this rank is connected; return why some ranks are not.

        Args:
            name: to be used once.
            flaw: why this rank is not; empty if it is.

        Raises:
            BackendError: it is not, and the others do not say whether they are.
        """
        self._channel.offer(name, flaw)
        # Who is connected waits for as long as the call may take: the others may still be at it.
        # Who is not knows why, which tells more than that some rank has not come.
        wait = self._parent.wait(self._where, self._deadline)
        patience = self._deadline.within(_WORD_S)
        while len(offered := self._channel.offered(name)) < self._channel.size:
            if flaw and patience.expired:
                raise BackendError(flaw, "gloo")
            self._look()
            try:
                wait.turn()
            except CommunicatorAbortedError:
                # A rank that was through has connected with all, with this rank too.
                if flaw or not is_broken_after(self._channel):
                    raise
                break
        self._channel.withdraw(name)
        return [text for _, text in sorted(offered.items()) if text]


def is_broken_after(channel: Channel) -> bool:
    """Tell whether a rank broke the communicator that was through with connecting.

    It has gone on to the next generation, or its program has failed.
    """
    return channel.failure is not None and channel.failure.kind in ("shrink", "failed")
