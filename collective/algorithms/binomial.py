"""The binomial tree over positions 0 to size - 1, with its root at 0.

Position p has a subtree of the positions p to p + 2**k - 1, 2**k being the lowest bit
set in p, so that every subtree is a range: pieces that travel through it stay together,
and folding children from the nearest to the farthest keeps their order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

__all__ = ["TreeNode", "node"]


class TreeNode(NamedTuple):
    """A position in the tree.

    Attributes:
        parent: its position, None at the root.
        stop: where this subtree ends; it starts at this position.
        children: the start and end of each child's subtree, the nearest (and smallest)
            first.
    """

    parent: int | None
    stop: int
    children: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=256)
def node(position: int, size: int) -> TreeNode:
    """Return ``position`` in the tree of ``size``."""
    reach = position & -position or size  # the lowest bit that is set; the root reaches all
    children = []
    step = 1
    while step < reach and position + step < size:
        children.append((position + step, min(position + 2 * step, size)))
        step *= 2
    parent = position - reach if position else None
    return TreeNode(parent, min(position + reach, size), tuple(children))
