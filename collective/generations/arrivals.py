"""Queue in which processes that want to join and the ranks find each other.

The store in which the ranks met contains a queue of *tickets*. A process takes the first free
number (``join.N``) and waits for the answer (``join.N.answer``). The answer is written only once:
by the rank that leads the decision on the next generation, or by the process itself when it stops
waiting. The answer of a rank names the decision that may include the process. Only that decision
determines whether the process is a member (:mod:`collective.contract.decision`). The ranks publish
an announcement of themselves at the key ``join``.

The ticket is the number of the process. If the leader gave out numbers, two ranks that both take
themselves for the leader could give one number to two processes.

So a process that has given up is never decided on. A process that dies after the answer is treated
as a member that dies while the others connect. If the job has a secret, all values are sealed: a
process with another secret, or with none, cannot see the ranks, and the ranks cannot see it.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from collective.contract.process import RankProcess
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, ConfigError, ExcludedError

#: Version of the protocol that the ranks and joining processes use in the store.
_PROTOCOL = 1
_ROLL = "join"
_POLL_S = 0.01


class Joining(NamedTuple):
    """Process that is let in.

    Attributes:
        number: original number of the process, which no other rank ever has.
        host: name of its host.
        process: text of its :class:`RankProcess`.
    """

    number: int
    host: str
    process: str


class Arrivals:
    """Queue of the processes that wait to join, as the ranks use it.

    Args:
        store: store in which the ranks met.
        backend: name of the ranks' transport.
    """

    def __init__(self, store: Store, backend: str) -> None:
        self._store = store
        self._backend = backend
        self._announced = False
        # Number of the first ticket whose process may still be waiting.
        self._first = 0

    def announce(self) -> None:
        """Publish that there are ranks that can be joined, and the name of their transport."""
        if not self._announced:
            roll = {
                "protocol": _PROTOCOL,
                "backend": self._backend,
                "process": str(RankProcess.own()),
            }
            self._store.set(_ROLL, json.dumps(roll).encode())
            self._announced = True

    def keep(self) -> None:
        """Do not retract the announcement on close: this rank leaves, other ranks continue."""
        self._announced = False

    def end(self) -> None:
        """Publish that the ranks have ended, if this rank has made the announcement."""
        if self._announced:
            self._store.set(_ROLL, json.dumps({"protocol": _PROTOCOL, "ended": True}).encode())
            self._announced = False

    def waiting(self, decision: str = "") -> list[tuple[int, dict[str, Any]]]:
        """Return the tickets of waiting processes, except processes that were found to have ended.

        Args:
            decision: key of a decision; tickets whose answer names this decision count as waiting.
        """
        waiting = []
        for number, ticket, answer in self._tickets(self._first):
            process = RankProcess.parse(ticket.get("process"))
            answered = answer and answer.get("decision") != (decision or None)
            fits = {"host", "process"} <= set(ticket)
            if answered or not fits or (process is not None and process.has_ended()):
                self._first += number == self._first
            else:
                waiting.append((number, ticket))
        return waiting

    def _tickets(self, first: int = 0) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield the number of each ticket, its content, and its answer, which may be empty."""
        for number in itertools.count(first):
            ticket = self._store.try_get(f"join.{number}")
            if ticket is None:
                return
            answer = self._store.try_get(f"join.{number}.answer")
            yield number, _parsed(ticket), _parsed(answer or b"{}")

    def claim(
        self, name: str, generation: int, origin: Sequence[int], founders: int
    ) -> list[Joining]:
        """Answer all waiting processes that a decision may include them, and return them.

        Args:
            name: name of the ranks' lineage.
            generation: number of the generation that is decided on.
            origin: original numbers of the present members.
            founders: number of ranks in generation 0; joining processes get the numbers after them.
        """
        claimed = []
        decision = f"{name}.{generation}"
        for ticket, request in self.waiting(decision):
            # The number depends on the ticket only, so every leader computes the same number.
            number = founders + ticket
            offer = {
                "decision": decision, "name": name, "generation": generation,
                "origin": list(origin), "number": number, "founders": founders,
            }  # fmt: skip
            key = f"join.{ticket}.answer"
            answer = _parsed(self._store.put_if_absent(key, json.dumps(offer).encode()))
            if answer.get("decision") == decision:  # false if the process has just given up
                claimed.append(Joining(number, str(request["host"]), str(request["process"])))
        return claimed

    def admitted(self) -> set[RankProcess]:
        """Return all processes whose answer names a decision."""
        named = [ticket for _, ticket, answer in self._tickets() if "decision" in answer]
        processes = [RankProcess.parse(ticket.get("process")) for ticket in named]
        return {process for process in processes if process is not None}


