"""Deadlocks of ranks that wait for each other in calls of different communicators.

While a call waits for long, its rank makes a *note* once a second. The note says which call of
which communicator the rank is in, and how many calls of each other communicator it has begun.
Call A waits for call B if some rank that is in B has not come to A. If these relations between the
noted calls form a circle, the calls in the circle wait for each other. This is a deadlock, and not
only a late rank, for five reasons:

* Ranks note only calls that no rank leaves with a result before every other rank has come to them
  (:func:`_takes_everybody`), and receives from one named rank. Such a receive waits for the call
  that this rank is in.
* A receive waits only for a rank whose peers see all messages that it has sent
  (:meth:`Backend.delivered`). So no message is on its way between ranks in a circle.
* A rank makes a note only if nothing but the waiting thread could make a call in its process
  (:func:`alone`). So the rank comes to no other call before it leaves this one.
* A circle counts only when each of its ranks has noted the same call again after the circle was
  seen. Then all of the ranks were in these calls at one moment, when the circle was seen. So the
  circle is not put together from notes that were true at different times.
* At that moment each call needs a rank that the next call in the circle holds. This is the AND
  model of Chandy, Misra & Haas, "Distributed Deadlock Detection" (1983), whose circles are
  deadlocks.

Only a deadline could still end such a wait. So this module ignores calls with a shorter deadline
than their communicator's: the program may intend to go on after that deadline. Some deadlocks are
not detected here, and end by the deadline. These are deadlocks

* of ranks with further threads, with calls in the background, or with signal handlers in Python;
* of sends, of receives from any rank, and of messages of transports that do not know whether a
  message is in flight. At the deadline the error names ranks that wait for each other; see
  :mod:`.waits`;
* of calls that some rank leaves before all have come;
* of ranks that are threads.

C code that calls Python from threads of its own must not call collectives in these threads.
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

from .backend import ANY_SOURCE, Note
from .failure import Failure
from .recorder import Entry
from .waits import MessageCall, Waiting, caller, shortest_circle
from .work import all_idle

if TYPE_CHECKING:
    from collective.deadline import Deadline

    from .backend import Backend
    from .recorder import Recorder

# Prefix of the names of this package's threads. They run no code of the program, except the threads
# of lanes that are not idle.
_OWN = "collective-"
# A deadline of at least this share of the communicator's timeout counts as the full timeout. A step
# of a call has less time than the call, since earlier steps have taken some of it.
_WHOLE = 0.9
# Maximum length, in characters, of the text that goes with a note.
_TEXT = 2000
_memberships: weakref.WeakSet[FamilyMember] = weakref.WeakSet()


class Member(Protocol):
    """Part of a communicator that this module uses."""

    rank: int
    size: int
    timeout: float
    recorder: Recorder

    @property
    def closed(self) -> bool:
        """Whether the communicator is closed."""

    @property
    def backend(self) -> Backend:
        """The transport that connects the communicator's ranks."""


