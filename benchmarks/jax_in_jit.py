"""Measurement of sums inside ``jit``: our all-reduce through XLA's FFI against JAX's own psum.

::

    .jax/bin/python benchmarks/jax_in_jit.py --sizes 1K 1M 16M     # after make .jax/.done
    .jax/bin/python benchmarks/jax_in_jit.py --sizes 1K --busy

JAX's ``psum`` uses XLA's Gloo. Both sides live in the same processes and take turns, A B A B ….
"In a loop" is a step of a ``fori_loop``, so that a figure is one collective call and little else.
"Alone" is a run of a compiled program with one sum, until its result is there. It contains the
dispatch by JAX. "Outside" is ``comm.all_reduce`` on a NumPy array. It waits for programs with calls
of the same communicator. "On a dup" is the same call on a communicator that no program uses.

The figures are medians of the turns on the slowest rank, and the last column is the median ratio of
neighbouring turns. With ``--busy`` a thread of Python computes on each rank, as a data loader does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import socket
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers
from turns import alternate, median_ratio, repeated

from collective.communicator import Communicator
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.measure import Pace
from collective.tools.show import (
    add_outputs,
    add_sizes,
    microseconds,
    print_table,
    size_name,
)

_SIZES = "1K 1M 16M"
_OURS, _GLOO, _OURS_ALONE, _GLOO_ALONE, _OUTSIDE, _ON_DUP = _SIDES = (
    "ours in a loop", "Gloo in a loop", "ours alone", "Gloo alone", "ours outside", "on a dup",
)  # fmt: skip


def compared(
    comm: Communicator, _: Path, sizes: Sequence[int], quick: bool, busy: bool
) -> list[dict[str, Any]]:
    """Measure as one of the ranks; return the figures."""
    jax: Any = importlib.import_module("jax")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    port = int(comm.broadcast(np.array([port]))[0])  # that of rank 0
    jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank)
    functional: Any = importlib.import_module("collective.adapters.jax.functional")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    rows, alike = (jax.sharding.PartitionSpec(*axes) for axes in (("i",), ()))

    def over_all(function: Callable[..., Any], inputs: Any) -> Any:
        """Compile a function for all ranks, each of which has one row."""
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=rows, check_vma=False)
        )

    def ours(x: Any) -> Any:
        return functional.all_reduce(x, comm)

    def gloo(x: Any) -> Any:
        return jax.lax.psum(x, "i")

    def loop(sum_of: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
        # The factor keeps the numbers as they are, and the sums from being merged.
        def run(x: Any, count: int) -> Any:
            return jax.lax.fori_loop(0, count, lambda _, y: sum_of(y) * (1 / comm.size), x)

        return run

    programs = {
        _OURS: jax.jit(loop(ours)), _GLOO: over_all(loop(gloo), (rows, alike)),
        _OURS_ALONE: jax.jit(ours), _GLOO_ALONE: over_all(gloo, rows),
    }  # fmt: skip
    pace = Pace.of(quick)
    apart = comm.dup()
    records = []
    for nbytes in sizes:
        row = np.ones((1, nbytes // 4), np.float32)
        spread = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, rows), row)
        own = jax.numpy.asarray(row)
        sides = {
            _OURS: _looped(programs[_OURS], own), _GLOO: _looped(programs[_GLOO], spread),
            _OURS_ALONE: _single(programs[_OURS_ALONE], own, comm.size),
            _GLOO_ALONE: _single(programs[_GLOO_ALONE], spread, comm.size),
            _OUTSIDE: repeated(functools.partial(comm.all_reduce, row, out=np.empty_like(row))),
            _ON_DUP: repeated(functools.partial(apart.all_reduce, row, out=np.empty_like(row))),
        }  # fmt: skip
        with computing(busy):
            seconds = alternate(comm, sides, pace.rounds, pace.turn)
        medians = {name: statistics.median(turns) for name, turns in seconds.items()}
        ratio = median_ratio(seconds[_GLOO], seconds[_OURS])
        records.append({"nbytes": nbytes, **medians, "ratio": ratio})
    jax.distributed.shutdown()
    return records


def _looped(program: Any, ones: Any) -> Callable[[int], object]:
    """Return a function that makes a number of calls in one loop, and check one result."""
    assert np.allclose(program(ones, 1).addressable_shards[0].data, 1)
    return lambda count: program(ones, count).block_until_ready()


def _single(program: Any, ones: Any, total: int) -> Callable[[int], object]:
    """Return a function that runs a program with one call a number of times, and check a result."""
    assert np.allclose(program(ones).addressable_shards[0].data, total)
    return repeated(lambda: program(ones).block_until_ready())


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print the table of a run."""
    print(f"{headline(run['machine'])}; {run['ranks']} ranks\n")
    rows = [
        [size_name(record["nbytes"]), *(microseconds(record[side]) for side in _SIDES),
         f"{record['ratio']:.1f}"]
        for record in run["records"]
    ]  # fmt: skip
    header = ["size", *(f"{side} µs" for side in _SIDES), "Gloo / ours in a loop"]
    print_table(f"sums inside jit, JAX {run['version']}", header, rows, markdown)


@contextlib.contextmanager
def computing(busy: bool) -> Iterator[None]:
    """Let a thread of Python compute meanwhile, so that others wait for the interpreter lock."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute, daemon=True)
    if busy:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if busy:
            thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Compare sums inside jit with JAX's psum.")
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--backend", default="shm", help="transport (default: shm)")
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    parser.add_argument(
        "--busy", action="store_true", help="let a thread of Python compute on each rank"
    )
    add_sizes(parser, _SIZES)
    add_outputs(parser)
    options = parser.parse_args(arguments)

    def measure() -> dict[str, Any]:
        asked = options.sizes, options.quick, options.busy
        records = peers.run_here(options.n, options.backend, compared, *asked)
        version = importlib.metadata.version("jax")
        return {"ranks": options.n, "version": version, "records": records}

    show(measured(options, measure), options.markdown)
    return 0


if __name__ == "__main__":
    import jax_in_jit  # the ranks import their function by this name

    sys.exit(jax_in_jit.main())
