"""The choice of algorithms by size, against published formulas of the costs."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from collective.algorithms import costs


def _tree(p, n):
    """Return messages, bytes and folded bytes of a binomial tree from the root down."""
    return math.log2(p), math.log2(p) * n, 0.0


def _scatter(p, n):
    """Return the counts of a tree in which each level carries half as much."""
    return math.log2(p), n * (p - 1) / p, 0.0


def _all_gather(p, n):
    return p - 1, n * (p - 1) / p, 0.0


def _reduce_scatter(p, n):
    return p - 1, n * (p - 1) / p, n * (p - 1) / p


def _doubling(p, n):
    return math.log2(p), math.log2(p) * n, math.log2(p) * n


# Each function that chooses an algorithm, with the steps of its two alternatives. The counts are
# those of Thakur, Rabenseifner & Gropp, sections 3 and 4, for a power of two.
CHOICES = {
    costs.tree_beats_ring: ([_tree], [_scatter, _all_gather]),
    costs.doubling_beats_parts: ([_doubling], [_reduce_scatter, _all_gather]),
    costs.doubling_beats_pairwise: ([_doubling], [_reduce_scatter]),
}


@given(st.sampled_from(sorted(CHOICES, key=str)), st.integers(1, 7), st.integers(1, 1 << 24))
def test_algorithms_are_chosen_by_hockneys_model(choice, exponent, nbytes):
    size = 1 << exponent
    prices = costs.START_BYTES, 1, 1  # folding a byte costs as much as sending it

    def price(steps):
        return sum(count * each for way in steps for count, each in zip(way(size, nbytes), prices))

    first, second = map(price, CHOICES[choice])
    assume(abs(first - second) > 4)  # the functions round to whole bytes
    assert choice(size, nbytes) == (first < second)