class FamilyMember:
    """Membership of a communicator in its *family*: all communicators made from the same one.

    Args:
        comm: the communicator. This object does not keep it alive.
        parent: membership of the communicator from which ``comm`` was made.
        ranks: ranks of ``comm``, as numbered in the parent.
    """

    def __init__(
        self, comm: Member, parent: FamilyMember | None = None, ranks: Sequence[int] = ()
    ) -> None:
        self.name, self.made = "all", ""
        self.ranks: Sequence[int] = range(comm.size)
        self.recorder = comm.recorder
        self._comm = weakref.ref(comm)
        self._family: weakref.WeakSet[FamilyMember] = weakref.WeakSet()
        self._groups: dict[tuple[int, ...], int] = {}
        self._beat = 0
        self._circles = Circles()
        if parent is not None:
            self.ranks = members = tuple(parent.ranks[rank] for rank in ranks)
            # All members count the groups of the same ranks alike, so they agree on the name
            # without a message.
            parent._groups[members] = nth = parent._groups.get(members, 0) + 1
            text = f"{parent.name} {members} {nth}"
            self.name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            self.made = call_site()
            self._family = parent._family
        self._family.add(self)
        _memberships.add(self)

    def look(self, deadline: Deadline, call: object, began: float) -> None:
        """Break the communicator if its running call is part of a deadlock; see :func:`look`."""
        comm = self._comm()
        if comm is None or comm.closed or deadline.seconds < _WHOLE * comm.timeout:
            return
        note = self._note(comm, call, began)
        if note is None:
            return
        mine, call = self.ranks[comm.rank], [note["name"], note["number"]]
        notes = {**comm.backend.post(note, mine), mine: note}
        calls, text = self._circles.found(notes)
        circles = [(calls, text)] + [other["found"] for other in notes.values() if other["found"]]
        for calls, text in circles:
            if call in calls:
                # Publish the circle, too: other ranks of the circle wait in communicators that this
                # rank may not be in, and have to break those.
                comm.backend.post({**note, "found": [calls, text[:_TEXT]]}, mine)
                comm.backend.abort(Failure("mismatch", comm.rank, text))

    def _note(self, comm: Member, call: object, began: float) -> Note | None:
        """Return this rank's note.

        None if the rank is in no call to note, or if not only the waiting thread could make calls.
        """
        running = self.recorder.running()
        if running is None:
            note = self._of_receive(comm, call, began)
        else:
            note = self._of_entry(running) if _takes_everybody(running) else None
        if note is None or not alone(receives=running is None):
            return None
        begun = {member.name: member.recorder.started for member in list(self._family)}
        again = self.recorder.running()
        # Another thread than this one may be the waiting thread. Only if it is still in the same
        # call were all these numbers valid at one moment.
        if running is not None and (again is None or again.sequence != running.sequence):
            return None
        self._beat += 1
        delivered = self._has_delivered()
        return {**note, "begun": begun, "beat": self._beat, "found": None, "delivered": delivered}

    def _has_delivered(self) -> bool:
        """Return whether the peers see what this rank has sent in any communicator."""
        family = [member._comm() for member in list(self._family)]
        return all(each is None or each.closed or each.backend.delivered() for each in family)

    def _of_entry(self, running: Entry) -> dict[str, Any]:
        """Return the part of a note that describes a collective call."""
        return {
            "name": self.name,
            "number": running.sequence,
            "header": json.loads(running.request.header(running.site)),
            "made": self.made,
            "needs": None,
        }

    def _of_receive(self, comm: Member, call: object, began: float) -> dict[str, Any] | None:
        """Return the part of a note that describes a receive; None if it cannot be noted."""
        if not isinstance(call, MessageCall) or call.to is not None:
            return None
        if call.source is None or call.source in (ANY_SOURCE, comm.rank):
            return None
        needs = self.ranks[call.source]
        options = {"src": needs, "tag": call.tag}
        return {
            "name": f"{self.name} {self.ranks[comm.rank]}",
            "number": int(1e6 * began),
            "header": {
                "operation": call.operation,
                "dtype": None,
                "shape": None,
                "options": options,
                "site": Waiting.of(call, caller(), ()).site,
            },
            "made": self.made,
            "needs": needs,
        }


def look(
    deadline: Deadline, recorder: Recorder | None = None, call: object = None, began: float = 0.0
) -> None:
    """Break the communicator if its running call is part of a deadlock.

    A transport calls this about once a second, from any thread, during a wait that has lasted for a
    second.

    Args:
        deadline: deadline of the call that waits.
        recorder: recorder of the communicator that waits, if this thread is the one that waits.
        call: the call that waits.
        began: when its wait has begun, in seconds; not the same for two waits.
    """
    try:
        memberships = list(_memberships)
    except RuntimeError:  # another thread makes a communicator right now, so there is no deadlock
        return
    for membership in memberships:
        membership.look(deadline, call if membership.recorder is recorder else None, began)


def alone(receives: bool = False) -> bool:
    """Tell whether nothing but one thread of the program could make calls in this process.

    Args:
        receives: as of :func:`all_idle`. What the rank has sent must be delivered.
    """
    threads = threading.enumerate()
    programs = sum(not thread.name.startswith(_OWN) for thread in threads)
    known = {thread.ident for thread in threads}
    return (
        programs == 1
        and known.issuperset(sys._current_frames())
        and all_idle(receives)
        and not any(map(_calls_the_program, signal.valid_signals()))
    )


