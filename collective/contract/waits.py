"""Descriptions of waits for a rank's peers, and the circles of ranks that they show.

A rank that gives up asks which calls the other ranks wait in. If the awaited rank waits, too, the
error says in which call, and for which rank. If these waits lead back to a rank, its call and the
calls on the way wait for each other. Nothing here ends a wait before its deadline: a message may
be in flight, so only the rank that sends it knows whether it comes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from collective.request import call_site, in_thread, name_ranks

from .backend import ANY_SOURCE
from .failure import LONGER

#: The last call of a rank that has made none, for error texts.
NO_CALL = "no collective call"
#: How a rank has left, for error texts.
CLOSED = "has closed its communicator"
DROPPED = "has dropped its communicator without closing it"

# Age of a wait, in seconds and as a share of its deadline, from which on other ranks can read it.
_PUBLISH_S, _PUBLISH_SHARE = 0.25, 0.25
# Bounds of what a rank writes for its peers: characters of a call and of a place in the program,
# and numbers of ranks and of waits.
_CALL, _SITE, _RANKS, _WAITS = 200, 200, 16, 3
# Number of ranks in a chain that one error text describes, and of ranks in a circle that it
# describes.
_DESCRIBED, _LISTED = 32, 8

_Node = TypeVar("_Node")
_Way = TypeVar("_Way")


class MessageCall(NamedTuple):
    """Call on a message, as error texts name it.

    Attributes:
        operation: ``"send"``, ``"recv"`` or ``"sendrecv"``.
        tag: tag of the message.
        to: rank to which this rank still sends; None if there is nothing left to send.
        source: rank from which this rank still receives, or ``ANY_SOURCE``; None if there is
            nothing left to receive.
    """

    operation: str
    tag: int
    to: int | None
    source: int | None

    def __str__(self) -> str:
        return f"{self.operation}(tag={self.tag})"

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that the call sends to or receives from, each once."""
        return tuple(dict.fromkeys(rank for rank in (self.to, self.source) if rank is not None))

    def answers(self, other: MessageCall, rank: int, part: str) -> bool:
        """Tell whether this call is the other end of one message of a call.

        Args:
            other: a call of another rank.
            rank: that rank.
            part: the message that it sends, ``"to"``, or the one that it receives, ``"source"``.
        """
        end = self.source if part == "to" else self.to
        return self.tag == other.tag and end in (rank, ANY_SOURCE)


#: Maker of a call: a thread of this process, or the place in the program of a background call.
Caller = int | str


def caller() -> Caller:
    """Return who makes the running call; this costs less than to look for the place."""
    site = in_thread.site
    return threading.get_ident() if site is None else site


def _place_of(who: Caller) -> str:
    """Return ``file:line in function`` of a call that is still running; empty if it is unknown."""
    if isinstance(who, str):
        return who
    frame = sys._current_frames().get(who)
    return "" if frame is None else call_site(frame=frame)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One call in which a rank waits.

    Attributes:
        call: the call as text.
        site: place in the program that made the call; empty if it is unknown.
        background: whether the program may go on meanwhile.
        ranks: ranks that the call waits for. It needs all of them, unless the call receives from
            any rank.
        message: the message that the call waits for; None in a collective call.
    """

    call: str
    site: str
    background: bool
    ranks: tuple[int, ...]
    message: MessageCall | None = None

    @classmethod
    def of(cls, call: object, who: Caller, ranks: Sequence[int]) -> Waiting:
        """Return the description of a running call.

        Args:
            call: a :class:`MessageCall`, or any other operation.
            who: who makes the call, from :func:`caller`.
            ranks: ranks that the call waits for.
        """
        message = None
        if isinstance(call, MessageCall):
            # A part that is done has no awaited rank.
            to, source = call.to, call.source
            to = to if to in ranks else None
            source = source if source in (*ranks, ANY_SOURCE) else None
            message = call._replace(to=to, source=source)
        text, site = _clipped(str(call), _CALL), _place_of(who)
        # The end of a path says more than its beginning.
        site = site if len(site) <= _SITE else f"...{site[3 - _SITE :]}"
        return cls(text, site, isinstance(who, str), tuple(ranks)[:_RANKS], message)

    def wire(self) -> list[Any]:
        """Return the description in a form for JSON; :meth:`read` reads it."""
        message = None if self.message is None else list(self.message)
        return [self.call, self.site, self.background, list(self.ranks), message]

    @classmethod
    def read(cls, wire: Any) -> Waiting | None:
        """Return the description that a peer has written; None if it is damaged."""
        match wire:
            case [str(call), str(site), bool(background), [*ranks], message]:
                pass
            case _:
                return None
        if len(ranks) > _RANKS or not all(map(_is_rank, ranks)):
            return None
        match message:
            case None:
                parsed = None
            case [("send" | "recv" | "sendrecv") as operation, tag, to, source] if (
                _is_integer(tag)
                and (to is None or _is_rank(to))
                and (source is None or source == ANY_SOURCE or _is_rank(source))
            ):
                parsed = MessageCall(operation, tag, to, source)
            case _:
                return None
        call, site = _clipped(printable(call), _CALL), _clipped(printable(site), _SITE)
        return cls(call, site, background, tuple(ranks), parsed)

    def is_same_call(self, other: Waiting) -> bool:
        """Tell whether another rank's wait seems to be in the same collective call."""
        return other.message is None and other.call == self.call

    def __str__(self) -> str:
        text = self.call
        if self.message is not None:
            operation, tag, to, source = self.message
            ends = [] if to is None else [f"to rank {to}"]
            if source is not None:
                ends.append("from any rank" if source == ANY_SOURCE else f"from rank {source}")
            if to is not None and to == source:
                ends = [f"with rank {to}"]
            text = f"{operation}{f'(tag={tag})' * (tag != 0)} {' and '.join(ends)}"
        background = " in the background" * self.background
        return f"{text}{background}{f' at {self.site}' * bool(self.site)}"


