"""The monitor, without a transport: presence, failures, departures and calls of the ranks."""

import contextlib
import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from collective.backends.peers import channel as channel_module
from collective.backends.peers.channel import tell_dropped
from collective.backends.peers.hub import Hub
from collective.backends.peers.messages import disagreement
from collective.backends.peers.monitor import Monitor
from collective.contract.failure import Failure
from collective.contract.process import RankProcess
from collective.contract.recorder import Recorder
from collective.contract.world import World
from collective.control.link import Link, connect
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
)
from collective.memory.dtypes import named
from collective.request import Request
from collective.start.stores import FileStore, MemoryStore
from tests.support.interpreter import started

FAR = 30.0
KEY = bytes(range(32))


def world(rank, size, store, **changes):
    values = {
        "rank": rank, "size": size, "local_rank": rank, "local_size": size, "host": "here",
        "launcher": "none", "job": "test", "store": store,
    }  # fmt: skip
    return World(**{**values, **changes})


def hub_of(size, host, seconds=FAR, tls=None):
    """Return the hub of some ranks: of several hosts, or of this host alone if ``host`` is None."""
    place = {} if host is None else {"local_size": 0, "address": host}
    return Hub(world(0, size, MemoryStore(), tls=tls, **place), Deadline(seconds), KEY)


def start(ranks, size, directory, timeout=FAR, **changes):
    """Start the monitors of ``ranks`` in parallel; return each monitor or its error."""
    store = FileStore(directory)

    def one(rank):
        try:
            return Monitor.start(world(rank, size, store, **changes), Deadline(timeout))
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


@pytest.fixture
def monitors(tmp_path):
    """Start the monitors of three ranks, each with a recorder."""
    started = start(range(3), 3, tmp_path / "store")
    for monitor in started:
        monitor.channel.recorder = Recorder()
    yield started
    for monitor in started:
        monitor.channel.close()


def until(condition, seconds=FAR):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.002)


def wait_for_error(channel, timeout=FAR, awaited=None, any_of=False):
    """Wait as a call does until there is an error, and return the error."""
    waiting = channel.wait("all_reduce", Deadline(timeout), awaited, any_of)
    since = time.monotonic()
    while True:
        try:
            time.sleep(waiting.slice() / 10)
            waiting.check()
        except Exception as error:
            return error
        assert time.monotonic() - since < 2 * FAR


def test_all_ranks_connect_and_leave_store_empty(monitors, tmp_path):
    assert [monitor.hosts for monitor in monitors] == [["here"] * 3] * 3
    assert os.listdir(tmp_path / "store") == []
    for monitor in monitors:
        monitor.channel.check("all_reduce")


def test_store_is_reusable(tmp_path):
    for _ in range(3):
        for monitor in start(range(2), 2, tmp_path):
            monitor.channel.close()


def test_missing_ranks_are_named(tmp_path):
    for error in start([0, 2], 4, tmp_path, timeout=0.5):
        assert isinstance(error, RendezvousError)
        assert "after 0.5 s ranks 1, 3 of 4 have not joined at " in str(error)
    assert os.listdir(tmp_path) == []


def test_missing_rank_0_is_named(tmp_path):
    for error in start([1, 2], 3, tmp_path, timeout=0.3):
        assert "rank 0 of 3 (" in str(error)
        assert ") did not answer within 0.3 s [rank " in str(error)


def test_different_sizes_raise_rendezvous_error(tmp_path):
    store = FileStore(tmp_path)

    def one(rank, size):
        with pytest.raises(RendezvousError, match=r"with size 3, but rank 2 .* with size 4"):
            Monitor.start(world(rank, size, store, local_size=size), Deadline(FAR))

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(one, 0, 3), pool.submit(one, 2, 4)]:
            future.result()


def test_two_processes_with_same_rank_raise_rendezvous_error(tmp_path):
    for error in start([0, 1, 1], 3, tmp_path):
        assert "two processes say that they are rank 1" in str(error)


def test_rank_outside_of_size_raises_rendezvous_error(tmp_path):
    for error in start([0, 3], 3, tmp_path):
        assert "says that it is rank 3 of 3. Ranks count from 0 to 2 (RANK)" in str(error)


def test_rank_0_after_end_of_roll_call_raises_rendezvous_error(tmp_path, monkeypatch):
    """The hub exists before rank 0 connects, and the other ranks may have ended the roll call."""

    def late(*arguments):
        raise ConnectionRefusedError("nobody listens any more")

    monkeypatch.setattr("collective.backends.peers.monitor.connect", late)
    error, *_ = start([0], 2, tmp_path, timeout=0.2)
    assert isinstance(error, RendezvousError)
    assert os.listdir(tmp_path) == []


