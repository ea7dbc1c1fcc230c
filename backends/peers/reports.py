"""Reports of a rank's calls when one of them stalls, and the comparison of the ranks' reports.

A report has ``entries``, the last calls as ``[sequence, digest, compares, header]``; ``finished``,
the number of the last call that is over; and ``started``, the number of the last call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from collective.contract.recorder import Entry, Recorder
from collective.request import Request, describe, differing

from .link import Message

__all__ = ["disagreement", "last_calls", "make_report"]

# Number of calls in a report: ranks that are further apart have made different calls.
_REPORTED = 8
# Operations to which ranks may pass arrays of different lengths, or None.
_MAY_DIFFER = frozenset({"broadcast", "scatter", "gather", "all_gather", "all_to_all"})


def make_report(recorder: Recorder | None, finished: int, on_arrival: bool) -> Message:
    """Return this rank's report.

    Args:
        recorder: flight recorder with the rank's calls; None before there are any.
        finished: number of the last call that is over, also on the devices.
        on_arrival: whether the transport itself finds calls that differ, once all ranks have come.
            If true, the report leaves out properties in which the calls may legitimately differ.
    """
    entries, started = [], 0
    if recorder is not None:
        started = recorder.started
        # Start at the oldest call that is not over: a program may be far ahead of its device.
        ahead = recorder.entries(max(_REPORTED, started - finished))
        for entry in [*ahead[: _REPORTED - 1], ahead[-1]] if ahead else ():
            header = json.loads(entry.request.header(entry.site))
            entries.append([entry.sequence, *_compared(entry, on_arrival), header])
    return {"entries": entries, "finished": finished, "started": started}


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


def last_calls(ranks: Sequence[int], reports: dict[int, Message | None]) -> str:
    """Describe the last calls of ``ranks``, as far as the reports tell.

    Args:
        ranks: ranks to describe.
        reports: the ranks' reports; None for a rank that does not answer.
    """
    texts = [_last_call(rank, reports[rank]) for rank in ranks if rank in reports]
    return "; ".join(texts) or "the monitor does not answer"


def _last_call(rank: int, report: Message | None) -> str:
    if report is None:
        return f"rank {rank} does not answer"
    if not report["entries"]:
        return f"rank {rank} has made no collective call"
    sequence, _, _, header = report["entries"][-1]
    site = f" at {header['site']}" if header["site"] else ""
    state = "last did" if report["finished"] >= sequence else "is in"
    return f"rank {rank} {state} its call {sequence}, {describe(header)}{site}"
