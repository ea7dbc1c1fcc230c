"""The choice of algorithms by size, against published formulas of the costs."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from collective.algorithms import costs

pytestmark = pytest.mark.quick


def _all_gather(p, n):
    return p - 1, n * (p - 1) / p, 0.0


def _reduce_scatter(p, n):
    return p - 1, n * (p - 1) / p, n * (p - 1) / p


def _doubling(p, n):
    return math.log2(p), math.log2(p) * n, math.log2(p) * n


# Each function that chooses an algorithm, with the steps of its two alternatives. The counts are
# those of Thakur, Rabenseifner & Gropp, sections 3 and 4, for a power of two.
CHOICES = {
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


@given(st.integers(2, 128), st.integers(1, 1 << 30), st.sampled_from([1 << 16, 1 << 19]))
def test_long_broadcasts_go_along_chain_by_hockneys_model(size, nbytes, chunk):
    # A chain of p ranks passes k pieces in p - 2 + k steps.
    count = math.ceil(nbytes / chunk)
    chain = (size - 2 + count) * (costs.START_BYTES + min(nbytes, chunk))
    tree = math.ceil(math.log2(size)) * (costs.START_BYTES + nbytes)
    assert costs.tree_beats_chain(size, nbytes, chunk) == (tree <= chain)
