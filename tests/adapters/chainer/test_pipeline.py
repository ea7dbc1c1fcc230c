"""Chainer links as stages of a pipeline, against the same links in one process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.functional")

import chainer
import chainer.functions as F
import chainer.links as L

import collective
from collective.adapters.chainer import Pipeline
from collective.testing import run_ranks
from tests.support.chainer_ranks import on, run

_CLOSE = 1e-12


class Layer(chainer.Chain):
    """One dense layer of float64, drawn from a generator of its own."""

    def __init__(self, rank: int, width: int = 5) -> None:
        super().__init__()
        draw = np.random.RandomState(rank).standard_normal
        with self.init_scope(), chainer.using_config("dtype", np.float64):
            self.dense = L.Linear(width, width, initialW=draw((width, width)) / 2)

    def forward(self, x: Any) -> Any:
        return F.tanh(self.dense(x))


class Front(Layer):
    """A first stage that also returns an array for a later stage, and integers."""

    def forward(self, x: Any) -> Any:
        return super().forward(x), F.tanh(self.dense(x * 2)), np.arange(len(x)) % 3


class Middle(Layer):
    def forward(self, x: Any, skipped: Any, counts: Any) -> Any:
        return super().forward(x) * scale(counts, x), skipped, counts


class Back(Layer):
    def forward(self, x: Any, skipped: Any, counts: Any) -> Any:
        return super().forward(x) + skipped * scale(counts, x)


def scale(counts: Any, x: Any) -> Any:
    return F.broadcast_to(F.cast(F.expand_dims(counts, 1), np.float64), x.shape)


class Shift(chainer.Chain):
    """A sum whose gradient Chainer passes to the input and the parameter as the same array."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        with self.init_scope():
            self.shift = chainer.Parameter(np.full((2, 5), rank + 1.0))

    def forward(self, x: Any) -> Any:
        return x + self.shift


def plain(size: int) -> list[Any]:
    return [Layer(rank) for rank in range(size)]


def with_tuples(size: int) -> list[Any]:
    return [Front(0), *(Middle(rank) for rank in range(1, size - 1)), Back(size - 1)]


def handed_on(size: int) -> list[Any]:
    return [*(Shift(rank) for rank in range(size - 1)), Layer(size)]


def batch(samples: int) -> tuple[Any, Any]:
    draw = np.random.RandomState(7)
    return draw.standard_normal((samples, 5)), draw.standard_normal((samples, 5))


def squares(y: Any, target: Any) -> Any:
    return F.mean_squared_error(y, target)


def summed(y: Any, target: Any) -> Any:
    return F.sum((y - target) ** 2)


LOSSES = {"mean": squares, "sum": summed}


def gradients(stage: Any) -> list[Any]:
    return [parameter.grad for _, parameter in sorted(stage.namedparams())]


def piped(
    comm: Any,
    model: Callable[[int], list[Any]],
    samples: int,
    steps: int = 1,
    **how: Any,
) -> tuple[float | None, list[Any]]:
    """Return the loss of pipeline steps, and the gradients of this rank's stage."""
    stages = model(comm.size)
    pipe = Pipeline(stages, comm, **how)
    loss = LOSSES[how.get("reduction", "mean")]
    pipe.stage.cleargrads()
    # Only the first stage needs inputs, and only the last stage needs targets.
    x, target = batch(samples)
    for _ in range(steps):
        result = pipe.step(
            x if comm.rank == 0 else None,
            target if comm.rank == comm.size - 1 else None,
            loss,
        )
    return result, gradients(pipe.stage)


