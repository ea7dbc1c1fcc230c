"""Which algorithm for which size: few rounds while messages are short, few bytes later.

Hockney's model, as in Thakur, Rabenseifner & Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), section 3: a message of m bytes costs
START_BYTES + m, in units of the time that one byte takes; folding a byte costs one unit
more. Every rank computes the same from the same sizes, so they choose alike.
"""

from __future__ import annotations

import functools

__all__ = [
    "START_BYTES",
    "doubling_beats_pairwise",
    "doubling_beats_parts",
    "forwarding_pays",
    "rounds",
    "tree_beats_ring",
    "whole_pays",
]

#: What could be carried in the time that starting a message takes: some 15 µs in Python,
#: at some 8 GB/s between processes of one host. (A network carries less in that time, but
#: takes longer to start, too.)
START_BYTES = 128 << 10


def rounds(size: int) -> int:
    """Return how many rounds reach everybody when each round doubles the reached."""
    return (size - 1).bit_length()


def forwarding_pays(size: int, nbytes: int) -> bool:
    """Tell whether to save rounds, log(size) for size - 1, by moving ``nbytes`` once more."""
    return nbytes <= (size - 1 - rounds(size)) * START_BYTES


@functools.lru_cache(maxsize=256)
def tree_beats_ring(size: int, nbytes: int) -> bool:
    """Compare sending ``nbytes`` down a tree with scattering and gathering its parts."""
    tree = rounds(size) * (START_BYTES + nbytes)
    ring = (rounds(size) + size - 1) * START_BYTES + 2 * nbytes * (size - 1) // size
    return tree <= ring


def doubling_beats_parts(size: int, nbytes: int) -> bool:
    """Compare folding all in log(size) rounds with folding parts and collecting them."""
    return _doubling(size, nbytes) <= _pairwise(size, nbytes) + _ring(size, nbytes)


def doubling_beats_pairwise(size: int, nbytes: int) -> bool:
    """Compare folding all in log(size) rounds with folding one part a rank."""
    return _doubling(size, nbytes) <= _pairwise(size, nbytes)


def whole_pays(nbytes: int) -> bool:
    """Tell whether every rank should collect all inputs, of ``nbytes`` each, and fold them.

    With n ranks and m bytes, log(n) rounds with (n - 1) m to carry and as much to fold,
    against 2 (n - 1) rounds with 3 m in all: they meet near START_BYTES for any n.
    """
    return nbytes <= START_BYTES


def _doubling(size: int, nbytes: int) -> int:
    return rounds(size) * (START_BYTES + 2 * nbytes)


def _pairwise(size: int, nbytes: int) -> int:
    return (size - 1) * START_BYTES + 2 * nbytes * (size - 1) // size


def _ring(size: int, nbytes: int) -> int:
    return (size - 1) * START_BYTES + nbytes * (size - 1) // size
