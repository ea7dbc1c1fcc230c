"""The monitor: a rank's knowledge of its peers, independent of the transport's engine.

Engines like MPI and Gloo cannot tell a dead rank from a late rank, or a rank that left from a rank
that failed. They cannot tell which rank made another call, either. So beside the engine every rank
keeps a link to a hub in rank 0's process (:mod:`collective.backends.peers.hub`). The hub is a
thread that sleeps until something goes wrong. A mesh of links would not depend on rank 0, but it
costs n² sockets. If rank 0's process leaves first, waiting ranks look for deaths themselves
(:meth:`Monitor.look_around`). A second hub would add the comparison of calls alone. One
communicator's view of the monitor is in :mod:`collective.backends.peers.channel`.

When a call has waited for a second, the hub compares the ranks' flight recorders. Ranks that made
different calls get ``MismatchError``. When a deadline passes, the error can name the rank that did
not come and the last call of that rank.
"""

# When rank 0 dies, its link to every rank ends without a goodbye: then rank 0 is lost, unless it
# had left the communicator before. From then on a rank that waits looks at the others in place of
# the hub: at the processes of its own host by their numbers (RankProcess), and at those of other
# hosts by their standbys, whose port refuses once the process has ended. The roll call brings the
# addresses of both, so rank 0 may die together with another rank. Without a standby a death on
# another host is noticed only by the engine or the deadline.
#
# The launcher may count a rank as lost before any connection ends: its host is cut off. The store
# carries that word (Store.announced), and every wait looks for it.

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from collective.contract.process import RankProcess
from collective.control.link import KeyDiffersError, Link, Message, ProofError, connect, parse
from collective.control.secret import COMPARE, Secret
from collective.control.store import NotPublishedError
from collective.deadline import Deadline
from collective.errors import ConfigError, RendezvousError

from .channel import WORLD, Channel, Unclosed, tell_dropped
from .hub import Hub
from .messages import FROM_HUB, check, make_report
from .standby import Standby

if TYPE_CHECKING:
    from collective.contract.world import World

# The store's key under which rank 0 publishes how to reach the hub.
_KEY = "monitor"
# How long the hub may take to conclude the roll call after its deadline.
_ANSWER_S = 2.0
_RETRY_S = 0.01
# How often a rank that waits for the hub's answer checks whether the ranks can still meet.
_LOOK_S = 0.1
# How often a rank that waits checks what the launcher has announced and, once the hub has ended,
# which ranks have ended. The second check reads one file per rank of this host.
_AROUND_S = 0.2


