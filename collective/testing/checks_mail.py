"""Checks of posted messages: matching, probing, cancelling, and any number in flight."""

from __future__ import annotations

import threading

import numpy as np

from collective import ANY_SOURCE, Communicator
from collective.contract import mail as kinds

from .checks import able, on_each_rank

ANY_TAG = kinds.ANY_TAG
_needs_mail = able("posts", "posts no messages")

# Lengths around those at which a transport changes its way.
_LENGTHS = (0, 1, 7, 896, 4096, 65_535, 65_536, 65_537, 3_000_001)


def _content(nbytes: int, *seed: int) -> bytes:
    return np.random.default_rng([nbytes, *seed]).bytes(nbytes)


@on_each_rank(needs=_needs_mail)
def check_mail_lengths(comm: Communicator) -> None:
    """Check that messages of any length arrive, also at their sender, in memory or without."""
    mail, right, left = comm.inner.mail, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in _LENGTHS:
        memory = bytearray(length + 3)
        receives = [mail.receive(memory, left, 5), mail.receive(None, left, 5)]
        sends = [mail.send(_content(length, comm.rank, turn), right, 5) for turn in range(2)]
        mail.wait_all([*receives, *sends])
        assert memory == _content(length, left, 0) + bytes(3), f"{length} bytes into memory"
        assert bytes(receives[1].data) == _content(length, left, 1), f"{length} bytes"
        for receive in receives:
            assert mail.status(receive) == (left, 5, length), mail.status(receive)


@on_each_rank(at_least=2, needs=_needs_mail)
def check_mail_posted_order(comm: Communicator) -> None:
    """Check that messages go to the first receive that matches, whatever the receive names."""
    mail = comm.inner.mail
    for early in (False, True):
        if comm.rank == 1:
            if early:  # the messages are there before the receives
                comm.barrier()
            wanted = [(0, 3), (ANY_SOURCE, ANY_TAG), (0, ANY_TAG), (ANY_SOURCE, 2), (0, 1)]
            receives = [mail.receive(None, *each) for each in wanted]
            if not early:
                comm.barrier()
            mail.wait_all(receives)
            got = [(mail.status(each).tag, bytes(each.data)) for each in receives]
            assert got == [(3, b"c"), (1, b"a"), (2, b"b"), (2, b"d"), (1, b"e")], got
        else:
            if not early:
                comm.barrier()
            if comm.rank == 0:
                for data, tag in ((b"a", 1), (b"b", 2), (b"c", 3), (b"d", 2), (b"e", 1)):
                    mail.wait(mail.send(data, 1, tag))
            if early:
                comm.barrier()
        comm.barrier()


@on_each_rank(at_least=2, needs=_needs_mail)
def check_mail_many_in_flight(comm: Communicator) -> None:
    """Check that 2,000 sends and receives are in flight at a time, without a thread for each."""
    mail, right, left = comm.inner.mail, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    number = 2000
    comm.barrier()
    before = threading.active_count()
    sends = [mail.send(_content(100, comm.rank, tag), right, tag) for tag in range(number)]
    receives = [mail.receive(None, left, tag) for tag in reversed(range(number))]
    sends += [mail.send(bytes(100_000), right, number + turn) for turn in range(20)]
    receives += [mail.receive(None, left, number + turn) for turn in range(20)]
    threads = threading.active_count() - before
    mail.wait_all([*receives, *sends])
    for tag, receive in zip(reversed(range(number)), receives[:number], strict=True):
        assert bytes(receive.data) == _content(100, left, tag), f"tag {tag}"
    # Ranks that are threads of one process may start others meanwhile.
    assert threads < 20, f"{threads} threads"


@on_each_rank(at_least=2, needs=_needs_mail)
def check_mail_eager(comm: Communicator) -> None:
    """Check that all ranks may send 64 KiB many times before they receive, or meet meanwhile."""
    mail, right, left = comm.inner.mail, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    number = 100
    data = _content(64 << 10, comm.rank)
    for turn in range(number):
        assert mail.send(data, right, turn).done, f"send {turn} of {len(data)} bytes"
    if comm.rank == 0:
        comm.barrier()  # which must move what has been copied
    for turn in range(number):
        received = mail.wait(mail.receive(None, left, turn)).data
        assert bytes(received) == _content(64 << 10, left), f"message {turn}"
    if comm.rank != 0:
        comm.barrier()
    comm.barrier()  # what a rank has copied moves only while the rank is in a call


