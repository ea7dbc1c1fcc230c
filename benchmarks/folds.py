"""How fast reductions fold: ``python benchmarks/folds.py``.

The folds in C of :mod:`collective.native` beside the Python ones, which they repeat, in turns in
one process: gigabytes of one operand a second, the fastest of the turns, since nothing but other
processes can make one slower. Of 64 KiB, three arrays lie in a second-level cache; of 1 KiB,
calling takes longer than folding.
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
    """Return the bytes a second of both folds of one operator."""
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
    rates = {side: a.nbytes / min(each) for side, each in seconds.items()}
    return {"op": op, "dtype": dtype.name, "nbytes": nbytes, **rates}


def _placed(array: Any, number: int) -> Any:
    """Return a copy at the beginning of a cache line, another line of a page for each number.

    Loads and stores at corresponding places of pages wait for each other, by which as many
    figures would depend on the allocator's luck.
    """
    room = np.empty(array.nbytes + 8192, np.uint8)
    start = -room.__array_interface__["data"][0] % 4096 + 1088 * number
    copy: Any = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def _folding(fold: Callable[..., Any], a: Any, b: Any, out: Any) -> Callable[[int], None]:
    """Return what folds so many times, with nothing between: a short fold takes 0.1 µs."""

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
        found = [
            measure(op, BY_NAME[dtype], nbytes, options.turns)
            for op in options.ops
            for dtype in options.dtypes
            if _has_meaning(op, BY_NAME[dtype])
            for nbytes in options.sizes
        ]
        return {"folds": found, "native": native.status()}

    run = measured(options, measure_all)
    _print(run, options.markdown)
    return 0


def _print(run: dict[str, Any], markdown: bool) -> None:
    sizes = list(dict.fromkeys(each["nbytes"] for each in run["folds"]))
    rows: dict[tuple[str, str], list[str]] = {}
    for each in run["folds"]:
        cells = rows.setdefault((each["op"], each["dtype"]), [])
        cells += [f"{each[side] / 1e9:.3g}" for side in ("c", "python")]
        cells.append(f"{each['c'] / each['python']:.1f}")
    print_table(
        f"{headline(run['machine'])}; native core {run['native']}; GB/s",
        ["op", "dtype", *(f"{size_name(size)}: {column}" for size in sizes
                          for column in ("C", "Python", "×"))],
        [[*which, *cells] for which, cells in rows.items()],
        markdown,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
