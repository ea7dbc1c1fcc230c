"""Connecting the ranks with Gloo, with each other and with no other process.

Gloo accepts any connection to a rank's port that sends the number expected of a peer, and that
number is small. So a stranger can connect first, in place of a peer. Therefore the ranks prove
their identity to each other over every connection that Gloo has made. Each rank reports its
result to the monitor's hub. If any rank found a stranger, all ranks reconnect at other ports.
"""

from __future__ import annotations

import contextlib
import hmac
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from collective.backends.peers.monitored import Pairing, listens_at
from collective.errors import BackendError, CommunicatorAbortedError
from collective.platform import stop_listening

from .engine import CUT_TAG, AddressStore, cut, device, process_group, seconds

# Seconds that the proofs may take once all ranks are connected: a round trip, so that a silent
# stranger is found soon. For slow networks each further attempt has twice the time, up to a limit.
_PROOF_S, _LONGEST_PROOF_S = 0.25, 5.0
# Seconds for which a rank that is not connected waits for the reports of the other ranks.
_WORD_S = 10.0
_PROOF_BYTES = 32
# More attempts do not help if a stranger appears every time or the network does not work.
_ATTEMPTS = 8


class Connector:
    """Connects the ranks of one communicator."""

    def __init__(self, pairing: Pairing) -> None:
        self._pairing = pairing
        self._channel = pairing.channel
        self._key = pairing.channel.secret.key("gloo")
        # Where this rank listens, once it has offered that to the other ranks.
        self._address: tuple[str, int] | None = None

    def connect(self) -> Any:
        """Connect and return the process group; None if this rank has no peers.

        Raises:
            BackendError: Gloo could not connect this rank.
            CommunicatorAbortedError, CollectiveTimeoutError: another rank is gone, or late.
        """
        if self._channel.size == 1:
            return None
        for attempt in range(_ATTEMPTS):
            patience = min(_PROOF_S * 2**attempt, _LONGEST_PROOF_S)
            # Listen at another port each time: a stranger who took a peer's place knows the last.
            group, flaws = self._attempt(str(attempt), device(self._pairing.world), patience)
            if not flaws:
                break
        else:
            raise BackendError("; ".join(flaws), "gloo")
        # Gloo would keep a descriptor for each connection of a stranger, and end the process when
        # none are left. Another communicator listens at another port.
        if self._address is not None:
            stop_listening(self._address)
        return group

    def _attempt(self, name: str, listening: Any, patience: float) -> tuple[Any, list[str]]:
        """Return a process group, and the reasons why ranks must reconnect; empty if none must.

        Args:
            name: name of the attempt, used once.
            listening: the device at which this rank listens.
            patience: seconds that the proofs may take.
        """
        rank, size = self._channel.rank, self._channel.size
        pairing = self._pairing
        meeting = AddressStore(pairing, f"addresses {name}")
        group, flaw = None, ""
        try:
            watching = pairing.wait()

            def look() -> None:
                watching.check()
                pairing.look()

            group = process_group(meeting, rank, size, listening, pairing.deadline, look)
        except BackendError as error:
            # Keep only the text. The error's traceback refers to this frame, which would keep
            # Gloo's sockets open.
            flaw = str(error)
        # Even a rank that is properly connected goes on only if all other ranks are: a Gloo group
        # cannot replace a single rank. Nor can a rank that still connects prove anything.
        self._address = meeting.address
        flaws = self._flaws(f"connected {name}", flaw)
        if not flaws:
            try:
                self._prove(name, group, patience)
            except BackendError as error:
                flaw = str(error)
            flaws = self._flaws(f"proved {name}", flaw)
        # Withdraw the addresses only now: until here, ranks that are still connecting read them.
        self._channel.withdraw(f"addresses {name}")
        if flaws and group is not None:
            cut(group, rank, size)
        if flaws and flaw:
            warnings.warn(f"{flaw}; reconnecting", RuntimeWarning, stacklevel=2)
        return group, flaws

    def _prove(self, name: str, group: Any, patience: float) -> None:
        """Send a proof of identity over each connection of ``group``; check the peers' proofs.

        Args:
            name: name of the attempt.
            group: the process group, which all ranks have connected.
            patience: seconds that this may take.

        Raises:
            BackendError: a peer has sent no proof, or a wrong one.
        """
        rank = self._channel.rank
        peers = [peer for peer in range(self._channel.size) if peer != rank]
        # Strangers must not know the tag either, because Gloo cannot refuse a message by its tag.
        tag = int.from_bytes(self._proof(name)[:8], "big") % CUT_TAG
        deadline = self._pairing.deadline.within(patience)
        # Gloo keeps no reference to the memory that it sends from, so ``going`` keeps it alive.
        coming, going, works = {}, {}, []
        # Start every message before waiting for any of them. Otherwise one silent stranger would
        # use up the time of all other peers.
        for peer in peers:
            coming[peer] = torch.zeros(_PROOF_BYTES, dtype=torch.uint8, device="cpu")
            proof = bytearray(self._proof(f"{name} {rank} {peer}"))
            going[peer] = torch.frombuffer(proof, dtype=torch.uint8)
            with self._connection_of(peer):
                works.append((peer, group.recv([coming[peer]], peer, tag)))
                works.append((peer, group.send([going[peer]], peer, tag)))
        for peer, work in works:
            with self._connection_of(peer):
                work.wait(seconds(deadline.left()))
        for peer in peers:
            with self._connection_of(peer):
                expected = self._proof(f"{name} {peer} {rank}")
                if not hmac.compare_digest(coming[peer].numpy().tobytes(), expected):
                    raise RuntimeError("its proof is wrong")

    @contextlib.contextmanager
    def _connection_of(self, peer: int) -> Iterator[None]:
        """Convert an error of Gloo in the body to one that names the peer of the connection."""
        try:
            yield
        except RuntimeError as error:
            raise BackendError(
                f"gloo: the process connected to {listens_at(self._pairing.world)} as rank {peer} "
                f"has not proved that it knows this job's secret: "
                f"{str(error).partition(chr(10))[0]} [rank {self._channel.rank} of "
                f"{self._channel.size}]",
                "gloo",
            ) from error

    def _proof(self, what: str) -> bytes:
        return hmac.digest(self._key, what.encode(), "sha256")

    def _flaws(self, name: str, flaw: str) -> list[str]:
        """Report to the other ranks whether this rank is connected; return all ranks' flaws.

        Args:
            name: name of this exchange, to be used once.
            flaw: the reason why this rank is not connected; empty if it is.

        Returns:
            The reasons why ranks are not connected; empty if all ranks are.

        Raises:
            BackendError: this rank is not connected, and other ranks have not reported in time.
        """
        self._channel.offer(name, flaw)
        # A rank that is connected waits until the call's deadline, because other ranks may still
        # be connecting. A rank that is not connected waits only for a while: its own reason says
        # more than an error that some rank is missing.
        wait = self._pairing.wait()
        patience = self._pairing.deadline.within(_WORD_S)
        while len(offered := self._channel.offered(name)) < self._channel.size:
            if flaw and patience.expired:
                raise BackendError(flaw, "gloo")
            self._pairing.look()
            try:
                wait.turn()
            except CommunicatorAbortedError:
                # If a rank broke the communicator after it had finished connecting, that rank is
                # connected to all ranks, this rank included.
                if flaw or not self._channel.broken_by_connected:
                    raise
                break
        self._channel.withdraw(name)
        return [text for _, text in sorted(offered.items()) if text]
