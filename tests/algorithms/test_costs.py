"""The cost model: its formulas, and the fit of its parameters."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from collective.algorithms import costs, model
from collective.algorithms.model import (
    ALGORITHMS,
    LinkSpeed,
    Measured,
    coefficients,
    fit,
    operations,
)

N = 1 << 20
ALPHA, BETA, GAMMA = 4e-6, 1 / 9e9, 1 / 30e9
NEAR = np.array([ALPHA, BETA, ALPHA, BETA, GAMMA])
SIZES = [8**exponent for exponent in range(1, 9)]


@pytest.mark.parametrize("p", [2, 4, 8, 64, 1024])
def test_all_reduce_costs_match_published_formulas(p):
    def seconds(algorithm):
        return coefficients("all_reduce", N, p, p, algorithm) @ NEAR

    lg = math.log2(p)
    # Thakur, Rabenseifner & Gropp, sections 4.1, 4.4 and 4.5.
    assert seconds("recursive doubling") == pytest.approx(lg * (ALPHA + N * BETA + N * GAMMA))
    rabenseifner = 2 * lg * ALPHA + 2 * (p - 1) / p * N * BETA + (p - 1) / p * N * GAMMA
    assert seconds("Rabenseifner") == pytest.approx(rabenseifner)
    assert seconds("tree") == pytest.approx(lg * (2 * ALPHA + 2 * N * BETA + N * GAMMA))
    # Patarasuk & Yuan, section 3: 2 (p - 1) rounds of n / p bytes.
    ring = 2 * (p - 1) * (ALPHA + N / p * BETA) + (p - 1) / p * N * GAMMA
    assert seconds("ring") == pytest.approx(ring)
    assert seconds("hierarchical") == pytest.approx(ring)  # one host has no levels


@pytest.mark.parametrize("p", [3, 6, 7, 12, 1000])
def test_all_reduce_beyond_power_of_two_adds_two_messages(p):
    below = 1 << (p.bit_length() - 1)
    for algorithm in ("recursive doubling", "Rabenseifner"):
        more = coefficients("all_reduce", N, p, p, algorithm)
        less = coefficients("all_reduce", N, below, below, algorithm)
        assert (more - less).tolist() == [2, 2 * N, 0, 0, N]


def test_coefficients_separate_links_between_and_inside_hosts():
    # 4 hosts of 8.
    ring = coefficients("all_reduce", N, 32, 8, "ring")
    assert ring.tolist() == [0, 0, 62, 62 * N / 32, N * 31 / 32]
    doubling = coefficients("all_reduce", N, 32, 8, "recursive doubling")
    assert doubling.tolist() == [3, 3 * N, 2, 2 * N * 8, 5 * N]  # 8 ranks share a cable
    rabenseifner = coefficients("all_reduce", N, 32, 8, "Rabenseifner")
    far = 2 * (N / 16 + N / 32) * 8
    assert rabenseifner.tolist() == [6, 2 * N * 7 / 8, 4, far, N * 31 / 32]
    tree = coefficients("all_reduce", N, 32, 8, "tree")
    assert tree.tolist() == [6, 6 * N, 4, 4 * N, 5 * N]
    levels = coefficients("all_reduce", N, 32, 8, "hierarchical")
    inside = coefficients("all_reduce", N, 8, 8, "ring")
    between = coefficients("all_reduce", N, 4, 4, "Rabenseifner")
    assert levels.tolist() == [*inside[:2], *between[:2], inside[4] + between[4]]


@settings(deadline=None)
@given(st.sampled_from(operations()), st.sampled_from(sorted(ALGORITHMS)),
       st.integers(1, 5000), st.integers(1, 64), st.integers(0, 1 << 30))  # fmt: skip
def test_coefficients_respect_lower_bounds(op, algorithm, ranks, per_host, nbytes):
    counts = coefficients(op, nbytes, ranks, per_host, algorithm)
    assert (counts >= 0).all()
    if ranks == 1:
        assert not counts.any()
        return
    assert counts[0] + counts[2] >= 1  # with two or more ranks there is a message
    if ranks <= per_host:
        assert counts[2] == counts[3] == 0
    else:
        assert counts[2] >= 1
    if op == "all_reduce":
        # No algorithm moves less than 2 (p - 1) / p of the bytes (Patarasuk & Yuan, theorem 1),
        # unless ranks exchange in both directions at once and send everything.
        least = 1 if algorithm == "recursive doubling" else 2 * (ranks - 1) / ranks
        assert counts[1] + counts[3] >= least * nbytes * (1 - 1e-12)


def synthetic(algorithm, alpha, beta, gamma, ops=("all_reduce", "all_gather"), counts=(2, 4)):
    return [
        Measured(op, n, p, float(coefficients(op, n, p, p, algorithm)
                                 @ [alpha, beta, alpha, beta, gamma]))
        for op in ops for p in counts for n in SIZES
    ]  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(ALGORITHMS)), st.floats(1e-7, 1e-3), st.floats(1e-11, 1e-8),
       st.floats(0.1, 3))  # fmt: skip
def test_fit_recovers_parameters_of_synthetic_data(algorithm, alpha, beta, folding):
    gamma = beta * folding
    fitted = fit(synthetic(algorithm, alpha, beta, gamma), algorithm)
    assert fitted.separate
    assert [*fitted.link, fitted.gamma] == pytest.approx([alpha, beta, gamma], rel=1e-6)
    assert fitted.typical < 1e-9
    assert fitted.r2 == pytest.approx(1)
    counts = coefficients("all_reduce", N, 64, 8, algorithm)
    far = LinkSpeed(1e-5, 1 / 12e9)
    expected = counts @ [alpha, beta, *far, gamma]
    assert fitted.seconds(counts, far) == pytest.approx(expected, rel=1e-6)
    assert fitted.interval(counts, far) == pytest.approx((expected, expected), rel=1e-6)


def test_fit_of_single_operation_does_not_separate_gamma():
    measured = synthetic("ring", ALPHA, BETA, GAMMA, ops=("all_reduce",))
    fitted = fit(measured, "ring")
    assert not fitted.separate
    assert fitted.gamma == 0
    # n (p - 1) / p of each byte is sent twice and folded once: beta takes half of gamma.
    assert fitted.link.beta == pytest.approx(BETA + GAMMA / 2)
    assert fitted.typical < 1e-9


def test_fit_reports_its_error():
    measured = synthetic("ring", ALPHA, BETA, GAMMA)
    distorted = [m._replace(seconds=m.seconds * (2 if m.bytes == 8**5 else 1)) for m in measured]
    fitted = fit(distorted, "ring")
    # The fit predicts about half of the time that the slowed measurements took.
    assert fitted.worst == pytest.approx(-0.5, abs=0.1)
    assert fitted.typical == pytest.approx(np.sqrt(np.mean(fitted.errors**2)))
    assert 0.1 < fitted.typical < 0.5
    assert 0.9 < fitted.r2 < 1
    # An algorithm that did not produce the measurements fits them worse.
    assert fit(measured, "ring").typical < 1e-9 < fit(measured, "tree").typical


def test_fit_intervals_have_stated_coverage():
    hits = 0
    counts = coefficients("all_reduce", N, 4, 4, "ring")
    truth = counts @ NEAR
    exact = synthetic("ring", ALPHA, BETA, GAMMA)
    for seed in range(60):
        draws = np.random.default_rng(seed)
        noisy = [m._replace(seconds=m.seconds * (1 + 0.1 * draws.uniform(-1, 1))) for m in exact]
        low, high = fit(noisy, "ring").interval(counts)
        hits += low <= truth * (1 + 0.1 * draws.uniform(-1, 1)) <= high
    assert hits >= 48  # 54 expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 12))
def test_non_negative_least_squares_solution_is_optimal(seed, count):
    draws = np.random.default_rng(seed)
    rows, target = draws.uniform(0, 1, (count, 3)), draws.uniform(-1, 2, count)
    (solution,) = model._non_negative(rows, target[None])
    assert (solution >= 0).all()
    # The conditions of Karush, Kuhn and Tucker: the slope of a positive parameter is zero, and a
    # parameter at the bound 0 does not reduce the error by becoming positive.
    slope = rows.T @ (rows @ solution - target)
    assert slope[solution > 0] == pytest.approx(0, abs=1e-8)
    assert (slope[solution == 0] >= -1e-8).all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=8, max_size=8))
def test_fit_never_gives_negative_costs(seconds):
    assume(len(set(seconds)) > 1)
    measured = [Measured("all_reduce", n, 2, s) for n, s in zip(SIZES, seconds)]
    for algorithm in ALGORITHMS:
        fitted = fit(measured, algorithm)
        assert min(*fitted.link, fitted.gamma) >= 0
        low, high = fitted.interval(coefficients("all_reduce", N, 64, 64, algorithm))
        assert 0 <= low <= high


@pytest.mark.parametrize(
    "measured",
    [
        [],
        [Measured("all_reduce", 8, 2, 1e-6)] * 5,
        [Measured("nonsense", n, 2, 1e-6) for n in SIZES],
        [Measured("all_reduce", n, 1, 1e-6) for n in SIZES],
        [Measured("all_reduce", n, 2, 0.0) for n in SIZES],
    ],
)
def test_fit_of_too_few_measurements_raises_value_error(measured):
    with pytest.raises(ValueError, match=r"\d usable measurements of \d lengths"):
        fit(measured, "ring")


# Each function that chooses an algorithm, with the steps of its two alternatives in the model.
CHOICES = {
    costs.tree_beats_ring: (["broadcast"], ["scatter", "all_gather"]),
    costs.doubling_beats_parts: (["all_reduce"], ["reduce_scatter", "all_gather"]),
    costs.doubling_beats_pairwise: (["all_reduce"], ["reduce_scatter"]),
}


@given(st.sampled_from(sorted(CHOICES, key=str)), st.integers(1, 7), st.integers(1, 1 << 24))
def test_algorithms_are_chosen_by_the_model_at_fixed_prices(choice, exponent, nbytes):
    size = 1 << exponent
    prices = np.array([costs.START_BYTES, 1, 0, 0, 1])  # folding a byte costs as much as sending it

    def price(steps):
        ways = [coefficients(op, nbytes, size, size, "recursive doubling") for op in steps]
        return float(sum(ways) @ prices)

    first, second = map(price, CHOICES[choice])
    assume(abs(first - second) > 4)  # the functions round to whole bytes
    assert choice(size, nbytes) == (first < second)
