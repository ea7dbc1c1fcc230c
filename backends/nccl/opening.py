"""Meeting of the ranks before they make an NCCL communicator, and the checks on them.

If a rank has no library, another version, or the GPU of another rank, NCCL waits for its ranks or
ends their processes. So the ranks first exchange their versions and GPUs over the transport of the
host, and all of them raise the same error.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective import cuda
from collective.deadline import Deadline
from collective.errors import (
    BackendUnavailableError,
    CollectiveError,
    DeviceError,
    InvalidArgumentError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.platform import boot_id

from . import library as libraries
from .hosting import connect_step
from .prototypes import version_text

if TYPE_CHECKING:
    from collective.contract.backend import Backend
    from collective.contract.world import World
    from collective.cuda import Device

    from .library import NcclLibrary

_UINT8 = BY_NAME["uint8"]
# Length of a packed card, and the largest number of characters of an error's text in it.
CARD_BYTES = 2048
_TEXT = 1200
_ID_BYTES = 128
# Tags of the cards of two ranks: for messages from the lower rank to the higher, and back.
_UPWARD, _DOWNWARD = -4, -5


class Card(NamedTuple):
    """Description of one rank's NCCL and GPU.

    Attributes:
        error: why the rank cannot take part; empty if it can.
        kind: the error's class: ``"device"`` or ``"library"``.
        version: version of the rank's NCCL.
        bus: bus id of the rank's GPU.
        host: text by which NCCL identifies the host; NCCL refuses two ranks with the same host and
            GPU.
        sharing: whether the rank's environment lets NCCL accept such ranks.
    """

    error: str = ""
    kind: str = ""
    version: int = 0
    bus: str = ""
    host: str = ""
    sharing: bool = False

    def packed(self) -> np.ndarray[Any, Any]:
        """Return the card as bytes of fixed length, for sending."""
        text = json.dumps(self._replace(error=self.error[:_TEXT])).encode()
        if len(text) > CARD_BYTES:  # the text has characters that take six bytes each
            text = json.dumps(self._replace(error="its error is too long to send")).encode()
        packed = np.full(CARD_BYTES, ord(" "), np.uint8)
        packed[: len(text)] = np.frombuffer(text, np.uint8)
        return packed

    @classmethod
    def unpacked(cls, packed: np.ndarray[Any, Any]) -> Card:
        """Return the card that :meth:`packed` has packed."""
        return cls(*json.loads(packed.tobytes()))


class Handshake:
    """Exchange between the ranks before NCCL makes a communicator.

    Args:
        ordinal: the GPU that this rank should use; None to choose it by ``local_rank``.
        local_rank: index of this rank among the ranks of its host.
        path: path of the library; empty to search for it.
    """

    def __init__(self, ordinal: int | None, local_rank: int, path: str) -> None:
        self._ordinal = ordinal
        self._local_rank = local_rank
        self._path = path

    @classmethod
    def of(cls, world: World) -> Handshake:
        """Return the meeting for this rank of ``world``."""
        options = world.options
        ordinal = int(options["device"]) if options.get("device") else None
        return cls(ordinal, world.local_rank, options.get("nccl_library", ""))

    def device(self) -> Device:
        """Return this rank's GPU.

        Raises:
            DeviceError: there is no GPU, or not the one that this rank should use.
            BackendUnavailableError: there is no driver.
        """
        if self._ordinal is not None:
            return cuda.device(self._ordinal)
        # Without a driver the count is 0. Then cuda.device() raises the reason.
        return cuda.device(self._local_rank % max(1, cuda.device_count()))

    def library(self) -> NcclLibrary:
        """Return this rank's NCCL.

        Raises:
            BackendUnavailableError: there is no usable library.
        """
        return libraries.load(self._path)

    def check(self, host: Backend, required: bool, deadline: Deadline) -> None:
        """Check that the ranks have the libraries that they require, and initialise none of them.

        Collective: all ranks of ``host``.

        Args:
            host: the host plane.
            required: whether this rank can do nothing without a GPU.
            deadline: deadline of the exchange.

        Raises:
            BackendUnavailableError: a rank lacks the driver or NCCL; on every rank.
        """
        card = Card()
        if required:
            try:
                cuda.check_driver()
                if libraries.find(self._path) is None:
                    self.library()  # raises the reason
            except CollectiveError as error:
                card = Card(str(error), "library")
        _able("nccl", self._exchange(host, 2, card, deadline), range(host.size), host.rank)

    def _card(self) -> tuple[Card, NcclLibrary | None, Device | None]:
        """Return this rank's card, with the rank's library and GPU if it has them."""
        try:
            device = self.device()
        except CollectiveError as error:
            kind = "device" if isinstance(error, InvalidArgumentError) else "library"
            return Card(str(error), kind), None, None
        try:
            library = self.library()
        except CollectiveError as error:
            return Card(str(error), "library"), None, device
        sharing = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0")
        return Card("", "", library.version, device.bus_id, _host(), sharing), library, device

    def everybody(
        self, host: Backend, where: object, deadline: Deadline
    ) -> tuple[NcclLibrary, Device]:
        """Exchange the cards of all ranks; return this rank's library and GPU if all can go on.

        Collective: all ranks of ``host``.

        Raises:
            BackendUnavailableError, DeviceError: as :func:`agree_on`; on every rank.
        """
        card, library, device = self._card()
        agree_on(where, self._exchange(host, 1, card, deadline), range(host.size), host.rank)
        assert library is not None
        assert device is not None
        return library, device

    def _exchange(self, host: Backend, number: int, card: Card, deadline: Deadline) -> list[Card]:
        """Exchange the cards of all ranks, as this step of connecting; return them."""
        packed = Buffer.empty(CARD_BYTES * host.size, _UINT8)
        own, lengths = Buffer(card.packed(), _UINT8), [CARD_BYTES] * host.size
        connect_step(host, number, "all_gather", own, packed, deadline, elements=lengths)
        return [Card.unpacked(part) for part in np.split(packed.array, host.size)]

    def name(self, host: Backend, library: NcclLibrary, deadline: Deadline) -> bytes:
        """Return the new communicator's unique id, which rank 0 makes and broadcasts."""
        identity = Buffer(np.zeros(_ID_BYTES, np.uint8), _UINT8)
        if host.rank == 0:
            identity.array[:] = np.frombuffer(library.unique_id(), np.uint8)
        connect_step(host, 0, "broadcast", identity, identity, deadline, root=0)
        return identity.array.tobytes()

    def pair(
        self, host: Backend, sender: int, receiver: int, where: object, deadline: Deadline
    ) -> tuple[NcclLibrary, Device, bytes]:
        """Exchange cards with the other of two ranks.

        Returns:
            This rank's library and GPU, and the unique id of the new communicator, which the
            sender makes.

        Raises:
            BackendUnavailableError, DeviceError: as :func:`agree_on`; on both ranks.
        """
        card, library, device = self._card()
        sending = host.rank == sender
        sent, received = (Buffer(np.zeros(CARD_BYTES + _ID_BYTES, np.uint8), _UINT8) for _ in "12")
        sent.array[:CARD_BYTES] = card.packed()
        if sending and library is not None:
            sent.array[CARD_BYTES:] = np.frombuffer(library.unique_id(), np.uint8)
        peer = receiver if sending else sender
        tag = _UPWARD if sender < receiver else _DOWNWARD
        host.sendrecv(sent, peer, received, peer, tag, deadline)
        cards = [card, Card.unpacked(received.array[:CARD_BYTES])]
        agree_on(where, cards, (host.rank, peer), host.rank)
        assert library is not None
        assert device is not None
        letter = sent if sending else received
        return library, device, letter.array[CARD_BYTES:].tobytes()


