"""Tables that are no wider than a terminal: what does not fit goes into a part below.

Figures are never cut or broken; a column of words is wrapped. Each part begins with the columns
that say what its rows are about.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

__all__ = ["GAP", "MARKUP", "figures", "lines", "narrowest", "parts", "widened"]

#: Spaces between two columns.
GAP = 2
# As far as a column of words is narrowed before it goes into a part of its own.
_NARROW = 24
#: A colour, as rich reads it.
MARKUP = re.compile(r"\[/?[a-z]*\]")


def figures(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns hold figures, colours apart; the first one never."""
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
    """Return how narrow each column may be, in characters.

    Args:
        header, rows: of the whole table.
        width: of what it is printed to.
        markup: whether ``[red]`` is a colour.
        by_words: whether a column's name may have a line a word.
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
    """Return the columns of each part of a table, such that each is up to ``width`` wide.

    A part with one column beside those that it begins with may be wider.

    Args:
        header, rows: of the whole table.
        least: what :func:`narrowest` has for it.
        width: in characters.
        gap: spaces between two columns.
    """
    keys = [0, 1] if len(header) > 1 and not figures(header, rows)[1] else [0]
    room = width - sum(least[n] for n in keys) - gap * (len(keys) - 1)
    found: list[list[int]] = []
    left = 0
    for n in range(len(keys), len(header)):
        if not found or least[n] + gap > left:
            found.append(list(keys))
            left = room
        found[-1].append(n)
        left -= least[n] + gap
    return found or [keys]


def widened(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: Sequence[int],
    least: Sequence[int],
    room: int,
) -> list[int]:
    """Return how wide each column of a part is, when ``room`` more characters are given out.

    Those that lack least come first, and none gets more than it needs.
    """
    needs = {
        n: max(len(MARKUP.sub("", cell)) for cell in (header[n], *(row[n] for row in rows)))
        for n in columns
    }
    found = {n: least[n] for n in columns}
    for n in sorted(columns, key=lambda n: needs[n] - least[n]):
        more = max(0, min(needs[n] - least[n], room))
        found[n] += more
        room -= more
    return [found[n] for n in columns]


def _narrow(width: int) -> int:
    """Return as far as a column of words is narrowed before it goes into another part."""
    return max(_NARROW, width // 4)


def lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows as lines with columns of spaces, none wider than ``width`` if that can be.

    The last column is wrapped, at spaces: a path is to be copied. After a cell that is wider than
    its column its row goes on in a line of its own.
    """
    limit = _narrow(width)
    starts = [0]
    for column in list(zip(*rows))[:-1]:
        wide = max([len(cell) for cell in column if len(cell) <= limit], default=limit)
        starts.append(starts[-1] + wide + GAP)
    found = []
    for row in rows:
        line = ""
        for start, cell in zip(starts, row[:-1]):
            if len(line) > max(0, start - GAP):
                found.append(line)
                line = ""
            line = line.ljust(start) + cell
        if len(line) > max(0, starts[-1] - GAP):
            found.append(line)
            line = ""
        last = textwrap.wrap(
            row[-1], max(1, width - starts[-1]), break_long_words=False, break_on_hyphens=False
        )
        found.append(line.ljust(starts[-1]) + (last[0] if last else ""))
        found += [" " * starts[-1] + each for each in last[1:]]
    return [line.rstrip() for line in found]
