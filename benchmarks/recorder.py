"""What the flight recorder costs a call: ``python benchmarks/recorder.py``.

The recorder is always on. This is the time of recording one call, its beginning and its end,
made two frames below the program as a communicator does; the best of several turns, since
nothing but other processes can make it longer. It has to stay below a microsecond.
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
    """Return the nanoseconds that recording one call takes."""
    recorder, call = Recorder(), Request("all_reduce", None, (4,), op=as_op("sum"))
    # Where a communicator records is code of the package's, which is looked through for the
    # line of the program.
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
    parser = argparse.ArgumentParser(description="What the flight recorder costs a call.")
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)
    run = measured(options, lambda: {"nanoseconds": measure()})
    found = run["nanoseconds"]
    print_table(
        headline(run["machine"]),
        ["what", "must", "measured", "verdict"],
        [["recording a call", "1000 ns", f"{found:.0f} ns",
          "kept" if found < _MUST_NS else "missed"]],
        options.markdown,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
