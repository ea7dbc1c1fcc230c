"""``collective parity``: the same numbers in any framework on any transport, or where not."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collective.errors import InvalidArgumentError
from collective.install import hint
from collective.launch import restart_with

from .outputs import check_file, written

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

    from collective.tools.parity.report import Report
    from collective.tools.parity.runner import Plan

__all__ = ["add_parser"]


_EPILOG = """\
exit code: 1 if a result differs from the oracle, a rank dies or hangs, or trained weights or splits
do not agree; 2 if what was asked for does not exist; else 0. A transport or framework that is not
here, and what a transport declares not to support, is no failure.
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
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
        "framework": "numpy, torch, chainer, cupy, torch.cuda, cuda, mixed (default: all)",
        "op": "operations, such as all_reduce (default: all)",
        "reduction": "reductions, such as sum,max (default: all)",
        "dtype": "dtypes (default: all)",
        "shape": "shape classes: scalar, empty, odd, strided, large (default: all)",
    }
    for name, told in helps.items():
        parser.add_argument(f"--{name}", type=_words, metavar="A,B", help=told)
    parser.add_argument(
        "--ranks", type=_sizes, default=(2, 3, 4), metavar="N,N", help="(default: 2,3,4)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of all numbers (default: 0)")
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="then try N random cases a transport"
    )
    parser.add_argument(
        "--timeout", type=float, default=20.0, metavar="S", help="deadline of a call (default: 20)"
    )
    parser.add_argument(
        "--train", action="store_true", help="then compare training in PyTorch and in Chainer"
    )
    parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="train this pair of models (docs/parity.md)"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps of training (default: 8)")
    parser.add_argument(
        "--splits", action="store_true", help="then compare networks computed in pieces"
    )
    parser.add_argument(
        "--no-matrix",
        action="store_true",
        help="only what --random, --train, --model or --splits ask for",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for people there")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Run, report; return the exit code."""
    try:
        from rich.console import Console
    except ImportError:
        print(f"collective parity: rich is missing; {hint('parity')}", file=sys.stderr)
        return 2
    check_file("--json", options.json)
    check_file("--html", options.html)
    # Here and not above: it brings NumPy and the transports along.
    from collective.tools.parity.report import show

    # Threads of several ranks get in each other's way, and split products into other sums.
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if options.is_program:  # for ranks that are threads of this process, too
        restart_with(**one)
    for variable, value in one.items():
        os.environ.setdefault(variable, value)
    began = time.monotonic()
    console = Console(highlight=False)
    report = _run(options, console)
    report.seconds = time.monotonic() - began
    data = report.as_data()
    show(console, data)
    text = json.dumps(data, indent=1) + "\n"
    well = written("--json", options.json, lambda path: path.write_text(text, encoding="utf-8"))
    if options.html is not None:
        from collective.tools.parity.page import page

        html = page(data)
        well &= written(
            "--html", options.html, lambda path: path.write_text(html, encoding="utf-8")
        )
    return int(report.failed) or 2 * (not well)


def _run(options: argparse.Namespace, console: Console) -> Report:
    from collective.tools.parity.report import Report

    with _Progress(console) as progress:
        plan, missing = _plan(options, progress)
        # What cannot be is refused before hours of work.
        if options.random:
            from collective.tools.parity.random_cases import explore
        if options.train or options.model:
            from collective.tools.parity.training import compare, require

            require(plan, options.model)
        if options.splits:
            from collective.tools.parity import splits

            splits.require(plan)
        report = Report(plan, missing)
        if not options.no_matrix:
            plan = report.plan = _run_matrix(plan, report, progress)
        if options.random:
            for transport in plan.transports:
                if not transport.reason and transport.on_host:
                    progress.begin(f"{transport.name}: random cases", options.random)
                    report.random.append(explore(plan, transport, options.random, progress.step))
        if options.train or options.model:
            progress.begin("training", 0)
            report.training += compare(plan, options.steps, options.model, progress.say)
        if options.splits:
            progress.begin("splits", 0)
            report.splits += splits.compare(plan, progress.say)
    return report


def _plan(options: argparse.Namespace, progress: _Progress) -> tuple[Plan, dict[str, str]]:
    from collective.tools.parity import cases, frameworks, transports
    from collective.tools.parity.runner import Plan

    known = {
        "framework": (*frameworks.NAMES, "mixed"),
        "op": cases.OPERATIONS,
        "reduction": cases.OPS,
        "dtype": cases.DTYPES,
        "shape": tuple(cases.SHAPES),
    }
    chosen = {name: _chosen(name, getattr(options, name), all_) for name, all_ in known.items()}
    progress.say("looking at transports")
    found = transports.survey(options.backend, progress.say)
    asked = [name for name in chosen["framework"] if name != "mixed"]
    missing = {name: why for name, why in frameworks.unavailable(asked).items() if why}
    plan = Plan(
        transports=found,
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


def _run_matrix(plan: Plan, report: Report, progress: _Progress) -> Plan:
    from collective.tools.parity.runner import run

    there = [transport for transport in plan.transports if not transport.reason]
    progress.begin("", sum(len(plan.cases(each)) for each in there) * len(plan.sizes))

    def count(outcome: Any) -> None:
        report.add(outcome)
        progress.step(failed=len(report.failures))

    return run(plan, count, lambda transport, size: progress.say(f"{transport.name}, {size} ranks"))


class _Progress:
    """A bar on a terminal; elsewhere nothing."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self._bar = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            Remaining(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, failed="")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str, total: int) -> None:
        """Start over, with ``total`` things to do; 0 if that is not known."""
        self._bar.reset(self._task, total=total or None, description=what, failed="")

    def say(self, what: str) -> None:
        """Tell what is done now."""
        self._bar.update(self._task, description=what)

    def step(self, failed: int = 0) -> None:
        """Count one thing as done."""
        told = f"[red]{failed} failed[/]" if failed else ""
        self._bar.update(self._task, advance=1, failed=told)


def _chosen(name: str, given: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    for each in given or ():
        if each not in known:
            raise InvalidArgumentError(f"--{name}: {each!r}; one of {', '.join(known)}.")
    return list(known) if given is None else list(dict.fromkeys(given))


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; integers >= 1, such as 2,3")
    return sizes
