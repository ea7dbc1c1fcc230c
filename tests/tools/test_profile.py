"""Measurements in traces: waiting, moving, hiding, steps, and the verdict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.tools.profile.events import RankTrace, Slice
from collective.tools.profile.measure import Intervals, judge, profile

BACKGROUND = 2_000_000


def a_rank(rank, *slices, size=2, marks=()):
    about = {"rank": rank, "size": size, "local_size": size, "backend": "shm", "host": "here"}
    return RankTrace(about, list(slices), {"program": list(marks)} if marks else {})


def a_call(start, end, seq=1, name="all_reduce", nbytes=800, tid=0, site="train.py:7", **args):
    details = {
        "comm": "w",
        "seq": seq,
        "bytes": nbytes,
        "dtype": "float64",
        "site": site,
        "ranks": 2,
    }
    return Slice(name, "collective", tid, start, end, {**details, **args})


def the_operation(result, name):
    (cost,) = [operation for operation in result.operations if operation.name == name]
    return cost


# -- one call -----------------------------------------------------------------------------------


def test_profile_separates_waiting_from_moving():
    result = profile([a_rank(0, a_call(1.0, 1.5)), a_rank(1, a_call(1.3, 1.4))])
    cost = the_operation(result, "all_reduce")
    assert (cost.calls, cost.nbytes, cost.failed) == (1, 800, 0)
    assert cost.seconds == pytest.approx(0.5)
    assert cost.waiting == pytest.approx(0.15)  # 0.3 and 0
    # Moving lasts from the arrival of the last rank to the end on the slowest rank.
    assert cost.moving == pytest.approx(0.2)
    assert cost.algbw == pytest.approx(4000)
    assert cost.busbw == pytest.approx(4000)
    assert cost.late == {1: 1}


@pytest.mark.parametrize(
    ("name", "times", "waiting", "moving"),
    [
        # The root sends and waits for no rank.
        ("broadcast", [(1.0, 1.1), (2.0, 2.1)], 0, 0.1),
        ("broadcast", [(2.0, 2.1), (1.0, 2.2)], 0.5, 0.2),
        ("gather", [(1.0, 2.1), (2.0, 2.05)], 0.5, 0.1),
        # A rank that sends to the root does not wait.
        ("gather", [(2.0, 2.1), (1.0, 1.1)], 0, 0.1),
    ],
)
def test_profile_of_rooted_call_counts_waiting_of_receivers(name, times, waiting, moving):
    calls = [a_call(*interval, name=name, root_rank=0) for interval in times]
    cost = the_operation(profile([a_rank(n, call) for n, call in enumerate(calls)]), name)
    assert (cost.waiting, cost.moving) == pytest.approx((waiting, moving))


def test_profile_hidden_share_is_time_computed_during_call():
    def wait(start, end):
        return Slice("wait all_reduce", "wait", 0, start, end, {})

    # The call takes 1 s in the background. Rank 0 waits for its last quarter, rank 1 for its last
    # half.
    result = profile([
        a_rank(0, a_call(1, 2, tid=BACKGROUND), wait(1.75, 2.1)),
        a_rank(1, a_call(1, 2, tid=BACKGROUND), wait(1.5, 2.1)),
    ])  # fmt: skip
    cost = the_operation(result, "all_reduce")
    assert cost.background == pytest.approx(1)
    assert cost.hidden == pytest.approx(0.625)


def test_profile_excludes_failed_and_comparing_calls_from_transfers():
    never = a_call(3, 9, seq=3)
    never.over = False
    result = profile([
        a_rank(0, a_call(1, 2, seq=1, differ=True), a_call(2, 3, seq=2, error="PeerLostError"),
               never),
    ])  # fmt: skip
    cost = the_operation(result, "all_reduce")
    assert (cost.calls, cost.failed) == (2, 2)


def test_profile_bus_bandwidth_uses_all_ranks_of_call():
    result = profile([a_rank(n, a_call(1, 2, ranks=4)) for n in range(2)])
    cost = the_operation(result, "all_reduce")
    assert cost.busbw == pytest.approx(1.5 * cost.algbw)  # 2(n-1)/n


def test_profile_of_empty_has_no_bandwidth():
    result = profile([a_rank(0, a_call(1, 2, name="empty")), a_rank(1, a_call(1, 2, name="empty"))])
    assert the_operation(result, "empty").algbw is None


def test_profile_counts_messages_of_all_ranks():
    def message(name, start, end):
        return Slice(name, "message", 0, start, end, {"bytes": 40})

    result = profile([a_rank(0, message("send", 0, 1), message("send", 2, 3)),
                     a_rank(1, message("recv", 0, 1.5), message("recv", 2, 3))])  # fmt: skip
    sent, received = the_operation(result, "send"), the_operation(result, "recv")
    assert (sent.calls, sent.nbytes, sent.seconds) == (2, 80, 2)
    assert received.seconds == 2.5
    assert sent.algbw is None


# -- steps --------------------------------------------------------------------------------------


def training(rank, steps=10, comp=0.3, sync=0.1, late=0.0, marks=True):
    """Return a rank's trace of steps, each computing and one all-reduce, after 5 s of setup."""
    slices, marked, at = [], [], 0.0
    for seq in range(1, steps + 1):
        first = 5.0 if seq == 1 else 0.0
        slices.append(a_call(at + comp + first, at + comp + first + sync, seq=seq, nbytes=8000))
        at += comp + first + sync
        marked += [at] * marks
    return a_rank(rank, *slices, marks=marked)