#: The calls in which ranks wait, by rank. There are several if a rank has several threads.
Waits = Mapping[int, Sequence[Waiting]]


def publish_after(seconds: float) -> float:
    """Return the age of a wait from which on other ranks can read it.

    Messages and calls that take no longer cost nothing.

    Args:
        seconds: the timeout of the call.
    """
    return min(_PUBLISH_S, _PUBLISH_SHARE * seconds)


def to_wire(waits: Sequence[Waiting]) -> list[Any]:
    """Return a rank's waits in a form for JSON; those that block the program come first."""
    return [waiting.wire() for waiting in sorted(waits, key=_in_background)[:_WAITS]]


def from_wire(wire: Any) -> list[Waiting]:
    """Return the waits that a peer has written, without those that are damaged."""
    if not isinstance(wire, list):
        return []
    return [waiting for each in wire[:_WAITS] if (waiting := Waiting.read(each)) is not None]


def needed(waits: Sequence[Waiting]) -> set[int]:
    """Return the ranks that a rank needs to go on; a receive from any rank needs none of them."""
    return {
        rank
        for waiting in waits
        if waiting.message is None or waiting.message.source != ANY_SOURCE
        for rank in waiting.ranks
    }


def _in_background(waiting: Waiting) -> bool:
    return waiting.background


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_rank(value: Any) -> bool:
    return _is_integer(value) and 0 <= value < 1 << 31


def printable(text: str) -> str:
    """Return a peer's text on one line, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


# -- circles -----------------------------------------------------------------------------------


def circle(start: int, waits: Waits) -> dict[int, Waiting]:
    """Return a shortest circle of ranks that wait for each other, with the call of each rank.

    The circle leads through ``start``, or through ranks that ``start`` waits for; it is empty if
    there is none. Calls in the background do not count, since the program may go on. The two ends
    of one message do not count, either: that message may be on its way.
    """
    reached = [start]
    for rank in reached:
        found = shortest_circle(rank, lambda member: _followed(member, waits))
        if found:
            return found
        following = {peer for peer, _ in _followed(rank, waits)} - set(reached)
        reached += sorted(following)[: _DESCRIBED - len(reached)]
    return {}


def shortest_circle(
    start: _Node, followed: Callable[[_Node], Iterable[tuple[_Node, _Way]]]
) -> dict[_Node, _Way]:
    """Return a shortest circle through ``start``; empty if there is none.

    Args:
        start: a rank, or a call.
        followed: function that returns what a rank or a call waits for, each with the way there.

    Returns:
        The members of the circle, from ``start`` on, each with its way to the next one.
    """
    before: dict[_Node, tuple[_Node, _Way]] = {}
    reached = [start]
    for node in reached:
        for following, way in followed(node):
            if following == start:
                circle = {node: way}
                while node != start:
                    node, way = before[node]
                    circle[node] = way
                return dict(reversed(circle.items()))
            if following not in before:
                before[following] = node, way
                reached.append(following)
    return {}


def _followed(rank: int, waits: Waits) -> Iterator[tuple[int, Waiting]]:
    """Yield the ranks that a rank's program needs to go on, each with the call that needs it."""
    for waiting in waits.get(rank, ()):
        if waiting.background:
            continue
        message = waiting.message
        if message is None:
            for peer in waiting.ranks:
                if not any(waiting.is_same_call(other) for other in waits.get(peer, ())):
                    yield peer, waiting
            continue
        for part, end in (("to", message.to), ("source", message.source)):
            if end is None or end == ANY_SOURCE:
                continue
            others = [other.message for other in waits.get(end, ()) if other.message is not None]
            if not any(other.answers(message, rank, part) for other in others):
                yield end, waiting


