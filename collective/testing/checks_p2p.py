"""Checks of send, recv and sendrecv: contents, order, tags and sources."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np

from collective import ANY_SOURCE, NULL, Communicator, Status

from .checks import able, on_each_rank
from .checks_data import needs_torch
from .samples import LARGE, LAYOUTS, SHAPES, assert_same, dtypes_of, laid_out, values

_needs_any_source = able("any_source", "does not support ANY_SOURCE")


@on_each_rank(at_least=2)
def check_send_recv(comm: Communicator) -> None:
    """Check that messages arrive between every two ranks: every dtype and size, large too."""
    for src in range(comm.size):
        for dst in range(comm.size):
            if src == dst or comm.rank not in (src, dst):
                continue
            for dtype in dtypes_of(comm.capabilities.dtypes):
                for shape in SHAPES:
                    x = values(dtype, shape, src, 60 + dst)
                    what = f"{dtype}{list(shape)} from {src} to {dst}"
                    if comm.rank == src:
                        comm.send(x, dst)
                    else:
                        assert_same(comm.recv(None, src, like=x), x, f"recv(None) of {what}")
            x = values("float32", LARGE, src, 61 + dst)
            if comm.rank == src:
                comm.send(x, dst)
            else:
                out = np.zeros(LARGE, np.float32)
                assert comm.recv(out, src) is out
                assert_same(out, x, f"a large array from {src} to {dst}")


@on_each_rank(at_least=2)
def check_send_recv_layouts(comm: Communicator) -> None:
    """Check that arrays of any strides can be sent, and received into."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for layout in LAYOUTS:
        x = laid_out(layout, values("float32", (5, 7), comm.rank, 62))
        work = comm.send(x, right, async_op=True)
        out = laid_out(layout, np.zeros((5, 7), np.float32))
        comm.recv(out, left)
        work.wait()
        assert_same(out, values("float32", (5, 7), left, 62), f"{layout} to {layout}")


@on_each_rank(at_least=2)
def check_message_order(comm: Communicator) -> None:
    """Check that messages of one tag, of any sizes, arrive in the order in which they were sent."""
    lengths = [1, 5000, 0, 3, 40_000, 2, 2, 100_000, 1] * 2
    if comm.rank == 0:
        for dst in range(1, comm.size):
            for turn, length in enumerate(lengths):
                comm.send(np.full(length, turn + dst), dst)
    else:
        for turn, length in enumerate(lengths):
            message = comm.recv(None, 0)
            assert_same(message, np.full(length, turn + comm.rank), f"message {turn} of a row")


@on_each_rank(at_least=2)
def check_tags(comm: Communicator) -> None:
    """Check that a receive takes the message with its tag, whatever came before it."""
    tags = [0, 1, 7, 2**31 - 1]
    for length in (1, 50_000):
        if comm.rank == 0:
            works = [
                comm.send(np.full(length, tag), dst, tag=tag, async_op=True)
                for dst in range(1, comm.size)
                for tag in tags
            ]
            for work in works:
                work.wait()
        else:
            for tag in reversed(tags):
                message = comm.recv(None, 0, tag=tag)
                assert_same(message, np.full(length, tag), f"the message with tag {tag}")


