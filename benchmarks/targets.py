"""Measurement of the targets of ``reach.py``, with a verdict on each.

::

    python benchmarks/targets.py                           # about half an hour
    python benchmarks/targets.py --quick                   # about six minutes
    python benchmarks/targets.py --rows gather ddp         # only these rows
    python benchmarks/targets.py --from run.json           # print an earlier run's tables

If a bound applies to several sizes, the worst of them counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import reach
import sittings

from collective.tools.bench.machine import measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the targets to reach.")
    sittings.add_options(parser)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=reach.ROWS,
        default=reach.ROWS,
        metavar="ROW",
        help="only these targets: %(choices)s",
    )
    parser.add_argument("--brief", action="store_true", help="print the verdicts only")
    options = parser.parse_args(arguments)
    run = measured(options, lambda: reach.measure(options))
    reach.show(run, not options.brief, options.markdown)
    sittings.show_contestants(run, options.markdown)
    return sittings.exit_code("targets", run)


if __name__ == "__main__":
    sys.exit(main())
