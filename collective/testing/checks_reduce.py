"""Checks of the calls that compute: every op on every dtype, size, layout and root."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective import Communicator, ReduceOp, premul_sum
from collective.inner import Capabilities, Op

from .checks import Case, on_each_rank, roots
from .samples import (
    LARGE,
    LAYOUTS,
    OPS,
    SHAPES,
    Array,
    assert_bits,
    assert_close,
    assert_same,
    dtypes_at,
    dtypes_of,
    expected,
    extreme,
    laid_out,
    of_bits,
    pieces,
    plain,
    regions,
    special_bits,
    values,
)

_BY_OP: list[Case] = [{"op": op} for op in OPS]
_LARGE: list[Case] = [
    {"op": op, "dtype": dtype}
    for op, dtype in (
        ("sum", "float32"), ("max", "float64"), ("bxor", "uint8"), ("avg", "complex64"),
        ("sum", "int16"),
    )
]  # fmt: skip
#: Tolerance for the rounding of a division, in dtypes of few bits.
_ROUNDING = {"float16": 4e-3, "bfloat16": 2e-2}
_BY_LAYOUT: list[Case] = [{"layout": layout} for layout in LAYOUTS]


def _hold(found: Any, op: Op, inputs: list[Any], dtype: str, what: str, part: Any = ...) -> None:
    """Check a result: bit by bit, or within a tolerance for ``avg``, whose division rounds."""
    if str(found.dtype).rpartition(".")[2] != dtype:
        raise AssertionError(f"{what}: dtype {found.dtype}; expected {dtype}")
    found = plain(found)
    wanted = expected(op, inputs)[part].astype(found.dtype)
    if op == "avg":
        assert_close(found, wanted, what, _ROUNDING.get(dtype, 1e-6))
    else:
        assert_same(found, wanted, what)


def hold_fold(
    comm: Communicator, op: Op | ReduceOp, mine: Any, total: Array, first: Array, what: str
) -> None:
    """Check the bits of a fold by all calls that fold.

    Args:
        mine: this rank's array, which is overwritten.
        total: bits of the fold of all ranks.
        first: bits of the fold of the ranks up to this one.
        what: the operator and the array, for error texts.
    """
    assert_bits(comm.all_reduce(mine, op=op), total, f"all_reduce{what}")
    found = comm.all_reduce(mine, op=op, order="rank")
    assert_bits(found, total, f"all_reduce{what} in rank order")
    for root in {0, comm.size - 1}:
        reduced = comm.reduce(mine, op=op, root=root)
        if comm.rank == root:
            assert_bits(reduced, total, f"reduce{what} to {root}")
    part = regions(total.size, comm.size)[comm.rank]
    assert_bits(comm.reduce_scatter(mine, op=op), total[part], f"reduce_scatter{what}")
    assert_bits(comm.scan(mine, op=op), first, f"scan{what}")
    comm.all_reduce(mine, op=op, out=mine)
    assert_bits(mine, total, f"all_reduce{what} in place")


def _can(comm: Communicator, op: Op) -> list[str]:
    known = comm.capabilities
    return dtypes_of(known.dtypes, OPS[op]) if op in known.ops else []


@on_each_rank(_BY_OP)
def check_all_reduce(comm: Communicator, op: Op) -> None:
    """Check that all_reduce folds all ranks' elements: every dtype; 0, 1 or odd numbers of them."""
    for dtype in _can(comm, op):
        for shape in SHAPES:
            inputs = [values(dtype, shape, rank, 1, op) for rank in range(comm.size)]
            found = comm.all_reduce(inputs[comm.rank], op=op)
            _hold(found, op, inputs, dtype, f"all_reduce({op}) of {dtype}{list(shape)}")


@on_each_rank(_LARGE)
def check_all_reduce_large(comm: Communicator, op: Op, dtype: str) -> None:
    """Check all_reduce of over a mebibyte, also in place, of a length that no piece divides."""
    if dtype not in _can(comm, op):
        return
    count = LARGE * 4 // np.dtype(dtype).itemsize + comm.size - 1
    inputs = [values(dtype, count, rank, 2, op) for rank in range(comm.size)]
    mine = inputs[comm.rank].copy()
    what = f"all_reduce({op}) of {dtype}[{count}]"
    _hold(comm.all_reduce(mine, op=op), op, inputs, dtype, what)
    assert_same(mine, inputs[comm.rank], f"the input of {what}")
    result = comm.all_reduce(mine, op=op, out=mine)
    assert result is mine, f"{what}: out= is not what was returned"
    _hold(mine, op, inputs, dtype, f"{what} in place")


