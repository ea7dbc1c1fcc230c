"""Tables that are no wider than a terminal: columns that do not fit form a further part below.

Figures are never cut or wrapped; a column of words is wrapped. Each part begins with the columns
that name the subject of its rows.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

__all__ = ["GAP", "MARKUP", "figures", "lines", "narrowest", "parts", "widened"]

#: Spaces between two columns.
GAP = 2
# Width to which a column of words is narrowed before the column goes into a further part.
_NARROW = 24
#: Colour mark-up of rich.
MARKUP = re.compile(r"\[/?[a-z]*\]")


def figures(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns hold figures, ignoring colours; the first column never does."""
    return [i > 0 and all(_is_figure(row[i]) for row in rows) for i in range(len(header))]


def _is_figure(cell: str) -> bool:
    shown = MARKUP.sub("", cell)
    return not shown or shown.lstrip("+-")[:1].isdigit() or shown in "-–"


def narrowest(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    markup: bool = False,
    by_words: bool = True,
) -> list[int]:
    """Return the least width of each column, in characters.

    Args:
        header, rows: the whole table.
        width: width of the terminal or page.
        markup: whether ``[red]`` is a colour.
        by_words: whether the words of a column's name may stand below each other.
    """
    least = []
    for n, (name, is_figure) in enumerate(zip(header, figures(header, rows))):
        cells = [MARKUP.sub("", row[n]) if markup else row[n] for row in rows]
        widest = max(map(len, [*cells, ""]))
        if not is_figure:
            widest = min(widest, _narrow(width))
        least.append(max(widest, *map(len, name.split() if by_words and name else [name])))
    return least


def parts(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    least: Sequence[int],
    width: int,
    gap: int = GAP,
) -> list[list[int]]:
    """Return the columns of each part of a table, so that each part is up to ``width`` wide.

    A part with only one column beside its key columns may be wider.

    Args:
        header, rows: the whole table.
        least: the table's widths of :func:`narrowest`.
        width: width in characters.
        gap: spaces between two columns.
    """
    keys = [0, 1] if len(header) > 1 and not figures(header, rows)[1] else [0]
    room = width - sum(least[n] for n in keys) - gap * (len(keys) - 1)
    groups: list[list[int]] = []
    left = 0
    for n in range(len(keys), len(header)):
        if not groups or least[n] + gap > left:
            groups.append(list(keys))
            left = room
        groups[-1].append(n)
        left -= least[n] + gap
    return groups or [keys]


def widened(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: Sequence[int],
    least: Sequence[int],
    room: int,
) -> list[int]:
    """Return the width of each column of a part, when ``room`` more characters are available.

    Columns that lack least come first. No column gets more than it needs.
    """
    needs = {
        n: max(len(MARKUP.sub("", cell)) for cell in (header[n], *(row[n] for row in rows)))
        for n in columns
    }
    widths = {n: least[n] for n in columns}
    for n in sorted(columns, key=lambda n: needs[n] - least[n]):
        more = max(0, min(needs[n] - least[n], room))
        widths[n] += more
        room -= more
    return [widths[n] for n in columns]


def _narrow(width: int) -> int:
    """Return the width to which a column of words is narrowed at most."""
    return max(_NARROW, width // 4)


def lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows as lines with aligned columns, up to ``width`` wide if possible.

    The last column is wrapped only at spaces, so that a path can be copied. If a cell is wider than
    its column, the row continues on a new line.
    """
    limit = _narrow(width)
    starts = [0]
    for column in list(zip(*rows))[:-1]:
        wide = max([len(cell) for cell in column if len(cell) <= limit], default=limit)
        starts.append(starts[-1] + wide + GAP)
    output = []
    for row in rows:
        line = ""
        for start, cell in zip(starts, row[:-1]):
            if len(line) > max(0, start - GAP):
                output.append(line)
                line = ""
            line = line.ljust(start) + cell
        if len(line) > max(0, starts[-1] - GAP):
            output.append(line)
            line = ""
        last = textwrap.wrap(
            row[-1], max(1, width - starts[-1]), break_long_words=False, break_on_hyphens=False
        )
        output.append(line.ljust(starts[-1]) + (last[0] if last else ""))
        output += [" " * starts[-1] + part for part in last[1:]]
    return [line.rstrip() for line in output]
