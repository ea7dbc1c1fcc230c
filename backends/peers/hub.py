"""The middle of the monitor: a thread in rank 0's process that every rank is linked to.

It calls the roll, passes on who aborted or left, notices who died, and compares the
ranks' flight recorders when one of them says that a call stalls. It keeps no state of
the communicators: whoever speaks of one names its members.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from collective.contract.descriptors import RAISE_THE_LIMIT
from collective.contract.stalls import Circles
from collective.deadline import Deadline
from collective.errors import RendezvousError

from .link import Link, Message, encoded, listen
from .messages import ENROLMENT, FROM_RANKS, check
from .reports import disagreement
from .server import Server

if TYPE_CHECKING:
    from collective.contract.world import Tls

__all__ = ["Hub"]

# How long a round of comparing waits for the recorders: a rank whose interpreter is busy in
# code that holds the GIL may not answer at all.
_CHECK_S = 0.5
# How often it looks whether the roll call was given up.
_ROLL_S = 1.0
# How long the hub leaves what ranks wait in alone once it has looked.
_LOOK_S = 0.2


@dataclass
class _StallCheck:
    """One comparison that is going on.

    Attributes:
        deadline: when it is concluded without the reports that have not come.
        askers: who wants to know who is late, and of whom besides.
    """

    members: list[int]
    deadline: Deadline
    askers: dict[int, list[int]] = field(default_factory=dict)
    reports: dict[int, Message] = field(default_factory=dict)


@dataclass
class _Exchange:
    """What the members of a communicator offer each other under one name.

    Attributes:
        fresh: who has offered something that nobody was told yet.
    """

    members: list[int]
    texts: dict[int, str] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)


class Hub:
    """Serves the links of one world; see the module's docstring.

    Args:
        size: how many ranks are to come.
        host: an address of this host where ranks of others can connect; None on one host.
        deadline: when the roll call is given up.
        key: what a rank has to know.
        tls: for connections between hosts, or None.

    Attributes:
        address: what :func:`.link.connect` takes to reach it.
        refusal: why the roll call has failed, None as long as it has not.
        session: tells this meeting of the ranks from all others.
    """

    def __init__(
        self, size: int, host: str | None, deadline: Deadline, key: bytes, tls: Tls | None = None
    ) -> None:
        self.refusal: str | None = None
        self.session = secrets.token_hex(16)
        self._size = size
        self._deadline = deadline
        self._links: dict[int, Link] = {}
        self._ranks: dict[Link, int] = {}
        # What each has said of itself.
        self._about: dict[int, Message] = {}
        self._complete = False
        self._over = False
        self._checks: dict[str, _StallCheck] = {}
        # What the ranks have said last that they wait in, and when that was looked at.
        self._waits: dict[int, Message] = {}
        self._circles = Circles()
        self._looked_at = -math.inf
        self._exchanges: dict[tuple[str, str], _Exchange] = {}
        try:
            listening, self.address = listen(host)
        except OSError as error:
            raise RendezvousError(
                f"rendezvous: rank 0 cannot listen on {host}: {error}. It has to be an address "
                "of this host: set COLLECTIVE_INTERFACE to the interface that the other hosts "
                "reach (`collective doctor` lists them)."
            ) from error
        self._server = Server(listening, key, self, tls)
        threading.Thread(target=self._server.run, name="collective-hub", daemon=True).start()

    def give_up(self) -> None:
        """End a roll call that rank 0 waits for no more."""
        self._deadline = Deadline(0.0)

    # -- for the server's thread ----------------------------------------------------------

    def pause(self) -> float | None:
        """Return how many seconds may pass until :meth:`turn` has something to do; None: any."""
        left = [each.deadline.left() for each in self._checks.values()]
        if not self._complete:  # it may be given up at any time
            left.append(self._deadline.at_most(_ROLL_S))
        return min(left, default=None)

    def turn(self) -> bool:
        """Do what is due by now; return whether there is anybody left to serve."""
        # After all that was there to be read: many ranks offer something at one time.
        for (channel, name), exchange in list(self._exchanges.items()):
            self._pass_on(channel, name, exchange)
        for channel in [name for name, each in self._checks.items() if each.deadline.expired]:
            self._conclude(channel)
        if not self._complete and self._deadline.expired and not self._over:
            missing = sorted(set(range(self._size)) - set(self._links))
            why = f"ranks {missing} of {self._size} have not arrived"
            if strangers := self._server.refusals():
                why += f"; {strangers} did not prove to know this job's key"
            if self._server.scarce:
                why += f"; rank 0 could not take them in: {self._server.scarce}. {RAISE_THE_LIMIT}"
            self._refuse(why)
        return not self._over

    def heard(self, link: Link, message: Message) -> None:
        """Act on a message of somebody who knows the key."""
        if link in self._ranks:
            self._hear(link, message)
        else:
            check(message, ENROLMENT)
            self._enrol(link, message)

    def gone(self, link: Link, why: str) -> None:
        """Tell the others that a rank has gone, and why."""
        if link in self._ranks:
            rank = self._ranks[link]
            self._forget(rank)
            # Before that nobody has met it: it may come again, and is missing if it does not.
            if self._complete:
                self._tell(list(self._links), {"kind": "lost", "rank": rank, "why": why})

    # -- the roll call --------------------------------------------------------------------

    def _enrol(self, link: Link, about: Message) -> None:
        rank, size, host = about["rank"], about["size"], about["host"]
        if size != self._size or not 0 <= rank < self._size:
            self._refuse(
                f"rank 0 on this job's hub was told that there are {self._size} ranks; rank {rank} "
                f"on {host} that there are {size}. Every rank needs the same size (WORLD_SIZE)"
            )
        elif rank in self._links:
            self._refuse(
                f"two processes say that they are rank {rank}, one on {self._about[rank]['host']} "
                f"and one on {host}. Every process needs a rank of its own (RANK)"
            )
        else:
            self._links[rank], self._about[rank], self._ranks[link] = link, about, rank
            if len(self._links) == self._size:
                self._complete = True
                # Nobody else is to come, and whoever reads of this hub by mistake, in a store
                # that serves again, is to notice.
                self._server.stop_listening()
                every = [self._about[each] for each in range(self._size)]
                answer: Message = {"kind": "complete", "session": self.session}
                answer["hosts"] = [each["host"] for each in every]
                answer["processes"] = [str(each.get("process", "")) for each in every]
                answer["contacts"] = [str(each.get("contact", "")) for each in every]
                self._tell(range(self._size), answer)

    def _refuse(self, why: str) -> None:
        """End the roll call without success, for everybody who has proved to be of this job."""
        self.refusal = why
        for link in self._server.peers:
            with contextlib.suppress(OSError):
                link.send({"kind": "refused", "why": why})
        self._over = True

    # -- what ranks say -------------------------------------------------------------------

    def _hear(self, link: Link, message: Message) -> None:
        rank = self._ranks[link]
        kind, channel = check(message, FROM_RANKS), message.get("channel", "")
        members: list[int] = message.get("members", [])
        if kind == "bye":
            self._forget(rank)
        elif kind in ("failure", "heard", "left"):
            self._tell((each for each in members if each != rank), {**message, "rank": rank})
        elif kind == "stall":
            if channel not in self._checks:
                self._checks[channel] = _StallCheck(members, Deadline(_CHECK_S))
                self._tell(members, {"kind": "report", "channel": channel})
            if message["asks"] is not None:
                self._checks[channel].askers[rank] = message["asks"]
        elif kind == "waits":
            self._waits[rank] = message
            self._look_for_circles()
        elif kind == "offer":
            exchange = self._exchanges.setdefault((channel, message["name"]), _Exchange(members))
            exchange.texts[rank] = message["text"]
            exchange.fresh.add(rank)
        elif channel in self._checks and rank in self._checks[channel].members:  # a report
            known = self._checks[channel]
            known.reports[rank] = message
            if all(each in known.reports for each in known.members if each in self._links):
                self._conclude(channel)

    def _conclude(self, channel: str) -> None:
        """Tell the members if they have made different calls, else the askers who is late."""
        known = self._checks.pop(channel)
        text = disagreement(known.members, known.reports)
        if text is not None:
            self._tell_mismatch(channel, known.members, text)
            return
        # Not everything to everybody: a thousand ranks may stall at once.
        reports = known.reports
        first = max((report["started"] for report in reports.values()), default=0)
        late = {
            each
            for each in known.members
            if each not in reports or reports[each]["started"] < first
        }
        for rank, besides in known.askers.items():
            asked = {
                each: {**reports[each], "entries": reports[each]["entries"][-1:]}
                if each in reports
                else None
                for each in late.union(besides)
            }
            self._tell([rank], {"kind": "late", "channel": channel, "late": asked})

    def _pass_on(self, channel: str, name: str, exchange: _Exchange) -> None:
        """Give what is new to those who have offered something before, and all to the others."""
        fresh, exchange.fresh = exchange.fresh, set()
        before = exchange.texts.keys() - fresh
        about = {"kind": "offers", "channel": channel, "name": name}
        if fresh:
            self._tell(fresh, {**about, "texts": exchange.texts})
            self._tell(before, {**about, "texts": {each: exchange.texts[each] for each in fresh}})
        if exchange.texts.keys() >= set(exchange.members):
            del self._exchanges[channel, name]

    def _look_for_circles(self) -> None:
        """Break communicators whose ranks wait for each other in calls of several of them."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_S:
            return  # a thousand ranks may wait, and each says so again
        self._looked_at = now
        calls, text = self._circles.found({rank: w["note"] for rank, w in self._waits.items()})
        broken = {
            message["channel"]: message["members"]
            for message in self._waits.values()
            if [message["note"]["name"], message["note"]["number"]] in calls
        }
        for channel, members in broken.items():
            self._tell_mismatch(channel, members, text)
        if broken:
            self._waits.clear()  # the others say again what they wait in

    def _tell_mismatch(self, channel: str, members: Iterable[int], text: str) -> None:
        failure = {"kind": "mismatch", "rank": 0, "text": text, "ranks": []}
        message = {"kind": "failure", "channel": channel, "failure": failure, "finished": None}
        self._tell(members, message)

    def _forget(self, rank: int) -> None:
        self._waits.pop(rank, None)
        # What it takes part in is never complete.
        for key in [key for key, each in self._exchanges.items() if rank in each.members]:
            del self._exchanges[key]
        link = self._links.pop(rank)
        del self._ranks[link]
        if link in self._server.peers:
            self._server.drop(link)
        self._over = self._complete and not self._links

    def _tell(self, ranks: Iterable[int], message: Message) -> None:
        data = encoded(message)
        for rank in ranks:
            if rank in self._links:
                # A rank that cannot be told is gone, which its link will say.
                with contextlib.suppress(OSError):
                    self._links[rank].write(data)