@on_each_rank(_BY_LAYOUT)
def check_reductions_of_layouts(comm: Communicator, layout: str) -> None:
    """Check reductions of arrays that are not contiguous, to such arrays, and in place."""
    shape = (6 * comm.size, 5)
    inputs = [values("float32", shape, rank, 3) for rank in range(comm.size)]
    total = expected("sum", inputs)
    mine = laid_out(layout, inputs[comm.rank])
    what = f"of a {layout} array"
    assert_same(comm.all_reduce(mine), total, f"all_reduce {what}")
    out = laid_out(layout, np.zeros(shape, np.float32))
    assert comm.all_reduce(mine, out=out) is out
    assert_same(out, total, f"all_reduce {what} to one")
    reduced = comm.reduce(mine, root=comm.size - 1)
    if comm.rank == comm.size - 1:
        assert_same(reduced, total, f"reduce {what}")
    piece = laid_out(layout, np.zeros((6, 5), np.float32))
    comm.reduce_scatter(mine, out=piece)
    assert_same(piece, np.split(total, comm.size)[comm.rank], f"reduce_scatter {what} to one")
    scanned = comm.scan(mine)
    assert_same(scanned, expected("sum", inputs[: comm.rank + 1]), f"scan {what}")
    assert_same(mine, inputs[comm.rank], f"the input, {layout}")
    comm.all_reduce(mine, out=mine)
    assert_same(mine, total, f"all_reduce {what} in place")
    # NumPy counts one element as contiguous, whatever its stride.
    one = comm.all_reduce(laid_out(layout, np.ones(1, np.int8)))
    assert_same(one, np.full(1, comm.size, np.int8), f"all_reduce of one element, {layout}")
    row = np.broadcast_to(values("float32", 5, comm.rank, 4), shape)
    rows = [np.broadcast_to(values("float32", 5, rank, 4), shape) for rank in range(comm.size)]
    assert_same(comm.all_reduce(row), expected("sum", rows), "all_reduce of an expanded array")


@on_each_rank()
def check_all_reduce_in_place(comm: Communicator) -> None:
    """Check all_reduce(x, out=x) of every dtype, and of overlapping parts of one array."""
    for dtype in _can(comm, "sum"):
        for count in (0, 1, 13, 9001):
            inputs = [values(dtype, count, rank, 5) for rank in range(comm.size)]
            mine = inputs[comm.rank] + values(dtype, count, 0, 6) * 0
            comm.all_reduce(mine, out=mine)
            _hold(mine, "sum", inputs, dtype, f"all_reduce of {dtype}[{count}] in place")
    inputs = [values("float64", 100, rank, 7) for rank in range(comm.size)]
    mine = inputs[comm.rank].copy()
    comm.all_reduce(mine[:90], out=mine[10:])
    total = expected("sum", [array[:90] for array in inputs])
    assert_same(mine[10:], total, "all_reduce to memory that overlaps its input")


@on_each_rank(roots)
def check_reduce(comm: Communicator, root: int) -> None:
    """Check that a reduce gives the root the fold and the other ranks None: every op and size.

    Each dtype is reduced to some root, not to every root.
    """
    for op in OPS:
        for dtype in dtypes_at(root, comm, _can(comm, op)):
            for shape in ((0,), (), (7,), (1001,)):
                inputs = [values(dtype, shape, rank, 8, op) for rank in range(comm.size)]
                found = comm.reduce(inputs[comm.rank], root=root, op=op)
                what = f"reduce({op}, root={root}) of {dtype}{list(shape)}"
                if comm.rank == root:
                    _hold(found, op, inputs, dtype, what)
                else:
                    assert found is None, f"{what}: rank {comm.rank} got {found!r}"


@on_each_rank(roots)
def check_reduce_large(comm: Communicator, root: int) -> None:
    """Check that a reduce of over a mebibyte, also in place at the root, keeps the inputs."""
    inputs = [values("float32", LARGE, rank, 9) for rank in range(comm.size)]
    total = expected("sum", inputs)
    mine = inputs[comm.rank].copy()
    found = comm.reduce(mine, root=root)
    assert_same(mine, inputs[comm.rank], "the input of a large reduce")
    if comm.rank == root:
        assert_same(found, total, "a large reduce")
    found = comm.reduce(mine, root=root, out=mine)
    if comm.rank == root:
        assert_same(mine, total, "a large reduce in place")
    else:
        assert_same(mine, inputs[comm.rank], "the input of a large reduce, off the root")


@on_each_rank(_BY_OP)
def check_reduce_scatter(comm: Communicator, op: Op) -> None:
    """Check that reduce_scatter gives each rank its piece of the fold, cut as by array_split."""
    for dtype in _can(comm, op):
        for shape in ((0,), (1,), (4 * comm.size,), (4 * comm.size + 1, 3), (1001,)):
            inputs = [values(dtype, shape, rank, 10, op) for rank in range(comm.size)]
            found = comm.reduce_scatter(inputs[comm.rank], op=op)
            part = list(regions(shape[0], comm.size))[comm.rank]
            what = f"reduce_scatter({op}) of {dtype}{list(shape)}"
            _hold(found, op, inputs, dtype, what, part)


