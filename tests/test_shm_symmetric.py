"""Calls on symmetric memory of shm, which are made in place from 24 KiB up."""

from __future__ import annotations

import numpy as np
import pytest
from shm_ranks import shm  # noqa: F401

import collective
from collective.contract.world import World
from collective.errors import CollectiveError, MismatchError
from collective.memory.arrays import adapter_of
from collective.start.file_store import FileStore

# Above the size from which symmetric memory is read in place, and not a multiple of the sizes.
N = 20_011


def _put(array, values) -> None:
    array[:] = values


def _expected(rank: int, size: int, step: int, count: int = N) -> dict:
    inputs = [np.arange(count) % 97 + 10 * r + step for r in range(size)]
    cut = np.array_split(np.arange(count), size)
    pieces = [np.array_split(x, size) for x in inputs]
    return {
        "all_reduce": sum(inputs),
        "broadcast": inputs[size - 1],
        "all_gather": np.concatenate(inputs),
        "reduce_scatter": sum(inputs)[cut[rank]],
        "all_to_all": np.concatenate([p[rank] for p in pieces]),
    }


def _call(comm, name: str, x, out):
    options = {"root": comm.size - 1} if name == "broadcast" else {}
    return getattr(comm, name)(x, out=out, **options)


def _buffers(comm, name: str, count: int = N):
    """Return symmetric views for input and output; the same one where it works in place."""
    x = comm.empty(count + 64)[:count]
    if name in ("all_reduce", "broadcast"):
        return x, x
    length = len(_expected(comm.rank, comm.size, 0, count)[name])
    return x, comm.empty(comm.size * count)[:length]


def changing_data(comm, name: str) -> None:
    x, out = _buffers(comm, name)
    for step in range(5):
        _put(x, np.arange(N) % 97 + 10 * comm.rank + step)
        _call(comm, name, x, out)
        np.testing.assert_array_equal(out, _expected(comm.rank, comm.size, step)[name])


NAMES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_calls_in_place(shm, size, name):  # noqa: F811
    shm(size, changing_data, name)


def even_pieces(comm) -> None:
    count = comm.size * 8_000
    x, out = comm.empty(count + 8)[:count], comm.empty(count + 8)[:count]
    for step in range(3):
        _put(x, np.arange(count) % 97 + 10 * comm.rank + step)
        comm.all_to_all(x, out=out)
        expected = _expected(comm.rank, comm.size, step, count)["all_to_all"]
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_to_all_of_even_pieces(shm, size):  # noqa: F811
    shm(size, even_pieces)


def other_places(comm, kind: str) -> None:
    """Corresponding places, then others on one rank, then corresponding ones again."""
    memory = comm.empty(3 * N)
    same = memory[:N]
    odd = {
        "ordinary": np.zeros(2 * N, np.float32)[5 : N + 5],
        "other_offset": memory[N + comm.rank * 128 : 2 * N + comm.rank * 128],
        "other_view": memory[:N],
    }[kind]
    for step in range(9):
        odd_step = step % 3 == 1 and comm.rank == comm.size - 1
        x = odd if odd_step else same
        x[:] = comm.rank * 7 + step
        comm.all_reduce(x, out=x)
        assert (x == sum(r * 7 + step for r in range(comm.size))).all(), (kind, step)
        gathered = np.empty(comm.size * N, np.float32)[:]
        comm.all_gather(x, out=gathered)
        assert (gathered == x[0]).all(), (kind, step)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["ordinary", "other_offset", "other_view"])
def test_ranks_may_give_memory_of_different_kinds(shm, size, kind):  # noqa: F811
    shm(size, other_places, kind)


