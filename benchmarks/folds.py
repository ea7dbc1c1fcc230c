"""Measurement of the speed of folds, the local part of reductions: ``python benchmarks/folds.py``.

The folds in C of :mod:`collective.native` and the Python folds with the same results take turns in
one process. The unit is gigabytes of one operand per second. The figure is the fastest turn, since
only other processes can make a turn slower. Three arrays of 64 KiB fit into a second-level cache.
For arrays of 1 KiB, the call takes longer than the fold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective import native
from collective.algorithms import arithmetic
from collective.errors import DtypeError
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import as_op
from collective.tools.bench.alternate import alternate
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, add_sizes, names, print_table, size_name

_OPS = ("sum", "prod", "min", "max", "band", "land")
_DTYPES = ("bool", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64",
           "complex64")  # fmt: skip
_TURN_S = 1e-3


def measure(op: str, dtype: DType, nbytes: int, turns: int) -> dict[str, Any]:
    """Return the bytes per second of both folds of an operator."""
    values = np.random.default_rng(0).standard_normal(nbytes // dtype.itemsize) * 10
    if dtype.name == "bfloat16":
        a = arithmetic.float32_to_bfloat16(values.astype(np.float32))
    else:
        a = values.astype(dtype.storage)
    arrays = [_placed(array, number) for number, array in enumerate((a, a[::-1], a))]
    sides = {"c": arithmetic.fold(as_op(op), dtype), "python": arithmetic.reference(op, dtype)}
    calls = {side: _folding(fold, *arrays) for side, fold in sides.items()}
    with np.errstate(all="ignore"):
        seconds = alternate(None, calls, turns, _TURN_S)
    rates = {side: a.nbytes / min(turns_of_side) for side, turns_of_side in seconds.items()}
    return {"op": op, "dtype": dtype.name, "nbytes": nbytes, **rates}


def _placed(array: Any, number: int) -> Any:
    """Return a copy of ``array`` that begins at a cache line chosen by ``number``.

    Each number has another line within a page. Loads and stores at the same offset in two pages
    wait for each other, so otherwise the figures would depend on the allocator.
    """
    room = np.empty(array.nbytes + 8192, np.uint8)
    start = -room.__array_interface__["data"][0] % 4096 + 1088 * number
    copy: Any = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def _folding(fold: Callable[..., Any], a: Any, b: Any, out: Any) -> Callable[[int], None]:
    """Return a function that folds ``count`` times back to back; a short fold takes 0.1 µs."""

    def several(count: int) -> None:
        for _ in range(count):
            fold(a, b, out=out)

    return several


def _has_meaning(op: str, dtype: DType) -> bool:
    try:
        arithmetic.check(as_op(op), dtype)
    except DtypeError:
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="How fast reductions fold, in C and in Python.")
    parser.add_argument("--ops", type=names, default=_OPS, help="such as sum,max")
    parser.add_argument("--dtypes", type=names, default=_DTYPES, help="such as float16,float32")
    add_sizes(parser, "1K 64K 1M", text="bytes of an operand, such as 64K")
    parser.add_argument("--turns", type=int, default=25)
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)

    def measure_all() -> dict[str, Any]:
        folds = [
            measure(op, BY_NAME[dtype], nbytes, options.turns)
            for op in options.ops
            for dtype in options.dtypes
            if _has_meaning(op, BY_NAME[dtype])
            for nbytes in options.sizes
        ]
        return {"folds": folds, "native": native.status()}

    run = measured(options, measure_all)
    _print(run, options.markdown)
    return 0


def _print(run: dict[str, Any], markdown: bool) -> None:
    sizes = list(dict.fromkeys(fold["nbytes"] for fold in run["folds"]))
    rows: dict[tuple[str, str], list[str]] = {}
    for fold in run["folds"]:
        cells = rows.setdefault((fold["op"], fold["dtype"]), [])
        cells += [f"{fold[side] / 1e9:.3g}" for side in ("c", "python")]
        cells.append(f"{fold['c'] / fold['python']:.1f}")
    print_table(
        f"{headline(run['machine'])}; native core {run['native']}; GB/s",
        ["op", "dtype", *(f"{size_name(size)}: {column}" for size in sizes
                          for column in ("C", "Python", "×"))],
        [[*which, *cells] for which, cells in rows.items()],
        markdown,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