@on_each_rank(at_least=2)
def check_messages_among_collectives(comm: Communicator) -> None:
    """Check that messages in flight do not get mixed up with collective calls."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for length in (3, 70_000):
        sent = [comm.send(np.full(length, turn), right, async_op=True) for turn in range(3)]
        total = comm.all_reduce(np.full(length, comm.rank))
        assert_same(total, np.full(length, sum(range(comm.size))), "all_reduce among messages")
        coming = [comm.recv(None, left, async_op=True) for _ in range(3)]
        joined = comm.all_gather(np.full(length, comm.rank))
        assert_same(joined, np.repeat(np.arange(comm.size), length), "all_gather among messages")
        for turn, work in enumerate(coming):
            assert_same(work.wait(), np.full(length, turn), f"message {turn} among collectives")
        for work in sent:
            work.wait()


@on_each_rank()
def check_sendrecv(comm: Communicator) -> None:
    """Check that a ring of ranks can sendrecv without deadlock, in any sizes; also with itself."""
    for step in range(comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        for length in (0, 1, 1001, LARGE):
            x = values("float32", length, comm.rank, 63)
            wanted = values("float32", length, source, 63)
            received = comm.sendrecv(x, to, source)
            assert_same(received, wanted, f"sendrecv of {length} elements, {step} ranks on")
            out = np.zeros(length, np.float32)
            assert comm.sendrecv(x, to, source, out=out, tag=5) is out
            assert_same(out, wanted, f"sendrecv of {length} elements into out")
        uneven = comm.sendrecv(values("int64", 100 * comm.rank, comm.rank, 64), to, source)
        assert_same(uneven, values("int64", 100 * source, source, 64), "sendrecv of other lengths")


@on_each_rank([{"how": how} for how in ("at once", "later", "behind a message")], at_least=2)
def check_sendrecv_in_place(comm: Communicator, how: str) -> None:
    """Check that sendrecv sends the old values of ``x`` if ``out`` is ``x`` or overlaps it."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(8):
        for length in (3, 5000, 100_000):
            shift = length // 3 * (turn % 3)
            memory = values("float64", length + shift, comm.rank, 69 + turn)
            wanted = values("float64", length + shift, left, 69 + turn)[:length]
            x = memory[:length]
            out = x if shift == 0 else memory[shift:]
            before = None
            if how == "behind a message":
                before = comm.sendrecv(np.full(length, comm.rank), right, left, async_op=True)
            found = comm.sendrecv(x, right, left, out=out, async_op=how == "later")
            if how == "later":
                found.wait()
            if before is not None:
                assert_same(before.wait(), np.full(length, left), f"the message before, {length}")
            assert_same(out, wanted, f"{length} elements, {shift} apart, {how}")


@on_each_rank(at_least=2)
def check_sendrecv_with_nobody(comm: Communicator) -> None:
    """Check sendrecv along a line of ranks that ends in NULL: rows arrive, and no rank waits."""
    before = comm.rank - 1 if comm.rank else NULL
    after = comm.rank + 1 if comm.rank + 1 < comm.size else NULL
    for length in (1, 1001, LARGE):
        for to, source in ((after, before), (before, after)):
            x = values("float32", length, comm.rank, 68)
            wanted = None if source == NULL else values("float32", length, source, 68)
            what = f"{length} elements from {source}"
            found = comm.sendrecv(x, to, source)
            if wanted is None:
                assert found is None, f"sendrecv from nobody returned {found!r}"
                wanted = np.zeros(length, np.float32)
            else:
                assert_same(found, wanted, f"sendrecv of {what}")
            out = np.zeros(length, np.float32)
            assert comm.sendrecv(x, to, source, out=out, tag=3) is out
            assert_same(out, wanted, f"sendrecv of {what} into out")
            out = np.zeros(length, np.float32)
            work = comm.sendrecv(x, to, source, out=out, async_op=True)
            assert work.wait() is out
            assert_same(out, wanted, f"sendrecv of {what} in the background")


@on_each_rank(transport=False)
def check_messages_with_nobody(comm: Communicator) -> None:
    """Check that a send to NULL returns at once, and a receive leaves ``out`` unchanged."""
    x, out, status = np.ones(3), np.arange(3.0), Status()
    of_numpy: Any = np.int64(NULL)
    assert comm.send(x, NULL) is None
    assert comm.send({"x": [x]}, of_numpy) is None
    assert comm.send(x, NULL, async_op=True).wait() is None
    assert comm.recv(out, NULL, status=status) is out
    assert status.source == NULL, f"{status} of nobody's message"
    assert comm.recv(None, NULL) is None
    assert comm.recv(out, NULL, async_op=True).wait() is out
    assert comm.sendrecv(x, NULL, NULL, out=out) is out
    assert comm.sendrecv(x, NULL, NULL, out=out, async_op=True).wait() is out
    assert_same(out, np.arange(3.0), "out of a receive from NULL")
    comm.send_object("x", NULL)
    assert comm.recv_object(NULL) is None


