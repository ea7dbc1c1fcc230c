"""Virtual shards: their bits on every transport: ``python benchmarks/shards.py``.

The table has one digest for each operator and dtype: that of the results on all transports and
numbers of ranks, with and without the native core. ``hierarchical`` takes the last rank for one on
another host.

::

    python benchmarks/shards.py
    python benchmarks/shards.py --transports threads,shm,gloo,hierarchical --mpi .mpi
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from collective import Shards, user_op
from collective.communicator import Communicator
from collective.launch.mpiexec import Mpiexec
from collective.testing import RankPool
from collective.testing.frameworks import encoded
from collective.testing.samples import of_bits, plain
from collective.tools.bench.machine import headline, measured
from collective.tools.parity.transports import TwoHosts
from collective.tools.show import Progress, add_outputs, print_table

_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64")
_OPS = ("sum", "avg", "prod", "max", "a function")
_SHARDS = 8
#: Elements of a short and of a long array: the ranks fold the long one in pieces.
_COUNTS = (7, 100_003)
_CORE = " without the core" if os.environ.get("COLLECTIVE_DISABLE") == "native" else ""

Digests = dict[str, str]
#: Case -> digest -> the runs that gave it.
Seen = dict[str, dict[str, list[str]]]


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
    for name, pool in _pools(transports, mpi, sizes):
        progress.show(name + _CORE)
        for found in pool.run(_digests):
            for case, digest in found.items():
                runs = seen.setdefault(case, {}).setdefault(digest, [])
                runs += [name + _CORE] * (name + _CORE not in runs)
    progress.clear()
    return seen


def _bits_without_core(options: argparse.Namespace) -> Seen:
    """Return the digests of a process without the native core, which runs this program."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "bits.json"
        command = [sys.executable, __file__, "--json", str(result)]
        command += ["--transports", options.transports, "--sizes", options.sizes]
        command += ["--mpi", str(options.mpi)] if options.mpi is not None else []
        environment = {**os.environ, "COLLECTIVE_DISABLE": "native"}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        seen: Seen = json.loads(result.read_text())["bits"]
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 1 if any bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", default="threads,shm", help="(default: threads,shm)")
    parser.add_argument("--mpi", type=Path, help="folder with one environment for each MPI library")
    parser.add_argument("--sizes", default="1,2,3,4,5,8", help="(default: 1,2,3,4,5,8)")
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)

    def measure() -> dict[str, Any]:
        sizes = [int(size) for size in options.sizes.split(",")]
        seen = bits(options.transports.split(","), options.mpi, sizes)
        if not _CORE:
            for case, digests in _bits_without_core(options).items():
                for digest, runs in digests.items():
                    seen.setdefault(case, {}).setdefault(digest, []).extend(runs)
        return {"bits": seen}

    run = measured(options, measure)
    columns = ["fold of 8 shards", "digest", "verdict"]
    print_table(headline(run["machine"]), columns, _bits_rows(run["bits"]))
    return int(any(len(digests) > 1 for digests in run["bits"].values()))


if __name__ == "__main__":
    # Ranks under mpiexec find functions by the name of their module, which must not be __main__.
    sys.exit(importlib.import_module(Path(__file__).stem).main())
