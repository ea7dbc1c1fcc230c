"""Command line of the benchmarks whose ranks all use JAX: ``jax_arrays.py``, ``jax_in_jit.py``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import peers

from collective.tools.bench.machine import measured
from collective.tools.show import add_outputs, add_sizes

__all__ = ["computing", "run"]


def run(
    description: str,
    compared: Callable[..., list[dict[str, Any]]],
    sizes: str,
    show: Callable[[dict[str, Any], bool], None],
    arguments: Sequence[str] | None,
    busy: bool = False,
) -> int:
    """Measure on the ranks, show the figures, and return the exit code.

    Args:
        description: description of the command.
        compared: function that measures as one of the ranks, as :func:`peers.run_here` calls it.
        sizes: numbers of bytes, by default.
        show: function that prints the table of a run, in Markdown if its second argument is true.
        arguments: command line.
        busy: whether the command has the option ``--busy``, the last argument of ``compared``.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument("--backend", default="shm", help="transport (default: shm)")
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    if busy:
        parser.add_argument(
            "--busy", action="store_true", help="let a thread of Python compute on each rank"
        )
    add_sizes(parser, sizes)
    add_outputs(parser)
    options = parser.parse_args(arguments)

    def measure() -> dict[str, Any]:
        rest = [options.busy] if busy else []
        records = peers.run_here(
            options.n, options.backend, compared, options.sizes, options.quick, *rest
        )
        version = importlib.import_module("importlib.metadata").version("jax")
        return {"ranks": options.n, "version": version, "records": records}

    show(measured(options, measure), options.markdown)
    return 0


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