@on_each_rank(at_least=2, needs=_needs_mail)
def check_mail_probe(comm: Communicator) -> None:
    """Check that a probe takes nothing, and that a matched message belongs to its finder alone."""
    mail = comm.inner.mail
    for length in (3, 200_000):
        if comm.rank == 0:
            for dst in range(1, comm.size):
                contents = [_content(length, dst, turn) for turn in range(3)]
                mail.wait_all([mail.send(content, dst, 7) for content in contents])
        else:
            assert mail.iprobe(ANY_SOURCE, 8) is None
            assert mail.probe(ANY_SOURCE, ANY_TAG) == (0, 7, length)
            assert mail.probe(0, 7) == mail.iprobe(0, 7) == (0, 7, length)
            first = mail.match(ANY_SOURCE, 7)
            assert mail.status(first) == (0, 7, length)
            rest = [mail.wait(mail.receive(None, ANY_SOURCE, ANY_TAG)), mail.match(0, 7)]
            assert mail.imatch(ANY_SOURCE, ANY_TAG) is None
            memory = bytearray(length)
            mail.read(first, memory)
            got = [bytes(memory), *(bytes(each.data) for each in rest)]
            assert got == [_content(length, comm.rank, turn) for turn in range(3)]
        comm.barrier()


@on_each_rank(needs=_needs_mail)
def check_mail_wants_answer(comm: Communicator) -> None:
    """Check that a receive tells whether its sender waits for an answer, whatever it names."""
    mail, right, left = comm.inner.mail, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for tag in (3, ANY_TAG):
        sends = [mail.send(b"x", right, 3, asks) for asks in (True, False)]
        receives = [mail.receive(None, left, tag) for _ in sends]
        mail.wait_all([*receives, *sends])
        assert [bool(each.tag & mail.WANTS_ANSWER) for each in receives] == [True, False]
        assert [mail.status(each) for each in receives] == [(left, 3, 1)] * 2


@on_each_rank(at_least=2, needs=_needs_mail)
def check_mail_cancel(comm: Communicator) -> None:
    """Check that a cancelled receive gets nothing, and that one with a message stays."""
    mail, right, left = comm.inner.mail, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    cancelled = [mail.receive(bytearray(9), left, 4), mail.receive(None, ANY_SOURCE, ANY_TAG)]
    assert all(mail.cancel(each) for each in cancelled)
    assert all(each.done and each.nbytes == 0 for each in cancelled)
    comm.barrier()
    mail.send(b"kept", right, 4)
    receive = mail.wait(mail.receive(None, left, 4))
    assert bytes(receive.data) == b"kept"
    assert not mail.cancel(receive)


@on_each_rank(at_least=2, needs=_needs_mail)
def check_mail_truncation(comm: Communicator) -> None:
    """Check that a receive with too little memory says both lengths, and harms nothing else."""
    mail, right, left = comm.inner.mail, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in (10, 100_000):
        memory = bytearray(8)
        receive = mail.receive(memory, left, 1)
        sends = [mail.send(_content(length, comm.rank), right, 1), mail.send(b"next", right, 1)]
        text = ""
        try:
            mail.wait(receive)
        except kinds.Truncated as error:
            text = str(error)
        assert f"has {length} bytes" in text, text
        assert "has 8 " in text, text
        assert mail.status(receive).nbytes == length
        assert bytes(memory) == _content(length, left)[:8]
        assert bytes(mail.wait(mail.receive(None, left, 1)).data) == b"next"
        mail.wait_all(sends)


@on_each_rank(at_least=2, needs=_needs_mail)
def check_mail_contexts(comm: Communicator) -> None:
    """Check that messages of other contexts, and arrays of any length, never match."""
    mail, right, left = comm.inner.mail, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    order = [*range(1, comm.size), 0]
    other = mail.context(7, order)  # rank r has number r - 1
    assert order[other.rank] == comm.rank
    receives = [other.receive(None, ANY_SOURCE, ANY_TAG), mail.receive(None, ANY_SOURCE, ANY_TAG)]
    arrays = [np.full(length, float(comm.rank)) for length in (3, 50_000)]
    works = [comm.send(x, right, tag=2, async_op=True) for x in arrays]
    other.send(b"other", (other.rank + 1) % other.size, 2)
    mail.send(b"mail", right, 2)
    mail.wait_all(receives)
    got = [bytes(each.data) for each in receives]
    assert got == [b"other", b"mail"], got
    assert other.status(receives[0]) == ((other.rank - 1) % other.size, 2, 5)
    assert mail.status(receives[1]) == (left, 2, 4)
    for x in arrays:
        assert comm.recv(None, left, tag=2).tolist() == np.full(x.size, float(left)).tolist()
    for work in works:
        work.wait()


@on_each_rank(at_least=3, needs=_needs_mail)
def check_mail_sources_take_turns(comm: Communicator) -> None:
    """Check that a receive from any rank reaches a message of each, while others keep sending."""
    mail, number = comm.inner.mail, 40
    if comm.rank:
        for _ in range(number):
            mail.send(b"x", 0, 0)
    comm.barrier()
    if comm.rank == 0:
        sources = []
        for _ in range(number * (comm.size - 1)):
            sources.append(mail.status(mail.wait(mail.receive(None, ANY_SOURCE, 0))).source)
        for rank in range(1, comm.size):
            assert sources.count(rank) == number, sources
            assert rank in sources[: 4 * comm.size], sources
    comm.barrier()
