"""A store that outlives the rank that serves it.

Where ranks of several hosts meet at an address, rank 0's process serves the store, and the store
dies with rank 0. Then the lowest rank that lives serves it. Every rank has a socket for that
purpose, and all ranks know its address since the roll call. Two things must not happen. Two ranks
must not serve at once, to ranks that disagree about who is alive. And a decision that was made must
not be made again with another outcome.

*Which rank serves.* A rank goes on to the next server only if the last server's process has
certainly ended. The proof is that the kernel of that host refuses a connection to the process's
socket, or that a listener with another key answers, which has got the port since. The process had
the socket open from the roll call until it ended or closed its communicator.
A timeout proves nothing, so no rank goes on after a timeout. Therefore a host that is cut off, or
has lost its power, leaves the other ranks without a store. So all ranks that ask either ask the
same server or a server that has ended.

*Which values the server knows.* Each rank remembers the values that it has read from the store or
put there. Before the new server answers its first question, it asks every living rank for these
values. So a value that some living rank may rely on is there again before any rank can put another
value. No rank relies on a value that no living rank has seen. Once a rank has told the new server
its values, the rank drops every answer of an earlier server, even one that it has already received.
The new server waits for a rank that lives but does not answer (because it is stopped, say), and
gives no answers before. The new server does not ask a rank that is already out by a decision that
the server was part of: such a rank has taken part in nothing since.
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

from collective.control.link import AnotherKeyError, Link, Message, Tls, connect, listen
from collective.control.ports import Ports
from collective.control.server import RefusedError, Server, Values, ask
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import RendezvousError

if TYPE_CHECKING:
    from collective.contract.world import World

# Errors of a connection to a standby that is gone: nobody listens at its port, or another listener
# has got the port, as happens soon if the ranks may use only a few (COLLECTIVE_PORT).
_GONE = (ConnectionRefusedError, AnotherKeyError)
# How long a living rank may take to report what it knows, and the new server to answer.
_TELL_S, _ANSWER_S = 20.0, 30.0
# Timeout of a connection; time between two checks whether a process has ended; and pause before a
# rank connects again to a process that has just closed the last connection.
_CONNECT_S, _LOOK_S, _RETRY_S = 5.0, 0.2, 0.01
# Timeout of the connection of such a check: a host that is cut off must not hold the caller up.
_TRY_S = 0.5
# How long a process that is killed may take to close all of its sockets, on a busy machine.
_ENDING_S = 1.0
# Number of values that a rank remembers at most. A generation has some keys, an agreement one key
# per rank.
_REMEMBERED = 1 << 14


class Standby:
    """This rank's part of the lasting store: a socket, and the values that the rank knows.

    Args:
        rank: this rank.
        host: an address of this host to which ranks of other hosts can connect; None if all ranks
            are on this host.
        tls: TLS contexts for connections between hosts, or None.
        ports: ports at which this rank may listen; None for any.

    Attributes:
        address: address of the socket, for :func:`collective.control.link.connect`.
        lasts: whether a store of :meth:`lasting` uses this standby, and closes it.
    """

    lasts = False

    def __init__(
        self, rank: int, host: str | None, tls: Tls | None, ports: Ports | None = None
    ) -> None:
        self._rank = rank
        self._tls = tls
        self._listening, self.address = listen(host, ports)
        self._contacts: Sequence[str] = ()
        self._key = b""
        self._thread: threading.Thread | None = None
        self._service: _Service | None = None
        self._looked: dict[int, float] = {}
        self._ended: set[int] = set()
        self._out: Set[int] = frozenset()
        # The lock guards three things. _known has the values that this rank has read or put.
        # _written has the values that it has set, which are newer than those that other ranks have
        # read. floor is the lowest server whose answers this rank still accepts.
        self.lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self.floor = 0

    @classmethod
    def of(cls, world: World) -> Standby | None:
        """Return this rank's standby; None where the store outlives every rank anyway."""
        if world.size == 1 or not world.store.served_by_rank:
            return None
        return cls(world.rank, world.own_host, world.tls, world.ports)

    def begin(self, contacts: Sequence[str], key: bytes) -> None:
        """Serve the socket, now that this rank has the addresses of the other ranks.

        Args:
            contacts: address of every rank's standby.
            key: secret key that a peer must prove to know.
        """
        self._contacts, self._key = contacts, key
        self._service = _Service(self)
        server = Server(self._listening, key, self._service, self._tls)
        self._thread = threading.Thread(target=server.run, name="collective-standby", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket: to other ranks this one has then ended. Closing twice is harmless."""
        if self._thread is None:
            self._listening.close()
            return
        assert self._service is not None
        self._service.over = True
        _wake(self._listening)
        # The garbage collector may call this in any thread, also in the one that serves the socket.
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def lasting(self, store: Store) -> LastingStore:
        """Return a store like ``store`` that other ranks serve when its server has ended."""
        self.lasts = True
        return LastingStore(store, self)

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return len(self._contacts)

    def remember(self, kind: str, key: str, value: bytes | None) -> None:
        """Remember the result of a question; the caller holds the lock."""
        if kind == "delete":
            self._known.pop(key, None)
            self._written.pop(key, None)
        elif value is not None:
            (self._written if kind == "set" else self._known)[key] = value.hex()
        for values in (self._known, self._written):
            if len(values) > _REMEMBERED:
                del values[next(iter(values))]

    def report(self, server: int) -> tuple[dict[str, str], dict[str, str]]:
        """Return this rank's values for ``server``; accept no answer of an earlier server again."""
        with self.lock:
            self.floor = max(self.floor, server)
            return dict(self._known), dict(self._written)

    def leave_out(self, ranks: Set[int]) -> None:
        """Do not ask ``ranks`` again: they are out by a decision that this rank was part of."""
        self._out = self._out | ranks

    def link(self, rank: int, seconds: float = _CONNECT_S) -> Link:
        """Return a connection to a rank's standby.

        Raises:
            ConnectionRefusedError, AnotherKeyError: the rank's process has ended, or has closed
                its standby.
            OSError: the standby cannot be reached.
        """
        return connect(self._contacts[rank], self._key, Deadline(seconds), self._tls)

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has certainly ended, or has closed its communicator."""
        now = time.monotonic()
        if rank not in self._ended and now >= self._looked.get(rank, 0.0) + _LOOK_S:
            self._looked[rank] = now
            try:
                self.link(rank, _TRY_S).close()
            except _GONE:
                self._ended.add(rank)
            except (EOFError, OSError):
                # This proves nothing: a host that is cut off does not answer, either.
                pass
        return rank in self._ended

    def _has_ended_now(self, rank: int) -> bool:
        """Check whether a rank's process has ended, even if the last check was a moment ago."""
        self._looked.pop(rank, None)
        return self.has_ended(rank)

    def gathered(self) -> dict[str, str]:
        """Return the values that the living ranks know, for this rank to serve.

        This rank answers no question before it has these values.

        Raises:
            RendezvousError: a lower rank may still live, or a living rank does not report.
        """
        for rank in range(self._rank):
            link = self._link_to_living(rank)
            if link is not None:
                link.close()
                raise RendezvousError(f"rank {rank} lives, and serves before rank {self._rank}")
        known, written = self.report(self._rank)
        for rank in range(self._rank + 1, self.size):
            if rank not in self._out:
                more = self._asked(rank)
                known.update(more[0])
                written.update(more[1])
        return {**known, **written}

    def _link_to_living(self, rank: int) -> Link | None:
        """Return a connection to a rank's standby; None if the rank's process has ended.

        Raises:
            RendezvousError: the standby cannot be reached, and its rank may still live.
        """
        try:
            return self.link(rank)
        except _GONE:
            return None
        except (EOFError, OSError) as error:
            if _ends(partial(self._has_ended_now, rank)):
                return None
            raise RendezvousError(
                f"rank {rank} cannot be reached, and may still live: {error}"
            ) from error

    def _asked(self, rank: int) -> tuple[dict[str, str], dict[str, str]]:
        """Return the values that a rank reports; none if the rank's process has ended."""
        link = self._link_to_living(rank)
        if link is None:
            return {}, {}
        try:
            link.send({"kind": "tell", "server": self._rank})
            answer = link.expect(Deadline(_TELL_S))
            return answer["known"], answer["written"]
        except TimeoutError as error:
            raise RendezvousError(
                f"rank {rank} lives, but did not report within {_TELL_S:g} s what was decided"
            ) from error
        except (EOFError, OSError, ValueError):
            if _ends(partial(self._has_ended_now, rank)):
                return {}, {}
            raise RendezvousError(
                f"rank {rank} lives, but did not report what was decided"
            ) from None
        finally:
            link.close()


class _Service:
    """Handler of a standby's socket: reports this rank's values to a new server on demand.

    Once the ranks before this one have ended, the handler answers any question to the store.
    """

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
                raise ValueError("a message whose server is not a rank")
            known, written = self._standby.report(message["server"])
            link.send({"known": known, "written": written})
            return
        if self._values is None:
            try:
                values = self._standby.gathered()
            except RendezvousError as error:
                link.send({"number": message["number"], "why": str(error)})
                return
            self._values = Values(values)
        self._values.heard(link, message)

    def gone(self, link: Link, why: str) -> None:
        """Do nothing: the peer connects again, or has ended."""


class LastingStore(Store):
    """One rank's access to a store whose server may die; see the module's docstring.

    Args:
        store: the store that rank 0 serves.
        standby: this rank's standby; it is closed with this store.
    """

    def __init__(self, store: Store, standby: Standby) -> None:
        self._first = store
        self._standby = standby
        self._asking = threading.Lock()
        # Rank that serves, as far as this rank knows; 0 means ``store``.
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
        value: bytes | None = self._do(lambda: self._first.try_get(key), "get", key)
        return value

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        found: bytes = self._do(lambda: self._first.put_if_absent(key, value), "put", key, value)
        return found

    def delete(self, key: str) -> None:
        self._do(lambda: self._first.delete(key), "delete", key)

    def check(self) -> None:
        self._first.check()

    def announced(self) -> Set[tuple[str, int]]:
        return self._first.announced()

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
        """Ask the current server and remember its answer; drop an answer of an earlier server."""
        standby = self._standby
        while True:
            # Ask no server below the floor. A standby to which this rank has reported its values
            # serves from such reports. By then its decisions may differ from the answers that an
            # earlier server still gives.
            server = max(self._server, standby.floor)
            try:
                answer = self._ask(server, kind, key, value) if server else ask_first()
            except _EndedError:
                self._server = server + 1
                continue
            except RendezvousError:
                if server or self._closed or not _ends(self._first.has_ended):
                    raise
                self._server = 1
                continue
            with standby.lock:
                # Check the floor again, with the lock that report() takes. Either a later report
                # includes the value that is remembered here. Or this rank has already reported:
                # then the loop drops the answer and asks the server that has the report.
                if server >= standby.floor:
                    standby.remember(kind, key, answer if value is None or kind == "put" else value)
                    return answer

    def _ask(self, server: int, kind: str, key: str, value: bytes | None) -> bytes | None:
        """Return a standby's answer.

        Raises:
            _EndedError: the standby's process has ended.
            RendezvousError: the standby cannot be reached, or may not serve.
        """
        if self._closed or server >= self._standby.size:
            why = "this rank has closed the store" if self._closed else "so has every later rank"
            raise RendezvousError(
                f"rendezvous: the process that served {self} has ended, and {why}"
            )
        try:
            with self._asking:
                return self._answer(server, kind, key, value)
        except RefusedError as error:
            raise RendezvousError(
                f"rendezvous: the process that served {self} has ended, and rank {server} cannot "
                f"serve in its place: {error}"
            ) from error
        except (EOFError, OSError, ValueError) as error:
            raise RendezvousError(
                f"rendezvous: {kind} of {key!r} at rank {server} failed: {error!r}. Rank {server} "
                f"serves {self} because the process that served it before has ended. Rank {server} "
                "may still live, so no other rank may serve in its place."
            ) from error

    def _answer(self, server: int, kind: str, key: str, value: bytes | None) -> bytes | None:
        deadline = Deadline(_ANSWER_S)
        while True:
            try:
                if self._link is None or self._linked != server:
                    self._drop()
                    self._link, self._linked = self._standby.link(server), server
                return ask(self._link, kind, key, value, deadline)
            except _GONE:
                raise _EndedError from None
            except (EOFError, ConnectionError):
                # Either the server has just ended, which the next attempt tells, or only the
                # connection has.
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
    """The process of the rank that served has ended."""


def _ends(has_ended: Callable[[], bool]) -> bool:
    """Return whether a process has ended, or ends in a moment.

    A killed process closes its connections and its listening port one after the other. So a
    connection may break while the port still accepts new connections.
    """
    deadline = Deadline(_ENDING_S)
    while not has_ended():
        if deadline.expired:
            return False
        time.sleep(_RETRY_S)
    return True


def _wake(listening: socket.socket) -> None:
    """Wake the thread that waits for connections; from now on the kernel refuses connections."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
