"""Command line of the benchmarks whose ranks all use JAX: ``jax_arrays.py``, ``jax_in_jit.py``."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import peers

from collective.tools.bench.machine import measured
from collective.tools.show import add_outputs, add_sizes

__all__ = ["run"]


def run(
    description: str,
    compared: Callable[..., list[dict[str, Any]]],
    sizes: str,
    show: Callable[[dict[str, Any], bool], None],
    arguments: Sequence[str] | None,
) -> int:
    """Measure on the ranks, show the figures, and return the exit code.

    Args:
        description: description of the command.
        compared: function that measures as one of the ranks, as :func:`peers.run_here` calls it.
        sizes: numbers of bytes, by default.
        show: function that prints the table of a run, in Markdown if its second argument is true.
        arguments: command line.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--backend", default="shm", help="transport (default: shm)")
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    add_sizes(parser, sizes)
    add_outputs(parser)
    options = parser.parse_args(arguments)

    def measure() -> dict[str, Any]:
        records = peers.run_here(options.n, options.backend, compared, options.sizes, options.quick)
        version = importlib.import_module("importlib.metadata").version("jax")
        return {"ranks": options.n, "version": version, "records": records}

    show(measured(options, measure), options.markdown)
    return 0
