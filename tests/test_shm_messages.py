"""Messages over shm, and the collectives that go over messages where memory cannot be read."""

from __future__ import annotations

import numpy as np
import pytest
from shm_ranks import messages, shm  # noqa: F401

import collective
from collective.errors import DtypeError, ShapeError

# Elements of 8 bytes: the few fit a slot of the control segment, the many do not.
SMALL, LARGE = 3, 50_021


def _inputs(size: int, count: int) -> list[np.ndarray]:
    return [np.arange(count, dtype=np.float64) % 89 + 100 * r for r in range(size)]


def all_operations(comm, count: int, symmetric: bool) -> bool:
    size, rank = comm.size, comm.rank
    inputs = _inputs(size, count)
    x = comm.empty(count, "float64") if symmetric else np.empty(count)
    x[:] = inputs[rank]
    total, joined = sum(inputs), np.concatenate(inputs)
    pieces = [np.array_split(array, size) for array in inputs]
    for root in (0, size - 1):
        at_root = rank == root
        found = {
            "broadcast": (comm.broadcast(x if at_root else None, root=root), inputs[root]),
            "broadcast known": (comm.broadcast(x, root=root), inputs[root]),
            "reduce": (comm.reduce(x, root=root), total if at_root else None),
            "scatter": (comm.scatter(x if at_root else None, root=root), pieces[root][rank]),
            "gather": (comm.gather(x, root=root), joined if at_root else None),
        }
        for name, (got, expected) in found.items():
            np.testing.assert_array_equal(got, expected, err_msg=f"{name}, root {root}")
    uneven = np.concatenate([inputs[r][: count - r] for r in range(size)])
    found = {
        "all_reduce": (comm.all_reduce(x), total),
        "all_reduce max": (comm.all_reduce(x, op="max", order="rank"), inputs[-1]),
        "reduce_scatter": (comm.reduce_scatter(x), np.array_split(total, size)[rank]),
        "scan": (comm.scan(x), sum(inputs[: rank + 1])),
        "all_gather": (comm.all_gather(x), joined),
        "all_gather uneven": (comm.all_gather(x[: count - rank]), uneven),
        "all_to_all": (comm.all_to_all(x), np.concatenate([p[rank] for p in pieces])),
    }
    for name, (got, expected) in found.items():
        np.testing.assert_array_equal(got, expected, err_msg=name)
    comm.all_reduce(x, out=x)
    np.testing.assert_array_equal(x, total)
    return comm._backend._single_copy


@pytest.mark.parametrize("symmetric", [False, True], ids=["ordinary", "symmetric"])
@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_operations_without_reading_peers_memory(messages, size, count, symmetric):  # noqa: F811
    assert messages(size, all_operations, count, symmetric) == [False] * size


