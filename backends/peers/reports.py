"""What a rank reports of its calls when one stalls, and what is found in the ranks' reports.

A report has ``entries``, the last calls as ``[sequence, digest, compares, header]``; ``finished``,
the number of the last one that is over; and ``started``, that of the last one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from collective.contract.recorder import Entry, Recorder
from collective.request import Request, describe, differing

from .link import Message

__all__ = ["disagreement", "last_calls", "make_report"]

# Calls in a report: ranks that are further apart have made different calls.
_REPORTED = 8
# Of these ranks may pass arrays of different lengths, or None.
_MAY_DIFFER = frozenset({"broadcast", "scatter", "gather", "all_gather", "all_to_all"})


def make_report(recorder: Recorder | None, finished: int, on_arrival: bool) -> Message:
    """Return what a rank reports.

    Args:
        recorder: its calls; None before there are any.
        finished: the number of the last call that is over, on the devices as well.
        on_arrival: whether the transport finds calls that differ by itself, once all ranks have
            come: then the report tells no differences that the ranks may turn out to have.
    """
    entries, started = [], 0
    if recorder is not None:
        started = recorder.started
        # From the oldest that is not over: a program may be far ahead of its device.
        ahead = recorder.entries(max(_REPORTED, started - finished))
        for entry in [*ahead[: _REPORTED - 1], ahead[-1]] if ahead else ():
            header = json.loads(entry.request.header(entry.site))
            entries.append([entry.sequence, *_compared(entry, on_arrival), header])
    return {"entries": entries, "finished": finished, "started": started}


def _compared(entry: Entry, on_arrival: bool) -> tuple[int, bool]:
    """Return by what other ranks' calls of this number are like this one."""
    request = entry.request
    if on_arrival and request.operation in _MAY_DIFFER:
        return Request(request.operation, root=request.root).digest, False
    return request.digest, entry.compares


def disagreement(members: list[int], reports: dict[int, Message]) -> str | None:
    """Return what to tell the ranks if they have made different calls, else None.

    Args:
        members: the communicator's ranks, in its order, as numbers of the world.
        reports: of those that answered.
    """
    tables: dict[int, dict[int, Any]] = {
        rank: {sequence: rest for sequence, *rest in report["entries"]}
        for rank, report in reports.items()
    }
    unfinished = min((report["finished"] for report in reports.values()), default=0) + 1
    for sequence in sorted({number for table in tables.values() for number in table}):
        made = {rank: table[sequence] for rank, table in tables.items() if sequence in table}
        # What all of them have finished was the same call, or did no harm that shows now. A
        # comparison of calls finds differences by itself, unless a rank is not comparing.
        calls = {(compares, 0 if compares else digest) for digest, compares, _ in made.values()}
        if sequence < unfinished or len(calls) < 2:
            continue
        headers = {nth: made[rank][2] for nth, rank in enumerate(members) if rank in made}
        absent = [nth for nth, rank in enumerate(members) if rank not in made]
        return (
            f"the ranks made different calls (their call {sequence}):\n{differing(headers, absent)}"
            "\nEvery rank must make the same collective calls in the same order. It was noticed "
            "when a call stalled, too late to go on; COLLECTIVE_CHECK=always compares each call "
            "before it is sent"
        )
    return None


def last_calls(ranks: Sequence[int], reports: dict[int, Message | None]) -> str:
    """Tell what ranks did last, as far as it is known.

    Args:
        reports: None of those that do not answer.
    """
    known = [_last_call(rank, reports[rank]) for rank in ranks if rank in reports]
    return "; ".join(known) or "the monitor does not answer"


def _last_call(rank: int, report: Message | None) -> str:
    if report is None:
        return f"rank {rank} does not answer"
    if not report["entries"]:
        return f"rank {rank} has made no collective call"
    sequence, _, _, header = report["entries"][-1]
    site = f" at {header['site']}" if header["site"] else ""
    state = "last did" if report["finished"] >= sequence else "is in"
    return f"rank {rank} {state} its call {sequence}, {describe(header)}{site}"
