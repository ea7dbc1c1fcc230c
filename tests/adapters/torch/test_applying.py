"""Modules called in parallel, each in a thread."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import time
import traceback
import weakref

import pytest

torch = pytest.importorskip("torch")

from collective.adapters.torch.replicas import parallel_apply  # noqa: E402
from collective.errors import InvalidArgumentError  # noqa: E402


class WordlessError(Exception):
    def __str__(self):
        return "words of its own"


def raising(error):
    def where_it_broke(*_):
        raise error

    return where_it_broke


def fine(*args):
    return args


def test_parallel_apply_calls_each_module_in_own_thread():
    meeting = threading.Barrier(3)

    def call(*args, **kwargs):
        meeting.wait(timeout=60)  # passes only if all three calls run at once
        return args, kwargs, threading.current_thread().name

    results = parallel_apply([call] * 3, [(1, 2), [3], "one"], [{"a": 1}, None, {}])
    assert results == [
        ((1, 2), {"a": 1}, "replica-0"),
        ((3,), {}, "replica-1"),
        (("one",), {}, "replica-2"),
    ]


def test_parallel_apply_of_single_module_uses_calling_thread():
    def call():
        return threading.current_thread()

    assert parallel_apply([call], [()]) == [threading.current_thread()]
    error = ValueError("bad")
    with pytest.raises(ValueError, match="bad") as caught:
        parallel_apply([raising(error)], [()])
    assert caught.value is error


def state():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled() if torch.is_autocast_enabled("cpu") else None,
    )


@pytest.mark.parametrize(
    "entered",
    [
        lambda: torch.enable_grad(),
        lambda: torch.no_grad(),
        lambda: torch.inference_mode(),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    ],
    ids="grad no_grad inference bfloat16 float16".split(),
)
def test_parallel_apply_threads_inherit_torch_modes(entered):
    with entered():
        expected = state()
        assert parallel_apply([state] * 2, [(), ()]) == [expected] * 2
    assert parallel_apply([state] * 2, [(), ()]) == [state()] * 2


def test_parallel_apply_threads_inherit_grad_mode_in_inference_mode():
    with torch.inference_mode(), torch.enable_grad():
        assert parallel_apply([state] * 2, [(), ()]) == [state()] * 2


def test_parallel_apply_threads_copy_context_variables():
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("mine")

    def call():
        inherited = variable.get()
        variable.set("the replica's")
        return inherited

    assert parallel_apply([call] * 2, [(), ()]) == ["mine", "mine"]
    assert variable.get() == "mine"


def test_parallel_apply_error_names_replica_and_location():
    error = ValueError("bad")
    with pytest.raises(ValueError, match="bad") as caught:
        parallel_apply([fine, raising(error), raising(KeyError("later"))], [torch.ones(1)] * 3)
    assert caught.value is error
    assert (str(error), error.__notes__) == ("bad", ["replica 1 of 3 on cpu"])
    text = "".join(traceback.format_exception(caught.value))
    assert "where_it_broke" in text
    assert text.count("Traceback") == 1


@pytest.mark.parametrize(
    "error",
    [KeyError("missing"), OSError(2, "no such file"), WordlessError(), SystemExit(3)],
    ids=lambda error: type(error).__name__,
)
def test_parallel_apply_error_gets_note(error):
    error.__cause__ = OSError("disk")
    before = str(error), error.args, error.__cause__
    with pytest.raises(type(error)) as caught:
        parallel_apply([fine, raising(error)], [(), ()])
    assert caught.value is error
    assert (str(error), error.args, error.__cause__) == before
    assert error.__notes__ == ["replica 1 of 2"]


def test_parallel_apply_raises_after_all_modules_have_ended():
    ended = []

    def slow():
        time.sleep(0.1)
        ended.append(True)

    with pytest.raises(ValueError, match="bad"):
        parallel_apply([raising(ValueError("bad")), slow], [(), ()])
    assert ended == [True]
    assert not [t for t in threading.enumerate() if t.name.startswith("replica-")]


def test_parallel_apply_handled_error_leaves_no_references():
    references = []

    def broken(x):
        activation = x * 2
        references.append(weakref.ref(activation))
        raise ValueError("bad")

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            parallel_apply([broken, broken], [torch.ones(1)] * 2)
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_parallel_apply_error_raised_twice_has_single_note():
    error = ValueError("bad")
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            parallel_apply([raising(error), raising(error)], [(), ()])
    assert error.__notes__ == ["replica 0 of 2"]


def test_parallel_apply_with_lists_of_different_lengths_raises():
    for options in ({"inputs": [()]}, {"kwargs": [{}]}, {"devices": ["cpu"]}):
        with pytest.raises(InvalidArgumentError, match=f"1 {next(iter(options))} for 2 modules"):
            parallel_apply([fine] * 2, **{"inputs": [(), ()], **options})
