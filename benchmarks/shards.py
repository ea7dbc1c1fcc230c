"""Virtual shards: their bits on every transport, and their cost: ``python benchmarks/shards.py``.

The first table has one digest for each operator and dtype: that of the results on all transports
and numbers of ranks, with and without the native core. ``hierarchical`` takes the last rank for one
on another host. The second table is for two ranks over ``shm``. The sides take turns in one
run. ``2 shards`` is compared with an ordinary ``all_reduce``, which makes the same fold. ``8
shards``, four on each rank, is compared with the same local folds by NumPy and an ordinary
``all_reduce``. Shards that are added one by one are compared with folds that copy every second
shard, since a program may change the array of a shard once it is added. The third table is for two
ranks that compare their results (``COLLECTIVE_CHECK=results``), over ``shm`` and ``gloo``. The
values of the setting take turns in the same processes. Each ratio is the median of those of
neighbouring turns, with the quartiles. ``auto, again`` shows how much the ratio of two equal sides
varies.

::

    python benchmarks/shards.py
    python benchmarks/shards.py --skip cost --skip results --mpi .mpi --core on,off \
        --transports threads,shm,gloo,hierarchical
    python benchmarks/shards.py --skip bits --skip cost --mib 1,16
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from collective import ShardFold, Shards, user_op
from collective.communicator import Communicator
from collective.launch.mpiexec import Mpiexec
from collective.testing import RankPool
from collective.testing.frameworks import encoded
from collective.testing.samples import of_bits, plain
from collective.tools.bench.alternate import alternate, median_ratio, repeated
from collective.tools.bench.machine import headline, measured
from collective.tools.parity.transports import TwoHosts
from collective.tools.show import Progress, add_outputs, microseconds, print_table

_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64")
_OPS = ("sum", "avg", "prod", "max", "a function")
_SHARDS = 8
#: Elements of a short and of a long array: the ranks fold the long one in pieces.
_COUNTS = (7, 100_003)
# The cost that is promised, as a ratio to the side that is named after it.
_MOST = 1.1

Digests = dict[str, str]
#: Case -> digest -> the runs that gave it.
Seen = dict[str, dict[str, list[str]]]


# -- bits -----------------------------------------------------------------------------------------


def _digests(comm: Communicator) -> Digests:
    """Return a digest of the results for each operator and dtype; shards in two divisions."""
    size = comm.size
    turned = [range(0)] * size
    turned[0], turned[-1] = range(3, _SHARDS), range(3)  # one rank: the whole range, see below
    divisions = [Shards(_SHARDS, comm)]
    if size > 1:
        divisions.append(Shards(_SHARDS, comm, held=turned))
    found = {}
    for dtype in _DTYPES:
        for op in _OPS:
            # A function takes NumPy's own arrays. Complex numbers have no order.
            lacks = {"max": ("complex64",), "a function": ("bfloat16",)}
            if dtype in lacks.get(op, ()):
                continue
            digest = ""
            for shards in divisions:
                results = [_result(comm, shards, dtype, op, count) for count in _COUNTS]
                bits = hashlib.sha256(b"".join(x.tobytes() for x in results)).hexdigest()[:12]
                if digest not in ("", bits):
                    bits = f"{digest} and {bits}"
                digest = bits
            found[f"{op} of {dtype}"] = digest
    return found


def _result(comm: Communicator, shards: Shards, dtype: str, op: str, count: int) -> Any:
    random = np.random.default_rng([count, _SHARDS])
    rows = random.uniform(0.5, 2, (_SHARDS, count)) * random.choice([-1, 1], (_SHARDS, count))
    mine: Any = rows[shards.mine.start : shards.mine.stop]
    if dtype == "bfloat16":
        mine = of_bits(dtype, encoded(mine.astype(np.float32), dtype))
    else:
        mine = (mine * (1 - 0.5j) if dtype == "complex64" else mine).astype(dtype)
    chosen: Any = user_op(_half_and_other) if op == "a function" else op
    return plain(comm.all_reduce(mine, op=chosen, order=shards))


def _half_and_other(left: Any, right: Any) -> Any:
    """Return a fold that is neither associative nor commutative."""
    return (left * np.asarray(0.5, left.dtype) + right).astype(left.dtype)


def bits(transports: Sequence[str], mpi: Path | None, sizes: Sequence[int]) -> Seen:
    """Return the digests of each operator and dtype, and the runs that gave them."""
    seen: Seen = {}
    progress = Progress()
    core = " without the core" if os.environ.get("COLLECTIVE_NATIVE") == "off" else ""
    for name, pool in _pools(transports, mpi, sizes):
        progress.show(name + core)
        for found in pool.run(_digests):
            for case, digest in found.items():
                runs = seen.setdefault(case, {}).setdefault(digest, [])
                runs += [name + core] * (name + core not in runs)
    progress.clear()
    return seen


def _bits_without_core(options: argparse.Namespace) -> Seen:
    """Return the digests of a process without the native core, which runs this program."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "bits.json"
        command = [sys.executable, __file__, "--skip", "cost", "--skip", "results"]
        command += ["--json", str(result)]
        command += ["--transports", options.transports, "--sizes", options.sizes]
        command += ["--mpi", str(options.mpi)] if options.mpi is not None else []
        environment = {**os.environ, "COLLECTIVE_NATIVE": "off"}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        seen: Seen = json.loads(result.read_text())["bits"]
    return seen


