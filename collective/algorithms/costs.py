"""Choice of algorithms by size: few rounds for short messages, few bytes for long ones.

The choice uses Hockney's model, as in Thakur, Rabenseifner & Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), section 3. A message of m bytes costs
START_BYTES + m, in units of the time that one byte takes. Folding a byte costs one unit
more. All ranks compute the same costs from the same sizes, so they choose the same algorithm.

Costs are whole numbers. Products of floats could round to two choices on two kinds of processors,
and ranks with different algorithms wait for each other without end.
``tests/algorithms/test_costs.py`` compares the choices with the published formulas.
"""

from __future__ import annotations

import functools

#: Number of bytes that could be carried in the time that it takes to start a message. Starting
#: takes some 15 µs in Python, and processes of one host carry some 8 GB/s. (A network carries fewer
#: bytes in that time, but also takes longer to start a message.)
START_BYTES = 128 << 10


def rounds(size: int) -> int:
    """Return how many rounds reach all ranks if each round doubles the ranks reached."""
    return (size - 1).bit_length()


def forwarding_pays(size: int, nbytes: int) -> bool:
    """Tell whether log(size) rounds that move ``nbytes`` once more beat size - 1 rounds."""
    return nbytes <= (size - 1 - rounds(size)) * START_BYTES


@functools.lru_cache(maxsize=256)
def tree_beats_chain(size: int, nbytes: int, chunk_bytes: int) -> bool:
    """Tell whether sending ``nbytes`` down a tree beats passing chunks along the chain of ranks."""
    tree = rounds(size) * (START_BYTES + nbytes)
    # The last of the ``size - 1`` receivers gets its first chunk after ``size - 1`` messages, and
    # then one chunk after the other.
    chunks = -(-nbytes // chunk_bytes)
    chain = (size - 2 + chunks) * (START_BYTES + min(nbytes, chunk_bytes))
    return tree <= chain


def doubling_beats_parts(size: int, nbytes: int) -> bool:
    """Tell whether folding all in log(size) rounds beats folding parts and collecting them."""
    return _doubling(size, nbytes) <= _pairwise(size, nbytes) + _ring(size, nbytes)


def doubling_beats_pairwise(size: int, nbytes: int) -> bool:
    """Tell whether folding all in log(size) rounds beats folding one part a rank."""
    return _doubling(size, nbytes) <= _pairwise(size, nbytes)


def whole_pays(nbytes: int) -> bool:
    """Tell whether every rank should collect all inputs, of ``nbytes`` each, and fold them.

    With n ranks and m bytes, this takes log(n) rounds, carries (n - 1) m bytes and folds as many.
    The alternative takes 2 (n - 1) rounds, with a cost of 3 m in all for the bytes. The two are
    equal near START_BYTES for any n.
    """
    return nbytes <= START_BYTES


def _doubling(size: int, nbytes: int) -> int:
    return rounds(size) * (START_BYTES + 2 * nbytes)


def _pairwise(size: int, nbytes: int) -> int:
    return (size - 1) * START_BYTES + 2 * nbytes * (size - 1) // size


def _ring(size: int, nbytes: int) -> int:
    return (size - 1) * START_BYTES + nbytes * (size - 1) // size
