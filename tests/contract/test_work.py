"""Handles of operations, and the lanes that run them."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from collective.contract.work import Lane, Work
from collective.deadline import Deadline
from collective.errors import CollectiveError, CollectiveTimeoutError
from collective.request import in_thread


@pytest.fixture
def lane():
    made = Lane("a-lane")
    yield made
    made.close(Deadline(5.0))


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "a-lane"]


def test_work_gives_its_result_again_and_again(lane):
    work = lane.submit("all_reduce", lambda: 42)
    assert work.wait() == 42
    assert work.wait(timeout=1) == 42
    assert work.done()
    assert work.exception() is None
    assert repr(work) == "<Work all_reduce: done>"


def test_work_raises_what_the_operation_raised(lane):
    def fail():
        raise CollectiveError("broken")

    work = lane.submit("reduce", fail)
    for _ in range(2):
        with pytest.raises(CollectiveError, match="broken"):
            work.wait()
    assert isinstance(work.exception(), CollectiveError)
    assert repr(work) == "<Work reduce: failed>"
    assert lane.submit("next", lambda: 1).wait() == 1, "a failure stops the lane"


def test_a_wait_that_times_out_cancels_nothing(lane):
    go = threading.Event()
    work = lane.submit("gather", lambda: go.wait(5))
    with pytest.raises(CollectiveTimeoutError, match=r"gather is still running after 0\.05 s"):
        work.wait(timeout=0.05)
    assert not work.done()
    assert work.exception() is None
    assert repr(work) == "<Work gather: running>"
    go.set()
    assert work.wait(timeout=5) is True


def test_a_lane_keeps_the_order(lane):
    seen = []
    works = [lane.submit(str(k), lambda k=k: seen.append(k)) for k in range(200)]
    works[-1].wait()
    assert seen == list(range(200))


def test_a_lane_is_busy_until_all_is_done(lane):
    assert lane.idle
    go = threading.Event()
    works = [lane.submit("first", go.wait), lane.submit("second", lambda: None)]
    assert not lane.idle
    assert not lane.drain(Deadline(0.05))
    go.set()
    assert lane.drain(Deadline(5))
    assert all(work.done() for work in works)
    assert lane.idle


def test_a_lane_is_not_idle_until_its_last_work_is_over(lane):
    running, go = threading.Event(), threading.Event()
    work = lane.submit("step", lambda: (running.set(), go.wait(5)))
    assert running.wait(5)
    idle, queued = lane.idle, len(lane.queue)
    go.set()
    work.wait()
    assert (idle, queued) == (False, 1)
    lane.drain(Deadline(5.0))
    assert lane.idle


def test_a_lane_has_one_thread_and_only_when_it_is_used(lane):
    assert _threads() == []
    for _ in range(3):
        lane.submit("x", lambda: None).wait()
    assert len(_threads()) == 1
    assert _threads()[0].daemon, "a hanging operation would keep the interpreter from leaving"


def test_a_closed_lane_leaves_no_thread():
    lane = Lane("a-lane")
    work = lane.submit("slow", lambda: time.sleep(0.05))
    lane.close(Deadline(5.0))
    assert work.done()
    assert _threads() == []
    lane.close(Deadline(5.0))


def test_closing_a_lane_that_hangs_waits_as_long_as_it_is_told():
    lane, go = Lane("a-lane"), threading.Event()
    lane.submit("hangs", go.wait)
    began = time.monotonic()
    lane.close(Deadline(0.1))
    assert time.monotonic() - began >= 0.1
    go.set()
    for thread in _threads():
        thread.join(5.0)
    assert _threads() == []


def test_a_lane_that_lay_idle_starts_again(monkeypatch):
    monkeypatch.setattr("collective.contract.work._LINGER_S", 0.02)
    lane = Lane("a-lane")
    for _ in range(3):
        assert lane.submit("x", threading.get_ident).wait(5)
        for thread in _threads():
            thread.join(5.0)
        assert _threads() == []


def test_a_lane_keeps_nothing_of_what_it_ran(lane):
    class Array:
        pass

    array = Array()
    gone = weakref.ref(array)
    lane.submit("x", lambda array=array: None).wait()
    del array
    lane.drain(Deadline(5))
    gc.collect()
    assert gone() is None


def test_a_lane_that_ends_keeps_nothing_of_where_its_calls_came_from(lane):
    class Site(str):
        pass

    sites = [Site("here")]
    gone = weakref.ref(sites[0])
    lane.submit("x", lambda: setattr(in_thread, "site", sites.pop())).wait()
    assert in_thread.site is None, "it is the lane's thread's"
    assert gone() is not None
    lane.close(Deadline(5.0))
    assert gone() is None


def test_exceptions_that_are_none_of_ours_reach_the_waiter_too(lane):
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        lane.submit("leaves", leave).wait()
    assert isinstance(Work("new").exception(), type(None))