@on_each_rank()
def check_reduce_scatter_counts(comm: Communicator) -> None:
    """Check reduce_scatter by counts, along another axis, and of more than a mebibyte."""
    counts = [(3 * rank) % 5 for rank in range(comm.size)]
    mine = pieces(counts)[comm.rank]
    inputs = [values("int32", (sum(counts), 3), rank, 11) for rank in range(comm.size)]
    total = expected("sum", inputs)
    found = comm.reduce_scatter(inputs[comm.rank], counts=counts)
    assert_same(found, total[mine], f"reduce_scatter with counts {counts}")
    turned = np.ascontiguousarray(inputs[comm.rank].T)
    found = comm.reduce_scatter(turned, counts=counts, axis=1)
    assert_same(found, total.T[:, mine], f"reduce_scatter with counts {counts} along axis 1")
    found = comm.reduce_scatter(turned, counts=counts, axis=-1)
    assert_same(found, total.T[:, mine], f"reduce_scatter with counts {counts} along axis -1")
    large = [values("float32", LARGE, rank, 12) for rank in range(comm.size)]
    found = comm.reduce_scatter(large[comm.rank])
    part = list(regions(LARGE, comm.size))[comm.rank]
    assert_same(found, expected("sum", large)[part], "a large reduce_scatter")


@on_each_rank()
def check_scan(comm: Communicator) -> None:
    """Check that a scan gives each rank the fold of the ranks up to it: every op and dtype."""
    for op in OPS:
        if op == "avg":
            continue
        for dtype in _can(comm, op):
            for shape in ((0,), (), (7,), (3, 5)):
                inputs = [values(dtype, shape, rank, 13, op) for rank in range(comm.rank + 1)]
                found = comm.scan(inputs[-1], op=op)
                _hold(found, op, inputs, dtype, f"scan({op}) of {dtype}{list(shape)}")
    inputs = [values("float32", LARGE, rank, 14) for rank in range(comm.rank + 1)]
    mine = inputs[-1].copy()
    assert_same(comm.scan(mine), expected("sum", inputs), "a large scan")
    comm.scan(mine, out=mine)
    assert_same(mine, expected("sum", inputs), "a large scan in place")


@on_each_rank()
def check_premul_sum(comm: Communicator) -> None:
    """Check that premul_sum multiplies by each rank's own factor before it sums, in every call."""
    if "premul_sum" not in comm.capabilities.ops:
        return
    op, root = premul_sum(0.5 * (comm.rank + 1)), comm.size - 1
    for dtype in dtypes_of(comm.capabilities.dtypes, "fc"):
        inputs = [values(dtype, 77, rank, 15) for rank in range(comm.size)]
        mine = inputs[comm.rank]
        scaled = [plain(x) * (0.5 * (rank + 1)) for rank, x in enumerate(inputs)]
        total = expected("sum", scaled)
        wanted = {
            "all_reduce": (comm.all_reduce(mine, op=op), total),
            "reduce": (comm.reduce(mine, op=op, root=root), total),
            "reduce_scatter": (
                comm.reduce_scatter(mine, op=op), total[regions(77, comm.size)[comm.rank]]
            ),
            "scan": (comm.scan(mine, op=op), expected("sum", scaled[: comm.rank + 1])),
        }  # fmt: skip
        for call, (found, right) in wanted.items():
            if found is not None:
                got = plain(found)
                assert_close(got, right.astype(got.dtype), f"{call}(premul_sum) of {dtype}", 2e-2)


# -- the minimum and maximum of signed zeros and NaN, bit by bit ----------------------------------

# A prime, so that it is not a multiple of any piece that a transport cuts.
_DRAWN = 2003


def _on_the_host(capabilities: Capabilities) -> str | None:
    if "cuda" in capabilities.devices:
        return "folds floats in the memory of GPUs, where zeros and NaN are the library's affair"
    return None


@on_each_rank([{"op": "min"}, {"op": "max"}], needs=_on_the_host)
def check_extremes(comm: Communicator, op: Op) -> None:
    """Check that -0 is less than +0, and that any NaN gives the same NaN, bit by bit."""
    if op not in comm.capabilities.ops:
        return
    for dtype in dtypes_of(comm.capabilities.dtypes, "f"):
        generators = map(np.random.default_rng, range(comm.size))
        every = np.stack([special_bits(random, dtype, _DRAWN) for random in generators])
        for count in (1, _DRAWN, LARGE) if dtype == "float32" else (1, _DRAWN):
            _fold_extremes(comm, op, dtype, every, count)


def _fold_extremes(comm: Communicator, op: Op, dtype: str, every: Array, count: int) -> None:
    """Fold the rows of ``every``, which are the ranks' bits, with every call that folds.

    Args:
        count: number of elements; a longer array than a row repeats the row.
    """
    mine = of_bits(dtype, np.resize(every[comm.rank], count))
    total = np.resize(extreme(op, dtype, every), count)
    first = np.resize(extreme(op, dtype, every[: comm.rank + 1]), count)
    hold_fold(comm, op, mine, total, first, f"({op}) of {dtype}[{count}]")
