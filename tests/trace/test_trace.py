"""Traces: the files, their content, and errors when a file cannot be written."""

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective import trace
from collective.communicator import Communicator
from collective.contract.world import World
from collective.errors import ConfigError, MismatchError
from collective.start.config import load
from collective.start.connecting import connect
from collective.start.stores import MemoryStore
from collective.testing import run_ranks
from collective.tools.cli.main import main
from collective.tools.profile.events import merge, read
from collective.trace import tracer as tracers
from collective.trace.traced import offsets
from collective.training.gradients import Gradients, Parameter
from tests.support.interpreter import run_python

# Required keys of an event, by its phase, from the document "Trace Event Format".
REQUIRED = {
    "B": {"name", "cat", "ts", "pid", "tid"},
    "E": {"ts", "pid", "tid"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
    "b": {"name", "cat", "ts", "pid", "id2"},
    "e": {"name", "cat", "ts", "pid", "id2"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "t": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
    "M": {"name", "pid", "args"},
}


def traced_ranks(
    directory: Path,
    size: int,
    program: Callable[[Communicator], Any],
    traces: Callable[[int], bool] = lambda rank: True,
) -> list[Any]:
    """Run ``program`` on every rank; return the result or the exception of each rank.

    Args:
        traces: function that returns whether a rank traces.
    """
    results: list[Any] = [None] * size
    job, store = f"traced-{secrets.token_hex(4)}", MemoryStore()

    def rank(number: int) -> None:
        world = World(number, size, number, size, socket.gethostname(), "none", job, store)
        where = str(directory) if traces(number) else ""
        try:
            with connect(world, "threads", timeout=20.0, trace=where) as comm:
                results[number] = program(comm)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=rank, args=(n,), name=f"rank-{n}") for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for tracer in [tracer_ for tracer_ in tracers._open if tracer_.directory == str(directory)]:
        tracer.close()
    return results


def calls(comm):
    """Make calls of every kind."""
    with trace.span("load", index=3, of='a "batch"'):
        x = np.ones(1000, "float32")
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    comm.all_reduce(np.ones(4), op="max")
    comm.all_gather(np.ones(comm.rank + 1))
    comm.broadcast(np.ones(3), root=1)
    if comm.rank == 0:
        comm.send(np.ones(5), 1, tag=7)
    elif comm.rank == 1:
        comm.recv(None, 0, tag=7)
    half = comm.split(comm.rank % 2)
    half.all_reduce(np.ones(2))
    comm.sendrecv(np.ones(9), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size,
                  async_op=True).wait()  # fmt: skip


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    directory = tmp_path_factory.mktemp("traced")
    assert traced_ranks(directory, 3, calls) == [None] * 3
    return directory


def contents(directory):
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]


def test_trace_files_follow_format(traced):
    for rank, content in enumerate(contents(traced)):
        assert content["otherData"]["rank"] == rank
        assert content["otherData"]["size"] == 3
        events = content["traceEvents"]
        open_ = {}
        last = {}
        for event in events:
            assert event.keys() >= REQUIRED[event["ph"]], event
            assert event["pid"] == rank
            if event["ph"] in "BEi":
                assert event["ts"] >= last.get(event["tid"], 0.0)
                last[event["tid"]] = event["ts"]
            if event["ph"] == "B":
                open_[event["tid"]] = open_.get(event["tid"], 0) + 1
            elif event["ph"] == "E":
                open_[event["tid"]] -= 1
                assert open_[event["tid"]] >= 0
        assert set(open_.values()) == {0}
        assert {e["tid"] for e in events if e.get("name") == "thread_name"} >= set(last)


def test_trace_tracks_have_other_numbers_than_ranks(traced):
    """Perfetto shows a track with the number of its process as the main thread, and track 0."""
    tracks = {e["tid"] for content in contents(traced) for e in content["traceEvents"]}
    assert min(tracks) > 16384


