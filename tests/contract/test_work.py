"""Handles of operations (``Work``), and the lanes that run the operations."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from collective.contract.work import Lane, Work, deliver
from collective.deadline import Deadline
from collective.errors import CollectiveError, CollectiveTimeoutError
from collective.request import in_thread

pytestmark = pytest.mark.quick

# Longer than any wait of these tests on a busy machine.
FAR_S = 60.0


@pytest.fixture
def lane():
    new_lane = Lane("a-lane")
    yield new_lane
    new_lane.close(Deadline(FAR_S))


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "a-lane"]


def test_work_wait_returns_result_repeatedly(lane):
    work = lane.submit("all_reduce", lambda: 42)
    assert work.wait() == 42
    assert work.wait(timeout=FAR_S) == 42
    assert work.done()
    assert work.exception() is None
    assert repr(work) == "<Work all_reduce: done>"


def test_work_wait_raises_error_of_operation(lane):
    def fail():
        raise CollectiveError("broken")

    work = lane.submit("reduce", fail)
    for _ in range(2):
        with pytest.raises(CollectiveError, match="broken"):
            work.wait()
    assert isinstance(work.exception(), CollectiveError)
    assert repr(work) == "<Work reduce: failed>"
    assert lane.submit("next", lambda: 1).wait() == 1, "a failure stops the lane"


def test_work_wait_timeout_does_not_cancel_operation(lane):
    go = threading.Event()
    work = lane.submit("gather", lambda: go.wait(FAR_S))
    with pytest.raises(CollectiveTimeoutError, match=r"gather is still running after 0\.05 s"):
        work.wait(timeout=0.05)
    assert not work.done()
    assert work.exception() is None
    assert repr(work) == "<Work gather: running>"
    go.set()
    assert work.wait(timeout=FAR_S) is True


def test_lane_keeps_order_of_submission(lane):
    seen = []
    works = [lane.submit(str(k), lambda k=k: seen.append(k)) for k in range(200)]
    works[-1].wait()
    assert seen == list(range(200))


def test_lane_is_busy_until_all_work_is_done(lane):
    assert lane.idle
    go = threading.Event()
    works = [lane.submit("first", go.wait), lane.submit("second", lambda: None)]
    assert not lane.idle
    assert not lane.drain(Deadline(0.05))
    go.set()
    assert lane.drain(Deadline(FAR_S))
    assert all(work.done() for work in works)
    assert lane.idle


def test_lane_is_not_idle_while_last_work_runs(lane):
    running, go = threading.Event(), threading.Event()
    work = lane.submit("step", lambda: (running.set(), go.wait(FAR_S)))
    assert running.wait(FAR_S)
    idle, queued = lane.idle, len(lane.queue)
    go.set()
    work.wait()
    assert (idle, queued) == (False, 1)
    lane.drain(Deadline(FAR_S))
    assert lane.idle


def test_lane_has_one_thread_after_first_use(lane):
    assert _threads() == []
    for _ in range(3):
        lane.submit("x", lambda: None).wait()
    assert len(_threads()) == 1
    assert _threads()[0].daemon, "a hanging operation would keep the interpreter from exiting"


def test_lane_close_ends_its_thread():
    lane = Lane("a-lane")
    work = lane.submit("slow", lambda: time.sleep(0.05))
    lane.close(Deadline(FAR_S))
    assert work.done()
    assert _threads() == []
    lane.close(Deadline(FAR_S))


def test_lane_close_waits_until_deadline_for_hanging_work():
    lane, go = Lane("a-lane"), threading.Event()
    lane.submit("hangs", go.wait)
    began = time.monotonic()
    lane.close(Deadline(0.1))
    assert time.monotonic() - began >= 0.1
    go.set()
    for thread in _threads():
        thread.join(FAR_S)
    assert _threads() == []


def test_deliver_waits_for_lanes_that_send_and_until_the_deadline(lane):
    receiving, release = Lane("receiving"), threading.Event()
    receiving.delivers = False
    receiving.submit("recv", release.wait)
    sent = lane.submit("send", lambda: "sent")
    deliver([receiving, lane], Deadline(60.0))
    assert sent.done()
    stuck = lane.submit("send", release.wait)
    deliver([receiving, lane], Deadline(0.01))
    assert not stuck.done()
    release.set()
    receiving.close(Deadline(60.0))


def test_lane_restarts_after_idle_thread_ended(monkeypatch):
    monkeypatch.setattr("collective.contract.work._LINGER_S", 0.02)
    lane = Lane("a-lane")
    for _ in range(3):
        assert lane.submit("x", threading.get_ident).wait(FAR_S)
        for thread in _threads():
            thread.join(FAR_S)
        assert _threads() == []


def test_lane_does_not_keep_finished_work_alive(lane):
    class Array:
        pass

    array = Array()
    gone = weakref.ref(array)
    lane.submit("x", lambda array=array: None).wait()
    del array
    lane.drain(Deadline(FAR_S))
    gc.collect()
    assert gone() is None


def test_lane_close_releases_site_of_last_call(lane):
    class Site(str):
        pass

    sites = [Site("here")]
    gone = weakref.ref(sites[0])
    lane.submit("x", lambda: setattr(in_thread, "site", sites.pop())).wait()
    assert in_thread.site is None, "the site belongs to the lane's thread"
    assert gone() is not None
    lane.close(Deadline(FAR_S))
    assert gone() is None


def test_work_wait_raises_system_exit_of_operation(lane):
    def leave():
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        lane.submit("leaves", leave).wait()
    assert isinstance(Work("new").exception(), type(None))
