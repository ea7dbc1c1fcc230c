"""The hub of the ranks' monitors: a thread in rank 0's process, to which every rank has a link.

The hub calls the roll: it waits until all ranks have enrolled. Later it tells the other ranks
which ranks aborted or left, and notices which ranks died. When a rank reports that a call stalls,
the hub compares the ranks' flight recorders. The hub keeps no state of the communicators: every
message about a communicator lists its members.
"""

# There is one hub, and no second one takes over when rank 0's process ends. A second hub would add
# only the comparison of calls and the goodbyes. Deaths are then noticed by each waiting rank itself
# (Monitor.look_around), and the store goes over to a standby (standby.py).
#
# A message is checked field by field even though its sender knows the key: the sender may be of
# another version. An error in one message must not end this thread, on which all ranks depend.

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from collective.contract.process import RAISE_THE_LIMIT
from collective.contract.stalls import Circles
from collective.control.link import Link, Message, encoded, listen
from collective.control.secret import COMPARE
from collective.control.server import Server
from collective.deadline import Deadline
from collective.errors import RendezvousError
from collective.request import name_ranks

from .messages import ENROLMENT, FROM_RANKS, check, disagreement, followed

if TYPE_CHECKING:
    from collective.contract.world import World

# How long a comparison waits for the ranks' reports. A rank whose interpreter is busy in code
# that holds the GIL may not answer at all.
_CHECK_S = 0.5
# How often the hub checks whether rank 0 has given up the roll call.
_ROLL_S = 1.0
# Reports of further ranks, for which the asked ranks wait: how many each asker gets at least, and
# how many all askers get at most if they get more than that.
_FURTHER, _FURTHER_IN_ALL = 32, 4096
# Shortest time between two searches for ranks that wait for each other.
_LOOK_S = 0.2
# How long rank 0 waits at its end for the hub, which a rank with a full socket may hold up.
_GOODBYE_S = 2.0


@dataclass
class _StallCheck:
    """One comparison of flight recorders that is in progress.

    Attributes:
        deadline: moment at which the hub concludes without the reports that have not come.
        askers: ranks that want to know which ranks are late. Each has a list of further ranks
            whose reports it wants, too.
    """

    members: list[int]
    deadline: Deadline
    askers: dict[int, list[int]] = field(default_factory=dict)
    reports: dict[int, Message] = field(default_factory=dict)


@dataclass
class _Offers:
    """Texts that the members of a communicator offer each other under one name.

    Attributes:
        fresh: ranks whose texts the hub has not passed on yet.
    """

    members: list[int]
    texts: dict[int, str] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)


