"""How processes that want to join find the ranks, and these find them.

In the store in which the ranks met there is a queue of *tickets*. A process takes the first number
that is free (``join.N``) and waits for the answer (``join.N.answer``), which is written once: by
the rank that decides who is in the next generation, or by the process itself, that it waits no
longer. An answer says in which decision it may be; whether it is a member that decision alone says
(:mod:`collective.contract.decision`). What the ranks say of themselves is at ``join``.

So nobody who has given up is decided on, and whoever dies meanwhile is a member that dies while
the others connect. With a job's secret all of it is sealed: a process with another one, or with
none, is not seen, nor does it see anything.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from collective.contract.process import RankProcess
from collective.contract.store import Store
from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, ConfigError, ExcludedError

__all__ = ["Arrivals", "Joining", "Knock"]

#: Of what travels through the store between the ranks and those who join.
_PROTOCOL = 1
_ROLL = "join"
_POLL_S = 0.01


class Joining(NamedTuple):
    """One that is let in.

    Attributes:
        number: which is nobody else's, ever.
        host: the name of its host.
        process: as :class:`RankProcess` writes it.
    """

    number: int
    host: str
    process: str


class Arrivals:
    """Those who wait, as the ranks see them.

    Args:
        store: in which the ranks met.
        backend: the name of their transport.
    """

    def __init__(self, store: Store, backend: str) -> None:
        self._store = store
        self._backend = backend
        self._announced = False
        # The first ticket that may still wait.
        self._first = 0

    def announce(self) -> None:
        """Say that there are ranks that can be joined, and how."""
        if not self._announced:
            roll = {
                "protocol": _PROTOCOL,
                "backend": self._backend,
                "process": str(RankProcess.own()),
            }
            self._store.set(_ROLL, json.dumps(roll).encode())
            self._announced = True

    def keep(self) -> None:
        """Leave it as it is said at the end: this rank goes, and others go on."""
        self._announced = False

    def end(self) -> None:
        """Say that there are not any more, if this rank has said that there are."""
        if self._announced:
            self._store.set(_ROLL, json.dumps({"protocol": _PROTOCOL, "ended": True}).encode())
            self._announced = False

    def waiting(self, decision: str = "") -> list[tuple[int, dict[str, Any]]]:
        """Return the tickets of those who wait, and live as far as is known.

        Args:
            decision: those who were named to this one wait, too.
        """
        found = []
        for number, ticket, answer in self._tickets(self._first):
            process = RankProcess.parse(ticket.get("process"))
            answered = answer and answer.get("decision") != (decision or None)
            fits = {"host", "process"} <= set(ticket)
            if answered or not fits or (process is not None and process.has_ended()):
                self._first += number == self._first
            else:
                found.append((number, ticket))
        return found

    def _tickets(self, first: int = 0) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield the number of each ticket, what is on it, and its answer, which may be empty."""
        for number in itertools.count(first):
            ticket = self._store.try_get(f"join.{number}")
            if ticket is None:
                return
            answer = self._store.try_get(f"join.{number}.answer")
            yield number, _parsed(ticket), _parsed(answer or b"{}")

    def claim(
        self, name: str, generation: int, origin: Sequence[int], founders: int
    ) -> list[Joining]:
        """Answer all who wait that they may be in a decision, and return them.

        Args:
            name: of the ranks' lineage.
            generation: that is decided on.
            origin: the members' numbers, as they are now.
            founders: how many ranks there were at first, whose numbers come before all others'.
        """
        found = []
        decision = f"{name}.{generation}"
        for ticket, request in self.waiting(decision):
            number = founders + ticket  # whoever leads, and however often: it is this one's
            offer = {
                "decision": decision, "name": name, "generation": generation,
                "origin": list(origin), "number": number, "founders": founders,
            }  # fmt: skip
            key = f"join.{ticket}.answer"
            answer = _parsed(self._store.put_if_absent(key, json.dumps(offer).encode()))
            if answer.get("decision") == decision:  # and it has not given up just now
                found.append(Joining(number, str(request["host"]), str(request["process"])))
        return found

    def admitted(self) -> set[int]:
        """Return the process ids of all who were ever named to a decision."""
        named = [ticket for _, ticket, answer in self._tickets() if "decision" in answer]
        processes = [RankProcess.parse(ticket.get("process")) for ticket in named]
        return {process.pid for process in processes if process is not None}


