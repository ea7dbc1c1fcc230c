"""The messages between the ranks and the hub, and the reports of calls that stall.

The sender of a message knows the job's key, but it may run another version, or be broken. A message
that differs from the tables here ends the sender's connection, and no part of it takes effect.

A report has ``entries``, the last calls as ``[sequence, digest, compares, header]``; ``finished``,
the number of the last call that is over; ``started``, the number of the last call; and ``waits``,
the calls in which the rank waits, as :meth:`collective.contract.waits.Waiting.wire` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from collective.contract.recorder import Entry, Recorder
from collective.contract.waits import NO_CALL, Waiting, from_wire, last_done, needed, to_wire
from collective.control.link import Message
from collective.request import Request, describe, differing

# Number of calls in a report: ranks that are further apart have made different calls.
_REPORTED = 8
# Maximum length of the text of a call, in characters.
_CALL = 200
# Operations to which ranks may pass arrays of different lengths, or None.
_MAY_DIFFER = frozenset({"broadcast", "scatter", "gather", "all_gather", "all_to_all"})

_Test = Callable[[Any], bool]


def _integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0.0 <= value < math.inf


def _count(value: Any) -> bool:
    return _integer(value) and value >= 0


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _list_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _or_none(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _with(**tests: _Test) -> _Test:
    def test(value: Any) -> bool:
        return isinstance(value, dict) and all(k in value and t(value[k]) for k, t in tests.items())

    return test


_ranks = _list_of(_count)
_failure = _with(kind=_text, rank=_integer, text=_text, ranks=_ranks)
# The description of a call, from collective.request.Request.header().
_header = _with(
    operation=_text, dtype=_or_none(_text), shape=_or_none(_list_of(_integer)),
    options=lambda value: isinstance(value, dict), site=_text,
)  # fmt: skip


def _entry(value: Any) -> bool:
    # The sequence number, the digest, whether the call is still a comparison, and its header.
    tests = (_count, _integer, _flag, _header)
    return (
        isinstance(value, list)
        and len(value) == len(tests)
        and all(test(part) for test, part in zip(tests, value))
    )


# The failure, and the number of calls that the sender had finished; None if the sender is not in
# a call.
_broken = {"failure": _failure, "finished": _or_none(_integer)}
_left = {"finished": _integer, "dropped": _flag, "last": _text}
_report = {
    "entries": _list_of(_entry), "finished": _integer, "started": _count,
    "waits": _list_of(lambda value: Waiting.read(value) is not None),
}  # fmt: skip


_note = _with(
    name=_text, number=_count, header=_header, made=_text, beat=_count,
    begun=lambda value: isinstance(value, dict) and all(map(_count, value.values())),
)  # fmt: skip


def _by_rank(test: _Test) -> _Test:
    return lambda value: (
        isinstance(value, dict) and all(r.isdecimal() and test(value[r]) for r in value)
    )


#: The first message of a rank.
ENROLMENT: Mapping[str, Mapping[str, _Test]] = {
    "here": {"rank": _count, "size": _count, "host": _text},
}
#: Later messages of a rank.
FROM_RANKS: Mapping[str, Mapping[str, _Test]] = {
    "bye": {},
    "failure": {"channel": _text, "members": _ranks, **_broken},
    "heard": {"channel": _text, "members": _ranks},
    "left": {"channel": _text, "members": _ranks, **_left},
    "stall": {
        "channel": _text,
        "members": _ranks,
        "asks": _or_none(_ranks),
        "within": _or_none(_seconds),
    },
    "report": {"channel": _text, **_report},
    "waits": {"channel": _text, "members": _ranks, "note": _note},
    "offer": {"channel": _text, "members": _ranks, "name": _text, "text": _text},
}
#: Messages of the hub.
FROM_HUB: Mapping[str, Mapping[str, _Test]] = {
    "complete": {"hosts": _list_of(_text), "session": _text},
    "refused": {"why": _text},
    "failure": {"channel": _text, **_broken},
    "heard": {"channel": _text, "rank": _count},
    "left": {"channel": _text, "rank": _count, **_left},
    "report": {"channel": _text},
    "late": {"channel": _text, "late": _by_rank(_or_none(_with(**_report)))},
    "offers": {"channel": _text, "name": _text, "texts": _by_rank(_text)},
    "lost": {"rank": _count, "why": _text},
}


def check(message: Message, kinds: Mapping[str, Mapping[str, _Test]]) -> str:
    """Check that ``message`` is of one of ``kinds`` and has its fields; return its kind.

    Raises:
        ValueError: the kind is another one, or a field is missing or of another type.
    """
    kind = message.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"a message of kind {kind!r:.40}; it must be one of {', '.join(kinds)}")
    for name, test in kinds[kind].items():
        if name not in message:
            raise ValueError(f"a message of kind {kind!r} without {name!r}")
        if not test(message[name]):
            raise ValueError(f"a message of kind {kind!r} with {name} {message[name]!r:.40}")
    return kind


# -- reports -------------------------------------------------------------------------------------


def make_report(
    recorder: Recorder | None, finished: int, on_arrival: bool, messages: Sequence[Waiting] = ()
) -> Message:
    """Return this rank's report.

    Args:
        recorder: flight recorder with the rank's calls; None before there are any.
        finished: number of the last call that is over, also on the devices.
        on_arrival: whether the transport itself finds calls that differ, once all ranks have come.
            If true, the report leaves out properties in which the calls may legitimately differ.
        messages: the messages in which this rank waits.
    """
    entries, started, waits = [], 0, list(messages)
    if recorder is not None:
        started = recorder.started
        # Start at the oldest call that is not over: a program may be far ahead of its device.
        ahead = recorder.entries(max(_REPORTED, started - finished))
        for entry in [*ahead[: _REPORTED - 1], ahead[-1]] if ahead else ():
            header = json.loads(entry.request.header(entry.site))
            entries.append([entry.sequence, *_compared(entry, on_arrival), header])
        running = recorder.running()
        if running is not None:
            # The rank does not know whom it waits for; waits_of() does.
            waits.append(Waiting(str(running.request), running.site, False, ()))
    return {
        "entries": entries, "finished": finished, "started": started, "waits": to_wire(waits),
    }  # fmt: skip


def _compared(entry: Entry, on_arrival: bool) -> tuple[int, bool]:
    """Return the digest that matching calls share, and whether the call is still a comparison."""
    request = entry.request
    if on_arrival and request.operation in _MAY_DIFFER:
        return Request(request.operation, root=request.root).digest, False
    return request.digest, entry.compares


def disagreement(members: list[int], reports: dict[int, Message]) -> str | None:
    """Return the text for the ranks if they have made different calls, else None.

    Args:
        members: the communicator's ranks, in its order, numbered as in the world.
        reports: reports of the ranks that answered.
    """
    tables: dict[int, dict[int, Any]] = {
        rank: {sequence: rest for sequence, *rest in report["entries"]}
        for rank, report in reports.items()
    }
    unfinished = min((report["finished"] for report in reports.values()), default=0) + 1
    for sequence in sorted({number for table in tables.values() for number in table}):
        made = {rank: table[sequence] for rank, table in tables.items() if sequence in table}
        # A call that all ranks have finished was the same call, or its differences do no harm that
        # shows now. While all ranks are still comparing their calls, that comparison itself finds a
        # difference; it cannot if one of the ranks is not comparing.
        calls = {(compares, 0 if compares else digest) for digest, compares, _ in made.values()}
        if sequence < unfinished or len(calls) < 2:
            continue
        headers = {nth: made[rank][2] for nth, rank in enumerate(members) if rank in made}
        absent = [nth for nth, rank in enumerate(members) if rank not in made]
        return (
            f"the ranks made different calls (their call {sequence}):\n{differing(headers, absent)}"
            "\nEvery rank must make the same collective calls in the same order. The difference "
            "was noticed only when a call stalled, so the communicator is broken. Set "
            "COLLECTIVE_CHECK=always to compare each call before it is sent"
        )
    return None


def followed(
    members: Sequence[int], ranks: set[int], reports: Mapping[int, Message], most: int
) -> dict[int, Message | None]:
    """Return the last part of the reports of ``ranks``, and of the ranks that these wait for.

    Args:
        members, reports: as in :func:`disagreement`.
        ranks: ranks, numbered as in the world.
        most: maximum number of ranks beside ``ranks``.
    """
    reached = sorted(ranks)
    for rank in reached:
        waits = from_wire(reports[rank]["waits"]) if rank in reports else []
        numbers = needed([waiting for waiting in waits if waiting.message is not None])
        further = {members[number] for number in numbers if number < len(members)}
        reached += sorted(further - set(reached))[: max(0, len(ranks) + most - len(reached))]
    return {
        rank: {**reports[rank], "entries": reports[rank]["entries"][-1:]}
        if rank in reports
        else None
        for rank in reached
    }


def waits_of(reports: Mapping[int, Message | None]) -> dict[int, list[Waiting]]:
    """Return the calls in which the ranks wait, by rank, from their reports."""
    started = {rank: report["started"] for rank, report in reports.items() if report is not None}
    waits = {}
    for rank, number in started.items():
        report = reports[rank]
        assert report is not None
        behind = tuple(peer for peer, other in started.items() if other < number)
        waits[rank] = [
            waiting if waiting.message is not None else replace(waiting, ranks=behind)
            for waiting in from_wire(report["waits"])
        ]
    return waits


def last_call_of(recorder: Recorder | None) -> str:
    """Return the last collective call of this rank, as text."""
    entries = [] if recorder is None else recorder.entries(1)
    return str(entries[-1].request)[:_CALL] if entries else NO_CALL


def last_call(rank: int, reports: Mapping[int, Message | None]) -> str:
    """Describe the last call of ``rank``, as far as the reports tell.

    Args:
        rank: the rank to describe.
        reports: the ranks' reports; None for a rank that does not answer.
    """
    if rank not in reports:
        return f"rank {rank} has not been asked" if reports else "the monitor does not answer"
    report = reports[rank]
    if report is None:
        return f"rank {rank} does not answer"
    if not report["entries"]:
        return last_done(rank, NO_CALL)
    sequence, _, _, header = report["entries"][-1]
    site = f" at {header['site']}" if header["site"] else ""
    state = "last did" if report["finished"] >= sequence else "is in"
    return f"rank {rank} {state} its call {sequence}, {describe(header)}{site}"