def test_trace_events_describe_calls(traced):
    ranks = read(traced)
    first = next(
        s for s in ranks[0].slices if s.name == "all_reduce" and s.category != "background"
    )
    assert first.background
    assert first.args["dtype"] == "float32"
    assert first.args["bytes"] == 4000
    assert first.args["op"] == "sum"
    assert first.args["ranks"] == 3
    assert re.search(r"test_trace\.py:\d+ in calls$", first.args["site"])
    span = next(s for s in ranks[2].slices if s.category == "span")
    assert (span.name, span.args) == ("load", {"index": 3, "of": 'a "batch"'})
    (sent,) = [s for s in ranks[0].slices if s.name == "send" and s.args.get("tag") == 7]
    (received,) = [s for s in ranks[1].slices if s.name == "recv" and s.args.get("tag") == 7]
    assert sent.args["bytes"] == received.args["bytes"] == 40
    assert (sent.args["dst"], received.args["src"]) == (1, 0)


def test_trace_call_has_same_key_on_all_its_ranks(traced):
    keys = [[call.key for call in rank.calls()] for rank in read(traced)]
    world = [[key for key in of_rank if "/" not in key[0]] for of_rank in keys]
    assert world[0] == world[1] == world[2]
    assert len(set(world[0])) == len(world[0])
    groups = [[key for key in of_rank if "/" in key[0]] for of_rank in keys]
    assert groups[0] == groups[2] != groups[1]
    # The trace has each call once, although all_gather first exchanged the sizes.
    assert [name for _, _, name in world[0]].count("broadcast") == 1


def test_trace_command_merges_all_ranks(traced, tmp_path, capsys):
    assert main(["trace", str(traced), "-o", str(tmp_path / "all.json")]) == 0
    assert "events of 3 rank(s)" in capsys.readouterr().out
    merged = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert merged == [e for content in contents(traced) for e in content["traceEvents"]]


def test_read_ignores_files_of_other_run(tmp_path):
    traced_ranks(tmp_path, 3, lambda comm: comm.barrier())
    for path in tmp_path.glob("rank-*.json"):
        os.utime(path, (1, 1))
    traced_ranks(tmp_path, 2, lambda comm: comm.barrier())
    assert [rank.rank for rank in read(tmp_path)] == [0, 1]
    assert merge(tmp_path, tmp_path / "all.json")[1] == 2
    with pytest.raises(ConfigError, match=r"no trace in .*COLLECTIVE_TRACE"):
        read(tmp_path / "elsewhere")


@settings(max_examples=25, deadline=None)
@given(share=st.floats(0.05, 1.0))
def test_read_accepts_truncated_file(traced, tmp_path_factory, share):
    text = (traced / "rank-00000.json").read_bytes()
    directory = tmp_path_factory.mktemp("cut")
    (directory / "rank-00000.json").write_bytes(text[: round(len(text) * share)])
    (truncated,) = read(directory)
    complete = read(traced)[0]
    assert [s.name for s in truncated.slices] == [s.name for s in complete.slices][
        : len(truncated.slices)
    ]
    assert all(s.end >= s.start for s in truncated.slices)


def test_trace_shows_buckets_and_steps_of_gradients(tmp_path):
    def train(comm):
        parameters = [Parameter(f"p{n}", (100,), "float32") for n in range(4)]
        gradients = Gradients(comm, parameters, bucket_bytes=800, first_bytes=400)
        for _ in range(3):
            for number in range(4):
                gradients.views[number][:] = 1
                gradients.ready(number)
            gradients.finish()

    assert traced_ranks(tmp_path, 2, train) == [None, None]
    for rank in read(tmp_path):
        buckets = [s.args["index"] for s in rank.slices if s.name == "bucket"]
        assert buckets == sorted(set(buckets)) * 3
        assert len(set(buckets)) > 1
        assert len(rank.steps["gradients"]) == 3
        assert [s.name for s in rank.slices].count("finish gradients") == 3


# -- errors -------------------------------------------------------------------------------------


def test_unwritable_trace_file_raises_config_error_on_all(tmp_path):
    (tmp_path / "rank-00001.json").mkdir()
    for error in traced_ranks(tmp_path, 3, lambda comm: comm.barrier()):
        assert isinstance(error, ConfigError)
        assert re.search(
            r"rank 1: .*rank-00001\.json: Is a directory .*COLLECTIVE_TRACE", str(error)
        )