def listening() -> set[str]:
    """Return the TCP addresses and ports on which this process listens, in the format of /proc."""
    sockets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    tables = (Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def test_hub_listens_on_given_address_until_all_ranks_joined(tmp_path):
    before = listening()
    hub = hub_of(2, "127.0.0.1")
    (address,) = listening() - before
    assert address.split(":")[0] == "0100007F"
    links = [connect(hub.address, KEY, Deadline(FAR)) for _ in range(2)]
    for rank, link in enumerate(links):
        link.send({"kind": "here", "rank": rank, "size": 2, "host": "here"})
    complete = {"kind": "complete", "hosts": ["here", "here"], "session": hub.session}
    complete["processes"] = complete["contacts"] = ["", ""]  # the ranks did not send these fields
    assert [link.expect(Deadline(FAR)) for link in links] == [complete] * 2
    assert address not in listening()
    for link in links:
        link.close()


def test_hub_on_single_host_opens_no_network_port(tmp_path):
    before = listening()
    hub_of(2, None, 0.1)
    assert listening() <= before


def test_failure_reaches_ranks_on_other_hosts(tmp_path):
    monitors = start(range(2), 2, tmp_path, local_size=1, address="127.0.0.1")
    monitors[0].channel.abort(Failure("aborted", 0, "enough"))
    until(lambda: monitors[1].channel.failure)
    for monitor in monitors:
        monitor.channel.close()


def test_address_of_another_host_is_refused_with_remedy(tmp_path):
    error, *_ = start([0], 2, tmp_path, timeout=0.5, local_size=1, address="192.0.2.1")
    assert "cannot listen on 192.0.2.1" in str(error)
    assert "COLLECTIVE_INTERFACE" in str(error)


def test_abort_reaches_all_ranks(monitors):
    monitors[2].channel.abort(Failure("failed", 2, "Traceback: no more milk"))
    for monitor in monitors[:2]:
        error = wait_for_error(monitor.channel)
        assert isinstance(error, PeerFailedError)
        assert error.rank == 2
        assert "no more milk" in str(error)
    # Later failures do not replace the first one.
    monitors[0].channel.abort(Failure("aborted", 0, "late"))
    assert monitors[0].channel.failure.kind == "failed"


def test_hub_tells_rank_of_its_own_process_last(tmp_path, monkeypatch):
    """That rank may end the process, and the hub, at the news."""
    hubs, told = [], []

    class Kept(Hub):
        def __init__(self, *args):
            super().__init__(*args)
            hubs.append(self)

    monkeypatch.setattr("collective.backends.peers.monitor.Hub", Kept)
    monitors = start(range(3), 3, tmp_path / "store")
    for rank, link in hubs[0]._links.items():
        monkeypatch.setattr(link, "write", lambda data, rank=rank: told.append(rank))
    monitors[1].channel.abort(Failure("failed", 1, "why"))
    until(lambda: len(told) == 2)
    assert told == [2, 0]
    for monitor in monitors:
        monitor.channel.close()


def test_await_heard_returns_after_peers_know_failure(monitors, monkeypatch):
    monkeypatch.setattr(channel_module, "_HEARD_S", FAR)
    giving_up, slow, _ = (monitor.channel for monitor in monitors)
    hear = slow._hear

    def hear_late(message):
        time.sleep(0.3)
        hear(message)

    slow._hear = hear_late
    giving_up.abort(Failure("aborted", 0, "enough"))
    giving_up.await_heard(range(3))
    assert slow.failure is not None


def test_await_heard_forwards_cause_to_uninformed_ranks(monitors, monkeypatch):
    """Another rank failed, and this rank learned of that before the other ranks."""
    monkeypatch.setattr(channel_module, "_HEARD_S", FAR)
    giving_up, other, _ = (monitor.channel for monitor in monitors)
    giving_up._break(Failure("lost", 2, "rank 2 is gone", (2,)))
    giving_up.await_heard([1])
    assert other.failure == giving_up.failure


def test_await_heard_does_not_wait_for_dead_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(channel_module, "_HEARD_S", 2 * FAR)
    with started("-c", _DIES.format(rank=1, store=str(tmp_path))) as victim:
        channel, *others = (monitor.channel for monitor in start([0, 2], 3, tmp_path))
        victim.kill()
        victim.wait()
        channel.abort(Failure("aborted", 0, "enough"))
        since = time.monotonic()
        channel.await_heard([1])
        assert time.monotonic() - since < FAR, "the rank has waited as long as for a stopped rank"
        for channel_to_close in (channel, *others):
            channel_to_close.close()


def test_await_heard_does_not_wait_for_closed_rank(monitors, monkeypatch):
    monkeypatch.setattr(channel_module, "_HEARD_S", 2 * FAR)
    giving_up, other, _ = (monitor.channel for monitor in monitors)
    other.abort(Failure("aborted", 1, "enough"))
    other.close()
    wait_for_error(giving_up)
    since = time.monotonic()
    giving_up.await_heard([1])
    assert time.monotonic() - since < FAR


def test_failure_hook_is_called(monitors):
    called = threading.Event()
    monitors[1].channel.on_failure.append(called.set)
    monitors[0].channel.abort(Failure("aborted", 0, "enough"))
    assert called.wait(FAR)


_DIES = """
import os, sys
from tests.backends.peers.test_monitor import world
from collective.backends.peers.monitor import Monitor
from collective.deadline import Deadline
from collective.start.stores import FileStore, MemoryStore
monitor = Monitor.start(world({rank}, 3, FileStore({store!r})), Deadline(30))
print("here", flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_dead_rank_is_named(tmp_path, victim):
    """The death of rank 0, whose process runs the hub, is noticed as well."""
    with started("-c", _DIES.format(rank=victim, store=str(tmp_path))) as process:
        monitors = start([rank for rank in range(3) if rank != victim], 3, tmp_path)
        assert process.stdout.readline() == "here\n"
        process.kill()
        for monitor in monitors:
            error = wait_for_error(monitor.channel)
            assert isinstance(error, PeerLostError)
            assert error.ranks == (victim,)
            assert f"rank {victim} (on here) is gone" in str(error)
            monitor.channel.close()


def test_departed_rank_raises_peer_lost_in_next_call(monitors):
    monitors[2].channel.recorder.begin(Request("barrier"))
    monitors[2].channel.recorder.end()
    monitors[2].channel.close()
    until(lambda: 2 in monitors[0].channel.left)
    # Rank 2 has completed its part of the call that runs here.
    monitors[0].channel.recorder.begin(Request("barrier"))
    time.sleep(0.6)
    monitors[0].channel.check("barrier")
    monitors[0].channel.recorder.end()
    monitors[0].channel.recorder.begin(Request("barrier"))
    error = wait_for_error(monitors[0].channel)
    assert isinstance(error, PeerLostError)
    assert error.ranks == (2,)
    # The error breaks all ranks, because no rank knows how far the call has come elsewhere.
    until(lambda: monitors[1].channel.failure is not None)
    with pytest.raises(PeerLostError):
        monitors[1].channel.check("recv", [0])
    with pytest.raises(PeerLostError):
        monitors[0].channel.check("recv", [2])


def test_any_source_wait_raises_after_all_sources_left(monitors):
    first = monitors[0].channel
    monitors[2].channel.close()
    until(lambda: 2 in first.left)
    time.sleep(0.6)
    first.check("recv", [1, 2], any_of=True)
    monitors[1].channel.close()
    error = wait_for_error(first, awaited=[1, 2], any_of=True)
    assert isinstance(error, PeerLostError)
    assert error.ranks == (1, 2)


def test_rank_0_leaving_first_keeps_monitor_working(monitors):
    monitors[0].channel.close()
    until(lambda: 0 in monitors[1].channel.left)
    monitors[1].channel.check("recv", [2])
    monitors[1].channel.abort(Failure("aborted", 1, "enough"))
    until(lambda: monitors[2].channel.failure)


def test_rank_0_leaves_only_once_hub_has_passed_on_its_failure(monitors, monkeypatch):
    heard, hear = [], Hub._hear

    def slow(hub, link, message):
        time.sleep(0.2)  # rank 0's process may end meanwhile
        hear(hub, link, message)
        heard.append(message["kind"])

    monkeypatch.setattr(Hub, "_hear", slow)
    monitors[0].channel.abort(Failure("aborted", 0, "because"))
    monitors[0].channel.close()
    assert heard == ["failure", "left", "bye"]


def test_departed_rank_is_not_lost_when_rank_0_ends(tmp_path):
    started = start(range(4), 4, tmp_path)
    here = started[2]
    for monitor in started[:2]:
        monitor.channel.close()
    until(lambda: here.channel.left == {0, 1})
    here.processes = [None, RankProcess.own()._replace(started=0), None, None]
    here._link.cut()  # as the end of rank 0 does
    until(lambda: here.hub_gone)
    here.channel.check("recv", [3])
    assert here.gone() == {0, 1}
    for monitor in started[2:]:
        monitor.channel.close()


def announce(monitors, rank):
    """Have the launcher tell all ranks that a rank's process is lost."""
    lost = {("a host", 100 + rank)}
    for monitor in monitors:
        monitor.processes = [RankProcess("a host", 100 + each, 0) for each in range(3)]
        monitor._store.announced = lambda: lost


def test_rank_that_launcher_announces_is_lost_to_all_others(monitors):
    announce(monitors, 2)
    for monitor in monitors[:2]:
        error = wait_for_error(monitor.channel)
        assert isinstance(error, PeerLostError)
        assert error.ranks == (2,)
        assert "rank 2 (on here) is gone: its process ended or its host is cut off" in str(error)
        assert monitor.channel.lost() == {2}
    assert monitors[2].channel.lost() == set()


def test_announced_loss_of_rank_0_stands_for_the_end_of_the_hub(monitors, monkeypatch):
    monkeypatch.setattr(channel_module, "_HEARD_S", 2 * FAR)
    announce(monitors, 0)
    assert wait_for_error(monitors[1].channel).ranks == (0,)
    assert monitors[1].hub_gone
    # Otherwise a rank would wait for messages that no hub passes on.
    since = time.monotonic()
    monitors[1].channel.await_heard([2])
    assert time.monotonic() - since < FAR


def test_announced_rank_that_has_left_breaks_no_other_wait(monitors):
    monitors[2].channel.close()
    until(lambda: monitors[0].channel.left == {2})
    announce(monitors, 2)
    time.sleep(0.3)
    monitors[0].channel.check("recv", [1])


def record(monitor, *operations):
    for operation in operations:
        monitor.channel.recorder.end()
        monitor.channel.recorder.begin(Request(operation, named("float32"), (4,)))


def test_stalled_differing_calls_raise_mismatch(monitors):
    for monitor in monitors[:2]:
        record(monitor, "all_reduce", "all_reduce")
    record(monitors[2], "all_reduce", "barrier")
    for monitor in monitors:
        error = wait_for_error(monitor.channel)
        assert isinstance(error, MismatchError)
        assert "ranks 0, 1: all_reduce(float32[4])" in str(error)
        assert "rank 2: barrier(float32[4])" in str(error)
        assert "test_monitor.py" in str(error)
        with pytest.raises(CommunicatorAbortedError, match="earlier mismatch"):
            monitor.channel.check("barrier")


def test_timeout_names_late_rank_and_its_last_call(monitors):
    for monitor in monitors:
        record(monitor, "all_gather")
    for monitor in monitors[:2]:
        record(monitor, "all_reduce")
    monitors[2].channel.recorder.end()
    error = wait_for_error(monitors[0].channel, timeout=0.3)
    assert isinstance(error, CollectiveTimeoutError)
    assert error.ranks == (2,)
    assert "waited 0.3 s for rank 2: rank 2 last did its call 1, all_gather" in str(error)
    other = wait_for_error(monitors[1].channel)
    assert isinstance(other, CollectiveTimeoutError)
    late = wait_for_error(monitors[2].channel)
    assert type(late) is CommunicatorAbortedError


def timed_error(channel, timeout):
    """Return the error of a call, and the seconds that it came after its deadline."""
    since = time.monotonic()
    error = wait_for_error(channel, timeout)
    return error, time.monotonic() - since - timeout


def test_timeout_names_rank_without_report_at_the_deadline(monitors, monkeypatch):
    """The hub waits half a second for the report of such a rank."""
    for monitor in monitors:
        record(monitor, "all_reduce")
    monkeypatch.setattr(monitors[2], "_say", lambda message: None)
    error, late = timed_error(monitors[0].channel, 1.5)
    assert error.ranks == (2,)
    assert "rank 2 does not answer" in str(error)
    assert late < 0.4


def test_timeout_names_silent_ranks_at_the_deadline_if_hub_does_not_answer(monitors, monkeypatch):
    monkeypatch.setattr(monitors[1], "_say", lambda message: None)
    monitors[1].channel.silent = lambda: {0, 2}
    error, late = timed_error(monitors[1].channel, 0.2)
    assert error.ranks == (0, 2)
    assert "rank 0 cannot be reached" in str(error)
    assert "rank 2 cannot be reached" in str(error)
    assert late < 0.4


def test_timeout_uses_earlier_report_of_rank_that_is_slow_at_the_deadline(monitors, monkeypatch):
    for monitor in monitors[:2]:
        record(monitor, "all_reduce")
    say, reports = monitors[2]._say, []

    def only_first_report(message):
        if message["kind"] == "report":
            reports.append(message)
        if len(reports) <= 1:
            say(message)

    monkeypatch.setattr(monitors[2], "_say", only_first_report)
    error = wait_for_error(monitors[0].channel, timeout=0.8)
    assert error.ranks == (2,)
    assert "rank 2 has made no collective call" in str(error)


def test_timeout_of_message_names_sender(monitors):
    error = wait_for_error(monitors[0].channel, timeout=0.2, awaited=[1])
    assert isinstance(error, CollectiveTimeoutError)
    assert error.ranks == (1,)
    assert "rank 1 has made no collective call" in str(error)


def test_timeout_of_slow_transport_names_no_rank(monitors):
    for monitor in monitors:
        record(monitor, "all_reduce")
    error = wait_for_error(monitors[0].channel, timeout=0.2)
    assert error.ranks == ()
    assert "every rank is in this call" in str(error)


def offer_one_after_the_other(monitors):
    """Let the ranks offer their numbers in turn; return the offers that each rank saw then."""
    offers = []
    for monitor in monitors:
        monitor.channel.offer("numbers", str(monitor.rank))
        until(lambda m=monitor: len(m.channel.offered("numbers")) == m.rank + 1)
        offers.append(monitor.channel.offered("numbers"))
    return offers


def test_offers_reach_earlier_and_later_ranks(monitors):
    offers = {0: "0", 1: "1", 2: "2"}
    assert offer_one_after_the_other(monitors) == [{0: "0"}, {0: "0", 1: "1"}, offers]
    for monitor in monitors:
        until(lambda m=monitor: m.channel.offered("numbers") == offers)
        monitor.channel.withdraw("numbers")
        assert monitor.channel.offered("numbers") == {}


def test_group_offers_use_group_ranks(monitors):
    first, second = (monitors[rank].channel.group([2, 0]) for rank in (0, 2))
    first.offer("name", "of rank 0")
    second.offer("name", "of rank 2")
    for channel in (first, second):
        until(lambda c=channel: c.offered("name") == {1: "of rank 0", 0: "of rank 2"})


def test_offered_after_end_of_rank_0_raises(monitors):
    without, all_ranks = monitors[1].channel.group([1, 2]), monitors[1].channel
    monitors[0].channel.close()
    without.offer("name", "nobody passes it on")
    monitors[1]._link.cut()
    until(lambda: monitors[1].hub_gone)
    with pytest.raises(RendezvousError, match="keep rank 0 running while other ranks make groups"):
        without.offered("name")
    # Ranks that connect with rank 0 get the error for a lost peer.
    assert all_ranks.offered("name") == {}
    assert isinstance(wait_for_error(all_ranks), PeerLostError)


def test_group_abort_leaves_parent_intact(monitors):
    first = monitors[0].channel.group([0, 2])
    first.abort(Failure("aborted", 0, "enough of the group"))
    # The other member makes the group later, and learns of the abort then.
    second = monitors[2].channel.group([0, 2])
    until(lambda: second.failure)
    assert second.name == first.name != monitors[0].channel.name
    assert (second.rank, second.size) == (1, 2)
    assert monitors[1].channel.group([0, 1]).name != first.name
    for monitor in monitors:
        monitor.channel.check("all_reduce")


def test_engine_error_is_replaced_by_known_failure(monitors):
    native = RuntimeError("connection closed by peer")
    monitors[1].channel.abort(Failure("failed", 1, "Traceback: no more milk"))
    assert isinstance(monitors[0].channel.explain("all_reduce", native), PeerFailedError)


def test_engine_error_with_silent_host_is_lost_peer_on_all_ranks(monitors):
    monitors[0].channel.silent = lambda: {2}
    errors = [monitors[0].channel.explain("recv", EOFError("timed out"))]
    errors += [wait_for_error(monitors[1].channel)]
    assert [(type(error), error.ranks) for error in errors] == [(PeerLostError, (2,))] * 2


def test_rank_that_is_cut_off_from_all_names_all(monitors):
    monitors[1].channel.silent = lambda: {0, 2}
    monitors[1]._hub_gone("")
    error = wait_for_error(monitors[1].channel)
    assert (type(error), error.ranks) == (PeerLostError, (0, 2))
    assert "ranks 0 (on here), 2 (on here) are gone" in str(error)


def test_unexplained_engine_error_breaks_communicator(monitors):
    error = monitors[0].channel.explain("all_reduce", RuntimeError("out of order"))
    assert isinstance(error, BackendError)
    assert "out of order" in str(error)
    until(lambda: monitors[1].channel.failure)
    assert "RuntimeError: out of order" in str(wait_for_error(monitors[1].channel))


@pytest.mark.parametrize("group", [False, True], ids=["all", "a group"])
def test_collected_communicator_raises_peer_lost_on_peer(tmp_path, group):
    first, second = start(range(2), 2, tmp_path)
    channels = [first.channel, second.channel]
    if group:
        channels = [channel.group([0, 1]) for channel in channels]
    survivor = channels[0]
    survivor.recorder = Recorder()
    survivor.recorder.begin(Request("barrier"))
    del channels
    if not group:
        del second
    gc.collect()
    error = wait_for_error(survivor)
    assert isinstance(error, PeerLostError)
    assert "rank 1 has dropped its communicator without closing it" in str(error)
    first.channel.close()
    if group:
        second.channel.close()


def test_collected_monitor_says_goodbye_despite_late_message(tmp_path, monkeypatch):
    first, second, third = start(range(3), 3, tmp_path)
    group = first.channel.group([0, 1])
    threads = [each for each in threading.enumerate() if each.name == "collective-monitor"]

    def after_the_group(*arguments):
        group.close()  # notifies the other rank, whose thread finds its monitor gone
        until(lambda: not all(thread.is_alive() for thread in threads))
        tell_dropped(*arguments)

    monkeypatch.setattr("collective.backends.peers.monitor.tell_dropped", after_the_group)
    del second
    gc.collect()
    until(lambda: first.channel.left == {1})
    third.channel.close()
    until(lambda: first.channel.left == {1, 2})
    assert first.channel.failure is None
    first.channel.close()


def test_forked_child_leaves_connection_alone(tmp_path):
    first, second = start(range(2), 2, tmp_path)
    pid = os.fork()
    if pid == 0:
        del first, second
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    first.channel.abort(Failure("aborted", 0, "still heard"))
    until(lambda: second.channel.failure)
    assert second.channel.failure.text == "still heard"
    for monitor in (first, second):
        monitor.channel.close()


def test_closed_monitors_leave_no_thread(tmp_path):
    before = set(threading.enumerate())
    for monitor in start(range(3), 3, tmp_path):
        monitor.channel.close()
    until(lambda: set(threading.enumerate()) <= before)


def report(*entries, finished=0):
    return {
        "entries": [[n, digest, compares, {"operation": operation, "dtype": None, "shape": None,
                     "options": {}, "site": ""}] for n, digest, compares, operation in entries],
        "finished": finished, "started": len(entries),
    }  # fmt: skip


def test_disagreement_compares_open_calls():
    a, b = (1, 7, False, "scan"), (1, 8, False, "barrier")
    assert disagreement([0, 1], {0: report(a), 1: report(a)}) is None
    assert "rank 1: barrier()" in disagreement([0, 1], {0: report(a), 1: report(b)})
    # The text numbers the ranks as the communicator does.
    assert "rank 0: barrier()" in disagreement([5, 3], {3: report(a), 5: report(b)})
    third = disagreement([0, 1, 2], {0: report(a), 1: report(b), 2: report()})
    assert "rank 2: has not come so far" in third
    # A rank that is not that far yet, or does not answer, does not disagree.
    assert disagreement([0, 1], {0: report(a), 1: report()}) is None
    assert disagreement([0, 1], {0: report(a)}) is None
    # Completed calls do no harm any more.
    assert disagreement([0, 1], {0: report(a, finished=1), 1: report(b, finished=1)}) is None
    # Two comparisons settle the difference themselves; a comparison and a call do not.
    asks = (1, 9, True, "gather")
    assert disagreement([0, 1], {0: report(asks), 1: report((1, 5, True, "scan"))}) is None
    assert "gather()" in disagreement([0, 1], {0: report(asks), 1: report(a)})


def test_goodbye_is_received_despite_connection_reset() -> None:
    receiver, sender = map(Link, socket.socketpair())
    receiver.send({"kind": "left"})
    sender.send({"kind": "bye"})
    sender.close()  # data is still unread, so the connection is reset
    assert receiver.receive() == [{"kind": "bye"}]
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()