def test_steps_divide_into_computing_and_synchronising():
    steps = profile([training(0), training(1, comp=0.2, sync=0.2)]).steps
    assert steps.how == "marks of the program"
    assert steps.count == 9
    assert steps.step == pytest.approx(0.4)
    assert steps.comp == pytest.approx(0.25)
    assert steps.comp_by_rank == pytest.approx([0.3, 0.2])
    assert steps.sync == pytest.approx(0.15)
    assert steps.waiting == pytest.approx(0.05)  # rank 1 waits 0.1 for rank 0


def test_steps_have_several_equal_calls():
    """Imitate the first sync_gradients: an all-reduce for each parameter, some of equal shape."""
    shapes = [800, 1600, 800, 4000, 800]
    slices, marks, at, seq = [], [], 0.0, 0
    for _ in range(8):
        at += 1.0
        for nbytes in shapes:
            seq += 1
            slices.append(a_call(at, at + 0.1, seq=seq, nbytes=nbytes))
            at += 0.1
        marks.append(at)
    steps = profile([a_rank(n, *slices, marks=marks) for n in range(2)]).steps
    assert steps.count == 7
    assert (steps.comp, steps.sync) == pytest.approx((1.0, 0.5))


def test_steps_of_ranks_that_ended_apart_are_those_of_all():
    steps = profile([training(0, steps=9), training(1, steps=7)]).steps
    assert steps.count == 6


def in_turn(rank, *parts):
    """Return the trace of a rank that computes ``before`` seconds and then calls, 0.01 s a call.

    Args:
        parts: (before, site) of each call.
    """
    slices, at = [], 0.0
    for seq, (before, site) in enumerate(parts):
        at += before
        slices.append(a_call(at, at + 0.01, seq=seq, site=f"train.py:{site}"))
        at += 0.01
    return a_rank(rank, *slices)


BUCKETS = [(0.001, 9)] * 19


@pytest.mark.parametrize(
    ("parts", "count", "comp"),
    [
        pytest.param([(0.5, 9), (0.1, 12)] * 8, 7, 0.6, id="two calls"),
        # More buckets in a step than there are steps.
        pytest.param([(0.0, 7), (0.5, 9), *BUCKETS, (0.0, 12)] * 8, 7, 0.519, id="equal buckets"),
        pytest.param([(0.0, 7), *[(0.1, 9)] * 4, (0.0, 12)] * 8, 7, 0.4, id="work in buckets"),
        # Only the time between calls shows which calls make a step.
        pytest.param([(0.5, 9), *BUCKETS] * 8, 6, 0.519, id="nothing but equal buckets"),
        pytest.param([(0.5 + 0.4 * (n % 3), 9) for n in range(9)], 8, 0.9, id="uneven work"),
        # Sums of losses every ten steps.
        pytest.param(([(0.5, 7), (0.0, 9)] * 10 + [(0.0, 12)]) * 5, 45, 0.5, id="losses"),
        pytest.param([(0.5, 7)] * 20 + [(0.1, 12)] * 9, 19, 0.5, id="one evaluation"),
        pytest.param(([(0.5, 7)] * 20 + [(0.1, 12)] * 9) * 3, 57, 0.5, id="evaluations"),
    ],
)
def test_steps_without_marks_are_repetitions_of_whole_loop(parts, count, comp):
    steps = profile([in_turn(n, *parts) for n in range(2)]).steps
    assert (steps.count, steps.comp) == (count, pytest.approx(comp))


