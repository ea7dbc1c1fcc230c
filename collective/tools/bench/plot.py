"""Plots of latency and bandwidth over size: a line for each side; dashed for peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collective.errors import BackendUnavailableError
from collective.install import hint
from collective.tools.show import rate_name, size_name, time_name

from .figures import of_peer
from .measure import METHODS, Record

__all__ = ["picture_formats", "plot"]

# Okabe and Ito's colours, which are distinct for any colour vision. Peers have greys.
_OURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_PEERS = ("#000000", "#555555", "#888888", "#aaaaaa")
_MARKERS = "osD^vP"
_AXES = {"latency": "latency (p50)", "bandwidth": "bus bandwidth"}
_TICKS = {"latency": time_name, "bandwidth": rate_name}


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
            f"{hint('bench')}"
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