class Monitor:
    """This rank's link to the hub; :meth:`start` makes it.

    Attributes:
        rank, size: this rank's number in the world, and the number of ranks.
        hosts: the name of every rank's host.
        secret: secret of this meeting of the ranks, and of no other meeting.
        processes: the process of every rank; None for a rank whose process is unknown.
        standby: this rank's part of a store that outlives rank 0; None if none is needed.
        hub_gone: whether the hub's process has ended, or the hub has sent a malformed message.
        channel: channel of the communicator of all ranks.
    """

    def __init__(
        self,
        world: World,
        link: Link,
        hosts: list[str],
        secret: Secret,
        processes: Sequence[RankProcess | None] = (),
        standby: Standby | None = None,
        hub: Hub | None = None,
    ) -> None:
        self.rank = world.rank
        self.size = world.size
        self.hosts = hosts
        self.secret = secret
        self.hub_gone = False
        self.processes = processes
        self._store = world.store
        self.standby = standby
        self._looked_at = 0.0
        self._link: Link | None = link
        self._hub = hub  # of this process
        self._channels: weakref.WeakValueDictionary[str, Channel] = weakref.WeakValueDictionary()
        # Messages about communicators that this rank has not made yet.
        self._early: dict[str, list[Message]] = {}
        self._lost: set[int] = set()
        # Reentrant: Channel.abort() breaks the channel while it holds this lock.
        self._lock = threading.RLock()
        # The finalizer runs once the program has dropped the last of the monitor's communicators
        # without closing it.
        self._unclosed: Unclosed = {}
        drop = weakref.finalize(self, _drop, link, self._unclosed, os.getpid(), hub)
        drop.atexit = False
        self.channel = Channel(self, WORLD, tuple(range(world.size)))
        threading.Thread(
            target=_watch, args=(weakref.ref(self), link), name="collective-monitor", daemon=True
        ).start()

    @classmethod
    def start(cls, world: World, deadline: Deadline) -> Self:
        """Link this rank to the hub and return when all ranks are there.

        Raises:
            RendezvousError: some ranks did not arrive before the deadline, the ranks disagree
                about the size of the world, or two processes claim one rank. The text names the
                ranks.
        """
        if world.rank == 0:
            key = _derived(world) or secrets.token_bytes(32)
            hub = Hub(world, deadline, key)
            world.store.set(_KEY, _published(world, hub.address, key))
            try:
                return cls(world, *_join_own(world, hub, key, deadline), hub)
            except BaseException:
                hub.give_up()
                raise
            finally:
                world.store.delete(_KEY)
        return cls(world, *_find(world, deadline))

    # -- for the channels -----------------------------------------------------------------

    def gone(self) -> set[int]:
        """Return the ranks that have ended, or are cut off, as far as this rank knows."""
        with self._lock:
            gone = {*self._lost, *([0] if self.hub_gone else [])}
        gone |= self._announced()
        for rank, process in enumerate(self.processes):
            if process is not None and rank not in gone and process.has_ended():
                gone.add(rank)
        if self.hub_gone and self.standby is not None:
            others = set(range(self.size)) - gone - {self.rank}
            gone.update(rank for rank in others if self.standby.has_ended(rank))
        return gone - {self.rank}

    def look_around(self) -> None:
        """Find out which ranks are lost by the launcher's word, or because the hub is gone.

        If the hub is gone, this rank looks at the other ranks in its place. The look is
        rate-limited, so a polling call can make it at every turn.
        """
        now = time.monotonic()
        if now < self._looked_at + _AROUND_S:
            return
        with self._lock:
            if (link := self._link) is None or now < self._looked_at + _AROUND_S:
                return
            self._looked_at = now
        announced = self._announced()
        if 0 in announced and not self.hub_gone:
            self.hub_gone = True
            link.cut()  # nobody answers there
        gone = self.gone() if self.hub_gone else announced
        with self._lock:
            for rank in gone - self._lost:
                # A rank that closed its communicator before it ended is not lost to everybody.
                # Only a call that awaits this rank fails: see Channel.check().
                if rank not in self.channel.left:
                    self._lose(rank)

    def _announced(self) -> set[int]:
        """Return the other ranks that the launcher counts as lost."""
        lost = self._store.announced()
        if not lost:
            return set()
        processes = enumerate(self.processes)
        found = {rank for rank, process in processes if process and process[:2] in lost}
        return found - {self.rank}

    def _say(self, message: Message) -> None:
        link = self._link
        if link is not None:
            # If the hub is gone, the watcher thread notices that, too.
            with contextlib.suppress(OSError):
                link.send(message)

    def _leave(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            _say_goodbye(link, self._hub)
        # The store of the next generations closes the standby, unless the ranks failed to connect.
        if self.standby is not None and not self.standby.lasts:
            self.standby.close()

    def _enter(self, channel: Channel) -> None:
        with self._lock:
            self._channels[channel.name] = channel
            for message in self._early.pop(channel.name, ()):
                channel._hear(message)
            for rank in self._lost.intersection(channel.members):
                channel._lose(rank)

    # -- the watcher thread ---------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        kind = check(message, FROM_HUB)
        with self._lock:
            if kind == "lost":
                if message["rank"] >= self.size:
                    raise ValueError(
                        f"a message that rank {message['rank']} of {self.size} is lost"
                    )
                self._lose(message["rank"], message["why"])
                return
            channel = self._channels.get(message["channel"])
            if channel is not None:
                channel._hear(message)
            elif kind == "report":
                # This rank has not made the communicator yet, so it has made no calls on it.
                self._say({**message, **make_report(None, 0, False)})
            elif kind in ("failure", "left"):
                self._early.setdefault(message["channel"], []).append(message)

    def _lose(self, rank: int, why: str = "") -> None:
        self._lost.add(rank)
        for channel in list(self._channels.values()):
            if rank in channel.members:
                channel._lose(rank, why)

    def _hub_gone(self, why: str) -> None:
        """Record that the hub's process has ended, or has sent a malformed message.

        The process may have ended after rank 0 has left the communicator: then rank 0 is not lost.
        """
        self.hub_gone = True
        with self._lock:
            if self._link is not None and 0 not in self.channel.left:
                self._lose(0, why)


# The result of a roll call: the link, the ranks' hosts, the meeting's secret, the ranks' processes,
# and this rank's standby.
_Joined = tuple[Link, list[str], Secret, "list[RankProcess | None]", Standby | None]


def _derived(world: World) -> bytes | None:
    """Return the hub's key, derived from the ranks' secret; None if they have no secret."""
    return None if world.secret is None else world.secret.key("hub")


def _published(world: World, address: str, key: bytes) -> bytes:
    """Return the record that rank 0 publishes; if the ranks have a secret, no key ever travels."""
    record = {"address": address}
    if world.secret is None:
        record["key"] = key.hex()
    return json.dumps(record).encode()


def _join_own(world: World, hub: Hub, key: bytes, deadline: Deadline) -> _Joined:
    """Take part in the roll call of this process's own hub."""
    while True:
        try:
            return _join(world, hub.address, key, deadline)
        except (EOFError, OSError) as error:
            # The roll call was over before this rank was there, or strangers fill the hub's queue.
            if hub.refusal is not None or deadline.expired:
                raise _refused(world, hub.refusal or repr(error)) from error
            time.sleep(_RETRY_S)


def _find(world: World, deadline: Deadline) -> _Joined:
    """Look for rank 0's hub and take part in its roll call."""
    refused: Exception | None = None
    while True:
        try:
            published = world.store.get(_KEY, deadline)
        except NotPublishedError as error:
            raise _absent(world, deadline) from error
        except RendezvousError as error:  # the store cannot be used; its error says why
            text = f"{error} [rank {world.rank} of {world.size}]"
            raise RendezvousError(text) from error.__cause__
        address, key = _read(world, published)
        try:
            return _join(world, address, key, deadline)
        except (EOFError, OSError) as error:
            # The store may still hold the address of an earlier roll call's hub, so try again. An
            # earlier error about this rank's key says more to the user than a late timeout.
            refused = refused if isinstance(refused, ProofError) else error
            if deadline.expired:
                if isinstance(refused, KeyDiffersError):
                    raise RendezvousError(
                        f"rendezvous: rank 0 of {world.size} ({address.replace(' ', ':')}) did not "
                        f"let rank {world.rank} join within {deadline.seconds:g} s: {refused}. "
                        f"Most likely its secret differs. {COMPARE}."
                    ) from error
                raise RendezvousError(
                    f"rendezvous: rank {world.rank} of {world.size} cannot reach rank 0 at "
                    f"{address.replace(' ', ':')}: {refused!r}. Check that this is the address of "
                    "the right interface of rank 0's host (COLLECTIVE_INTERFACE), and that no "
                    "firewall blocks it."
                ) from error
            time.sleep(_RETRY_S)


def _absent(world: World, deadline: Deadline) -> RendezvousError:
    """Return the error for a rank 0 that has published nothing."""
    text = (
        f"rendezvous: rank 0 of {world.size} ({world.store}) did not answer within "
        f"{deadline.seconds:g} s [rank {world.rank}]"
    )
    if world.secret is None:
        return RendezvousError(
            f"{text}. It was not started or has not called init(), or it has a secret and this "
            "rank has none."
        )
    return RendezvousError(f"{text}. If it was started, its secret most likely differs. {COMPARE}.")


def _read(world: World, published: bytes) -> tuple[str, bytes]:
    """Return the hub's address and key, as rank 0 has published them."""
    try:
        record = parse(published)
        address = str(record["address"])
        key = _derived(world) or bytes.fromhex(record["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise RendezvousError(
            f"rendezvous: the store's value for {_KEY!r} is not what rank 0 publishes there: "
            f"{error!r} [rank {world.rank}]. Another program writes to the store: give this launch "
            "a store of its own."
        ) from error
    return address, key


def _join(world: World, address: str, key: bytes, deadline: Deadline) -> _Joined:
    """Take part in the roll call.

    Raises:
        RendezvousError: the hub refuses this rank, or has given up the roll call.
        EOFError, OSError: the hub is not there, or has gone before the roll call was complete.
    """
    link = connect(address, key, deadline, world.tls, world.store.check)
    standby = None
    try:
        here = {"rank": world.rank, "size": world.size, "host": world.host}
        try:
            standby = Standby.of(world)
            here["contact"] = "" if standby is None else standby.address
        except ConfigError as error:
            here["fault"] = str(error)  # the hub tells every rank that no port is free here
        here["ports"] = str(world.ports or "")
        link.send({"kind": "here", **here, "process": str(RankProcess.own())})
        answer = _answer(world, link, deadline)
        if check(answer, FROM_HUB) == "complete" and len(answer["hosts"]) == world.size:
            processes = [RankProcess.parse(text) for text in answer.get("processes", ())]
            secret = Secret(key).within(answer["session"])
            if standby is not None:
                standby.begin(list(map(str, answer.get("contacts", ()))), secret.key("standby"))
            return link, answer["hosts"], secret, processes, standby
        raise _refused(
            world, answer.get("why", f"rank 0's hub sent an unexpected reply: {answer!r:.80}")
        )
    except ValueError as error:
        _give_up(link, standby)
        raise _refused(world, f"rank 0's hub sent a malformed reply: {error}") from error
    except BaseException:
        _give_up(link, standby)
        raise


def _give_up(link: Link, standby: Standby | None) -> None:
    link.close()
    if standby is not None:
        standby.close()


def _answer(world: World, link: Link, deadline: Deadline) -> Message:
    """Return the hub's answer; raise if the store learns meanwhile that the ranks cannot meet."""
    answer_by = Deadline(deadline.left() + _ANSWER_S)
    while True:
        try:
            return link.expect(answer_by.within(_LOOK_S))
        except TimeoutError:
            if answer_by.expired:
                raise
        world.store.check()


def _say_goodbye(link: Link, hub: Hub | None) -> None:
    with contextlib.suppress(OSError):
        link.send({"kind": "bye"})
    link.close()
    if hub is not None:
        hub.await_goodbye()


def _drop(link: Link, unclosed: Unclosed, owner: int, hub: Hub | None) -> None:
    # Finalizers run in no particular order, so those of the channels may not have run yet.
    tell_dropped(link, unclosed, list(unclosed), owner)
    # A forked child shares the connection with its parent, which would lose it.
    if os.getpid() == owner:
        _say_goodbye(link, hub)


def _refused(world: World, why: str) -> RendezvousError:
    return RendezvousError(f"rendezvous: {why} [rank {world.rank}].")


def _watch(reference: weakref.ref[Monitor], link: Link) -> None:
    """Listen to the hub until the hub or this rank goes; do not keep the monitor alive."""
    why = ""
    while not why:
        try:
            messages = link.receive()
        except (EOFError, OSError):
            break
        except ValueError as error:
            messages, why = [], str(error)
        monitor = reference()
        if monitor is None:
            return  # the monitor's finalizer says goodbye and then closes the link
        try:
            for message in messages:
                monitor._hear(message)
        except Exception as error:
            # Without this, the thread would end silently, and this rank would learn of no failure.
            why = f"{type(error).__name__}: {error}"
        del monitor
    monitor = reference()
    if monitor is not None:
        monitor._hub_gone(why)
    link.close()