class Knock:
    """A process that wants to join.

    Args:
        store: in which the ranks met.
        host: the name of this host.
        grace: seconds for which the ranks may have nobody who speaks for them: after a loss.
    """

    def __init__(self, store: Store, host: str, grace: float) -> None:
        self._store = store
        self._host = host
        self._grace = grace
        self._missing_since: float | None = None

    def backend(self, deadline: Deadline) -> str:
        """Wait for ranks that can be joined, and return the name of their transport.

        Raises:
            CollectiveTimeoutError: there are none.
            ExcludedError: they have ended.
            ConfigError: they speak another protocol.
        """
        while (roll := self._roll()) is None:
            if deadline.expired:
                raise self._late(deadline, "nobody there lets anybody in")
            time.sleep(_POLL_S)
        if roll.get("protocol") != _PROTOCOL:
            raise ConfigError(
                f"join: the ranks at {self._store} speak protocol {roll.get('protocol')}, this "
                f"process {_PROTOCOL}: they have another version of collective. Install the same."
            )
        return str(roll["backend"])

    def admitted(self, deadline: Deadline) -> dict[str, Any]:
        """Wait until the ranks have decided on a generation with this process.

        Returns:
            What :meth:`Arrivals.claim` has offered it.

        Raises:
            CollectiveTimeoutError: they did not call ``grow()``. It waits no longer then.
            ExcludedError: they have ended.
        """
        while True:
            key = f"{self._ticket()}.answer"
            while (text := self._store.try_get(key)) is None:
                try:
                    self._roll()
                    if deadline.expired:
                        raise self._late(deadline, "the ranks there did not call grow()")
                except BaseException:
                    # There is one answer. If the ranks were faster, they count on this process: it
                    # goes on, whatever it was that ended its patience.
                    won = self._store.put_if_absent(key, b'{"withdrawn": true}')
                    if "withdrawn" in _parsed(won):
                        raise
                time.sleep(_POLL_S)
            offer = _parsed(text)
            while (verdict := self._store.try_get(offer["decision"])) is None:
                self._roll()
                if deadline.expired:
                    raise self._late(deadline, "the ranks there did not decide")
                time.sleep(_POLL_S)
            # Otherwise a rank decided that had not seen this process: it asks once more.
            if offer["number"] in _parsed(verdict)["members"]:
                return offer

    def _ticket(self) -> str:
        """Return the key of a ticket that is this process's."""
        request = json.dumps({"host": self._host, "process": str(RankProcess.own())}).encode()
        number = 0
        while True:
            key = f"join.{number}"
            if self._store.try_get(key) is None:
                # Threads of a process have the same request: what is written has to be one's own.
                mine = request[:-1] + f', "id": "{secrets.token_hex(8)}"}}'.encode()
                if self._store.put_if_absent(key, mine) == mine:
                    return key
            number += 1

    def _roll(self) -> dict[str, Any] | None:
        """Return what the ranks say of themselves; None as long as they say nothing.

        Raises:
            ExcludedError: they have ended, or who spoke for them has, and nobody does instead.
        """
        text = self._store.try_get(_ROLL)
        roll = _parsed(text or b"{}")
        process = RankProcess.parse(roll.get("process"))
        missing = "ended" in roll or (process is not None and process.has_ended())
        now = time.monotonic()
        if not missing:
            self._missing_since = None
            return roll or None
        self._missing_since = self._missing_since or now
        # After a loss another rank speaks for them, but not before they have shrunk.
        if now - self._missing_since < self._grace:
            return None
        raise ExcludedError(
            f"join: the ranks that met at {self._store} have ended: there is nobody to join. "
            "Start all ranks again, or do without."
        )

    def _late(self, deadline: Deadline, why: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"join: timed out: waited {deadline.seconds:g} s at {self._store}, and {why}. "
            "Processes join where the ranks call waiting() and grow(), as elastic.generations does "
            "at each commit; who has another secret (COLLECTIVE_SECRET), or none, is not seen.",
            (),
        )


def _parsed(text: bytes) -> dict[str, Any]:
    """Return what somebody has written; nothing if it was none of ours."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
