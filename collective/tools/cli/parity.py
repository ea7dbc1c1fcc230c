"""``collective parity``: a check that all frameworks get the same numbers on all transports."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collective import InvalidArgumentError
from collective.launch import restart_with
from collective.tools.show import (
    Console,
    Progress,
    check_file,
    check_known,
    count,
    counts,
    names,
    write,
    written,
)

if TYPE_CHECKING:
    from collective.tools.parity.report import Report
    from collective.tools.parity.runner import Comparison


_EPILOG = """\
exit code: 1 if a result differs from the oracle, a rank dies or hangs, or trained weights do not
agree; 2 if an option names an unknown value; else 0. A transport or framework that cannot be used
here is not a failure, nor is a call that a transport declares not to support.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "parity",
        help="compare every transport and framework with a NumPy oracle",
        description="Make the calls of the public API over every transport that works here, on "
        "arrays of every framework, and compare the results with an oracle in NumPy: integers "
        "exactly, others within the error bound of their dtype and number of ranks.",
        epilog=_EPILOG,
    )
    helps = {
        "backend": "transports (default: all)",
        "framework": "numpy, torch, jax, chainer, cupy, torch.cuda, cuda, mixed (default: all)",
        "op": "operations, such as all_reduce (default: all)",
        "reduction": "reductions, such as sum,max (default: all)",
        "dtype": "dtypes (default: all)",
        "shape": "shape classes: scalar, empty, odd, strided, large (default: all)",
    }
    for name, text in helps.items():
        parser.add_argument(f"--{name}", type=names, metavar="A,B", help=text)
    parser.add_argument(
        "--ranks", type=counts, default=(2, 3, 4), metavar="N,N", help="(default: 2,3,4)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all random numbers (default: 0)"
    )
    parser.add_argument(
        "--timeout", type=float, default=20.0, metavar="S", help="deadline of a call (default: 20)"
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="instead of calls, compare the training of this model in PyTorch and in Chainer "
        "(docs/parity.md)",
    )
    parser.add_argument(
        "--shards",
        type=count,
        metavar="N",
        help="with --model: also train on N virtual shards, whose weights must have the same bits "
        "on any number of ranks",
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of training (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Compare, report, and return the exit code."""
    check_file("--json", options.json)
    # Imported here: the module imports NumPy and the transports.
    from collective.tools.bench.machine import Observer
    from collective.tools.parity.report import show

    # The threads of several ranks compete for cores, and they split products into other sums.
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # Start again, so that the variables hold for ranks that are threads of this process, too.
    if options.is_program:
        restart_with(**one)
    for variable, value in one.items():
        os.environ.setdefault(variable, value)
    observer = Observer()
    report = _run(options)
    data = report.as_data(observer.machine())
    show(Console(), data)
    well = written("--json", options.json, lambda path: write(path, data))
    return int(report.failed) or 2 * (not well)


def _run(options: argparse.Namespace) -> Report:
    from collective.tools.parity.report import Report

    progress = Progress("collective parity")
    try:
        plan, missing = _plan(options, progress)
        report = Report(plan, missing)
        if options.model:
            from collective.tools.parity.training import compare

            report.training += compare(
                plan, options.steps, options.model, options.shards, progress.show
            )
        elif options.shards:
            raise InvalidArgumentError("--shards: expected --model, too.")
        else:
            report.plan = _run_matrix(plan, report, progress)
        return report
    finally:
        progress.clear()


def _plan(options: argparse.Namespace, progress: Progress) -> tuple[Comparison, dict[str, str]]:
    from collective.testing import frameworks
    from collective.tools.parity import cases, transports
    from collective.tools.parity.runner import Comparison

    known = {
        "framework": (*frameworks.NAMES, "mixed"),
        "op": cases.OPERATIONS,
        "reduction": cases.OPS,
        "dtype": cases.DTYPES,
        "shape": tuple(cases.SHAPES),
    }
    chosen = {name: _chosen(name, getattr(options, name), all_) for name, all_ in known.items()}
    progress.show("looking at transports")
    surveyed = transports.survey(options.backend, progress.show)
    asked = [name for name in chosen["framework"] if name != "mixed"]
    missing = {name: why for name, why in frameworks.unavailable(asked).items() if why}
    plan = Comparison(
        transports=surveyed,
        frameworks=[name for name in chosen["framework"] if name not in missing],
        operations=chosen["op"],
        ops=chosen["reduction"],
        dtypes=chosen["dtype"],
        shapes=chosen["shape"],
        sizes=options.ranks,
        seed=options.seed,
        timeout=options.timeout,
        all_ops=options.reduction is not None,
    )
    return plan, missing


def _run_matrix(plan: Comparison, report: Report, progress: Progress) -> Comparison:
    from collective.tools.parity.runner import run

    there = [transport for transport in plan.transports if not transport.reason]
    progress.begin("", sum(len(plan.cases(each)) for each in there) * len(plan.sizes))

    def count(outcome: Any) -> None:
        report.add(outcome)
        progress.step(failed=len(report.failures))

    return run(
        plan, count, lambda transport, size: progress.show(f"{transport.name}, {size} ranks")
    )


def _chosen(name: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    check_known(f"--{name}", given or (), known)
    return list(known if given is None else given)