def test_trace_file_in_use_raises_config_error(tmp_path):
    other = trace.Tracer(str(tmp_path), 0)
    try:
        (error, _) = traced_ranks(tmp_path, 2, lambda comm: comm.barrier())
        assert isinstance(error, ConfigError)
        assert "another process is writing it" in str(error)
    finally:
        other.close()


@pytest.mark.parametrize(
    ("put", "says"),
    [
        (lambda path: path.write_text('{"chapter": 1}'), r"is no trace.*rank-00000\.json"),
        # The target of the link looks like a trace that has just begun.
        (lambda path: path.symlink_to(path.with_name("empty")), "a link is there"),
        (os.mkfifo, "is no trace"),
    ],
    ids=["other file", "link", "pipe"],
)
def test_tracer_does_not_overwrite_other_files(tmp_path, put, says):
    (tmp_path / "empty").touch()
    path = tmp_path / "rank-00000.json"
    put(path)
    before = path.lstat()
    with pytest.raises(FileExistsError, match=says):
        trace.Tracer(str(tmp_path), 0)
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (
        before.st_ino,
        before.st_mode,
        before.st_size,
    )
    assert (tmp_path / "empty").read_text() == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_tracer_does_not_overwrite_trace_of_other_user(tmp_path):
    trace.Tracer(str(tmp_path), 0).close()
    os.chown(tmp_path / "rank-00000.json", 54321, 54321)
    with pytest.raises(PermissionError, match="belongs to uid 54321"):
        trace.Tracer(str(tmp_path), 0)


@pytest.mark.parametrize("size", [0, 5, 1000], ids=["empty", "begun", "whole"])
def test_tracer_overwrites_trace_of_earlier_run(tmp_path, size):
    traced_ranks(tmp_path, 1, calls_alone)
    path = tmp_path / "rank-00000.json"
    os.truncate(path, size)
    assert traced_ranks(tmp_path, 1, calls_alone) == [None]
    assert json.loads(path.read_text())["otherData"]["size"] == 1


def calls_alone(comm):
    comm.all_reduce(np.ones(3))


def test_trace_file_is_readable_by_owner_only(tmp_path):
    trace.Tracer(str(tmp_path), 0).close()
    assert (tmp_path / "rank-00000.json").stat().st_mode & 0o777 == 0o600


def test_merge_does_not_follow_link_at_default_output(tmp_path, capsys):
    traced_ranks(tmp_path, 1, calls_alone)
    (tmp_path / "thesis").write_text("chapter 1")
    (tmp_path / "all.json").symlink_to("thesis")
    assert main(["trace", str(tmp_path)]) == 2
    assert "a link is there" in capsys.readouterr().err
    assert (tmp_path / "thesis").read_text() == "chapter 1"


def test_merge_replaces_longer_file(tmp_path):
    traced_ranks(tmp_path, 1, calls_alone)
    path, ranks, _ = merge(tmp_path)
    expected = path.read_text()
    path.write_text(expected + " " * 100_000)
    assert merge(tmp_path)[1] == ranks
    assert path.read_text() == expected


def test_read_ignores_non_files(tmp_path):
    traced_ranks(tmp_path, 1, calls_alone)
    os.mkfifo(tmp_path / "rank-00001.json")
    assert [rank_trace.rank for rank_trace in read(tmp_path)] == [0]


def test_tracing_on_some_ranks_only_raises_error(tmp_path):
    results = traced_ranks(tmp_path, 2, lambda comm: comm.barrier(), lambda rank: rank == 0)
    assert isinstance(results[0], ConfigError)
    assert "COLLECTIVE_TRACE for all ranks or for none" in str(results[0])
    assert isinstance(results[1], MismatchError)


def program(tmp_path, body, **environ):
    """Run a program of one or more ranks; return the finished process."""
    (tmp_path / "program.py").write_text(body)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVE_")}
    return run_python(
        *environ.pop("run", "").split(), "program.py", cwd=tmp_path, env=environment, **environ
    )


