"""A run's figures as tables and as plots over size."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collective import BackendUnavailableError
from collective.inner import install
from collective.tools.show import microseconds, print_table, rate_name, size_name, time_name

from .contestants import PEERS
from .measure import METHODS, Gap, Record

__all__ = ["of_peer", "picture_formats", "plot", "show"]

_COLUMNS = {
    "latency": ["size", "side", "p50 µs", "p90 µs", "p99 µs", "#wrong"],
    "bandwidth": ["size", "side", "time µs", "algbw GB/s", "busbw GB/s", "#wrong"],
}
# Okabe and Ito's colours, which are distinct for any colour vision. Peers have greys.
_OURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_PEERS = ("#000000", "#555555", "#888888", "#aaaaaa")
_MARKERS = "osD^vP"
_AXES = {"latency": "latency (p50)", "bandwidth": "bus bandwidth"}
_TICKS = {"latency": time_name, "bandwidth": rate_name}


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


# -- plots: a line for each side, dashed for peers ------------------------------------------------


def picture_formats() -> list[str]:
    """Return the file suffixes of the pictures that can be drawn.

    Raises:
        BackendUnavailableError: matplotlib is not installed; the text says how to install it.
    """
    try:
        from matplotlib.figure import Figure

        return list(Figure().canvas.get_supported_filetypes())
    except ImportError as error:
        raise BackendUnavailableError(
            f"bench: --plot needs matplotlib, which cannot be imported: {error}. Install it: "
            f"{install.hint('bench')}"
        ) from error


def plot(path: Path, records: Sequence[Record], title: str) -> None:
    """Draw a row of axes for each operation, dtype and number of ranks, a column for each method.

    Args:
        path: file of the picture; its suffix decides the format.
        records: results; the plot omits those of a barrier, which has no size.
        title: title above the picture.
    """
    from matplotlib.figure import Figure

    records = [record for record in records if record.nbytes]
    kinds = list(dict.fromkeys((r.operation, r.dtype, r.ranks) for r in records))
    methods = [m for m in METHODS if any(r.method == m for r in records)]
    styles = _styles(list(dict.fromkeys(r.side for r in records)), records)
    rows, columns = max(1, len(kinds)), max(1, len(methods))
    figure = Figure(figsize=(5.4 * columns, 3.4 * rows + 1.1), layout="constrained")
    figure.suptitle(title, fontsize=9, color="#444444")
    axes = figure.subplots(rows, columns, squeeze=False)
    for row, kind in enumerate(kinds):
        for column, method in enumerate(methods):
            chosen = [
                r for r in records
                if (r.operation, r.dtype, r.ranks) == kind and r.method == method
            ]  # fmt: skip
            _draw(axes[row][column], chosen, method, styles)
            operation, dtype, ranks = kind
            axes[row][column].set_title(f"{operation}, {dtype}, {ranks} ranks", fontsize=10)
    shown: dict[str, Any] = {}
    for plot_axes in axes.flat:
        shown.update(zip(*reversed(plot_axes.get_legend_handles_labels())))
    figure.legend(
        [shown[side] for side in styles if side in shown],
        [side for side in styles if side in shown],
        loc="outside lower center",
        ncols=min(4 if columns == 1 else 7, len(styles)),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=150)


def _styles(sides: Sequence[str], records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    peers = {r.side for r in records if of_peer(r.contestant)}
    ours = [side for side in sides if side not in peers]
    theirs = [side for side in sides if side in peers]
    styles = {}
    for n, side in enumerate(ours):
        styles[side] = {"color": _OURS[n % len(_OURS)], "marker": _MARKERS[n % len(_MARKERS)]}
    for n, side in enumerate(theirs):
        styles[side] = {
            "color": _PEERS[n % len(_PEERS)], "linestyle": "--",
            "marker": _MARKERS[n % len(_MARKERS)], "markerfacecolor": "white",
        }  # fmt: skip
    return styles


def _draw(
    axes: Any, records: Sequence[Record], method: str, styles: dict[str, dict[str, Any]]
) -> None:
    for side in dict.fromkeys(record.side for record in records):
        mine = sorted((r for r in records if r.side == side), key=lambda record: record.nbytes)
        if method == "latency":
            figures = [record.seconds for record in mine]
        else:
            figures = [record.busbw or 0.0 for record in mine]
        sizes = [record.nbytes for record in mine]
        axes.plot(sizes, figures, label=side, linewidth=1.6, markersize=4, **styles[side])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({record.nbytes for record in records})
    axes.set_xticks(ticks, [size_name(tick) for tick in ticks], fontsize=8, rotation=30)
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: _TICKS[method](value))
    axes.yaxis.set_minor_formatter("")
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylabel(_AXES[method], fontsize=9)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
