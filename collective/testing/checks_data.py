"""Checks of memory: results alias nothing, are not stale, and have the caller's framework."""

from __future__ import annotations

import importlib
import itertools
import mmap
import tempfile
from typing import Any

import numpy as np

from collective import Communicator
from collective.inner import Capabilities, Framework

from .checks import Case, on_each_rank, roots
from .kinds import Exporter
from .samples import LARGE, Array, assert_same, expected, has, moved, piece, values

#: A few elements, more than a slot of shared memory holds, and more than a mebibyte.
_COUNTS: list[Case] = [{"count": count} for count in (12, 24_000, LARGE)]


def needs_torch(capabilities: Capabilities) -> str | None:
    """Return why a check of PyTorch's arrays does not apply here, or None if it does."""
    return None if has("torch") else "torch is not installed"


def _every_call(comm: Communicator, x: Array, root: int) -> dict[str, Any]:
    """Return the result of each collective of ``x``; its length is a multiple of ``size``."""
    return {
        "broadcast": comm.broadcast(x, root=root),
        "scatter": comm.scatter(x, root=root),
        "gather": comm.gather(x, root=root),
        "all_gather": comm.all_gather(x),
        "reduce": comm.reduce(x, root=root),
        "all_reduce": comm.all_reduce(x),
        "reduce_scatter": comm.reduce_scatter(x),
        "all_to_all": comm.all_to_all(x),
        "scan": comm.scan(x),
    }


def _wanted(size: int, rank: int, inputs: list[Array], root: int) -> dict[str, Any]:
    total = expected("sum", inputs)
    calls = ("broadcast", "scatter", "gather", "all_gather", "all_to_all")
    wanted = {call: moved(call, inputs.__getitem__, rank, size, root=root) for call in calls}
    return {
        **wanted,
        # The root gets its own array back.
        "broadcast": wanted["broadcast"] if rank != root else None,
        "gather": wanted["gather"] if rank == root else None,
        "reduce": total if rank == root else None,
        "all_reduce": total,
        "reduce_scatter": total[piece(total.shape, rank, size)],
        "scan": expected("sum", inputs[: rank + 1]),
    }


def _hold_all(found: dict[str, Any], wanted: dict[str, Any], when: str) -> None:
    for call, result in wanted.items():
        if result is not None:
            assert_same(found[call], result, f"{call} {when}")


@on_each_rank(_COUNTS, at_least=2)
def check_inputs_untouched(comm: Communicator, count: int) -> None:
    """Check that no call changes its input, here or on a peer."""
    count -= count % comm.size
    for root in {0, comm.size - 1}:
        mine = values("float32", count, comm.rank, 50)
        before = mine.copy()
        _every_call(comm, mine, root)
        comm.barrier()
        assert_same(mine, before, f"the input of {count} elements after every call")


@on_each_rank([{"count": 0}, *_COUNTS], at_least=2, own_arrays=True)
def check_read_only(comm: Communicator, count: int) -> None:
    """Check that every call takes inputs in read-only memory, with elements or without."""
    count -= count % comm.size
    rank, right, left = comm.rank, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    inputs = [values("float32", count, peer, 58) for peer in range(comm.size)]
    mine = _in_read_only_memory(inputs[rank])
    for root in {0, comm.size - 1}:
        what = f"of {count} elements in read-only memory, root={root}"
        _hold_all(_every_call(comm, mine, root), _wanted(comm.size, rank, inputs, root), what)
        found = comm.broadcast(mine if rank == root else None, root=root, like="numpy")
        assert_same(found, inputs[root], f"broadcast, None elsewhere, {what}")
        out = None if rank == root else np.empty_like(mine)
        comm.broadcast(mine if rank == root else out, root=root, out=out)
        if out is not None:
            assert_same(out, inputs[root], f"broadcast to out {what}")
    found = comm.sendrecv(mine, right, left)
    assert_same(found, inputs[left], f"sendrecv of {count} elements in read-only memory")
    if rank == 0:
        comm.send(mine, 1)
    elif rank == 1:
        found = comm.recv(np.empty(count, np.float32), 0)
        assert_same(found, inputs[0], f"send of {count} elements from read-only memory")