def _calls_the_program(number: int) -> bool:
    """Tell whether the signal's handler is Python code of the program.

    Python would run that handler in the thread that waits.
    """
    handler = signal.getsignal(number)
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    return not str(getattr(handler, "__module__", "")).startswith("collective.")


def _takes_everybody(entry: Entry) -> bool:
    """Tell whether a call gives no rank a result before every rank has come to the call."""
    call = entry.request
    if entry.compares or call.operation == "barrier":
        return True
    if call.operation == "all_gather":
        return bool(call.elements) and all(call.elements)
    # A user's operator is code of the program, and could make calls.
    builtin = not str(call.options.get("op")).startswith("user_op")
    return call.operation == "all_reduce" and builtin and math.prod(call.shape or (0,)) > 0


class Circles:
    """Detector of circles of waiting calls, from the notes that ranks publish again and again."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, int, int]] = {}

    def found(self, notes: Mapping[int, Note]) -> tuple[list[list[Any]], str]:
        """Return the calls of a confirmed circle and a text about it.

        Each call is a name and a number. Without a confirmed circle the list and the text are
        empty.

        Args:
            notes: the last note of each rank; its wait may be over.
        """
        seen = {
            rank: (notes[rank]["name"], notes[rank]["number"], notes[rank]["beat"])
            for rank in circle(notes)
        }
        before = self._seen
        if [(rank, *seen[rank][:2]) for rank in seen] != [(r, *before[r][:2]) for r in before]:
            self._seen = seen
            return [], ""
        # A rank may have looked for its message just before the circle was seen. So its second note
        # after that counts: all had been delivered by then, and it has looked again.
        notes_later = 1 if all(notes[rank]["needs"] is None for rank in seen) else 2
        if not seen or any(seen[rank][2] < before[rank][2] + notes_later for rank in seen):
            return [], ""
        self._seen = {}
        calls = [[name, number] for name, number, _ in seen.values()]
        return calls, _describe(notes, calls)


def circle(notes: Mapping[int, Note]) -> list[int]:
    """Return the ranks of a circle of waiting calls; an empty list if there is none.

    The call of each rank waits for the next rank of the list, and the call of the last rank waits
    for the first rank.
    """
    calls: dict[tuple[str, int], list[int]] = {}
    for rank in sorted(notes):
        calls.setdefault((notes[rank]["name"], notes[rank]["number"]), []).append(rank)
    if len(calls) < 2:
        return []
    blockers: dict[tuple[str, int], dict[tuple[str, int], int]] = {}
    for (name, number), (first, *_) in calls.items():
        # Each call in which some rank waits that has not come to this one, and one such rank; or
        # the call of the rank whose message is needed.
        needs = notes[first]["needs"]
        blockers[name, number] = {}
        for other, ranks in calls.items():
            absent = [r for r in ranks if notes[r]["begun"].get(name, number) < number]
            if needs is not None:
                absent = [needs] if needs in ranks and notes[needs]["delivered"] else []
            if absent:
                blockers[name, number][other] = absent[0]
    circles = (shortest_circle(call, lambda blocked: blockers[blocked].items()) for call in calls)
    ranks = list(next(filter(None, circles), {}).values())
    return ranks[-1:] + ranks[:-1]  # the rank in the first call comes first


def _describe(notes: Mapping[int, Note], calls: Sequence[Sequence[Any]]) -> str:
    members = {
        rank: notes[rank]
        for rank in sorted(notes)
        if [notes[rank]["name"], notes[rank]["number"]] in calls
    }
    receives = any(note["needs"] is not None for note in members.values())
    waiting = {}
    for rank, note in members.items():
        site = note["header"]["site"] or "?"
        if not receives:
            made = f"made at {note['made']}" if note["made"] else "the one of all ranks"
            number = 1 + calls.index([note["name"], note["number"]])
            site = f"{site}, communicator {number} ({made})"
        waiting[rank] = {**note["header"], "site": site}
    where = "" if receives else " in calls of different communicators"
    remedy = (
        "No message is on its way to them. Let each receive meet its send, with the same tag and "
        "in a fitting order, or use sendrecv"
        if receives
        else "Every rank must use its communicators in the same order"
    )
    return (
        f"the ranks wait for each other{where} (ranks as numbered in the communicator of all "
        f"ranks):\n{differing(waiting)}\n{remedy}"
    )
