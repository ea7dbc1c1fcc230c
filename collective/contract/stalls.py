"""Ranks that wait for each other in different communicators, of which none can go on.

A wait that lasts has its rank *note* what it is in, once a second: which call of which
communicator, and how many calls of each other communicator it has begun. Calls that appear in
such notes wait for each other where some rank in the second has not come to the first, some
rank in the third not to the second, and so on in a circle. That is a deadlock, and not only a
late rank, for four reasons:

* What is noted are calls that no rank leaves with a result before every other has come to them
  (:func:`_takes_everybody`).
* A rank makes a note only if nothing but the thread that waits could call anything in its
  process (:func:`alone`). So it comes to no other call before it leaves this one.
* A circle counts when each of its ranks has noted the same call again, after it was seen: then all
  of them were in these calls at one time, when it was seen, and it was no sum of what was true
  one after the other.
* At that time each needs another to come, which is kept by the next: the AND model of Chandy,
  Misra & Haas, "Distributed Deadlock Detection" (1983), whose circles are deadlocks.

What could still end such a wait is a deadline. Calls that were given a shorter one than their
communicator has are left alone: a program may well mean to go on after it. Not seen, and ended
by the deadline as ever, are ranks with further threads, calls in the background, handlers of
signals in Python, messages, calls that some rank leaves before all have come, and ranks that
are threads. C code that calls Python from threads of its own must not call collectives in them.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from collective.request import call_site, differing

from .backend import Note
from .failure import Failure
from .recorder import Entry
from .work import all_idle

if TYPE_CHECKING:
    from collective.deadline import Deadline

    from .backend import Backend
    from .recorder import Recorder

__all__ = ["Circles", "Member", "Membership", "alone", "circle", "look"]

# Threads of such names are this package's, and run nothing of the program's; those of lanes do,
# as long as the lane is not idle.
_OWN = "collective-"
# What a step may have of its call's time: those before it have taken theirs.
_WHOLE = 0.9
# What a transport may take of a text that goes with a note.
_TEXT = 2000
_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()


class Member(Protocol):
    """What is looked at of a communicator."""

    rank: int
    size: int
    timeout: float
    recorder: Recorder

    @property
    def closed(self) -> bool:
        """Whether the communicator is closed."""

    @property
    def transport(self) -> Backend:
        """What connects its ranks."""


class Membership:
    """One communicator among those that were made from one, its *family*.

    Args:
        comm: the communicator. It is not kept alive.
        parent: that of the communicator from which this one was made.
        ranks: this one's ranks, as numbers of the parent.
    """

    def __init__(
        self, comm: Member, parent: Membership | None = None, ranks: Sequence[int] = ()
    ) -> None:
        self.name, self.made = "all", ""
        self.ranks: Sequence[int] = range(comm.size)
        self.recorder = comm.recorder
        self._comm = weakref.ref(comm)
        self._family: weakref.WeakSet[Membership] = weakref.WeakSet()
        self._groups: dict[tuple[int, ...], int] = {}
        self._beat = 0
        self._circles = Circles()
        if parent is not None:
            self.ranks = members = tuple(parent.ranks[rank] for rank in ranks)
            # The n-th group of the same ranks is the n-th on each of them.
            parent._groups[members] = nth = parent._groups.get(members, 0) + 1
            text = f"{parent.name} {members} {nth}"
            self.name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            self.made = call_site()
            self._family = parent._family
        self._family.add(self)
        _memberships.add(self)

    def look(self, deadline: Deadline) -> None:
        """Break the communicator if its running call is part of a deadlock; see :func:`look`."""
        comm = self._comm()
        if comm is None or comm.closed or deadline.seconds < _WHOLE * comm.timeout:
            return
        note = self._note()
        if note is None:
            return
        mine, call = self.ranks[comm.rank], [note["name"], note["number"]]
        notes = {**comm.transport.post(note, mine), mine: note}
        calls, text = self._circles.found(notes)
        found = [(calls, text)] + [each["found"] for each in notes.values() if each["found"]]
        for calls, text in found:
            if call in calls:
                # The others of the circle hear of it in communicators that this rank is not in.
                comm.transport.post({**note, "found": [calls, text[:_TEXT]]}, mine)
                comm.transport.abort(Failure("mismatch", comm.rank, text))

    def _note(self) -> Note | None:
        """Return what to note; None if there is no such call, or others could make calls."""
        running = self.recorder.running()
        if running is None or not _takes_everybody(running) or not alone():
            return None
        begun = {each.name: each.recorder.started for each in list(self._family)}
        again = self.recorder.running()
        # This may not be the thread that waits: if that is in the call still, the numbers are of
        # one time.
        if again is None or again.sequence != running.sequence:
            return None
        self._beat += 1
        return {
            "name": self.name,
            "number": running.sequence,
            "begun": begun,
            "header": json.loads(running.request.header(running.site)),
            "made": self.made,
            "beat": self._beat,
            "found": None,
        }


def look(deadline: Deadline) -> None:
    """Find out whether the running call waits in vain; transports call this while they wait.

    To be called about once a second by waits that have lasted for a second, in any thread.

    Args:
        deadline: that of the call that waits.
    """
    try:
        memberships = list(_memberships)
    except RuntimeError:  # another thread makes a communicator meanwhile, and waits for nobody
        return
    for each in memberships:
        each.look(deadline)


def alone() -> bool:
    """Tell whether one thread of the program is all that could make calls in this process."""
    threads = threading.enumerate()
    programs = sum(not thread.name.startswith(_OWN) for thread in threads)
    known = {thread.ident for thread in threads}
    return (
        programs == 1
        and known.issuperset(sys._current_frames())
        and all_idle()
        and not any(map(_calls_the_program, signal.valid_signals()))
    )


def _calls_the_program(number: int) -> bool:
    """Tell whether a signal runs Python code of the program's, in the thread that waits."""
    handler = signal.getsignal(number)
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    return not str(getattr(handler, "__module__", "")).startswith("collective.")