def _in_read_only_memory(array: Array) -> Array:
    """Return a copy of ``array`` that neither NumPy nor C can write to."""
    with tempfile.TemporaryFile() as file:
        file.write(array.tobytes() or bytes(1))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, array.dtype, array.size)


@on_each_rank(_COUNTS, at_least=2)
def check_results_alias_nothing(comm: Communicator, count: int) -> None:
    """Check that writing to a result changes no input and no peer's result."""
    count -= count % comm.size
    root = comm.size - 1
    inputs = [values("float32", count, rank, 51) for rank in range(comm.size)]
    mine = inputs[comm.rank].copy()
    wanted = _wanted(comm.size, comm.rank, inputs, root)
    found = _every_call(comm, mine, root)
    if comm.rank == root:
        del found["broadcast"]  # the root's result is its own input
    for victim in range(comm.size):
        comm.barrier()
        if comm.rank == victim:
            for result in found.values():
                if result is not None:
                    result[...] = -99
        comm.barrier()
        assert_same(mine, inputs[comm.rank], f"an input after rank {victim} wrote to its results")
        if comm.rank > victim:
            _hold_all(found, wanted, f"after rank {victim} wrote to its results")


@on_each_rank(at_least=2)
def check_leaves_that_overlap_inputs(comm: Communicator) -> None:
    """Check that, in reductions, a leaf of ``out`` may overlap a leaf of ``x`` of another dtype."""
    count = 12 * comm.size
    every = [
        [values("int32", count, rank, 52), values("int64", count, rank, 53)]
        for rank in range(comm.size)
    ]
    totals = [expected("sum", [leaves[k] for leaves in every]) for k in range(2)]
    pieces = [np.split(total, comm.size)[comm.rank] for total in totals]
    for name, wanted in (("all_reduce", totals), ("reduce_scatter", pieces)):
        memory: Any = np.zeros(3 * count, np.int64)
        x: list[Any] = [memory[:count].view(np.int32)[:count], memory[count : 2 * count]]
        for leaf, array in zip(x, every[comm.rank]):
            leaf[:] = array
        # The first result goes to where the second input is.
        length = wanted[0].size
        out = [memory[count:].view(np.int32)[:length], memory[2 * count :][:length]]
        getattr(comm, name)(x, out=out)
        for k, leaf in enumerate(out):
            assert_same(leaf, wanted[k], f"leaf {k} of {name} to memory of another leaf")


@on_each_rank(at_least=2)
def check_empty_out_inside_x(comm: Communicator) -> None:
    """Check that ``out`` of an empty piece may be an empty view of the input, async_op or not."""
    x = np.arange(comm.size - 1, dtype=np.int32)  # the last rank's piece is empty
    empty = comm.rank == comm.size - 1
    for later in (False, True):
        for name in ("reduce_scatter", "all_to_all"):
            mine = x.copy()
            size = 0 if empty else comm.size if name == "all_to_all" else 1
            out = mine[:0] if empty else np.zeros(size, np.int32)
            found = getattr(comm, name)(mine, out=out, async_op=later)
            found = found.wait() if later else found
            wanted = np.full(size, comm.rank * (comm.size if name == "reduce_scatter" else 1))
            assert_same(found, wanted.astype(np.int32), f"{name} of a piece each")
            assert_same(mine, x, f"the input of {name}")