def whole(
    model: Callable[[int], list[Any]], size: int, samples: int, reduction: str = "mean"
) -> tuple[float, list[list[Any]]]:
    """Return the loss and each stage's gradients, computed by one process on the whole batch."""
    stages = model(size)
    x, target = batch(samples)
    outputs: Any = (chainer.Variable(x),)
    for stage in stages:
        outputs = stage(*outputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = LOSSES[reduction](*outputs, target)
    for stage in stages:
        stage.cleargrads()
    loss.backward()
    return float(loss.array), [gradients(stage) for stage in stages]


def assert_close(
    results: list[Any], expected: tuple[float, list[list[Any]]], times: int = 1
) -> None:
    loss, arrays = expected
    assert [output for output, _ in results[:-1]] == [None] * (len(results) - 1)
    assert results[-1][0] == pytest.approx(loss, rel=_CLOSE)
    for (_, own), reference in zip(results, arrays, strict=True):
        for a, b in zip(own, reference, strict=True):
            assert a.dtype == np.float64
            assert np.abs(a - times * b).max() <= _CLOSE * max(1, np.abs(b).max())


HOW = {"schedule": "1f1b", "microbatches": 4}
# Ten samples in pieces of three and two; fewer pieces than stages; one stage; one piece.
CASES = [
    (2, HOW),
    (3, {"schedule": "gpipe", "microbatches": 4}),
    (4, {"schedule": "1f1b", "microbatches": 7}),
    (4, {"schedule": "1f1b", "microbatches": 2}),
    (1, {"schedule": "1f1b", "microbatches": 3}),
    (2, {"schedule": "gpipe", "microbatches": 1}),
    (3, {**HOW, "reduction": "sum"}),
]


@pytest.mark.parametrize(("size", "how"), CASES, ids=str)
def test_pipeline_step_equals_one_process(size: int, how: dict[str, Any]) -> None:
    results = run_ranks(size, piped, plain, 10, **how)
    assert_close(results, whole(plain, size, 10, how.get("reduction", "mean")))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_step_on_process_ranks_equals_one_process(schedule: str) -> None:
    results = run("shm-2", piped, plain, 10, schedule=schedule, microbatches=4)
    assert_close(results, whole(plain, 2, 10))


def test_pipeline_step_with_tuples_between_stages_equals_one_process() -> None:
    # Nine samples make three micro-batches, and each has the same integers.
    results = run_ranks(3, piped, with_tuples, 9, microbatches=3)
    assert_close(results, whole(with_tuples, 3, 9))


def test_pipeline_step_with_aliased_gradient_equals_one_process() -> None:
    results = run_ranks(3, piped, handed_on, 8, **HOW)
    # A micro-batch has two samples, and the shift applies to each micro-batch in the same way.
    x, target = batch(8)
    stages = handed_on(3)
    total: Any = 0
    for start in range(0, 8, 2):
        y = stages[2](stages[1](stages[0](x[start : start + 2])))
        total = total + squares(y, target[start : start + 2]) / 4
    for stage in stages:
        stage.cleargrads()
    total.backward()
    assert_close(results, (float(total.array), [gradients(stage) for stage in stages]))


def test_pipeline_steps_accumulate_gradients() -> None:
    assert_close(run_ranks(2, piped, plain, 10, 3, **HOW), whole(plain, 2, 10), times=3)


def last_stage_has_the_loss(comm: Any) -> Any:
    stage: Any = Layer(comm.rank)
    if comm.rank == 1:
        stage = L.Classifier(stage, squares)
        stage.compute_accuracy = False
    pipe = Pipeline([stage if rank == comm.rank else None for rank in range(2)], comm, **HOW)
    stage.cleargrads()
    return pipe.step(*batch(10)), gradients(stage)


def test_pipeline_step_uses_loss_returned_by_last_stage() -> None:
    assert_close(run_ranks(2, last_stage_has_the_loss), whole(plain, 2, 10))


def predicted(comm: Any) -> Any:
    pipe = Pipeline(plain(comm.size), comm, **HOW)
    return [pipe.predict(batch(samples)[0]) for samples in (10, 3)]


def test_pipeline_predict_equals_one_process() -> None:
    others, outputs = run_ranks(2, predicted)
    assert others == [None, None]
    for y, samples in zip(outputs, (10, 3)):
        expected = batch(samples)[0]
        for stage in plain(2):
            expected = stage(expected)
        np.testing.assert_allclose(y, expected.array, rtol=_CLOSE)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_stage_overlaps_with_next_stage(schedule: str) -> None:
    begun = [threading.Event() for _ in range(4)]

    class Beginning(Layer):
        count = 0

        def forward(self, x: Any) -> Any:
            begun[self.count].set()
            self.count += 1
            return super().forward(x)

    class Waiting(Layer):
        count = 0

        def forward(self, x: Any) -> Any:
            # Wait until the previous stage has begun with the next micro-batch.
            self.count += 1
            assert self.count == 4 or begun[self.count].wait(30)
            return super().forward(x)

    def overlapping(comm: Any) -> None:
        stages = [Beginning(0), Waiting(1)]
        Pipeline(stages, comm, schedule=schedule, microbatches=4).step(*batch(8), squares)

    run_ranks(2, overlapping)


class Counting(Layer):
    """A layer that records how many micro-batches had a live graph at once, at most."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.graphs: list[weakref.ref[Any]] = []
        self.most = 0

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        self.graphs.append(weakref.ref(y.creator))
        self.most = max(self.most, sum(graph() is not None for graph in self.graphs))
        return y


def kept(comm: Any, schedule: str) -> int:
    stages = [Counting(rank) for rank in range(comm.size)]
    pipe = Pipeline(stages, comm, schedule=schedule, microbatches=8)
    pipe.step(*batch(16), squares)
    assert all(graph() is None for graph in pipe.stage.graphs)
    return int(pipe.stage.most)


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", [3, 2, 1]), ("gpipe", [8, 8, 8])])
def test_pipeline_schedule_bounds_live_graphs(schedule: str, expected: list[int]) -> None:
    assert run_ranks(3, kept, schedule) == expected


@on("threads-2")
def test_pipeline_timeline_lists_passes_in_order(comm: Any) -> None:
    pipe = Pipeline(plain(comm.size), comm, **HOW)
    pipe.step(*batch(10), squares)
    assert len(pipe.timeline) == 8
    times = [moment for span in pipe.timeline for moment in (span.start, span.end)]
    assert times == sorted(times)


# -- errors ----------------------------------------------------------------------------------


class Failing(Layer):
    def forward(self, x: Any) -> Any:
        if hasattr(self, "called"):
            raise ValueError("no weights for these")
        self.called = True
        return super().forward(x)


def failing(comm: Any) -> tuple[str, int]:
    """Return the name of the error that a step raises, and the result of a later all-reduce.

    Also check that the next step of the same pipeline raises and that a new pipeline works.
    """
    stages = [Failing(rank) if rank == 1 else Layer(rank) for rank in range(comm.size)]
    pipe = Pipeline(stages, comm, **HOW)
    with pytest.raises((collective.PeerFailedError, ValueError)) as first:
        pipe.step(*batch(10), squares)
    assert "no weights for these" in str(first.value)
    with pytest.raises(collective.CommunicatorClosedError, match="Make another Pipeline") as second:
        pipe.step(*batch(10), squares)
    assert "no weights for these" in str(second.value)
    again = Pipeline(plain(comm.size), comm, **HOW)
    again.step(*batch(10), squares)
    return first.type.__name__, int(comm.all_reduce(np.array([1]))[0])


def check_failure(results: list[Any]) -> None:
    expected = ["PeerFailedError"] * len(results)
    expected[1] = "ValueError"
    assert results == [(name, len(results)) for name in expected]


@pytest.mark.parametrize("world", ["threads-3", "shm-2"])
def test_pipeline_stage_error_raises_on_all_ranks(world: str) -> None:
    check_failure(run(world, failing))


@on("threads-2")
@pytest.mark.parametrize(
    ("option", "values"),
    [("microbatches", [2, 4]), ("schedule", ["1f1b", "gpipe"]), ("reduction", ["mean", "sum"])],
)
def test_pipeline_with_different_options_raises_mismatch_error(
    comm: Any, option: str, values: list[Any]
) -> None:
    how = {**HOW, option: values[comm.rank]}
    with pytest.raises(collective.MismatchError, match=f"{option} is {values[1]!r}.*{values[0]!r}"):
        Pipeline(plain(2), comm, **how)
    assert comm.all_reduce(np.array([1]))[0] == 2


_X, _T = batch(10)
REFUSED_STEPS = {
    "fewer samples than micro-batches": ((_X[:3], _T[:3], squares), "3 samples.*of the 4"),
    "fewer targets than samples": ((_X, _T[:9], squares), "10 samples on rank 0, target 9"),
    "no batch": ((None, _T, squares), r"NoneType as x.*\[rank 0 of 2\]"),
    "a list of examples": (([_X[0]] * 9, _T, squares), "list as x.*concat_examples"),
    "inputs of different lengths": (((_X, _X[:2]), _T, squares), r"\[10, 2\] samples.*of x"),
    "loss that is a string": ((_X, _T, "mse"), r"str as loss.*\[rank 1 of 2\]"),
}


@on("threads-2")
@pytest.mark.parametrize("name", REFUSED_STEPS)
def test_pipeline_step_with_bad_batch_raises_on_all_ranks(comm: Any, name: str) -> None:
    arguments, match = REFUSED_STEPS[name]
    pipe = Pipeline(plain(2), comm, **HOW)
    with pytest.raises(collective.InvalidArgumentError, match=match):
        pipe.step(*arguments)
    # The pipeline remains usable.
    assert (pipe.step(*batch(10), squares) is None) == (comm.rank == 0)


@on("threads-2")
def test_pipeline_step_and_predict_mixed_raise_mismatch_error(comm: Any) -> None:
    pipe = Pipeline(plain(2), comm, **HOW)
    with pytest.raises(collective.MismatchError, match="rank 0 called step and rank 1 predict"):
        pipe.step(*batch(10), squares) if comm.rank == 0 else pipe.predict()


@on("threads-1")
def test_pipeline_step_with_array_as_loss_raises_shape_error(comm: Any) -> None:
    pipe = Pipeline(plain(1), comm, **HOW)
    with pytest.raises(collective.ShapeError, match=r"\(3, 5\) as loss.*Pass loss="):
        pipe.step(batch(10)[0])


REFUSED = {
    "no micro-batches": ({"microbatches": 0}, r"microbatches=0 \(expected a positive integer"),
    "fractional micro-batches": (
        {"microbatches": 2.0},
        r"microbatches=2.0 \(expected a positive integer",
    ),
    "an unknown schedule": ({"schedule": "zb"}, r"schedule='zb' \(expected one of 1f1b, gpipe"),
    "an unknown reduction": ({"reduction": "max"}, r"reduction='max' \(expected one of mean, sum"),
    "too many stages": ({"stages": plain(2)}, r"2 stages \(expected a list of 1.*Sequential"),
    "one link instead of a list": ({"stages": Layer(0)}, r"Layer stages \(expected a list of 1"),
    "no stage of this rank": (
        {"stages": [None]},
        r"NoneType as stage 0 \(expected a chainer\.Link",
    ),
    "function as stage": ({"stages": [F.relu]}, r"function as stage 0 \(expected a chainer\.Link"),
}


@on("threads-1")
@pytest.mark.parametrize("name", REFUSED)
def test_pipeline_with_bad_argument_raises_invalid_argument_error(comm: Any, name: str) -> None:
    options, match = REFUSED[name]
    how = {**HOW, "stages": plain(1), **options}
    with pytest.raises(collective.InvalidArgumentError, match=match):
        Pipeline(how.pop("stages"), comm, **how)


@on("threads-2")
def test_pipeline_stages_sharing_parameter_raise_unsupported_error(comm: Any) -> None:
    both = Layer(0)
    stages = [both, chainer.Sequential(Layer(1), both)]
    with pytest.raises(collective.UnsupportedError, match=r"/1/dense/[Wb] of stage 1 is /dense/"):
        Pipeline(stages, comm, **HOW)


def test_pipeline_skip_connection_across_stages_raises() -> None:
    class Leaving(Layer):
        def forward(self, x: Any) -> Any:
            self.latest = super().forward(x)
            return self.latest

    class Taking(Layer):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + front.latest

    front = Leaving(0)
    stages = [front, Taking(1)]

    def skipping(comm: Any) -> None:
        pipe = Pipeline(stages, comm, **HOW)
        with pytest.raises(collective.CollectiveError) as caught:
            pipe.step(*batch(12), squares)
        assert "of stage 0: a skip connection across stages" in str(caught.value)
        expected = collective.UnsupportedError if comm.rank else collective.PeerFailedError
        assert caught.type is expected

    run_ranks(2, skipping)
