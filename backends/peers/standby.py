"""A store that outlives the rank who serves it.

Where ranks of several hosts meet at an address, rank 0's process serves the store, and dies with
rank 0. Then the lowest rank that lives serves it: each has a socket for that, whose address all
know since the roll call. Two things must not happen: that two of them serve at once, to ranks that
think differently of who is alive; and that what was decided is decided once more, otherwise.

*Who serves.* A rank goes on to the next server only if the last one's process has ended for
certain: the kernel of that host refuses a connection to its socket, which was open from the roll
call on until the process ended, or closed its communicator. A timeout proves nothing, so nobody
goes on after one: a host that is cut off, or has lost its power, leaves the others without a
store. So all who ask, ask the same server, or one that has ended.

*What it knows.* Each rank remembers what it has read from the store or put there. Before it answers
its first question the new server asks every rank that lives for that. So a value that some living
rank may go by is there again before anybody can put another; what nobody who lives has seen,
nobody goes by. A rank that has told what it knows takes no answer of an earlier server any more,
though it may have it in its hands. One that lives and says nothing (stopped, say) is waited for,
and then nobody gets an answer. Not asked is who is out already by a decision that the server was
part of: it has taken part in nothing since.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from collective.contract.store import Store
from collective.deadline import Deadline
from collective.errors import RendezvousError

from .link import Link, Message, connect, listen
from .server import Server
from .values import RefusedError, Values, ask

if TYPE_CHECKING:
    from collective.contract.world import Tls, World

__all__ = ["LastingStore", "Standby"]

# How long one that lives may take to say what it knows, and the new server to answer.
_TELL_S, _ANSWER_S = 20.0, 30.0
# How long a connection may take; how often it is looked whether a process has ended; and the pause
# before another connection to one that has just closed the last.
_CONNECT_S, _LOOK_S, _RETRY_S = 5.0, 0.2, 0.01
# How long a process that is killed may take to close all of its sockets, on a busy machine.
_ENDING_S = 1.0
# What a rank remembers at most. A generation has some keys, an agreement one a rank.
_REMEMBERED = 1 << 14


class Standby:
    """This rank's part: the socket, and what it knows.

    Args:
        rank: this one.
        host: an address of this host where ranks of others can connect; None on one host.
        tls: for connections between hosts, or None.

    Attributes:
        address: what others take to reach it.
    """

    def __init__(self, rank: int, host: str | None, tls: Tls | None) -> None:
        self._rank = rank
        self._tls = tls
        self._listening, self.address = listen(host)
        self._contacts: Sequence[str] = ()
        self._key = b""
        self._thread: threading.Thread | None = None
        self._service: _Service | None = None
        self._looked: dict[int, float] = {}
        self._ended: set[int] = set()
        self._out: Set[int] = frozenset()
        # With the lock: what this rank has read or put, what it has set, which is newer than what
        # others have read of it; and from which server on it takes an answer.
        self.lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self.floor = 0

    @classmethod
    def of(cls, world: World) -> Standby | None:
        """Return this rank's; None where the store outlives every rank anyway."""
        if world.size == 1 or not world.store.served_by_rank:
            return None
        alone = world.local_size == world.size
        return cls(world.rank, None if alone else world.address, world.tls)

    def begin(self, contacts: Sequence[str], key: bytes) -> None:
        """Attend to the socket, now that it is known who the others are.

        Args:
            contacts: every rank's address.
            key: what they have to know.
        """
        self._contacts, self._key = contacts, key
        self._service = _Service(self)
        server = Server(self._listening, key, self._service, self._tls)
        self._thread = threading.Thread(target=server.run, name="collective-standby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket: to the others this rank has ended. A second close does nothing."""
        if self._thread is None:
            self._listening.close()
            return
        assert self._service is not None
        self._service.over = True
        _wake(self._listening)
        if self._thread is not threading.current_thread():  # which may collect garbage, too
            self._thread.join(1.0)

    def lasting(self, store: Store) -> LastingStore:
        """Return ``store``, which the others serve when its server has ended."""
        return LastingStore(store, self)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._contacts)

    def remember(self, kind: str, key: str, value: bytes | None) -> None:
        """Remember, with the lock, what came of a question."""
        if kind == "delete":
            self._known.pop(key, None)
            self._written.pop(key, None)
        elif value is not None:
            (self._written if kind == "set" else self._known)[key] = value.hex()
        for kept in (self._known, self._written):
            if len(kept) > _REMEMBERED:
                del kept[next(iter(kept))]

    def report(self, server: int) -> tuple[dict[str, str], dict[str, str]]:
        """Return what this rank knows to ``server``, and take no earlier one's answer any more."""
        with self.lock:
            self.floor = max(self.floor, server)
            return dict(self._known), dict(self._written)

    def leave_out(self, ranks: Set[int]) -> None:
        """Ask those no more: they are out, by a decision that this rank was part of."""
        self._out = self._out | ranks

    def link(self, rank: int) -> Link:
        """Return a connection to a rank's standby.

        Raises:
            ConnectionRefusedError: its process has ended, or has closed it.
            OSError: it cannot be reached.
        """
        return connect(self._contacts[rank], self._key, Deadline(_CONNECT_S), self._tls)

    def has_ended(self, rank: int) -> bool:
        """Tell whether a rank's process has ended for certain, or has closed its communicator."""
        now = time.monotonic()
        if rank not in self._ended and now >= self._looked.get(rank, 0.0) + _LOOK_S:
            self._looked[rank] = now
            try:
                self.link(rank).close()
            except ConnectionRefusedError:
                self._ended.add(rank)
            except (EOFError, OSError):
                # No proof: a host that is cut off answers nothing, either.
                pass
        return rank in self._ended

    def _has_ended_now(self, rank: int) -> bool:
        """Look whether a rank's process has ended, however short ago that was looked at."""
        self._looked.pop(rank, None)
        return self.has_ended(rank)

    def gathered(self) -> dict[str, str]:
        """Return what the living know, for this rank to serve; nobody has an answer before.

        Raises:
            RendezvousError: one lives and does not tell.
        """
        for rank in range(self._rank):
            try:
                self.link(rank).close()
            except ConnectionRefusedError:
                continue
            except (EOFError, OSError) as error:
                if _ends(partial(self._has_ended_now, rank)):
                    continue
                raise RendezvousError(
                    f"whether rank {rank} has ended is not known: {error}"
                ) from error
            raise RendezvousError(f"rank {rank} lives, and serves before this one")
        known, written = self.report(self._rank)
        for rank in range(self._rank + 1, self.size):
            if rank not in self._out:
                more = self._asked(rank)
                known.update(more[0])
                written.update(more[1])
        return {**known, **written}

    def _asked(self, rank: int) -> tuple[dict[str, str], dict[str, str]]:
        try:
            link = self.link(rank)
        except ConnectionRefusedError:
            return {}, {}
        except (EOFError, OSError) as error:
            if _ends(partial(self._has_ended_now, rank)):
                return {}, {}
            raise RendezvousError(
                f"rank {rank} cannot be reached, and may live: {error}"
            ) from error
        try:
            link.send({"kind": "tell", "server": self._rank})
            answer = link.expect(Deadline(_TELL_S))
            return answer["known"], answer["written"]
        except TimeoutError as error:
            raise RendezvousError(
                f"rank {rank} lives, and did not say in {_TELL_S:g} s what was decided"
            ) from error
        except (EOFError, OSError, ValueError):
            if _ends(partial(self._has_ended_now, rank)):
                return {}, {}
            raise RendezvousError(f"rank {rank} lives, and did not say what was decided") from None
        finally:
            link.close()