@on_each_rank(roots)
def check_whole_axis_in_place(comm: Communicator, root: int) -> None:
    """Check that ``out`` may lie over ``x`` if one rank has the whole axis, for every axis."""
    shape = (5, 2, 3)
    inputs = [values("int32", shape, rank, 59) for rank in range(comm.size)]
    views = {"x": lambda x: x, "a view": lambda x: x[:], "x.T": lambda x: x.reshape(3, 2, 5).T}
    calls = ("reduce_scatter", "scatter", "gather", "all_gather")
    for axis, (name, over), call in itertools.product(range(3), views.items(), calls):
        counts = [shape[axis] * (rank == root) for rank in range(comm.size)]
        part = piece(shape, comm.rank, comm.size, axis, counts)
        joins = call in ("gather", "all_gather")
        x = inputs[comm.rank][part if joins else ...].copy()
        wanted = expected("sum", inputs) if call == "reduce_scatter" else inputs[root]
        wanted = wanted if joins else wanted[part]
        out = over(x) if comm.rank == root else np.empty(wanted.shape, np.int32)
        options = {"root": root} if call in ("scatter", "gather") else {}
        found = getattr(comm, call)(x, out=out, axis=axis, counts=counts, **options)
        if found is not None:
            assert_same(found, wanted, f"{call} of all of axis {axis} to {name}, root={root}")


@on_each_rank([{"count": 12}, {"count": 24_000}])
def check_repeated(comm: Communicator, count: int) -> None:
    """Check that calls that repeat with other data give the results of that data each time."""
    count -= count % comm.size
    turns = 50 if count < 1000 else 8
    mine = np.empty(count, np.float32)
    for turn in range(turns):
        inputs = [values("float32", count, rank, 100 + turn) for rank in range(comm.size)]
        mine[:] = inputs[comm.rank]
        root = turn % comm.size
        found = _every_call(comm, mine, root)
        # The caller owns the input again: the transport must have read it by now.
        mine[:] = 77
        _hold_all(found, _wanted(comm.size, comm.rank, inputs, root), f"in turn {turn}")


@on_each_rank(at_least=2)
def check_sender_may_overwrite(comm: Communicator) -> None:
    """Check that a rank may change its input once its call has returned, whatever peers do."""
    for turn, count in enumerate((1, 100, 9000, 120_000) * 3):
        root = turn % comm.size
        mine = np.full(count, turn, np.int64)
        found = comm.broadcast(mine, root=root)
        if comm.rank == root:
            mine[:] = -1
        else:
            assert_same(found, np.full(count, turn, np.int64), f"broadcast of {count} in a row")
        piece = np.full(count * comm.size, turn + comm.rank, np.int64)
        found = comm.all_gather(piece[:count])
        piece[:] = -1
        wanted = np.repeat(np.arange(comm.size) + turn, count)
        assert_same(found, wanted, f"all_gather of {count} in a row")


def _structure(size: int, rank: int) -> dict[str, Any]:
    return {
        "w": values("float32", (2 * size, 3), rank, 52),
        "b": [values("float64", size, rank, 53), (values("int32", 3 * size, rank, 54),)],
        "empty": values("float32", 0, rank, 55),
    }


def _leaves(tree: dict[str, Any]) -> list[Array]:
    return [tree["w"], tree["b"][0], tree["b"][1][0], tree["empty"]]


@on_each_rank()
def check_structures(comm: Communicator) -> None:
    """Check that nested lists, tuples and dicts of several dtypes go through every call."""
    size, rank, root = comm.size, comm.rank, comm.size - 1
    trees = [_structure(size, r) for r in range(size)]
    mine = trees[rank]
    inputs = [[_leaves(tree)[k] for tree in trees] for k in range(4)]
    found = _every_call(comm, mine, root)  # type: ignore[arg-type]
    for call in found:
        if found[call] is None:
            continue
        if type(found[call]) is not dict or list(found[call]) != list(mine):
            raise AssertionError(f"{call} of a structure: {found[call]!r} is nested otherwise")
        if type(found[call]["b"][1]) is not tuple:
            raise AssertionError(f"{call} of a structure: a tuple became {found[call]['b'][1]!r}")
        for k, leaf in enumerate(_leaves(found[call])):
            wanted = _wanted(size, rank, inputs[k], root)[call]
            if wanted is not None:
                assert_same(leaf, wanted, f"leaf {k} of {call} of a structure")
    out = _structure(size, rank)
    comm.all_reduce(out, out=out)
    for k, leaf in enumerate(_leaves(out)):
        assert_same(leaf, expected("sum", inputs[k]), f"leaf {k} of all_reduce in place")
    # A rank that passes None gets the whole structure, small or large. Other ranks may pass the
    # structure in the same call.
    for large in (0, 40_000):
        whole = {**trees[root], "w": values("float32", (2 * size + large, 3), root, 52)}
        for knowing in ([root], [root, 0]):
            given = whole if rank in knowing else None
            taken = comm.broadcast(given, root=root, like=whole["w"])
            keys = list(whole) if rank in knowing else sorted(whole)
            assert list(taken) == keys, f"broadcast, None on all but {knowing}: {list(taken)}"
            for k, leaf in enumerate(_leaves(taken)):
                assert_same(leaf, _leaves(whole)[k], f"leaf {k} of a broadcast, None elsewhere")