def test_full_disc_ends_trace_but_not_program(tmp_path):
    body = """
import resource
import collective
from collective import trace
with collective.init() as comm:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    for i in range(500):
        with trace.span(f"span {i}"):
            comm.barrier()
        trace.current().flush()
print("done")
"""
    done = program(tmp_path, body, COLLECTIVE_TRACE="here")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr.count("the trace ends here, the program goes on") == 1
    assert "File too large" in done.stderr
    content = json.loads((tmp_path / "here" / "rank-00000.json").read_text())
    assert next(e for e in content["traceEvents"] if e["ph"] == "B")["name"] == "span 0"


def test_killed_rank_leaves_readable_trace(tmp_path):
    body = """
import os, signal, time
import numpy as np
import collective
from collective import trace
with collective.init() as comm:
    comm.all_reduce(np.ones(3))
    if comm.rank == 1:
        with trace.span("dying"):
            trace.current().flush()
            while not os.path.exists("through"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    open("through", "x").close()
    comm.all_reduce(np.ones(5))
"""
    done = program(
        tmp_path, body, run="-m collective run -n 2 --backend shm", COLLECTIVE_TRACE="here"
    )
    assert done.returncode != 0
    survivor, killed = read(tmp_path / "here")
    for path in (tmp_path / "here").iterdir():
        json.loads(path.read_text())
    assert [c.args["bytes"] for c in killed.calls()] == [24]
    assert [(s.name, s.over) for s in killed.slices if s.category == "span"] == [("dying", False)]
    assert [c.args["bytes"] for c in survivor.calls()] == [24, 40]
    assert survivor.calls()[1].args["error"] == "PeerLostError"


def test_untraced_program_imports_no_tracing_code(tmp_path):
    body = """
import sys
import numpy as np
import collective
from collective import trace
from collective.communicator import Communicator
with collective.init() as comm:
    comm.all_reduce(np.ones(3), async_op=True).wait()
    assert type(comm) is Communicator
    assert "collective.trace.traced" not in sys.modules
    assert trace.span("a") is trace.span("b", index=1)
    trace.step()
    assert collective.config().trace == ""
"""
    done = program(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_forked_child_writes_no_events(tmp_path):
    body = """
import os
import collective
from collective import trace
comm = collective.init()
with trace.span("parent"):
    pid = os.fork()
    if pid == 0:
        with trace.span("child"):
            pass
        raise SystemExit
os.waitpid(pid, 0)
trace.current().flush()
"""
    done = program(tmp_path, f"import warnings\nwarnings.simplefilter('ignore')\n{body}",
                   COLLECTIVE_TRACE="here")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (rank_trace,) = read(tmp_path / "here")
    assert [(s.name, s.over) for s in rank_trace.slices if s.category == "span"] == [
        ("parent", True)
    ]


def test_trace_setting_is_resolved_against_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load({}).trace == ""
    assert load({"trace": "here"}).trace == str(tmp_path / "here")
    (tmp_path / "collective.toml").write_text('trace = "traces"')
    (tmp_path / "collective.toml").chmod(0o600)  # else the settings may not name a file to write
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert load({}).trace == str(tmp_path / "traces")
    with pytest.raises(ConfigError, match="trace: 3 "):
        load({"trace": 3})


# -- clocks -------------------------------------------------------------------------------------

AHEAD = {"a": 0.0, "b": 5.0, "c": -1234.5}


def _offsets(comm):
    clocks = ["a", "b", "a", "c", "b"][: comm.size]
    mine = AHEAD[clocks[comm.rank]]
    return offsets(comm, clocks, lambda: time.monotonic() + mine)


def test_offsets_of_other_clocks_are_within_error():
    results = run_ranks(5, _offsets)
    assert all(result == results[0] for result in results)
    for clock, (offset, error) in zip(["a", "b", "a", "c", "b"], results[0]):
        # The bound of the algorithm: the peer answered between the request and the reply's arrival.
        assert abs(offset + AHEAD[clock]) <= error + 1e-9
        assert error < 1.0
    assert results[0][1] == results[0][4]
    assert results[0][0] == (0.0, 0.0)


def _alike(comm):
    return offsets(comm, ["a"] * comm.size, lambda: 1 / 0)


def test_offsets_on_one_host_need_no_messages():
    assert run_ranks(2, _alike) == [[(0.0, 0.0)] * 2] * 2