class Knock:
    """Process that wants to join, as the process itself uses the queue.

    Args:
        store: store in which the ranks met.
        host: name of this host.
        grace: seconds that the ranks may be without an announcing rank, as they are after a loss.
    """

    def __init__(self, store: Store, host: str, grace: float) -> None:
        self._store = store
        self._host = host
        self._grace = grace
        self._missing_since: float | None = None

    def backend(self, deadline: Deadline) -> str:
        """Wait for ranks that can be joined, and return the name of their transport.

        Raises:
            CollectiveTimeoutError: no ranks announced themselves in time.
            ExcludedError: the ranks have ended.
            ConfigError: the ranks use another protocol.
        """
        while (roll := self._roll()) is None:
            if deadline.expired:
                raise self._late(deadline, "no ranks there let processes join")
            time.sleep(_POLL_S)
        if roll.get("protocol") != _PROTOCOL:
            raise ConfigError(
                f"join: the ranks at {self._store} use protocol {roll.get('protocol')}, this "
                f"process {_PROTOCOL}: they have another version of collective. Install the same "
                "version."
            )
        return str(roll["backend"])

    def admitted(self, deadline: Deadline) -> dict[str, Any]:
        """Wait until the ranks have decided on a generation with this process.

        Returns:
            The answer that :meth:`Arrivals.claim` has written for this process.

        Raises:
            CollectiveTimeoutError: the ranks did not call ``grow()`` in time. Then the process has
                withdrawn its ticket.
            ExcludedError: the ranks have ended.
        """
        while True:
            key = f"{self._ticket()}.answer"
            while (text := self._store.try_get(key)) is None:
                try:
                    self._roll()
                    if deadline.expired:
                        raise self._late(deadline, "the ranks there did not call grow()")
                except BaseException:
                    # There is only one answer. If the ranks wrote it first, they may already count
                    # on this process. So it continues in spite of the error.
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
            # Otherwise the rank that decided had not seen this process: take a new ticket.
            if offer["number"] in _parsed(verdict)["members"]:
                return offer

    def _ticket(self) -> str:
        """Take a ticket for this process, and return its key."""
        request = json.dumps({"host": self._host, "process": str(RankProcess.own())}).encode()
        number = 0
        while True:
            key = f"join.{number}"
            if self._store.try_get(key) is None:
                # Threads of one process have the same request. The random id makes the ticket
                # unique, so that the comparison shows who has taken it.
                ticket = request[:-1] + f', "id": "{secrets.token_hex(8)}"}}'.encode()
                if self._store.put_if_absent(key, ticket) == ticket:
                    return key
            number += 1

    def _roll(self) -> dict[str, Any] | None:
        """Return the announcement of the ranks; None as long as there is none.

        Raises:
            ExcludedError: the ranks have ended; or the rank that made the announcement has ended,
                and no other rank has renewed the announcement within the grace.
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
        # After a loss another rank renews the announcement, but only after the ranks have shrunk.
        if now - self._missing_since < self._grace:
            return None
        raise ExcludedError(
            f"join: the ranks that met at {self._store} have ended, so this process cannot join "
            "them. Start all ranks again, or leave this process out."
        )

    def _late(self, deadline: Deadline, why: str) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"join: timed out: waited {deadline.seconds:g} s at {self._store}, and {why}. "
            "Processes join when the ranks call waiting() and grow(), as elastic.generations does "
            "at each commit. Ranks with another secret (COLLECTIVE_SECRET), or with none, cannot "
            "be seen.",
            (),
        )


def _parsed(text: bytes) -> dict[str, Any]:
    """Return the JSON object in ``text``; an empty dict if the text is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