def _host() -> str:
    """Return the text by which NCCL identifies the host."""
    host_id = os.environ.get("NCCL_HOSTID")
    if host_id:
        return host_id
    return f"{socket.gethostname()} {boot_id()}"


def agree_on(where: object, cards: Sequence[Card], ranks: Sequence[int], me: int) -> None:
    """Check that NCCL can connect ranks with these cards.

    Args:
        where: the call, for errors.
        cards: one card for each of ``ranks``.
        ranks: the numbers of the ranks.
        me: this rank.

    Raises:
        BackendUnavailableError: a rank has no library, or versions differ.
        DeviceError: a rank has no GPU, or two ranks have the same GPU.
    """
    _able(where, cards, ranks, me)
    versions: dict[int, list[int]] = {}
    places: dict[tuple[str, str], list[int]] = {}
    for rank, card in zip(ranks, cards):
        versions.setdefault(card.version, []).append(rank)
        places.setdefault((card.host, card.bus), []).append(rank)
    if len(versions) > 1:
        have = "; ".join(
            f"NCCL {version_text(version)} on rank{'s' * (len(having) > 1)} "
            f"{', '.join(map(str, having))}"
            for version, having in sorted(versions.items())
        )
        raise BackendUnavailableError(
            f"{where}: the ranks have different versions of NCCL: {have} [rank {me}]. Install the "
            "same one on all of them, or name its file in COLLECTIVE_NCCL_LIBRARY."
        )
    if all(card.sharing for card in cards):
        return
    for (_, bus), sharing in places.items():
        if len(sharing) > 1:
            raise DeviceError(
                f"{where}: ranks {' and '.join(map(str, sharing))} use the same GPU {bus} "
                f"(Duplicate GPU): give each rank its own by COLLECTIVE_DEVICE or "
                f"CUDA_VISIBLE_DEVICES [rank {me}]. With NCCL 2.30 or later, ranks can share a GPU "
                "if NCCL_MULTI_RANK_GPU_ENABLE=1 is set."
            )


def _able(where: object, cards: Sequence[Card], ranks: Sequence[int], me: int) -> None:
    """Raise the errors on the cards as one; see :func:`agree_on`."""
    problems = [f"rank {rank}: {card.error}" for rank, card in zip(ranks, cards) if card.error]
    if problems:
        kinds = {card.kind for card in cards if card.error}
        error = DeviceError if kinds == {"device"} else BackendUnavailableError
        raise error(f"{where}: {_several(problems)} [rank {me}]")


def _several(problems: Sequence[str]) -> str:
    """Return the first problem, and the number of other ones."""
    more = f" (and {len(problems) - 1} more like this)" if len(problems) > 1 else ""
    return problems[0] + more