def _joined(parts: Sequence[Seen]) -> Seen:
    seen: Seen = {}
    for part in parts:
        for case, digests in part.items():
            for digest, runs in digests.items():
                seen.setdefault(case, {}).setdefault(digest, []).extend(runs)
    return seen


def _bits_rows(seen: Seen) -> list[list[str]]:
    """Return a row for each operator and dtype: its digests, and the number of runs."""
    return [
        [
            case,
            " / ".join(found),
            f"equal in {len(runs)} runs" if len(found) == 1 else "DIFFERS: " + str(found),
        ]
        for case, found in seen.items()
        for runs in [next(iter(found.values()))]
    ]


def _pools(
    transports: Sequence[str], mpi: Path | None, sizes: Sequence[int]
) -> Iterator[tuple[str, RankPool]]:
    """Yield a pool of ranks for each transport and number of ranks, and its name."""
    for size in sizes:
        for transport in transports:
            chosen: Any = TwoHosts if transport == "hierarchical" and size > 1 else transport
            with RankPool(size, chosen, timeout=300) as pool:
                yield f"{transport}-{size}", pool
        for folder in sorted(mpi.iterdir()) if mpi is not None else ():
            with ExitStack() as stack:
                launcher = Mpiexec(str(folder / "bin" / "python"))
                pool = stack.enter_context(RankPool(size, "mpi", timeout=300, mpiexec=launcher))
                yield f"{folder.name}-{size}", pool


# -- cost -----------------------------------------------------------------------------------------


