"""A run's figures as tables."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from collective.tools.show import microseconds, print_table, size_name

from .contestants import PEERS
from .measure import METHODS, Gap, Record

_COLUMNS = {
    "latency": ["size", "side", "p50 µs", "p90 µs", "p99 µs", "#wrong"],
    "bandwidth": ["size", "side", "time µs", "algbw GB/s", "busbw GB/s", "#wrong"],
}


def of_peer(contestant: str) -> str:
    """Return the name of the peer that a contestant is, or "" for one of our transports."""
    library = contestant.partition("/")[0]
    return library if library in PEERS else ""


def show(records: Sequence[Record], gaps: Sequence[Gap]) -> None:
    """Print a table for each operation, dtype, number of ranks and method."""
    every: list[Record | Gap] = [*records, *gaps]
    kinds = [(entry.operation, entry.dtype, entry.ranks) for entry in every]
    for kind in dict.fromkeys(kinds):
        mine = [r for r in records if (r.operation, r.dtype, r.ranks) == kind]
        missing = [g for g in gaps if (g.operation, g.dtype, g.ranks) == kind]
        measured = [m for m in METHODS if any(r.method == m for r in mine)]
        for method in measured or METHODS[:1]:
            _show([r for r in mine if r.method == method], missing, kind, method)


def _show(
    records: Sequence[Record], gaps: Sequence[Gap], kind: tuple[str, str, int], method: str
) -> None:
    peers = [p for p in PEERS if any(of_peer(r.contestant) == p for r in records)]
    if method == "latency" and "memcpy" in peers:
        peers.remove("memcpy")  # bounds the speed of large calls; small calls are far from it
    header = [*_COLUMNS[method], *(f"× {peer}" for peer in peers)]
    rows = []
    sizes = {record.nbytes for record in records} | {gap.nbytes for gap in gaps}
    reasons = collections.Counter((gap.side, gap.reason) for gap in gaps)
    # A gap at every size gets one line at the end.
    always = [each for each, count in reasons.items() if count == len(sizes) > 1]
    for nbytes in sorted(sizes):
        here = [record for record in records if record.nbytes == nbytes]
        lines = [[r.side, *_cells(r), *_ratios(r, here, peers)] for r in here]
        absent = [(g.side, g.reason) for g in gaps if g.nbytes == nbytes]
        lines += [_absent(header, *each) for each in absent if each not in always]
        rows += [[size_name(nbytes) if n == 0 else "", *line] for n, line in enumerate(lines)]
    rows += [["all", *_absent(header, *each)] for each in always]
    if gaps:
        header.append("why not")
    operation, dtype, ranks = kind
    what = operation if operation == "barrier" else f"{operation}, {dtype}"
    print_table(f"{what}, {ranks} ranks: {method}", header, rows)


def _absent(header: Sequence[str], side: str, reason: str) -> list[str]:
    """Return the table line, without the size, of a side that was not measured."""
    return [side, *"–" * (len(header) - 2), reason]


def _cells(record: Record) -> list[str]:
    if record.method == "latency":
        times = (record.seconds, record.p90, record.p99)
        cells = [microseconds(seconds) for seconds in times if seconds is not None]
    else:
        speeds = (record.algbw or 0.0, record.busbw or 0.0)
        cells = [microseconds(record.seconds), *map(_speed, speeds)]
    return [*cells, str(record.wrong)]


def _speed(bytes_per_second: float) -> str:
    speed = bytes_per_second / 1e9
    return f"{speed:.3g}" if speed >= 1e-3 else "0.000"


def _ratios(record: Record, here: Sequence[Record], peers: Sequence[str]) -> list[str]:
    """Return how many times as fast as each peer a side is; a peer's fastest library counts."""
    if of_peer(record.contestant):
        return [""] * len(peers)
    ratios = []
    for peer in peers:
        theirs = [r.seconds for r in here if of_peer(r.contestant) == peer]
        ratios.append(f"{min(theirs) / record.seconds:.2f}" if theirs else "–")
    return ratios