class Hub:
    """Server of the links of one world; see the module's docstring.

    Args:
        world: the world, as rank 0 knows it.
        deadline: moment at which the hub gives up the roll call.
        key: secret key that a rank must prove to know.

    Attributes:
        address: address of the hub, for :func:`collective.control.link.connect`.
        refusal: reason why the roll call has failed; None as long as it has not failed.
        session: random text that identifies this meeting of the ranks.
    """

    def __init__(self, world: World, deadline: Deadline, key: bytes) -> None:
        self.refusal: str | None = None
        self._began = time.monotonic()
        self._world = world
        self.session = secrets.token_hex(16)
        self._deadline = deadline
        self._links: dict[int, Link] = {}
        self._ranks: dict[Link, int] = {}
        # The enrolment message of each rank.
        self._about: dict[int, Message] = {}
        self._complete = False
        self._over = False
        self._checks: dict[str, _StallCheck] = {}
        # The latest note of each rank about the call that it waits in, and the time of the last
        # search for circles in these notes.
        self._waits: dict[int, Message] = {}
        self._circles = Circles()
        self._looked_at = -math.inf
        self._exchanges: dict[tuple[str, str], _Offers] = {}
        host = world.own_host
        try:
            listening, self.address = listen(host, world.ports)
        except OSError as error:
            raise RendezvousError(
                f"rendezvous: rank 0 cannot listen on {host}: {error}. The address must be one "
                "of this host: set COLLECTIVE_INTERFACE to the interface that the other hosts "
                "reach (`collective doctor` lists the interfaces)."
            ) from error
        self._server = Server(listening, key, self, world.tls)
        self._without_rank_0 = threading.Event()
        self._thread = threading.Thread(target=self._server.run, name="collective-hub", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """End the roll call, because rank 0 no longer waits for it."""
        self._deadline = Deadline(0.0)

    def await_goodbye(self) -> None:
        """Return when the hub has passed on all that rank 0 has said, or time is up.

        Rank 0 calls this after its goodbye. Its process may end then, and this thread with it. The
        other ranks must learn before why rank 0 has broken a communicator.
        """
        # A finalizer may run in the hub's own thread. A forked child has no such thread.
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._without_rank_0.wait(_GOODBYE_S)

    # -- for the server's thread ----------------------------------------------------------

    def pause(self) -> float | None:
        """Return the seconds until :meth:`turn` has something to do; None if nothing is due."""
        pauses = [stall_check.deadline.left() for stall_check in self._checks.values()]
        if not self._complete:  # rank 0 may give up the roll call at any time
            pauses.append(self._deadline.at_most(_ROLL_S))
        return min(pauses, default=None)

    def turn(self) -> bool:
        """Do what is due by now; return whether there are still ranks to serve."""
        # The server calls this after it has read everything that had arrived. Many ranks offer
        # texts at the same time, so the hub passes on all of these texts together.
        for (channel, name), exchange in list(self._exchanges.items()):
            self._pass_on(channel, name, exchange)
        for channel in [name for name, each in self._checks.items() if each.deadline.expired]:
            self._conclude(channel)
        if not self._complete and self._deadline.expired and not self._over:
            self._refuse(self._missing())
        return not self._over

    def heard(self, link: Link, message: Message) -> None:
        """Act on a message of a peer that has proved that it knows the key."""
        if link in self._ranks:
            self._hear(link, message)
        else:
            check(message, ENROLMENT)
            self._enrol(link, message)

    def gone(self, link: Link, why: str) -> None:
        """Tell the other ranks that a rank has gone, and why."""
        if link in self._ranks:
            rank = self._ranks[link]
            self._forget(rank)
            # Before the roll call is complete no rank has met this one. It may connect again; if
            # it does not, the roll call reports it as missing.
            if self._complete:
                self._tell(self._links, {"kind": "lost", "rank": rank, "why": why})

    # -- the roll call --------------------------------------------------------------------

    def _enrol(self, link: Link, about: Message) -> None:
        rank, size, host = about["rank"], about["size"], about["host"]
        expected = self._world.size
        if size == expected and not 0 <= rank < size:
            self._refuse(
                f"a process on {host} says that it is rank {rank} of {size}. Ranks count from 0 to "
                f"{size - 1} (RANK)"
            )
        elif size != expected:
            self._refuse(
                f"rank 0 was started with size {expected}, but rank {rank} on {host} with size "
                f"{size}. Every rank needs the same size (WORLD_SIZE)"
            )
        elif (difference := self._other_ports(about)) is not None:
            self._refuse(difference)
        elif rank in self._links:
            self._refuse(
                f"two processes say that they are rank {rank}, one on {self._about[rank]['host']} "
                f"and one on {host}. Every process needs a rank of its own (RANK)"
            )
        else:
            self._links[rank], self._about[rank], self._ranks[link] = link, about, rank
            faulty = (each for each, it in self._about.items() if "fault" in it)
            if len(self._links) < size:
                return
            if (each := next(faulty, None)) is not None:
                self._refuse(f"rank {each}: {self._about[each]['fault']}")  # now all can hear it
            else:
                self._complete = True
                # No other rank will come. If a later launch uses the same store again, a rank may
                # read this hub's address there by mistake; its connection must then fail.
                self._server.stop_listening()
                enrolments = [self._about[number] for number in range(size)]
                answer: Message = {"kind": "complete", "session": self.session}
                answer["hosts"] = [enrolment["host"] for enrolment in enrolments]
                answer["processes"] = [
                    str(enrolment.get("process", "")) for enrolment in enrolments
                ]
                answer["contacts"] = [str(enrolment.get("contact", "")) for enrolment in enrolments]
                self._tell(range(size), answer)

    def _other_ports(self, about: Message) -> str | None:
        """Return the text of a refusal if a rank may listen at other ports than rank 0."""
        world = self._world
        own, other = str(world.ports or ""), str(about.get("ports", ""))
        if own == other or world.own_host is None:
            return None
        return (
            f"rank 0 on {world.host} listens at {_ports(own)}, but rank {about['rank']} on "
            f"{about['host']} at {_ports(other)}. A firewall opens one range of ports: set the "
            "same COLLECTIVE_PORT on every rank"
        )

    def _missing(self) -> str:
        """Return a text that names the ranks that have not enrolled, and the likely reason."""
        world = self._world
        ranks = sorted(set(range(world.size)) - set(self._links))
        # Without a length, the deadline has replaced another one: rank 0 has given up.
        seconds = self._deadline.seconds or time.monotonic() - self._began
        has = "has" if len(ranks) == 1 else "have"
        text = (
            f"after {seconds:.3g} s {name_ranks(ranks)} of {world.size} {has} not joined at "
            f"{world.store}"
        )
        refusals = world.store.refusals()
        mistaken, refused = Counter(self._server.mistaken), Counter(self._server.refused)
        if refusals is not None:
            mistaken.update(refusals[0])
            refused.update(refusals[1])
        if mistaken:
            were = "was" if sum(mistaken.values()) == 1 else "were"
            text += f"; {_listed(mistaken)} {were} refused because their secret differs"
            if world.secret is not None:
                text += f". {COMPARE}"
            else:
                text += ": this rank has none. Set COLLECTIVE_SECRET on all hosts, or on none"
        if refused:
            text += f"; {_listed(refused)} did not prove knowledge of this job's key"
            if world.tls is not None:
                text += ", such as ranks with other certificates, or none (COLLECTIVE_TLS)"
        if self._server.scarce:
            text += f"; rank 0 could not accept them: {self._server.scarce}. {RAISE_THE_LIMIT}"
        elif not mistaken and not refused:
            text += "; no other connection came. Check that every rank was started"
            if world.own_host is not None and refusals is not None:
                # A rank with another secret would have connected, and been refused.
                text += (
                    " in this time (COLLECTIVE_START_TIMEOUT), that all ranks have this address, "
                    f"and that no firewall blocks {world.own_host}"
                )
            elif world.own_host is not None and world.secret is not None:
                text += (
                    ", that all ranks have the same secret, and that no firewall blocks "
                    f"{world.own_host}. {COMPARE}"
                )
            elif world.own_host is not None:
                text += f", that no rank has a secret, and that no firewall blocks {world.own_host}"
        return text

    def _refuse(self, why: str) -> None:
        """End the roll call without success, and tell every peer that knows the key."""
        self.refusal = why
        # The rank of this process hears it last: its program may end the process then.
        for link in sorted(self._server.peers, key=lambda link: self._ranks.get(link) == 0):
            with contextlib.suppress(OSError):
                link.send({"kind": "refused", "why": why})
        self._over = True

    # -- messages from the ranks ----------------------------------------------------------

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
            stall_check = self._checks[channel]
            if message["within"] is not None:
                stall_check.deadline = stall_check.deadline.within(message["within"])
            if message["asks"] is not None:
                stall_check.askers[rank] = message["asks"]
        elif kind == "waits":
            self._waits[rank] = message
            self._look_for_circles()
        elif kind == "offer":
            exchange = self._exchanges.setdefault((channel, message["name"]), _Offers(members))
            exchange.texts[rank] = message["text"]
            exchange.fresh.add(rank)
        elif channel in self._checks and rank in self._checks[channel].members:  # a report
            stall_check = self._checks[channel]
            stall_check.reports[rank] = message
            if all(
                member in stall_check.reports
                for member in stall_check.members
                if member in self._links
            ):
                self._conclude(channel)

    def _conclude(self, channel: str) -> None:
        """Tell the members that their calls differ, or else tell the askers the late ranks."""
        stall_check = self._checks.pop(channel)
        text = disagreement(stall_check.members, stall_check.reports)
        if text is not None:
            self._tell_mismatch(channel, stall_check.members, text)
            return
        # Send each asker only the reports that it needs: a thousand ranks may stall at once.
        reports = stall_check.reports
        first = max((report["started"] for report in reports.values()), default=0)
        late = {
            member
            for member in stall_check.members
            if member not in reports or reports[member]["started"] < first
        }
        further = max(_FURTHER, _FURTHER_IN_ALL // max(1, len(stall_check.askers)))
        for rank, besides in stall_check.askers.items():
            asked = followed(stall_check.members, late.union(besides), reports, further)
            self._tell([rank], {"kind": "late", "channel": channel, "late": asked})

    def _pass_on(self, channel: str, name: str, exchange: _Offers) -> None:
        """Send the fresh texts to ranks that offered earlier, and all texts to the fresh ranks."""
        fresh, exchange.fresh = exchange.fresh, set()
        before = exchange.texts.keys() - fresh
        about = {"kind": "offers", "channel": channel, "name": name}
        if fresh:
            self._tell(fresh, {**about, "texts": exchange.texts})
            self._tell(before, {**about, "texts": {rank: exchange.texts[rank] for rank in fresh}})
        if exchange.texts.keys() >= set(exchange.members):
            del self._exchanges[channel, name]

    def _look_for_circles(self) -> None:
        """Break the communicators in whose calls ranks wait for each other in a circle."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_S:
            return  # a thousand ranks may wait, and each of them repeats its note
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
            self._waits.clear()  # ranks that still wait send their notes again

    def _tell_mismatch(self, channel: str, members: Iterable[int], text: str) -> None:
        failure = {"kind": "mismatch", "rank": 0, "text": text, "ranks": []}
        message = {"kind": "failure", "channel": channel, "failure": failure, "finished": None}
        self._tell(members, message)

    def _forget(self, rank: int) -> None:
        self._waits.pop(rank, None)
        # An exchange with this rank as a member can no longer complete.
        for key in [key for key, each in self._exchanges.items() if rank in each.members]:
            del self._exchanges[key]
        link = self._links.pop(rank)
        del self._ranks[link]
        if link in self._server.peers:
            self._server.drop(link)
        self._over = self._complete and not self._links
        if rank == 0:
            self._without_rank_0.set()

    def _tell(self, ranks: Iterable[int], message: Message) -> None:
        data = encoded(message)
        # The rank of this process hears it last: its program may end the process then.
        for rank in sorted(ranks, key=lambda each: each == 0):
            if rank in self._links:
                # A rank that cannot be reached has gone; the server notices that on its link.
                with contextlib.suppress(OSError):
                    self._links[rank].write(data)


def _ports(text: str) -> str:
    return f"COLLECTIVE_PORT={text}" if text else "any ports (COLLECTIVE_PORT is not set)"


def _listed(connections: Mapping[str, int]) -> str:
    """Return numbers of connections by address as words."""
    return ", ".join(
        f"{count} connection{'s' * (count > 1)} from {address}"
        for address, count in list(connections.items())
    )