def _cost(comm: Communicator, nbytes: int, rounds: int) -> dict[str, list[float]]:
    count = nbytes // 4
    mine = np.random.default_rng(comm.rank).standard_normal((_SHARDS // 2, count), np.float32)
    out, rooms = np.empty(count, np.float32), np.empty((2, count), np.float32)
    two, eight = Shards(2, comm), Shards(_SHARDS, comm)
    fold = ShardFold(eight)

    def folded_by_hand() -> None:
        np.add(mine[0], mine[1], out=rooms[0])
        np.add(mine[2], mine[3], out=rooms[1])
        np.add(rooms[0], rooms[1], out=rooms[0])
        comm.all_reduce(rooms[0], out=out)

    def copied_by_hand() -> None:
        np.copyto(rooms[0], mine[0])
        np.add(rooms[0], mine[1], out=rooms[0])
        np.copyto(rooms[1], mine[2])
        np.add(rooms[1], mine[3], out=rooms[1])
        np.add(rooms[0], rooms[1], out=rooms[0])
        comm.all_reduce(rooms[0], out=out)

    def one_by_one() -> None:
        fold.clear()
        for row in mine:
            fold.add(row)
        comm.all_reduce(fold, out=out, order=eight)

    sides: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(mine[0], out=out),
        "2 shards": lambda: comm.all_reduce(mine[:1], out=out, order=two),
        "4 folds by hand, all_reduce": folded_by_hand,
        "8 shards": lambda: comm.all_reduce(mine, out=out, order=eight),
        "4 folds and 2 copies by hand, all_reduce": copied_by_hand,
        "8 shards, one by one": one_by_one,
    }
    several = {name: repeated(call) for name, call in sides.items()}
    return alternate(comm, several, rounds, 0.1)


def cost(mib: Sequence[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each side, by the size of the array."""
    with RankPool(2, "shm", timeout=600) as pool:
        return {f"{n} MiB": pool.run(_cost, n << 20, rounds)[0] for n in mib}


#: Values of ``COLLECTIVE_CHECK`` whose cost is compared: nothing, each call, every tenth.
_CHECKS = {
    "auto": "auto", "auto, again": "auto", "results": "results", "results:10": "results:10"
}  # fmt: skip
#: Calls of a turn: one of them is compared with ``results:10``. The shorter the turns, the less
#: differs between neighbours that is not due to the sides.
_CALLS = 10
#: Turns of a side for each round of the other tables, for short and for long arrays.
_TURNS, _LONG_TURNS, _LONG_BYTES = 20, 2, 4 << 20


def _checked(comm: Communicator, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of an ``all_reduce`` of the slowest rank in each turn, by check."""
    x = np.ones(nbytes // 4, np.float32)
    out = np.empty_like(x)

    def side(check: str) -> Callable[[int], None]:
        # All sides use the same transport.
        checked = Communicator(
            comm.transport, local_rank=comm.local_rank, local_size=comm.local_size,
            host=comm.host, timeout=600, check=check,
        )  # fmt: skip
        call = repeated(lambda: checked.all_reduce(x, out=out))
        return lambda count: call(_CALLS * count)

    sides = {name: side(check) for name, check in _CHECKS.items()}
    rounds *= _TURNS if nbytes < _LONG_BYTES else _LONG_TURNS
    turns = alternate(comm, sides, rounds, 0.0, warm=2)
    return {name: [each / _CALLS for each in seconds] for name, seconds in turns.items()}


def compared(mib: Sequence[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of a call in each turn, by array and check."""
    turns: dict[str, dict[str, list[float]]] = {}
    for backend in ("shm", "gloo"):
        with RankPool(2, backend, timeout=600) as pool:
            for n in mib:
                turns[f"{n} MiB, {backend}"] = pool.run(_checked, n << 20, rounds)[0]
    return turns


def _compared_rows(turns: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    rows = []
    for array, sides in turns.items():
        for name, seconds in sides.items():
            row = [array, name, microseconds(statistics.median(seconds))]
            ratios = [mine / other for mine, other in zip(seconds, sides["auto"])]
            if name == "auto" or len(ratios) < 2:
                rows.append([*row, "", ""])
                continue
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append([*row, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"])
    return rows


def _cost_rows(turns: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    rows = []
    to = {"2 shards": "all_reduce", "8 shards": "4 folds by hand, all_reduce",
          "8 shards, one by one": "4 folds and 2 copies by hand, all_reduce"}  # fmt: skip
    for size, sides in turns.items():
        for name, seconds in sides.items():
            row = [size, name, microseconds(statistics.median(seconds))]
            if name in to:
                ratio = median_ratio(seconds, sides[to[name]])
                verdict = "kept" if ratio <= _MOST else "missed"
                row += [f"{ratio:.2f} × {to[name]}", verdict if "one" not in name else ""]
            rows.append(row + [""] * (5 - len(row)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if any bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", default="threads,shm", help="(default: threads,shm)")
    parser.add_argument("--mpi", type=Path, help="folder with one environment for each MPI library")
    parser.add_argument("--sizes", default="1,2,3,4,5,8", help="(default: 1,2,3,4,5,8)")
    parser.add_argument("--core", default="on", help="on, off, or on,off (default: on)")
    parser.add_argument("--mib", default="1,16", help="sizes of the second table (default: 1,16)")
    parser.add_argument("--rounds", type=int, default=15, help="turns a side (default: 15)")
    parser.add_argument(
        "--skip", action="append", choices=["bits", "cost", "results"], default=[],
        help="leave out one table; may be given several times",
    )  # fmt: skip
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]

    def measure() -> dict[str, Any]:
        run: dict[str, Any] = {"bits": {}, "cost": {}}
        if "bits" not in options.skip:
            parts = []
            if "on" in options.core.split(","):
                parts.append(bits(options.transports.split(","), options.mpi, sizes))
            if "off" in options.core.split(","):
                parts.append(_bits_without_core(options))
            run["bits"] = _joined(parts)
        mib = [int(n) for n in options.mib.split(",")]
        if "cost" not in options.skip:
            run["cost"] = cost(mib, options.rounds)
        if "results" not in options.skip:
            run["results"] = compared(mib, options.rounds)
        return run

    run = measured(options, measure)
    if run["bits"]:
        columns = ["fold of 8 shards", "digest", "verdict"]
        rows = _bits_rows(run["bits"])
        print_table(headline(run["machine"]), columns, rows, options.markdown)
    if run["cost"]:
        columns = ["array", "call", "median", "ratio", "verdict"]
        rows = _cost_rows(run["cost"])
        print_table(headline(run["machine"]), columns, rows, options.markdown)
    if run.get("results"):
        columns = ["array", "COLLECTIVE_CHECK", "median", "× auto", "quartiles"]
        rows = _compared_rows(run["results"])
        print_table(headline(run["machine"]), columns, rows, options.markdown)
    return int(any(len(digests) > 1 for digests in run["bits"].values()))


if __name__ == "__main__":
    # Ranks under mpiexec find functions by the name of their module, which must not be __main__.
    sys.exit(importlib.import_module(Path(__file__).stem).main())
