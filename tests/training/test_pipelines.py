"""Schedules of pipelines: their properties, checked without running a pipeline."""

from __future__ import annotations

import itertools

import pytest

from collective.errors import InvalidArgumentError
from collective.training.pipelines import (
    SCHEDULES,
    Action,
    idle_share,
    least_idle,
    most_kept,
    order,
    replay,
)

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (2, 9), (3, 2), (4, 4), (4, 13), (7, 3), (8, 16)]

pytestmark = [pytest.mark.quick, pytest.mark.parametrize(("stages", "microbatches"), SIZES)]


def orders(schedule: str, stages: int, microbatches: int) -> list[list[Action]]:
    return [order(schedule, rank, stages, microbatches) for rank in range(stages)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_has_each_pass_once_and_backward_after_forward(
    schedule: str, stages: int, microbatches: int
) -> None:
    for actions in orders(schedule, stages, microbatches):
        both = itertools.product(("forward", "backward"), range(microbatches))
        assert sorted(actions) == sorted(itertools.starmap(Action, both))
        for microbatch in range(microbatches):
            forward, backward = Action("forward", microbatch), Action("backward", microbatch)
            assert actions.index(forward) < actions.index(backward)


def test_schedule_keeps_expected_number_of_microbatches(stages: int, microbatches: int) -> None:
    counts = [most_kept(actions) for actions in orders("1f1b", stages, microbatches)]
    assert counts == [min(microbatches, stages - rank) for rank in range(stages)]
    counts = [most_kept(actions) for actions in orders("gpipe", stages, microbatches)]
    assert counts == [microbatches] * stages


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_of_equal_stages_has_least_idle_share(
    schedule: str, stages: int, microbatches: int
) -> None:
    seconds = [{"forward": 1.0, "backward": 2.0}] * stages
    spans = replay(orders(schedule, stages, microbatches), seconds)
    assert idle_share(spans) == pytest.approx(least_idle(stages, microbatches), abs=1e-15)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replay_starts_pass_after_its_input(schedule: str, stages: int, microbatches: int) -> None:
    seconds = [{"forward": 1.0 + rank, "backward": 3.0 / (1 + rank)} for rank in range(stages)]
    spans = replay(orders(schedule, stages, microbatches), seconds)
    at = {(rank, *span[:2]): span for rank, rank_spans in enumerate(spans) for span in rank_spans}
    for rank, rank_spans in enumerate(spans):
        assert all(before.end <= after.start for before, after in itertools.pairwise(rank_spans))
        for span in rank_spans:
            neighbour = rank - 1 if span.kind == "forward" else rank + 1
            if 0 <= neighbour < stages:
                assert at[neighbour, span.kind, span.microbatch].end <= span.start


def test_replay_of_deadlock_raises_invalid_argument(stages: int, microbatches: int) -> None:
    actions = orders("1f1b", stages, microbatches)
    actions[-1].reverse()
    with pytest.raises(InvalidArgumentError, match="deadlock: these ranks wait for each other"):
        replay(actions, [{"forward": 1.0, "backward": 1.0}] * stages)
