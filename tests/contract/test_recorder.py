"""The flight recorder: its entries, its text, and the signal that prints it."""

import re
import signal
import sys
import time
import types

import numpy as np
import pytest

import collective
from collective.contract.recorder import Recorder, flight_recorder
from collective.request import LIBRARIES, Request, is_library_file, pass_over
from collective.testing import run_ranks
from tests.support.interpreter import started

pytestmark = pytest.mark.quick


def test_recorder_keeps_last_calls_with_their_places():
    recorder = Recorder("mine")
    first = Request("barrier")
    recorder.begin(first)
    recorder.end()
    recorder.begin(Request("scan"), True)
    finished, unfinished = recorder.entries()
    assert (finished.sequence, finished.request, finished.compares) == (1, first, False)
    assert re.search(r"test_recorder\.py:\d+ in test_recorder_keeps_last", finished.site)
    assert finished.seconds >= 0
    assert unfinished.seconds is None
    assert unfinished.began >= finished.began
    assert str(unfinished).startswith("#2 compare scan() at ")
    assert "not finished" in str(unfinished)
    assert recorder.entries(1) == [unfinished]
    assert str(recorder).startswith("mine: 2 collective calls, the last 2:\n  #1 barrier() at")


def test_repr_of_recorder_has_title_and_number_of_calls():
    recorder = Recorder("mine")
    recorder.begin(Request("barrier"))
    assert repr(recorder) == "<Recorder of mine: 1 calls>"


def test_recorder_drops_oldest_calls():
    recorder = Recorder()
    for number in range(2000):
        recorder.begin(Request("barrier") if number == 0 else Request("scan"))
        recorder.end()
    entries = recorder.entries()
    assert [entry.sequence for entry in entries] == list(range(2001 - len(entries), 2001))
    assert {entry.request.operation for entry in entries} == {"scan"}


def test_recorder_site_is_line_of_caller():
    recorder = Recorder()
    recorder.begin(Request("a"))
    first = line() - 1
    recorder.begin(Request("b"))
    second = line()
    lines = [int(re.search(r":(\d+) in", entry.site)[1]) for entry in recorder.entries()]
    assert lines[0] == first
    assert lines[1] in range(second - 3, second)


@pytest.fixture
def framework():
    """A framework that is imported after the recorder was made, and calls what it is passed."""
    known = list(LIBRARIES)
    module = types.ModuleType("framework")
    module.__file__ = "/elsewhere/framework/__init__.py"
    exec(compile("def call(f, *x): f(*x)", "/elsewhere/framework/hooks.py", "exec"), vars(module))
    yield module
    LIBRARIES[:] = known
    is_library_file.clear()


def test_recorder_site_is_in_the_program_although_a_framework_makes_the_call(framework):
    before, after = Recorder(), Recorder()
    framework.call(before.begin, Request("a"))
    pass_over(framework)
    framework.call(after.begin, Request("a"))
    assert before.entries()[0].site == "/elsewhere/framework/hooks.py:1 in call"
    site = after.entries()[0].site
    assert re.search(r"test_recorder\.py:\d+ in test_recorder_site_is_in_the_program", site)


def test_recorder_passes_over_the_frameworks_that_are_imported(framework, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", framework)
    recorder = Recorder()
    framework.call(recorder.begin, Request("a"))
    assert "test_recorder.py" in recorder.entries()[0].site


def line():
    return sys._getframe(1).f_lineno


def _calls(comm):
    comm.all_reduce(np.ones(3))
    comm.all_gather(np.ones(3), async_op=True).wait()
    comm.barrier()
    return [str(entry) for entry in comm.recorder.entries()]


def test_communicator_records_its_calls():
    for entries in run_ranks(2, _calls):
        assert [re.match(r"#\d+ (\w+)", text)[1] for text in entries] == [
            "all_reduce", "all_gather", "barrier",
        ]  # fmt: skip
        # The entry of the background call has a place and a time, too.
        assert all("test_recorder.py" in text and "µs" in text for text in entries)


def test_flight_recorder_lists_every_communicator():
    before = len(flight_recorder())
    with collective.init(size=1, rank=0) as comm:
        comm.barrier()
        mine = collective.flight_recorder()[-1]
        assert mine is comm.recorder
        assert "rank 0 of 1 over threads: 1 collective calls" in str(mine)
        group = comm.dup()
        assert flight_recorder()[-1] is group.recorder
    del comm, group, mine
    assert len(flight_recorder()) <= before + 2


_PROGRAM = """
import sys, time
import collective
with collective.init() as comm:
    comm.barrier()
    print("ready", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)
"""


def test_signal_prints_flight_recorder(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    with started(script) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stderr.readline().startswith("[flight recorder, process ")
        assert "1 collective calls" in process.stderr.readline()
        assert re.search(r"#1 barrier\(\) at .*program.py:5", process.stderr.readline())
        # The program keeps running.
        time.sleep(0.05)
        assert process.poll() is None


def test_signal_is_left_alone_if_disabled():
    before = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        collective.init(size=1, rank=0, disable="dump_signal").close()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_init_keeps_signal_handler_of_program(monkeypatch):
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGUSR2, mine)
    try:
        collective.init(size=1, rank=0).close()
        assert signal.getsignal(signal.SIGUSR2) is mine
    finally:
        signal.signal(signal.SIGUSR2, before)