def test_steps_without_marks_end_at_same_calls_on_all_ranks():
    """Rank 1 makes calls in a group, which rank 0 is not in, and ends a step earlier."""
    step = [(0.5, 9), (0.1, 12)]
    both = [in_turn(n, *step * (8 - n)) for n in range(2)]
    both[1].slices += [
        a_call(call.end, call.end + 0.001, seq=n, comm="w/1", site="train.py:10")
        for n, call in enumerate(both[1].slices)
    ]
    both[1].slices.sort(key=lambda one: one.start)
    assert profile(both).steps.count == 6


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [(0.5, 9)] * 3,
        [(0.5, 9), (0.1, 12)] * 3,
        [(0.1, n) for n in range(30)],
        [(0.1, n // 5) for n in range(60)],
    ],
)
def test_calls_without_marks_or_repetitions_are_no_steps(calls):
    assert profile([in_turn(n, *calls) for n in range(2)]).steps is None


def test_few_marks_are_no_steps():
    few = [training(n, steps=3) for n in range(2)]
    assert profile(few).steps is None


def test_steps_with_background_calls_keep_time_to_compute():
    slices = []
    for step in range(8):
        at = 2.0 * step
        # The call is issued at 0.5 and runs from 0.6 to 1.6; the program waits from 1.2.
        slices += [Slice("start all_reduce", "start", 0, at + 0.5, at + 0.5, {}),
                   a_call(at + 0.6, at + 1.6, seq=step, tid=BACKGROUND),
                   Slice("wait all_reduce", "wait", 0, at + 1.2, at + 1.6, {})]  # fmt: skip
    marks = [2.0 * step for step in range(8)]
    steps = profile([a_rank(n, *slices, marks=marks) for n in range(2)]).steps
    assert (steps.comp, steps.sync) == pytest.approx((1.6, 0.4))
    assert (steps.background, steps.hidden) == pytest.approx((1.0, 0.6))


# -- the criterion ------------------------------------------------------------------------------


@given(st.floats(1e-4, 10), st.floats(0, 10), st.integers(1, 64))
def test_judge_pays_if_epoch_gets_shorter(comp, sync, ranks):
    steps = profile([training(n, comp=0.3, sync=0.1) for n in range(2)]).steps
    steps = type(steps)(**{**{k: getattr(steps, k) for k in steps.__slots__},
                           "comp": comp, "sync": sync})  # fmt: skip
    verdict = judge(steps, ranks)
    # Equation 5 of the source, from its formulas of T_epoch with N / B = 1.
    alone, together = comp, (comp + sync) / ranks
    if together != pytest.approx(alone, rel=1e-9):
        assert verdict.pays == (together < alone)
    assert verdict.speedup == pytest.approx(alone / together)
    doubled = (comp + verdict.doubled_limit) / (2 * ranks)
    assert doubled == pytest.approx(together)


# -- intervals ----------------------------------------------------------------------------------

PARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple))


@given(PARTS, PARTS, st.integers(-5, 35), st.integers(-5, 35))
def test_intervals_behave_like_sets_of_moments(first, second, start, end):
    def cells(parts):
        return {cell for a, b in parts for cell in range(a, b)}

    left, right = Intervals(first), Intervals(second)
    assert float(np.sum(left.ends - left.starts)) == len(cells(first))
    start, end = min(start, end), max(start, end)
    assert left.within(start, end) == len(cells(first) & set(range(start, end)))
    either = left | right
    assert float(np.sum(either.ends - either.starts)) == len(cells(first) | cells(second))
