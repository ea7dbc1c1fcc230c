"""Meeting of ranks in the store of their framework: torch, JAX or Ray has started them.

The ranks meet by a roll call, under a name that other ranks may have used before.

Every member publishes a card with a token that it alone has. The leader, rank 0, reads the cards
and publishes a list of their tokens. A member that finds its token in the list accepts the list.
Once all members have accepted it, the leader starts the group. Cards and lists of an earlier group
of the same name do not contain the tokens of these members, so nobody accepts them, and each is
replaced as soon as its author's successor arrives. The leader starts a group with an error if the
members' cards differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.contract.recorder import dump_on_signal
from collective.control.store import PrefixedStore, Store
from collective.deadline import Deadline
from collective.errors import RendezvousError
from collective.platform import boot_id
from collective.request import name_ranks

from . import certificates, session
from .choice import Choice, choose
from .config import Config, load
from .connecting import connect
from .rendezvous import Endpoint
from .resolver import describe
from .stores import seal

# Least and longest time between two looks at the store. A thousand ranks may poll one server.
_PAUSE_S, _PAUSE_MOST_S = 0.002, 0.02


def host_id() -> str:
    """Return a text that only processes on this host share."""
    return f"{socket.gethostname()} {boot_id()}"


def connect_met(
    store: Store,
    rank: int,
    size: int,
    *,
    context: tuple[str, ...],
    toward: Callable[[Config], Endpoint | None],
    label: str = "a process",
    place: tuple[str, str] | None = None,
    look: Callable[[], object] = lambda: None,
    instead: Callable[[Config, Choice], Communicator | None] = lambda config, chosen: None,
    **settings: Any,
) -> Communicator:
    """Meet the other ranks in a store of their framework, and return the communicator.

    The transport and the other settings come from ``COLLECTIVE_*`` variables and files, as for
    :func:`collective.init`.

    Args:
        store: store of the framework whose keys are those of ranks that meet here.
        rank, size: number of this process, and of processes.
        context: as for :func:`.certificates.resolve`.
        toward: function that returns an address that all hosts reach, for the choice of this
            host's address; or None.
        label: what this process is, for errors.
        place: caller and where, as for :func:`.session.take_place`; None if ranks of another
            meeting may have the same place.
        look: called repeatedly while the ranks meet; raises if some rank will not come.
        instead: function that returns another communicator to use, or None.
        settings: settings that replace those of variables and files.

    Raises:
        RendezvousError: the ranks did not meet within ``start_timeout``, or they differ in their
            number or in their versions.
        ConfigError, BackendUnavailableError: as for :func:`collective.init`.
    """
    config = load({"rank": rank, "size": size, "local_rank": 0, "local_size": 1, **settings})
    secret, tls = certificates.resolve(config, *context)
    with contextlib.ExitStack() as opened:
        if place is not None:
            opened.callback(session.take_place(place[0], rank, size, place[1], config.launched))
        roll = seal(PrefixedStore(store, "roll/"), secret)
        job, local_rank, local_size = call_roll(
            roll, rank, Peer.of(size, label), Deadline(config.start_timeout), look
        )
        config = replace(config, local_rank=local_rank, local_size=local_size)
        config.warn_of_refused()
        config.name_libraries()
        chosen = choose(config)
        comm = instead(config, chosen)
        if comm is None:
            needs_address = local_size < size and not config.interface
            world = describe(
                config, chosen, job, seal(PrefixedStore(store, f"{job}/"), secret),
                secret=secret, tls=tls, launched=config.launched,
                toward=toward(config) if needs_address else None, exposed=str(store),
            )  # fmt: skip
            comm = connect(
                world, chosen.name, start_timeout=config.start_timeout, **config.of_communicator()
            )
        comm.inner.succession.at_end.append(opened.pop_all().close)
    session.tell_at_exit(comm)
    if "dump_signal" not in config.disable:
        dump_on_signal()
    return comm


class Peer(NamedTuple):
    """Description of one member.

    Attributes:
        size: number of members that this member expects.
        host: text that only processes on one host share.
        version: version of this package.
        python: version of Python, as ``3.11``.
        label: words that name the process in errors.
        token: text that no other process has.
    """

    size: int
    host: str
    version: str
    label: str
    python: str = f"{sys.version_info[0]}.{sys.version_info[1]}"
    token: str = ""

    @classmethod
    def of(cls, size: int, label: str) -> Peer:
        """Return the card of this process.

        Args:
            size: number of members.
            label: what this process is, in words.
        """
        from collective import __version__

        label = f"{label} on {socket.gethostname()}, pid {os.getpid()}"
        return cls(size, host_id(), __version__, label)


def call_roll(
    store: Store,
    rank: int,
    card: Peer,
    deadline: Deadline,
    look: Callable[[], object] = lambda: None,
) -> tuple[str, int, int]:
    """Meet the other members.

    Args:
        store: store whose keys are those of groups with this name.
        rank: number of this member.
        card: description of this member; this function gives it a token.
        deadline: moment by which all members must have come.
        look: called repeatedly meanwhile; raises if some member will not come.

    Returns:
        A unique name of the members, this rank's local rank, and its host's number of ranks.

    Raises:
        RendezvousError: not all members came in time, two members have one rank, or the members
            differ in their number of ranks or in their versions.
    """
    if card.size == 1:
        return secrets.token_hex(8), 0, 1
    call = _RollCall(store, rank, card._replace(token=secrets.token_hex(8)), deadline, look)
    call.publish()
    meeting = call.lead() if rank == 0 else call.follow()
    # A card whose author failed stays: until then the other members must not miss its author. The
    # next leader replaces or ignores it.
    store.delete(_card(rank))
    return meeting


def _card(rank: int) -> str:
    return f"card-{rank}"


class _RollCall:
    """Roll call of one member; see the module."""

    def __init__(
        self, store: Store, rank: int, card: Peer, deadline: Deadline, look: Callable[[], object]
    ) -> None:
        self.store = store
        self.rank = rank
        self.card = card
        self.deadline = deadline
        self.look = look
        self.pause = _PAUSE_S

    def publish(self) -> None:
        """Publish this member's card."""
        self.store.set(_card(self.rank), json.dumps(self.card).encode())

    def lead(self) -> tuple[str, int, int]:
        """Publish lists until the members have accepted one."""
        cards: list[Peer | None] = []
        job, strange, error = "", 0, ""
        while True:
            latest = self._cards()
            if latest != cards:
                cards = latest
                strange, error = _difference(cards)
                job = secrets.token_hex(8) if error or None not in cards else ""
                if job:
                    self.store.set("list", json.dumps({"job": job, "cards": cards}).encode())
            # A card that differs may be an old one, whose author is gone and accepts nothing.
            if job and self._accepted(job, {strange} if error else set(range(1, len(cards)))):
                self.store.set(f"start-{job}", error.encode())
                if error:
                    raise RendezvousError(error)
                return self._place(job, cards)
            self._pause(latest)

    def follow(self) -> tuple[str, int, int]:
        """Accept the lists that have this member's token, until the leader starts one."""
        job, cards = "", []
        while True:
            listed = self._listed()
            if listed is not None and listed["job"] != job:
                job, cards = listed["job"], listed["cards"]
                self.store.set(f"accept-{job}-{self.rank}", b"1")
            error = self.store.try_get(f"start-{job}") if job else None
            if error:
                raise RendezvousError(error.decode())
            if error is not None:
                return self._place(job, [Peer(*card) for card in cards])
            self._pause(None)

    def _listed(self) -> dict[str, Any] | None:
        value = self.store.try_get("list")
        listed: dict[str, Any] | None = None if value is None else json.loads(value)
        if listed is None or len(listed["cards"]) <= self.rank:
            return None
        card = listed["cards"][self.rank]
        return listed if card is not None and Peer(*card).token == self.card.token else None

    def _cards(self) -> list[Peer | None]:
        return [self._read(rank) for rank in range(self.card.size)]

    def _read(self, rank: int) -> Peer | None:
        value = self.store.try_get(_card(rank))
        return None if value is None else Peer(*json.loads(value))

    def _accepted(self, job: str, ranks: set[int]) -> bool:
        return all(self.store.try_get(f"accept-{job}-{rank}") is not None for rank in ranks)

    def _pause(self, latest: list[Peer | None] | None) -> None:
        """Wait a little; raise if another process has this rank, or if the time is over."""
        self.look()
        own = self._read(self.rank)
        if own is None:  # the leader has come, and has cleaned up
            self.publish()
        elif own.token != self.card.token:
            raise RendezvousError(
                f"rendezvous: {own.label} has joined as rank {self.rank}, like this process "
                f"({self.card.label}). Give every process another rank."
            )
        if self.deadline.expired:
            cards = latest or self._cards()
            missing = [rank for rank, card in enumerate(cards) if card is None]
            waits = f"{name_ranks(missing)} did not come" if missing else "not all ranks answered"
            raise RendezvousError(
                f"rendezvous: {waits} within {self.deadline.seconds:g} s, at {self.store}; rank "
                f"{self.rank} of {self.card.size} waited. Check that every process makes the "
                "group, or wait longer: COLLECTIVE_START_TIMEOUT, or the timeout of torch's group."
            )
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, _PAUSE_MOST_S)

    def _place(self, job: str, cards: Sequence[Peer | None]) -> tuple[str, int, int]:
        hosts = [card.host for card in cards if card is not None]
        host = hosts[self.rank]
        local_rank = hosts[: self.rank].count(host)
        return job, local_rank, hosts.count(host)


def _difference(cards: Sequence[Peer | None]) -> tuple[int, str]:
    """Return the first rank that cannot be in one group with rank 0, and the error's text."""
    first = cards[0]
    if first is None:
        return 0, ""
    for what, remedy, field in (
        ("number of ranks", "Pass one number everywhere.", "size"),
        ("version of collective", "Install one version on all hosts.", "version"),
        ("version of Python", "Use one version on all hosts.", "python"),
    ):
        for rank, card in enumerate(cards):
            if card is not None and getattr(card, field) != getattr(first, field):
                return rank, (
                    f"rendezvous: the ranks differ in the {what}: {getattr(first, field)} on rank "
                    f"0 ({first.label}), {getattr(card, field)} on rank {rank} ({card.label}). "
                    f"{remedy}"
                )
    return 0, ""