# -- texts -------------------------------------------------------------------------------------


def last_done(rank: int, call: str) -> str:
    """Return what ``rank`` did last: ``call``, or :data:`NO_CALL`."""
    return f"rank {rank} {'has made' if call == NO_CALL else 'last did'} {call}"


def explain(
    rank: int, awaited: Sequence[int], waits: Waits, last_call: Callable[[int], str]
) -> tuple[str, str]:
    """Return what a rank that gives up has waited for, and the remedy; both for error texts.

    Args:
        rank: the rank that gives up.
        awaited: ranks that have not done their part of its call.
        waits: the calls in which ranks wait, also those of ``rank``.
        last_call: describes the last call of a rank that waits in no known call.
    """
    names = name_ranks(awaited)
    ring = circle(rank, waits)
    if ring:
        members = sorted(ring)
        lines = [f"  rank {member}: {ring[member]}" for member in members[:_LISTED]]
        if len(members) > _LISTED:
            lines.append(f"  and {len(members) - _LISTED} more")
        text = f"{names}: {_listed(members)} wait for each other:"
        return "\n".join([text, *lines]), f"\n{_remedy(list(ring.values()))}"
    clauses: list[str] = []
    described = list(awaited)
    for peer in described:
        theirs = waits.get(peer, ())
        clauses += [f"rank {peer} is in {waiting}" for waiting in theirs]
        if not theirs:
            clauses.append(last_call(peer))
        if len(described) < _DESCRIBED:
            further = needed([waiting for waiting in theirs if waiting.message is not None])
            described += sorted(further - {rank, *described})
    return f"{names}: {'; '.join(dict.fromkeys(clauses))}", LONGER


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > _LISTED:
        return f"{len(ranks)} ranks"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _remedy(ring: Sequence[Waiting]) -> str:
    """Return what may end the circle of calls."""
    messages = [waiting.message for waiting in ring]
    if None in messages:
        return (
            "Every rank must make the collective calls, and the messages between them, in one order"
        )
    if any(message.operation == "sendrecv" for message in messages if message):
        return (
            "Compare dst and src of the sendrecv calls: rank A must pass dst=B where rank B passes "
            "src=A, with the same tag"
        )
    kinds = {(message.to is None, message.source is None) for message in messages if message}
    if kinds == {(True, False)}:
        return "Use sendrecv, or let one rank send first"
    if kinds == {(False, True)}:
        return "Use sendrecv, or let one rank receive first"
    return "Let each send meet its recv, with the same tag and in a fitting order, or use sendrecv"


def departed(rank_texts: Mapping[int, tuple[str, str]], call: object) -> str:
    """Return the text about ranks that have left before they have done their part of a call.

    Args:
        rank_texts: by rank, how the rank has left, and its last call.
        call: the call that waits for them.
    """
    text = "; ".join(
        f"rank {rank} {how} (its last call: {last})" for rank, (how, last) in rank_texts.items()
    )
    left = [rank for rank, (how, _) in rank_texts.items() if how in (CLOSED, DROPPED)]
    if not left:
        return text
    who = "it" if len(rank_texts) == 1 else name_ranks(left)
    text = f"{text}: {who} finished, or left its `with` block, without "
    if not isinstance(call, MessageCall) or call.tag < 0:
        return (
            f"{text}making this call; every rank must make this call. Is it inside `if rank == 0`?"
        )
    parts = {"receiving": call.to, "sending": call.source}
    deeds = [deed for deed, end in parts.items() if end in (*left, ANY_SOURCE)]
    return f"{text}{' and '.join(deeds)} this message"
