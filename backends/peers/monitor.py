"""What transports know of their peers apart from the transport.

Engines like MPI and Gloo cannot tell a rank that died from one that is late, a rank that
left from one that failed, or who called something else. Beside the engine every rank keeps a
link to a hub in rank 0's process (:mod:`collective.backends.peers.hub`): a thread that sleeps until
something goes wrong. One communicator's view of it is :mod:`collective.backends.peers.channel`.

When a call has waited for a second, the ranks' flight recorders are compared: ranks that made
different calls get ``MismatchError``, and a deadline that passes can say who did not come and
what that rank did last.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from collective.contract.process import RankProcess
from collective.contract.secret import Secret
from collective.deadline import Deadline
from collective.errors import RendezvousError

from .channel import WORLD, Channel
from .hub import Hub
from .link import Link, Message, ProofError, connect, parse
from .messages import FROM_HUB, check
from .standby import Standby
from .unclosed import Unclosed, tell_dropped

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.contract.world import World

__all__ = ["Monitor"]

# Where rank 0 tells the others how to reach the hub.
_KEY = "monitor"
# How long the hub may take to conclude the roll call after its deadline.
_ANSWER_S = 2.0
_RETRY_S = 0.01
# How often who waits for it looks whether the others will come at all.
_LOOK_S = 0.1
# How often a rank looks who has ended, once the hub has: a file a rank of this host.
_AROUND_S = 0.2


class Monitor:
    """This rank's link to the hub; made by :meth:`start`.

    Attributes:
        rank, size: of the world.
        hosts: the name of every rank's host.
        secret: of this meeting of the ranks, and no other.
        processes: that of every rank, as far as it is known.
        standby: this rank's part of a store that outlives rank 0; None if none is needed.
        hub_gone: whether the hub's process has ended, or says what is wrong.
        channel: of the communicator of all ranks.
    """

    def __init__(
        self,
        world: World,
        link: Link,
        hosts: list[str],
        secret: Secret,
        processes: Sequence[RankProcess | None] = (),
        standby: Standby | None = None,
    ) -> None:
        self.rank = world.rank
        self.size = world.size
        self.hosts = hosts
        self.secret = secret
        self.hub_gone = False
        self.processes = processes
        self.standby = standby
        self._looked_at = 0.0
        self._link: Link | None = link
        self._channels: weakref.WeakValueDictionary[str, Channel] = weakref.WeakValueDictionary()
        # What was said of communicators that this rank has not made yet.
        self._early: dict[str, list[Message]] = {}
        self._lost: set[int] = set()
        # Again by the thread that has it: Channel.abort() breaks the channel while it holds it.
        self._lock = threading.RLock()
        # When the last of its communicators has been dropped without being closed.
        self._unclosed: Unclosed = {}
        drop = weakref.finalize(self, _drop, link, self._unclosed, os.getpid())
        drop.atexit = False
        self.channel = Channel(self, WORLD, tuple(range(world.size)))
        threading.Thread(
            target=_watch, args=(weakref.ref(self), link), name="collective-monitor", daemon=True
        ).start()

    @classmethod
    def start(cls, world: World, deadline: Deadline) -> Self:
        """Link this rank to the others' and return when all of them are there.

        Raises:
            RendezvousError: some did not arrive before the deadline, or disagree about
                how many there are, or two claim one rank; the text says who.
        """
        if world.rank == 0:
            alone = world.local_size == world.size
            key = _derived(world) or secrets.token_bytes(32)
            hub = Hub(world.size, None if alone else world.address, deadline, key, world.tls)
            world.store.set(_KEY, _published(world, hub.address, key))
            try:
                return cls(world, *_join_own(world, hub, key, deadline))
            except BaseException:
                hub.give_up()
                raise
            finally:
                world.store.delete(_KEY)
        return cls(world, *_find(world, deadline))

    # -- for the channels -----------------------------------------------------------------

    def gone(self) -> set[int]:
        """Return the ranks that have ended, or are cut off, as far as it is known."""
        with self._lock:
            found = {*self._lost, *([0] if self.hub_gone else [])}
        for rank, process in enumerate(self.processes):
            if process is not None and rank not in found and process.has_ended():
                found.add(rank)
        if self.hub_gone and self.standby is not None:
            others = set(range(self.size)) - found - {self.rank}
            found.update(rank for rank in others if self.standby.has_ended(rank))
        return found - {self.rank}

    def look_around(self) -> None:
        """Find out, in the hub's stead, who has ended; seldom enough for whoever polls."""
        now = time.monotonic()
        with self._lock:
            if self._link is None or now < self._looked_at + _AROUND_S:
                return
            self._looked_at = now
        gone = self.gone()
        with self._lock:
            for rank in gone - self._lost:
                # Who has closed it first is missed by those alone who need it: Channel.check().
                if rank not in self.channel.left:
                    self._lose(rank)

    def _say(self, message: Message) -> None:
        link = self._link
        if link is not None:
            # If the hub is gone the watcher thread knows it as well.
            with contextlib.suppress(OSError):
                link.send(message)

    def _leave(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            _say_goodbye(link)

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
                    raise ValueError(f"rank {message['rank']} of {self.size} is lost")
                self._lose(message["rank"], message["why"])
                return
            channel = self._channels.get(message["channel"])
            if channel is not None:
                channel._hear(message)
            elif kind == "report":
                # Not made here yet: nothing was called.
                self._say({**message, "entries": [], "finished": 0, "started": 0})
            elif kind in ("failure", "left"):
                self._early.setdefault(message["channel"], []).append(message)

    def _lose(self, rank: int, why: str = "") -> None:
        self._lost.add(rank)
        for channel in list(self._channels.values()):
            if rank in channel.members:
                channel._lose(rank, why)

    def _hub_gone(self, why: str) -> None:
        """The hub's process has ended, also after it has left; or what it says is wrong."""
        self.hub_gone = True
        with self._lock:
            if self._link is not None and 0 not in self.channel.left:
                self._lose(0, why)


# What taking part in a roll call brings: the link, the ranks' hosts, the meeting's secret, the
# ranks' processes, and this one's standby.
_Joined = tuple[Link, list[str], Secret, "list[RankProcess | None]", Standby | None]


def _derived(world: World) -> bytes | None:
    """Return the hub's key where the ranks have a secret, from which it follows."""
    return None if world.secret is None else world.secret.key("hub")


def _published(world: World, address: str, key: bytes) -> bytes:
    """Return what rank 0 publishes: with a secret no key ever travels."""
    found = {"address": address}
    if world.secret is None:
        found["key"] = key.hex()
    return json.dumps(found).encode()


def _join_own(world: World, hub: Hub, key: bytes, deadline: Deadline) -> _Joined:
    """Take part in the roll call of this process's own hub."""
    while True:
        try:
            return _join(world, hub.address, key, deadline)
        except (EOFError, OSError) as error:
            # It was over before this rank was there; or strangers fill the queue.
            if hub.refusal is not None or deadline.expired:
                raise _refused(world, hub.refusal or repr(error)) from error
            time.sleep(_RETRY_S)


def _find(world: World, deadline: Deadline) -> _Joined:
    """Look for rank 0's hub and take part in its roll call."""
    refused: Exception | None = None
    while True:
        try:
            published = world.store.get(_KEY, deadline)
        except RendezvousError as error:
            raise RendezvousError(
                f"rendezvous: rank 0 of {world.size} did not arrive within {deadline.seconds:g} s "
                f"[rank {world.rank}]: {error}"
            ) from error
        address, key = _read(world, published)
        try:
            return _join(world, address, key, deadline)
        except (EOFError, OSError) as error:
            # It may be the hub of an earlier roll call, which the store has not forgotten yet. What
            # a hub said of this rank's key tells more than that the last attempt came too late.
            refused = refused if isinstance(refused, ProofError) else error
            if deadline.expired:
                raise RendezvousError(
                    f"rendezvous: rank {world.rank} of {world.size} cannot reach rank 0 at "
                    f"{address.replace(' ', ':')}: {refused!r}. Is it an address of the right "
                    "interface of that host (COLLECTIVE_INTERFACE), and open to this one?"
                ) from error
            time.sleep(_RETRY_S)


def _read(world: World, published: bytes) -> tuple[str, bytes]:
    """Return the hub's address and key, as rank 0 has published them."""
    try:
        found = parse(published)
        address = str(found["address"])
        key = _derived(world) or bytes.fromhex(found["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise RendezvousError(
            f"rendezvous: what the store holds for {_KEY!r} is not what rank 0 publishes there: "
            f"{error!r} [rank {world.rank}]. Somebody else writes to it: use a store of this "
            "launch's own."
        ) from error
    return address, key


def _join(world: World, address: str, key: bytes, deadline: Deadline) -> _Joined:
    """Take part in the roll call.

    Raises:
        RendezvousError: the hub refuses this rank, or has given up.
        EOFError, OSError: it is not there, or gone before it was complete.
    """
    link = connect(address, key, deadline, world.tls)
    standby = None
    try:
        standby = Standby.of(world)
        here = {"rank": world.rank, "size": world.size, "host": world.host}
        here["contact"] = "" if standby is None else standby.address
        link.send({"kind": "here", **here, "process": str(RankProcess.own())})
        answer = _answer(world, link, deadline)
        if check(answer, FROM_HUB) == "complete" and len(answer["hosts"]) == world.size:
            processes = [RankProcess.parse(text) for text in answer.get("processes", ())]
            secret = Secret(key).within(answer["session"])
            if standby is not None:
                standby.begin(list(map(str, answer.get("contacts", ()))), secret.key("standby"))
            return link, answer["hosts"], secret, processes, standby
        raise _refused(world, answer.get("why", f"the hub calls the roll by {answer!r:.80}"))
    except ValueError as error:
        _give_up(link, standby)
        raise _refused(world, f"the hub of rank 0 says what no hub says: {error}") from error
    except BaseException:
        _give_up(link, standby)
        raise


def _give_up(link: Link, standby: Standby | None) -> None:
    link.close()
    if standby is not None:
        standby.close()


def _answer(world: World, link: Link, deadline: Deadline) -> Message:
    """Return what the hub says, unless it is known meanwhile that the ranks will not meet."""
    answer_by = Deadline(deadline.left() + _ANSWER_S)
    while True:
        try:
            return link.expect(answer_by.within(_LOOK_S))
        except TimeoutError:
            if answer_by.expired:
                raise
        world.store.check()


def _say_goodbye(link: Link) -> None:
    with contextlib.suppress(OSError):
        link.send({"kind": "bye"})
    link.close()


def _drop(link: Link, unclosed: Unclosed, owner: int) -> None:
    # Their own finalizers may not have run, which are in no order.
    tell_dropped(link, unclosed, list(unclosed), owner)
    # A forked child has the same connection: ending it would end the parent's.
    if os.getpid() == owner:
        _say_goodbye(link)


def _refused(world: World, why: str) -> RendezvousError:
    return RendezvousError(f"rendezvous: {why} [rank {world.rank}].")


def _watch(reference: weakref.ref[Monitor], link: Link) -> None:
    """Listen to the hub until it or this rank goes; holds no monitor alive."""
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
            return  # its finalizer closes the link, once it has said goodbye
        try:
            for message in messages:
                monitor._hear(message)
        except Exception as error:
            # Nobody would hear of a failure any more if this thread just ended.
            why = f"{type(error).__name__}: {error}"
        del monitor
    monitor = reference()
    if monitor is not None:
        monitor._hub_gone(why)
    link.close()
