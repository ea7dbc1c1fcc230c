"""A store that outlives the rank that serves it: the next server and its data."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from collective.backends.peers.standby import LastingStore, Standby
from collective.control.link import ProofError, connect
from collective.control.ports import Ports
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import RendezvousError
from tests import warm
from tests.support.interpreter import run_together
from tests.support.network_hosts import free_port

KEY = b"of this test, and of nobody else"
DEADLINE_S = 60.0


class Served:
    """The data of the store on rank 0, and whether rank 0 lives."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lives = True


class First(Store):
    """Connection of one rank to the store on rank 0."""

    served_by_rank = True

    def __init__(self, served: Served) -> None:
        self._served = served
        # Called for each answer, before the rank gets the answer.
        self.answering: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return "tcp://rank0:1"

    def _living(self) -> dict[str, bytes]:
        if not self._served.lives:
            raise RendezvousError("rendezvous: gone")
        return self._served.values

    def set(self, key: str, value: bytes) -> None:
        self._living()[key] = value

    def try_get(self, key: str) -> bytes | None:
        value = self._living().get(key)
        self.answering()
        return value

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._living().setdefault(key, value)

    def delete(self, key: str) -> None:
        self._living().pop(key, None)

    def has_ended(self) -> bool:
        return not self._served.lives


class Ranks:
    """Standbys and stores of ranks that are all in this process."""

    def __init__(self, size: int) -> None:
        self.served = Served()
        self.standbys = [Standby(rank, None, None) for rank in range(size)]
        self.firsts = [First(self.served) for _ in range(size)]
        self.stores = [LastingStore(*each) for each in zip(self.firsts, self.standbys)]
        for standby in self.standbys:
            standby.begin([each.address for each in self.standbys], KEY)

    def end(self, *ranks: int) -> None:
        """Let some ranks look to the others as if their processes had ended."""
        for rank in ranks:
            self.served.lives = self.served.lives and rank != 0
            self.standbys[rank].close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks(4)
    yield started
    for store in started.stores:
        store.close()


def test_read_value_outlives_server(ranks: Ranks) -> None:
    ranks.stores[0].put_if_absent("decision", b"the first")
    assert ranks.stores[3].try_get("decision") == b"the first"
    ranks.end(0)
    assert ranks.stores[1].put_if_absent("decision", b"another") == b"the first"
    assert ranks.stores[2].try_get("decision") == b"the first"


def test_last_set_value_outlives_older_reads(ranks: Ranks) -> None:
    ranks.stores[2].set("note", b"here")
    assert [ranks.stores[rank].try_get("note") for rank in (1, 3)] == [b"here"] * 2
    ranks.stores[2].set("note", b"connected")
    ranks.end(0)
    assert ranks.stores[3].try_get("note") == b"connected"


@pytest.mark.parametrize("ends", [[(0,), (1,)], [(0, 1)], [(1,), (0,)], [(0, 1, 2)]], ids=str)
def test_lowest_surviving_rank_serves(ranks: Ranks, ends: list[tuple[int, ...]]) -> None:
    for number, together in enumerate(ends):
        ranks.stores[3].put_if_absent(f"decision {number}", b"of 3")
        ranks.end(*together)
    survivors = [rank for rank in range(4) if all(rank not in group for group in ends)]
    for rank in survivors:
        for number in range(len(ends)):
            assert ranks.stores[rank].put_if_absent(f"decision {number}", b"no") == b"of 3"
    decisions = {ranks.stores[rank].put_if_absent("next", str(rank).encode()) for rank in survivors}
    assert decisions == {str(survivors[0]).encode()}
    assert [ranks.standbys[rank]._service._values is not None for rank in survivors] == [
        rank == survivors[0] for rank in survivors
    ]


def test_rank_refuses_to_serve_while_lower_rank_lives(ranks: Ranks) -> None:
    link = ranks.standbys[3].link(2)
    link.send({"kind": "get", "key": "decision", "number": 0})
    reason = link.expect(Deadline(DEADLINE_S))["why"]
    link.close()
    assert reason == "rank 0 lives, and serves before rank 2"