class _Service:
    """What a standby answers: what it knows, and, once the ranks before it have ended, anything."""

    def __init__(self, standby: Standby) -> None:
        self.over = False
        self._standby = standby
        self._values: Values | None = None

    def turn(self) -> bool:
        return not self.over

    def pause(self) -> float | None:
        return None

    def heard(self, link: Link, message: Message) -> None:
        if message["kind"] == "tell":
            if type(message["server"]) is not int:
                raise ValueError("a server that is no rank")
            known, written = self._standby.report(message["server"])
            link.send({"known": known, "written": written})
            return
        if self._values is None:
            try:
                found = self._standby.gathered()
            except RendezvousError as error:
                link.send({"number": message["number"], "why": str(error)})
                return
            self._values = Values(found)
        self._values.heard(link, message)

    def gone(self, link: Link, why: str) -> None:
        """Do nothing: it comes again, or has ended."""


class LastingStore(Store):
    """One rank's way to a store whose server may die; see the module's docstring.

    Args:
        store: which rank 0 serves.
        standby: this rank's, closed with this.
    """

    def __init__(self, store: Store, standby: Standby) -> None:
        self._first = store
        self._standby = standby
        self._asking = threading.Lock()
        # Who serves, as far as this rank knows: 0 is the store that was given.
        self._server = 0
        self._link: Link | None = None
        self._linked = 0
        self._closed = False
        weakref.finalize(self, standby.close).atexit = False

    def __str__(self) -> str:
        return str(self._first)

    def set(self, key: str, value: bytes) -> None:
        self._do(lambda: self._first.set(key, value), "set", key, value)

    def try_get(self, key: str) -> bytes | None:
        found: bytes | None = self._do(lambda: self._first.try_get(key), "get", key)
        return found

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        found: bytes = self._do(lambda: self._first.put_if_absent(key, value), "put", key, value)
        return found

    def delete(self, key: str) -> None:
        self._do(lambda: self._first.delete(key), "delete", key)

    def check(self) -> None:
        self._first.check()

    def without(self, ranks: Set[int]) -> None:
        self._standby.leave_out(ranks)

    def close(self) -> None:
        self._closed = True
        self._standby.close()
        with self._asking:
            self._drop()
        self._first.close()

    # -- one question ---------------------------------------------------------------------

    def _do(
        self, ask_first: Callable[[], Any], kind: str, key: str, value: bytes | None = None
    ) -> Any:
        """Ask whoever serves, and remember the answer; one of a server before that is dropped."""
        standby = self._standby
        while True:
            # Not below the floor: a standby that this rank has told what it knows serves by that.
            # What an earlier server still answers may be decided otherwise by then.
            server = max(self._server, standby.floor)
            try:
                found = self._ask(server, kind, key, value) if server else ask_first()
            except _EndedError:
                self._server = server + 1
                continue
            except RendezvousError:
                if server or self._closed or not _ends(self._first.has_ended):
                    raise
                self._server = 1
                continue
            with standby.lock:
                # Looked at again, with the lock that report() takes: what is remembered now is in
                # what this rank tells, or the answer is dropped and the question asked where it has
                # told.
                if server >= standby.floor:
                    standby.remember(kind, key, found if value is None or kind == "put" else value)
                    return found

    def _ask(self, server: int, kind: str, key: str, value: bytes | None) -> bytes | None:
        """Return a standby's answer.

        Raises:
            _EndedError: its process has ended.
            RendezvousError: it cannot be reached, or may not serve.
        """
        if self._closed or server >= self._standby.size:
            why = "this rank has closed it" if self._closed else "every rank after it has, too"
            raise RendezvousError(f"rendezvous: who served {self} has ended, and {why}")
        try:
            with self._asking:
                return self._answer(server, kind, key, value)
        except RefusedError as error:
            raise RendezvousError(
                f"rendezvous: who served {self} has ended, and rank {server} cannot serve: {error}"
            ) from error
        except (EOFError, OSError, ValueError) as error:
            raise RendezvousError(
                f"rendezvous: {kind} of {key!r} at rank {server}, which serves since who served "
                f"{self} has ended, failed: {error!r}. It may live, so nobody serves in its stead."
            ) from error

    def _answer(self, server: int, kind: str, key: str, value: bytes | None) -> bytes | None:
        deadline = Deadline(_ANSWER_S)
        while True:
            try:
                if self._link is None or self._linked != server:
                    self._drop()
                    self._link, self._linked = self._standby.link(server), server
                return ask(self._link, kind, key, value, deadline)
            except ConnectionRefusedError:
                raise _EndedError from None
            except (EOFError, ConnectionError):
                # It has just ended, which the next attempt tells; or the connection has.
                self._drop()
                if deadline.expired:
                    raise
                time.sleep(_RETRY_S)
            except BaseException:
                self._drop()
                raise

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None


class _EndedError(Exception):
    """Who served has ended."""


def _ends(has_ended: Callable[[], bool]) -> bool:
    """Return whether a process has ended, or ends in a moment.

    A process that is killed closes its connections and the port at which it listens one after the
    other, so that a connection may break while the port still takes new ones.
    """
    deadline = Deadline(_ENDING_S)
    while not has_ended():
        if deadline.expired:
            return False
        time.sleep(_RETRY_S)
    return True


def _wake(listening: socket.socket) -> None:
    """Have whoever waits for connections look again; from now on they are refused."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