def _takes_everybody(entry: Entry) -> bool:
    """Tell whether no rank can have the result of a call before every rank has come to it."""
    call = entry.request
    if entry.compares or call.operation == "barrier":
        return True
    # An operator of the program's is code that could make calls.
    builtin = not str(call.options.get("op")).startswith("user_op")
    return call.operation == "all_reduce" and builtin and math.prod(call.shape or (0,)) > 0


class Circles:
    """Finds calls that wait for each other in what ranks note, looked at again and again."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, int, int]] = {}

    def found(self, notes: Mapping[int, Note]) -> tuple[list[list[Any]], str]:
        """Return the calls of a circle, each a name and a number, and what to say; or nothing yet.

        Args:
            notes: the last of each rank, maybe of a wait that is over.
        """
        seen = {
            rank: (notes[rank]["name"], notes[rank]["number"], notes[rank]["beat"])
            for rank in circle(notes)
        }
        before = self._seen
        if [(rank, *seen[rank][:2]) for rank in seen] != [(r, *before[r][:2]) for r in before]:
            self._seen = seen
            return [], ""
        if not seen or any(seen[rank][2] <= before[rank][2] for rank in seen):
            return [], ""
        self._seen = {}
        calls = [[name, number] for name, number, _ in seen.values()]
        return calls, _describe(notes, calls)


def circle(notes: Mapping[int, Note]) -> list[int]:
    """Return ranks that keep each other in calls which wait for each other; none if there are none.

    The first keeps the call of the last from going on, each other that of the one before it.
    """
    calls: dict[tuple[str, int], list[int]] = {}
    for rank in sorted(notes):
        calls.setdefault((notes[rank]["name"], notes[rank]["number"]), []).append(rank)
    if len(calls) < 2:
        return []
    kept: dict[tuple[str, int], dict[tuple[str, int], int]] = {}
    for name, number in calls:
        kept[name, number] = {
            other: next(rank for rank in ranks if notes[rank]["begun"].get(name, number) < number)
            for other, ranks in calls.items()
            if any(notes[rank]["begun"].get(name, number) < number for rank in ranks)
        }
    return next(filter(None, (_back_to(start, kept) for start in calls)), [])


def _back_to(
    start: tuple[str, int], kept: Mapping[tuple[str, int], Mapping[tuple[str, int], int]]
) -> list[int]:
    """Return the ranks on a way from a call over those that keep it back to it."""
    ways: list[tuple[tuple[str, int], list[int]]] = [(start, [])]
    visited = set()
    while ways:
        call, ranks = ways.pop()
        for other, rank in kept[call].items():
            if other == start:
                return [rank, *ranks]
            if other not in visited:
                visited.add(other)
                ways.append((other, [*ranks, rank]))
    return []


def _describe(notes: Mapping[int, Note], calls: Sequence[Sequence[Any]]) -> str:
    waiting = {}
    for rank in sorted(notes):
        note = notes[rank]
        call = [note["name"], note["number"]]
        if call in calls:
            made = f"made at {note['made']}" if note["made"] else "that of all ranks"
            site = f"{note['header']['site'] or '?'}, communicator {calls.index(call) + 1} ({made})"
            waiting[rank] = {**note["header"], "site": site}
    return (
        "the ranks wait for each other in calls of different communicators (ranks as numbered in "
        f"that of all):\n{differing(waiting)}\nEvery rank must use its communicators in the same "
        "order"
    )