@pytest.mark.parametrize("symmetric", [False, True], ids=["ordinary", "symmetric"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_operations_with_reading_peers_memory(shm, size, symmetric):  # noqa: F811
    if not all(shm(size, all_operations, LARGE, symmetric)):
        pytest.skip("this system forbids process_vm_readv")


def mixed_memory(comm) -> None:
    """Rank 0 gives symmetric memory, the others ordinary: all have to go the same way."""
    x = comm.empty(LARGE)
    if comm.rank:
        x = np.empty(LARGE, np.float32)
    for step in range(3):
        x[:] = comm.rank + step
        assert (comm.all_reduce(x) == sum(r + step for r in range(comm.size))).all()
        assert (comm.broadcast(x, root=1) == 1 + step).all()
        assert comm.all_gather(x).sum() == LARGE * sum(r + step for r in range(comm.size))


@pytest.mark.parametrize("size", [2, 3])
def test_memory_of_different_kinds_without_reading_peers_memory(messages, size):  # noqa: F811
    messages(size, mixed_memory)


# -- point to point ------------------------------------------------------------------------

LENGTHS = (0, 1, 13, 4_099, 33_000, 300_001)


def other_tags_first(comm) -> None:
    """Messages are asked for in the opposite order of that in which they come."""
    peer = 1 - comm.rank
    arrays = [np.full(n, comm.rank * 100 + tag, np.uint8) for tag, n in enumerate(LENGTHS)]
    works = [comm.send(a, peer, tag=tag, async_op=True) for tag, a in enumerate(arrays)]
    for tag in reversed(range(len(LENGTHS))):
        got = comm.recv(None, peer, tag=tag)
        assert got.shape == (LENGTHS[tag],), tag
        assert (got == peer * 100 + tag).all(), tag
    for work in works:
        work.wait()


def both_directions(comm) -> None:
    peer = 1 - comm.rank
    for step, n in enumerate(LENGTHS * 2):
        x = np.full(n, comm.rank + step, np.int32)
        got = comm.sendrecv(x, peer, peer, tag=step)
        assert got.shape == (n,), step
        assert (got == peer + step).all(), step
        out = np.zeros((n, 2), np.int32)[:, 0]  # strided
        assert comm.sendrecv(x, peer, peer, out=out) is out
        assert (out == peer + step).all(), step


def outstanding(comm) -> None:
    peer = 1 - comm.rank
    arrays = [np.full(20_000 if k % 3 else 7, k + comm.rank, np.int64) for k in range(100)]
    works = [comm.send(a, peer, tag=k % 5, async_op=True) for k, a in enumerate(arrays)]
    for tag in range(5):
        for k in range(tag, 100, 5):
            got = comm.recv(None, peer, tag=tag)
            assert got.shape == arrays[k].shape, k
            assert (got == k + peer).all(), k
    for work in works:
        work.wait()
    comm.barrier()


def any_source(comm) -> list[int]:
    if comm.rank:
        for step in range(10):
            n = 40_000 if step % 4 == 3 else 2
            comm.send(np.full(n, comm.rank * 1000 + step), 0, tag=9)
        return []
    found = [int(comm.recv(None, collective.ANY_SOURCE, tag=9)[0]) for _ in range(20)]
    for source in (1, 2):
        mine = [value % 1000 for value in found if value // 1000 == source]
        assert mine == list(range(10)), f"messages of rank {source} came out of order"
    return sorted(found)


def refused_messages(comm) -> None:
    x = np.arange(6.0)
    if comm.rank == 0:
        for _ in range(3):
            comm.send(x, 1)
        return
    out = np.full(5, -1.0)
    with pytest.raises(ShapeError, match="recv"):
        comm.recv(out, 0)
    with pytest.raises(DtypeError, match="recv"):
        comm.recv(np.zeros(6, np.float32), 0)
    assert (out == -1).all()
    assert (comm.recv(np.zeros(6), 0) == x).all()


def structures(comm) -> None:
    peer = 1 - comm.rank
    tree = {"b": [np.arange(3.0) + comm.rank], "a": np.full((200, 300), comm.rank)}
    got = comm.sendrecv(tree, peer, peer)
    assert (got["a"] == peer).all()
    assert (got["b"][0] == np.arange(3.0) + peer).all()
    assert comm.sendrecv(np.float64(comm.rank), peer, peer).shape == ()


def beside_collectives(comm) -> None:
    """Long messages run in the background while collectives use the same rings."""
    peer = 1 - comm.rank
    works = []
    for k in range(8):
        works.append(comm.send(np.full(LARGE, k + comm.rank), peer, tag=3, async_op=True))
        works.append(comm.recv(None, peer, tag=3, async_op=True))
        x = np.full(LARGE, k + comm.rank)
        assert (comm.all_reduce(x) == 2 * k + 1).all(), k
        assert (comm.all_gather(x)[:LARGE] == k).all(), k
    received = [w.wait() for w in works][1::2]
    assert [int(r[-1]) for r in received] == [k + peer for k in range(8)]


PAIRS = (both_directions, beside_collectives, other_tags_first, outstanding, refused_messages)
PAIRS += (structures,)


@pytest.mark.parametrize("program", PAIRS, ids=lambda program: program.__name__)
def test_messages(shm, program):  # noqa: F811
    shm(2, program)


@pytest.mark.parametrize("program", PAIRS, ids=lambda program: program.__name__)
def test_messages_without_reading_peers_memory(messages, program):  # noqa: F811
    messages(2, program)


def test_any_source_takes_every_message_once_and_in_order(shm):  # noqa: F811
    expected = sorted([1000 + k for k in range(10)] + [2000 + k for k in range(10)])
    assert shm(3, any_source)[0] == expected


def test_any_source_without_reading_peers_memory(messages):  # noqa: F811
    expected = sorted([1000 + k for k in range(10)] + [2000 + k for k in range(10)])
    assert messages(3, any_source)[0] == expected
