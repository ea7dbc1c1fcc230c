"""Watching Chainer's backward pass: its reports, their order, and the restored functions."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.backward")

import chainer
import chainer.functions as F
from chainer import _backprop, _backprop_utils
from chainer.functions.connection.linear import LinearGradWeight

from collective.adapters.chainer.backward import watching
from collective.errors import InvalidArgumentError


def replaceable() -> tuple[Any, ...]:
    return _backprop._backprop_to_all, _backprop_utils.backprop_step, LinearGradWeight.forward


ORIGINALS = replaceable()


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    yield
    assert replaceable() == ORIGINALS


def parameters(count: int) -> list[Any]:
    draw = np.random.RandomState(1).standard_normal
    leaves = [chainer.Parameter(draw((4, 4))) for _ in range(count)]
    for leaf in leaves:
        leaf.cleargrad()
    return leaves


def watched(leaves: list[Any], loss: Any) -> list[tuple[int, Any]]:
    """Run a backward pass; return the reported leaf numbers with copies of their gradients."""
    reports: list[tuple[int, Any]] = []
    nodes = {leaf.node: number for number, leaf in enumerate(leaves)}
    with watching(nodes, lambda number, gradient: reports.append((number, np.array(gradient)))):
        loss.backward()
    return reports


# A program: each step multiplies by a parameter, adds one, or joins an earlier value.
STEPS = st.lists(
    st.tuples(st.sampled_from(["mul", "add", "dense", "join", "twice"]), st.integers(0, 3)),
    max_size=12,
)


def run(program: list[tuple[str, int]], leaves: list[Any]) -> Any:
    values = [chainer.Variable(np.eye(4))]
    for kind, number in program:
        x = values[-1]
        if kind == "mul":
            x = F.matmul(x, F.tanh(leaves[number]))
        elif kind == "dense":
            x = F.linear(x, leaves[number])
        elif kind == "add":
            x = x + leaves[number]
        elif kind == "twice":
            x = x + leaves[number] * leaves[number]
        else:
            x = x + values[number % len(values)]
        values.append(x)
    return F.sum(F.tanh(values[-1]))


@given(STEPS)
def test_watching_reports_final_gradients(program: list[tuple[str, int]]) -> None:
    alone, leaves = parameters(4), parameters(4)
    run(program, alone).backward()
    reports = dict(watched(leaves, run(program, leaves)))
    for number, (a, b) in enumerate(zip(alone, leaves, strict=True)):
        if a.grad is None:
            assert b.grad is None
            assert number not in reports
        else:
            assert a.grad.tobytes() == b.grad.tobytes() == reports[number].tobytes()


@given(STEPS)
def test_watching_with_buffers_keeps_final_gradients(
    program: list[tuple[str, int]],
) -> None:
    alone, leaves = parameters(4), parameters(4)
    run(program, alone).backward()
    loss, room = run(program, leaves), np.full((4, 4, 4), np.nan)
    nodes = {leaf.node: number for number, leaf in enumerate(leaves)}
    with watching(nodes, lambda *_: None, lambda number: room[number]):
        loss.backward()
    for number, (a, b) in enumerate(zip(alone, leaves, strict=True)):
        if a.grad is None:
            assert b.grad is None
        else:
            assert a.grad.tobytes() == b.grad.tobytes()
        if [step for step in program if step[1] == number and step[0] != "join"] == [
            ("dense", number)
        ]:
            assert b.grad.base is room


def test_watching_adds_dense_gradient_to_existing_gradient() -> None:
    (leaf,) = parameters(1)
    leaf.grad = np.full((4, 4), 5.0)
    room = np.zeros((4, 4))
    with watching({leaf.node: 0}, lambda *_: None, lambda number: room):
        F.sum(F.linear(np.ones((2, 4)), leaf)).backward()
    np.testing.assert_array_equal(leaf.grad, np.full((4, 4), 7.0))
    np.testing.assert_array_equal(room, np.zeros((4, 4)))


@pytest.mark.parametrize(
    "kind", ["mixed types", "strided input", "another shape", "weight of itself"]
)
def test_watching_with_unsuitable_buffer_leaves_buffer_unused(kind: str) -> None:
    (leaf,) = parameters(1)
    x, room = np.ones((8, 4)), np.zeros((4, 4))
    if kind == "mixed types":
        x = x.astype(np.float32)
    elif kind == "strided input":
        x = np.ones((8, 8))[::2, ::2]
    elif kind == "another shape":
        room = np.zeros((2, 8))
    given_ = leaf if kind == "weight of itself" else x
    expected = chainer.Parameter(leaf.array.copy())
    F.sum(F.linear(expected if given_ is leaf else x, expected)).backward()
    with watching({leaf.node: 0}, lambda *_: None, lambda number: room):
        F.sum(F.linear(given_, leaf)).backward()
    assert leaf.grad.tobytes() == expected.grad.tobytes()
    np.testing.assert_array_equal(room, np.zeros_like(room))


def test_watching_reports_gradient_before_earlier_functions_run() -> None:
    first, last = parameters(2)
    h = F.tanh(first)
    order: list[Any] = []

    class Hook(chainer.FunctionHook):
        def backward_preprocess(self, function: Any, *_: Any) -> None:
            order.append(function.label)

    loss = F.sum(F.matmul(h, last))
    with Hook(), watching({last.node: 1}, lambda number, _: order.append(number)):
        loss.backward()
    assert order == ["Sum", "MatMul", 1, "Tanh"]


def test_watching_reports_reused_parameter_after_its_last_use() -> None:
    (leaf,) = parameters(1)
    h = F.tanh(F.matmul(F.tanh(F.matmul(np.eye(4), leaf)), leaf))
    reports = watched([leaf], F.sum(h))
    assert [number for number, _ in reports] == [0]
    np.testing.assert_array_equal(reports[0][1], leaf.grad)


class Cut(chainer.FunctionNode):
    """A sum that returns no gradient for its first input."""

    def forward(self, inputs: Any) -> Any:
        return (inputs[0] + inputs[1],)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        return None, gradients[0]


def test_watching_reports_no_gradient_of_cut_branch() -> None:
    cut, whole = parameters(2)
    reports = watched([cut, whole], F.sum(Cut().apply((F.tanh(cut), whole))[0]))
    assert [number for number, _ in reports] == [1]
    assert cut.grad is None
    # This parameter is also used before the cut, so it has a gradient. It is not reported, because
    # the pass could not know that no further gradient would follow.
    cut, whole = parameters(2)
    reports = watched([cut, whole], F.sum(Cut().apply((F.tanh(cut), whole))[0] + cut))
    assert [number for number, _ in reports] == [1]
    np.testing.assert_array_equal(cut.grad, np.ones((4, 4)))


def test_watching_includes_existing_gradient() -> None:
    (leaf,) = parameters(1)
    leaf.grad = np.full((4, 4), 5.0)
    reports = watched([leaf], F.sum(leaf))
    np.testing.assert_array_equal(reports[0][1], np.full((4, 4), 6.0))


def test_watching_callback_result_replaces_gradient() -> None:
    (leaf,) = parameters(1)
    replacement = np.zeros((4, 4))
    with watching({leaf.node: 0}, lambda *_: replacement):
        F.sum(leaf).backward()
    assert leaf.grad is replacement


def test_watching_ignores_nested_backward_passes() -> None:
    inner, outer = parameters(2)
    alone = parameters(2)

    def lossof(inner: Any, outer: Any) -> Any:
        return F.sum(F.forget(lambda h: F.matmul(h, inner), F.tanh(outer)))

    lossof(*alone).backward()
    reports = watched([inner, outer], lossof(inner, outer))
    assert [number for number, _ in reports] == [1]
    np.testing.assert_array_equal(inner.grad, alone[0].grad)
    np.testing.assert_array_equal(outer.grad, alone[1].grad)


def test_watching_ignores_other_threads() -> None:
    (leaf,) = parameters(1)
    reports: list[int] = []

    def other() -> None:
        F.sum(leaf).backward()

    with watching({leaf.node: 0}, lambda number, _: reports.append(number)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert reports == []
    np.testing.assert_array_equal(leaf.grad, np.ones((4, 4)))


def test_watching_in_two_threads_reports_to_each() -> None:
    leaves = parameters(2)
    barrier = threading.Barrier(2, timeout=20)
    reports: dict[int, list[int]] = {0: [], 1: []}

    def work(number: int) -> None:
        with watching({leaves[number].node: number}, lambda n, _: reports[number].append(n)):
            barrier.wait()
            F.sum(F.tanh(leaves[number])).backward()
            barrier.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports == {0: [0], 1: [1]}


def test_watching_with_double_backprop_raises() -> None:
    (leaf,) = parameters(1)
    with (
        pytest.raises(InvalidArgumentError, match="allowed is False"),
        watching({leaf.node: 0}, lambda *_: None),
    ):
        F.sum(leaf).backward(enable_double_backprop=True)


def test_watching_works_again_after_error() -> None:
    (leaf,) = parameters(1)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), watching({leaf.node: 0}, fail):
        F.sum(leaf).backward()
    assert watched([leaf], F.sum(leaf))[0][0] == 0