def test_server_with_late_closing_port_counts_as_ended(ranks: Ranks) -> None:
    looks = iter([False, False, True])
    ranks.firsts[2].has_ended = lambda: next(looks, True)  # type: ignore[method-assign]
    ranks.stores[2].put_if_absent("decision", b"the first")
    ranks.end(0)
    assert ranks.stores[2].put_if_absent("decision", b"another") == b"the first"


def test_takeover_is_refused_while_server_may_live(ranks: Ranks) -> None:
    ranks.firsts[2].has_ended = lambda: False  # type: ignore[method-assign]
    ranks.served.lives = False
    with pytest.raises(RendezvousError, match="rendezvous: gone"):
        ranks.stores[2].put_if_absent("decision", b"of 2")


def test_decision_without_silent_living_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("collective.backends.peers.standby._TELL_S", 0.05)
    stopped = Standby(2, None, None)  # stands for a rank whose process is stopped
    ranks = Ranks(2)
    contacts = [ranks.standbys[0].address, ranks.standbys[1].address, stopped.address]
    for standby in ranks.standbys:
        standby._contacts = contacts
    monkeypatch.setattr("collective.backends.peers.standby._CONNECT_S", 0.05)
    ranks.end(0)
    with pytest.raises(RendezvousError, match="rank 2 cannot be reached, and may still live"):
        ranks.stores[1].put_if_absent("decision", b"of 1")
    # After a decision with rank 1 has excluded rank 2, rank 2 is not needed any more.
    ranks.stores[1].without({2})
    assert ranks.stores[1].put_if_absent("decision", b"of 1") == b"of 1"
    stopped.close()
    ranks.stores[1].close()


def test_late_answer_is_discarded(ranks: Ranks) -> None:
    """Rank 3 holds an old answer when it reports its values; the others then decide differently."""
    ranks.served.values["decision"] = b"of the dead"

    def others_decide() -> None:
        ranks.firsts[3].answering = lambda: None
        ranks.end(0)
        assert ranks.stores[1].put_if_absent("decision", b"of the living") == b"of the living"

    ranks.firsts[3].answering = others_decide
    assert ranks.stores[3].try_get("decision") == b"of the living"


def test_concurrent_decisions_agree(ranks: Ranks) -> None:
    ranks.end(0)
    answers: list[bytes] = []

    def decide(rank: int) -> None:
        answers.append(ranks.stores[rank].put_if_absent("decision", str(rank).encode()))

    threads = [threading.Thread(target=decide, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(answers) == 3
    assert len(set(answers)) == 1


def test_connection_with_wrong_key_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ProofError):
        connect(ranks.standbys[1].address, b"something else", Deadline(DEADLINE_S))
    ranks.end(0)
    assert ranks.stores[1].put_if_absent("decision", b"of 1") == b"of 1"


def test_standby_whose_port_another_listener_has_got_has_ended() -> None:
    """Ranks that may use few ports take the port of a dead rank again before others look there."""
    port = free_port()
    mine = Standby(1, "127.0.0.1", None, Ports(port, port))
    others = [Standby(rank, "127.0.0.1", None) for rank in (0, 2)]
    contacts = [others[0].address, mine.address, others[1].address]
    for standby in (mine, *others):
        standby.begin(contacts, KEY)
    assert not others[0].has_ended(1)
    mine.close()
    new = Standby(1, "127.0.0.1", None, Ports(port, port))
    new.begin(contacts, b"the key of another meeting")
    assert others[1].has_ended(1)
    for standby in (new, *others):
        standby.close()


def test_closed_stores_leave_no_descriptor(ranks: Ranks) -> None:
    before = set(os.listdir("/proc/self/fd"))
    more = Ranks(3)
    more.end(0)
    more.stores[1].set("key", b"value")
    for store in more.stores:
        store.close()
        store.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(RendezvousError, match="this rank has closed the store"):
        more.stores[1].try_get("key")


def test_forked_child_does_not_keep_socket_open(ranks: Ranks) -> None:
    """An open socket would hide the end of the parent from the other ranks."""
    standby = Standby(1, None, None)
    ranks.standbys[0]._contacts = ["", standby.address]
    (there, tell), (until, end) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, b".")
        os.read(until, 1)
        os._exit(0)
    try:
        os.read(there, 1)
        standby._listening.close()  # as the end of a process does
        with pytest.raises(ConnectionRefusedError):
            ranks.standbys[0].link(1)
    finally:
        os.write(end, b".")
        os.waitpid(pid, 0)
        for descriptor in (there, tell, until, end):
            os.close(descriptor)


