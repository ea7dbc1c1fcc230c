"""Calls in C on arrays of a class that never change, as JAX's; a program of test_door.py."""

from __future__ import annotations

import sys

import numpy as np

from collective import native
from collective.errors import MismatchError
from collective.memory import arrays
from collective.memory.dtypes import from_numpy
from collective.testing import RankPool


class Frozen:
    place = "here"

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array if isinstance(self.array, np.ndarray) else 1 / 0


class Adapter(arrays.Adapter):
    immutable = True

    def view(self, x):
        return np.asarray(x.array), from_numpy(np.asarray(x.array).dtype)

    def wrap(self, array, dtype):
        return Frozen(array)


starts = []  # bytes of the results of calls in C, and where they begin in a line of the cache
places = []  # places of the arrays that C has Python read


def read(x):
    places.append(x.place)
    if x.place == "far":
        return None
    return x.array if isinstance(x.array, np.ndarray) else 1 / 0 if x.array == "raise" else None


def wrap(array):
    starts.append((array.nbytes, array.__array_interface__["data"][0] % 64))
    return Frozen(array)


native.see_frozen(Frozen, read, wrap, "place")
arrays.known[Frozen] = Adapter()


def job(comm):
    x = Frozen(np.arange(6, dtype=np.float32).reshape(3, 2))
    results = {
        "all_reduce": comm.all_reduce(x),
        "scan": comm.scan(x),
        "uneven": comm.all_gather(Frozen(x.array[: 1 + comm.rank]), counts=[1, 2]),
        "all_gather": comm.all_gather(x),
        "reduce": comm.reduce(x, root=1),
        "reduce_scatter": comm.reduce_scatter(x),
        "broadcast": comm.broadcast(x, root=0),
        "all_to_all": comm.all_to_all(Frozen(x.array[:2])),
    }
    for name, result in results.items():
        assert type(result) is Frozen or (name == "reduce" and comm.rank == 0), (name, result)
    assert (results["broadcast"] is x) == (comm.rank == 0)
    assert results["all_reduce"].array.tolist() == (2 * x.array).tolist()
    assert results["uneven"].array.shape == (3, 2)
    assert results["all_gather"].array.shape == (6, 2)
    out = np.empty((3, 2), np.float32)
    assert comm.all_reduce(x, out=out) is out
    for wrong, error in (
        (x.array[comm.rank :], MismatchError),
        (None, Exception),
        ("raise", Exception),
    ):
        try:
            comm.all_reduce(Frozen(wrong))
        except error:
            pass
        else:
            raise AssertionError(wrong)
    before = sys.getrefcount(x), sys.getrefcount(x.array), sys.getrefcount(Frozen.place)
    for _ in range(100):
        comm.all_reduce(x)
    after = sys.getrefcount(x), sys.getrefcount(x.array), sys.getrefcount(Frozen.place)
    assert after == before
    places.clear()
    for place in ("here", "there", "there", "far", "far", "there", "here"):
        there = Frozen(x.array)
        there.place = place
        total = comm.all_reduce(there)
        assert total.array.tolist() == (2 * x.array).tolist()
    assert type(comm.all_reduce(Frozen(np.ones(8192)))) is Frozen
    return places, [start for nbytes, start in starts if nbytes > 16 << 10]


if __name__ == "__main__":
    with RankPool(2, "shm") as ranks:
        print(ranks.run(job))
