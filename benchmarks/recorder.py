"""Measurement of the cost of the flight recorder for a call: ``python benchmarks/recorder.py``.

The recorder is always on. The figure is the time to record the beginning and the end of one call,
two frames below the program, as in a communicator. It is the best of several turns, since only
other processes can make a turn longer. The bound is one microsecond.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Sequence
from pathlib import Path

from collective.contract.recorder import Recorder
from collective.ops import as_op
from collective.request import Request
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, print_table

_MUST_NS = 1000.0
_CALLS, _TURNS = 100_000, 9


def measure() -> float:
    """Return the nanoseconds that it takes to record one call."""
    recorder, call = Recorder(), Request("all_reduce", None, (4,), op=as_op("sum"))
    # Compile the code as a file of the package: the recorder skips frames of the package to find
    # the line of the program, as it does below a communicator.
    source = "def inner():\n    begin(call)\n    end()\ndef outer():\n    inner()\n"
    name = str(Path(sys.modules[Recorder.__module__].__file__ or "").with_name("path.py"))
    inside = {"begin": recorder.begin, "end": recorder.end, "call": call}
    exec(compile(source, name, "exec"), inside)
    outside: dict[str, object] = {"outer": inside["outer"], "inner": lambda: None}
    calls = timeit.repeat("outer()", number=_CALLS, repeat=_TURNS, globals=outside)
    nothing = timeit.repeat("inner()", number=_CALLS, repeat=_TURNS, globals=outside)
    return (min(calls) - min(nothing)) / _CALLS * 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the cost of the flight recorder.")
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)
    run = measured(options, lambda: {"nanoseconds": measure()})
    nanoseconds = run["nanoseconds"]
    print_table(
        headline(run["machine"]),
        ["what", "must", "measured", "verdict"],
        [["recording a call", "1000 ns", f"{nanoseconds:.0f} ns",
          "kept" if nanoseconds < _MUST_NS else "missed"]],
        options.markdown,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