@on_each_rank(at_least=2, needs=needs_torch, own_arrays=True)
def check_frameworks(comm: Communicator) -> None:
    """Check that PyTorch and NumPy ranks share a call, and each gets arrays of its own kind."""
    # Only odd ranks import PyTorch, which takes seconds.
    torch = importlib.import_module("torch") if comm.rank % 2 else None
    kind = np.ndarray if torch is None else torch.Tensor
    count = 6 * comm.size
    inputs = [values("float32", count, rank, 56) for rank in range(comm.size)]
    mine: Any = inputs[comm.rank].copy()
    mine = mine if torch is None else torch.from_numpy(mine)
    found = _every_call(comm, mine, 0)
    wanted = _wanted(comm.size, comm.rank, inputs, 0)
    for call, result in found.items():
        if wanted[call] is not None:
            assert isinstance(result, kind), f"{call}: {type(result)} on a rank of {kind}"
            assert_same(result, wanted[call], f"{call} of PyTorch and NumPy")
    like: Framework = "numpy" if torch is None else "torch"
    taken = comm.broadcast(inputs[0] if comm.rank == 0 else None, root=0, like=like)
    assert isinstance(taken, kind), f"broadcast(None, like={like!r}) gave {type(taken)}"
    x = comm.empty((3, 4), like=like)
    assert isinstance(x, kind), f"empty(like={like!r}) gave {type(x)}"
    x[...] = comm.rank
    comm.all_reduce(x, out=x)
    total = np.full((3, 4), sum(range(comm.size)), np.float32)
    assert_same(x, total, "all_reduce of empty() of PyTorch and NumPy")


@on_each_rank(at_least=2, needs=needs_torch, own_arrays=True)
def check_torch_bfloat16(comm: Communicator) -> None:
    """Check that PyTorch's bfloat16, which NumPy does not have, can be moved and folded."""
    pair = comm.split(comm.rank // 2 if comm.rank < 2 else None)
    if pair is None or "bfloat16" not in comm.capabilities.dtypes:
        return
    torch = importlib.import_module("torch")
    whole = torch.arange(40, dtype=torch.bfloat16)
    strided = (whole * (comm.rank + 1))[::2]
    total = pair.all_reduce(strided)
    assert total.dtype is torch.bfloat16, f"all_reduce of bfloat16 gave {total.dtype}"
    assert_same(total, whole[::2] * 3, "all_reduce of strided bfloat16")
    assert_same(pair.broadcast(strided, root=1), (whole * 2)[::2], "broadcast of bfloat16")
    x = pair.empty((4, 4), torch.bfloat16, like="torch")
    assert x.dtype is torch.bfloat16, f"empty: {x.dtype}"
    x.fill_(comm.rank + 1)
    pair.all_reduce(x, out=x)
    assert_same(x, torch.full((4, 4), 3, dtype=torch.bfloat16), "all_reduce of empty() in bfloat16")
    pair.close()


@on_each_rank(own_arrays=True)
def check_dlpack(comm: Communicator) -> None:
    """Check that any CPU array with the DLPack protocol is accepted."""
    inputs = [values("float32", 6 * comm.size, rank, 57) for rank in range(comm.size)]
    foreign: Any = Exporter(inputs[comm.rank].copy())
    found = _every_call(comm, foreign, 0)
    wanted = _wanted(comm.size, comm.rank, inputs, 0)
    _hold_all(found, wanted, "of a DLPack exporter")
