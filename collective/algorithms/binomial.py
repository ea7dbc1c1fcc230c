"""Binomial tree over positions 0 to size - 1, with its root at 0.

The subtree of position p has the positions p to p + 2**k - 1, where 2**k is the lowest set bit
of p. So every subtree is a range of positions. Pieces that go through a subtree stay together, and
folding the children from the nearest to the farthest keeps their order.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

__all__ = ["TreeNode", "node"]


class TreeNode(NamedTuple):
    """Node of the tree at one position.

    Attributes:
        parent: position of the parent, None at the root.
        stop: end of this node's subtree, which starts at the node's own position.
        children: start and end of each child's subtree, the nearest (and smallest)
            first.
    """

    parent: int | None
    stop: int
    children: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=256)
def node(position: int, size: int) -> TreeNode:
    """Return the node at ``position`` in a tree of ``size`` positions."""
    reach = position & -position or size  # the lowest set bit; the root reaches all positions
    children = []
    step = 1
    while step < reach and position + step < size:
        children.append((position + step, min(position + 2 * step, size)))
        step *= 2
    parent = position - reach if position else None
    return TreeNode(parent, min(position + reach, size), tuple(children))