# -- with real processes ---------------------------------------------------------------------

_PROGRAM = """
import os, signal, sys
import numpy as np
import collective
first, size, port = map(int, sys.argv[1:4])
comm = collective.init("gloo", rank=first, size=size, local_rank=first, local_size=size,
                       store=f"tcp://127.0.0.1:{port}")
for victims in eval(sys.argv[4]):
    try:
        comm.barrier()
    except collective.PeerLostError:
        pass  # one that came out of it sooner has died before the others were out
    if first in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(np.ones(1))
    except collective.PeerLostError:
        comm = comm.shrink()
    origin = comm.membership.origin
    assert comm.all_reduce(np.array([2**first]))[0] == sum(2**each for each in origin)
assert comm.membership.agree()
print("through", comm.rank, comm.size, comm.membership.origin, comm.membership.generation)
comm.close()
"""


@pytest.mark.parametrize(
    "secret", ["", "of this test, and of nobody else"], ids=["no secret", "secret"]
)
@pytest.mark.parametrize(
    "losses",
    [((0,), (1,)), ((0, 1),), ((2,), (0,), (1,))],
    ids=["in sequence", "at once", "after another rank"],
)
def test_shrink_after_death_of_store_server_succeeds(
    tmp_path: Path, secret: str, losses: tuple[tuple[int, ...], ...]
) -> None:
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    port = free_port()
    results = run_together(
        *([program, rank, 4, port, losses] for rank in range(4)), python=warm.python(),
        timeout=DEADLINE_S, **({"COLLECTIVE_SECRET": secret} if secret else {}),
    )  # fmt: skip
    survivors = tuple(rank for rank in range(4) if all(rank not in victims for victims in losses))
    for new, rank in enumerate(survivors):
        error = results[rank].stderr
        expected = f"through {new} {len(survivors)} {survivors} {len(losses)}\n"
        assert (results[rank].stdout, results[rank].returncode) == (expected, 0), error
        # PyTorch's store client writes this word when its server has died.
        assert "recvVector" not in error, error


_CLOSED = """
import gc, sys, threading
import collective
gc.disable()
rank, port = int(sys.argv[1]), sys.argv[2]
comm = collective.init(
    backend="tcp", rank=rank, size=2, local_rank=0, local_size=1, interface="lo",
    store=f"tcp://127.0.0.1:{port}",
)
def listens():
    return "collective-standby" in {thread.name for thread in threading.enumerate()}
before = listens()
comm = comm.grow()
after = listens()
comm.close()
print(before, after, listens())
"""


def test_standby_listens_until_last_generation_closes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_CLOSED)
    port = free_port()
    for done in run_together(*([program, rank, port] for rank in range(2)), timeout=DEADLINE_S):
        assert done.stdout == "True True False\n", done.stderr


_WITHOUT_A_HUB = """
import os, signal, sys, time
import numpy as np
import collective
first, directory = int(sys.argv[1]), sys.argv[2]
comm = collective.init("gloo", rank=first, size=3, local_rank=first, local_size=3, store=directory)
pid = comm.broadcast_object(os.getpid(), root=0)
group = comm.group([1, 2]) if first else None
comm.barrier()
if first == 0:
    comm.close()
    sys.exit()
def gone():
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
while not gone():
    time.sleep(0.01)
try:
    group.barrier()
    if first == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        group.all_reduce(np.ones(1))
except collective.PeerLostError as error:
    print("heard of", error.ranks)
"""


def test_death_is_noticed_after_rank_0_has_left(tmp_path: Path) -> None:
    """The process of rank 0 notices deaths; after it has left each rank looks itself."""
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(_WITHOUT_A_HUB)
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    ranks = ([program, rank, store] for rank in range(3))
    results = run_together(*ranks, python=warm.python(), timeout=DEADLINE_S)
    assert results[1].stdout == "heard of (1,)\n", results[1].stderr