@on_each_rank(at_least=2, needs=_needs_any_source)
def check_any_source(comm: Communicator) -> None:
    """Check that ANY_SOURCE receives the messages of all ranks, each once and complete."""
    for length in (2, 60_000):
        if comm.rank:
            time.sleep(0.005 * (comm.size - comm.rank))
            for turn in range(3):
                comm.send(np.full(length, 10 * comm.rank + turn), 0, tag=3)
        else:
            seen: dict[int, int] = {}
            for _ in range(3 * (comm.size - 1)):
                status = Status()
                message = comm.recv(None, ANY_SOURCE, tag=3, status=status)
                source, turn = divmod(int(message[0]), 10)
                assert status.source == source, f"{status} of a message of rank {source}"
                assert_same(message, np.full(length, message[0]), f"a message of rank {source}")
                assert turn == seen.get(source, 0), f"rank {source}'s message {turn} came early"
                seen[source] = turn + 1
            assert seen == dict.fromkeys(range(1, comm.size), 3), f"messages by source: {seen}"
        comm.barrier()


@on_each_rank(at_least=2)
def check_send_structures(comm: Communicator) -> None:
    """Check that a nested structure is one message."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def tree(rank: int) -> dict[str, object]:
        return {
            "a": values("float32", 9, rank, 65),
            "b": (values("int8", (2, 3), rank, 66), [values("bool", 5, rank, 67)]),
        }

    def hold(found: dict[str, object], how: str) -> None:
        wanted = tree(left)
        assert type(found["b"]) is tuple, f"{how}: {type(found['b'])} for a tuple"
        assert_same(found["a"], wanted["a"], f"leaf a {how}")
        assert_same(found["b"][0], wanted["b"][0], f"leaf b[0] {how}")  # type: ignore[index]
        assert_same(found["b"][1][0], wanted["b"][1][0], f"leaf b[1] {how}")  # type: ignore[index]

    work = comm.send(tree(comm.rank), right, async_op=True)
    hold(comm.recv(None, left), "of a structure")
    work.wait()
    work = comm.send(tree(comm.rank), right, async_op=True)
    out = tree(comm.rank)
    assert comm.recv(out, left) is out
    hold(out, "of a structure into out")
    work.wait()


@on_each_rank(at_least=2, needs=needs_torch, own_arrays=True)
def check_send_between_frameworks(comm: Communicator) -> None:
    """Check that a PyTorch rank can send to a NumPy rank and back."""
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    if comm.rank == 1:
        torch = importlib.import_module("torch")
        comm.send(torch.from_numpy(numbers).T, 0)
        back = comm.recv(None, 0, like="torch")
        assert isinstance(back, torch.Tensor), f"like='torch' gave {type(back)}"
        assert_same(back, numbers + 1, "NumPy's answer")
        both = comm.sendrecv(back, 0, 0)
        assert isinstance(both, torch.Tensor), f"sendrecv of a tensor gave {type(both)}"
    elif comm.rank == 0:
        found = comm.recv(None, 1)
        assert isinstance(found, np.ndarray), f"recv(None) gave {type(found)}"
        assert_same(found, numbers.T, "PyTorch's message")
        comm.send(found.T + 1, 1)
        both = comm.sendrecv(found, 1, 1)
        assert isinstance(both, np.ndarray), f"sendrecv of an array gave {type(both)}"
        assert_same(both, numbers + 1, "PyTorch's half of the exchange")