def in_place_gather(comm) -> None:
    full = comm.empty(comm.size * N)
    mine = full[comm.rank * N : (comm.rank + 1) * N]
    for step in range(4):
        full[:] = -1
        mine[:] = comm.rank + step
        comm.barrier()
        comm.all_gather(mine, out=full)
        expected = np.repeat(np.arange(comm.size) + step, N)
        np.testing.assert_array_equal(full, expected)
        comm.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_all_gather_from_its_own_part_of_the_output(shm, size):  # noqa: F811
    shm(size, in_place_gather)


def uneven_after_even(comm) -> None:
    x, out = comm.empty(N)[:], comm.empty(comm.size * N)[:]
    x[:] = comm.rank
    for _ in range(2):
        comm.all_gather(x, out=out)
    short = np.full(N - 1, comm.rank, np.float32)
    if comm.rank == 0:  # the same arrays as before, but the others' are shorter
        with pytest.raises(collective.ShapeError):
            comm.all_gather(x, out=out)
    else:
        got = comm.all_gather(short)
        assert got.shape == (comm.size * N - comm.size + 1,)
    comm.all_gather(x, out=out)
    np.testing.assert_array_equal(out, np.repeat(np.arange(comm.size), N))


@pytest.mark.parametrize("size", [2, 3])
def test_uneven_lengths_after_even_ones_with_the_same_arrays(shm, size):  # noqa: F811
    shm(size, uneven_after_even)


def after_a_mismatch(comm) -> None:
    x = comm.empty(N)[:]
    for step in range(6):
        x[:] = comm.rank + 1
        if step % 2:
            with pytest.raises(MismatchError, match="all_reduce"):
                comm.all_reduce(x, op="max" if comm.rank else "sum", out=x)
            assert (x == comm.rank + 1).all(), "a refused call wrote to its output"
        comm.all_reduce(x, out=x)
        assert (x == sum(r + 1 for r in range(comm.size))).all(), step


@pytest.mark.parametrize("size", [2, 3])
def test_calls_go_on_after_a_mismatch(shm, size):  # noqa: F811
    shm(size, after_a_mismatch)


def scaled_ops(comm) -> None:
    x = comm.empty(N, "float16")[:]
    for step in range(3):
        x[:] = comm.rank + step
        comm.all_reduce(x, op="avg", out=x)
        mean = np.mean([r + step for r in range(comm.size)])
        np.testing.assert_allclose(x, mean, rtol=2e-3)
        x[:] = comm.rank + 1
        comm.all_reduce(x, op=collective.premul_sum(comm.rank + step), out=x)
        np.testing.assert_allclose(x, sum((r + 1) * (r + step) for r in range(comm.size)))


@pytest.mark.parametrize("size", [2, 3])
def test_averages_and_factors(shm, size):  # noqa: F811
    shm(size, scaled_ops)


def many_calls(comm) -> str:
    for length in range(1, 151):
        x = np.full(length, comm.rank, np.int64)
        assert (comm.all_reduce(x) == sum(range(comm.size))).all(), length
    if comm.rank == 0:
        try:
            comm.barrier(timeout=0.3)
        except CollectiveError as error:  # the other has left, or does not come
            return str(error)
    return ""


def test_the_table_of_last_calls_holds_the_last_of_many(shm):  # noqa: F811
    text, _ = shm(2, many_calls)
    assert "all_reduce(int64[150]" in text


def test_tensors_in_symmetric_memory_are_known_as_such(tmp_path):
    torch = pytest.importorskip("torch")
    world = World(0, 1, 0, 1, "here", "none", "job", FileStore(tmp_path / "store"))
    with collective.connect(world, "shm") as comm:
        for number, dtype in enumerate(("float32", "bfloat16"), 1):
            tensor = comm.empty(N, dtype, like="torch")
            assert comm._backend._heap.locate(_flat(tensor))[:2] == (number, 0), dtype
            assert comm._backend._heap.locate(_flat(tensor[16:]))[1] > 0, dtype
            assert comm._backend._heap.locate(_flat(torch.ones(N)))[0] == 0


def _flat(tensor):
    return adapter_of(tensor).view(tensor)[0].ravel()
